"""The engine of xarray: ``xarray.open_dataset(url, engine="icechunk-async")``."""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from xarray.backends import BackendEntrypoint, ZarrBackendEntrypoint
from zarr.errors import GroupNotFoundError

from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async.plugins.accessor import IcechunkAccessor, Origin
from icechunk_async.sync.errors import translated
from icechunk_async.sync.urls import repository_at, session_at, with_ref
from icechunk_async.urls import IcechunkURL, is_icechunk_url, veiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import xarray

__all__ = ["IcechunkBackend"]


class IcechunkBackend(BackendEntrypoint):
    """Opens groups of repositories; xarray finds it through an entry point."""

    description: ClassVar[str] = "Open groups of Icechunk repositories by URL (icechunk-async)"
    open_dataset_parameters: ClassVar[tuple[str, ...]] = (
        "filename_or_obj",
        "mask_and_scale",
        "decode_times",
        "concat_characters",
        "decode_coords",
        "drop_variables",
        "use_cftime",
        "decode_timedelta",
        "group",
        "ref",
        "storage_options",
        "authorize_virtual_chunk_access",
    )

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | None = None,
        ref: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        authorize_virtual_chunk_access: Mapping[str, Any] | None = None,
        **decoders: Any,
    ) -> xarray.Dataset:
        """Open a group as a dataset that reads its values when they are needed.

        Args:
            filename_or_obj: a URL of `icechunk_async.urls`, or the path or URL of a repository.
            drop_variables: as of `xarray.open_dataset`.
            group: path of a group below that of the URL.
            ref: a branch, a tag or a snapshot id, if the URL names none.
            storage_options: the backend's options, credentials among them.
            authorize_virtual_chunk_access: see `icechunk_async.sync.Repository.open`.
            decoders: as of `xarray.open_dataset`.

        Raises:
            InvalidInputError: the URL cannot be understood, or names a ref beside ``ref``.
            FileNotFoundError: there is no such group.
        """
        with Shortened():
            return self._opened(
                str(filename_or_obj),
                group,
                ref,
                storage_options,
                authorize_virtual_chunk_access,
                drop_variables=drop_variables,
                **decoders,
            )

    def _opened(
        self,
        text: str,
        group: str | None,
        ref: str | None,
        storage_options: Mapping[str, Any] | None,
        authorize_virtual_chunk_access: Mapping[str, Any] | None,
        **decoders: Any,
    ) -> xarray.Dataset:
        """Open a group; see `open_dataset`."""
        with translated():
            url = IcechunkURL.parse(text)
        at = with_ref(url, ref, group)
        repository = repository_at(at, None, authorize_virtual_chunk_access, storage_options)
        if ref is None:
            session, branch = session_at(repository, at), at.read_branch
        else:
            session = repository.readonly_session(ref=ref)
            branch = ref if ref in repository.list_branches() else None
        try:
            dataset = ZarrBackendEntrypoint().open_dataset(
                session.store,  # type: ignore[arg-type]  # not in xarray's types
                group=at.group or None,
                mode="r",
                consolidated=False,
                zarr_format=3,
                **decoders,
            )
        except GroupNotFoundError:  # its text is that of the store, over several lines
            raise FileNotFoundError(
                f"There is no group {at.group or '/'!r} in snapshot {session.snapshot_id}. Name "
                "one with 'group', or at the end of the URL."
            ) from None
        if (shown := veiled(text)) != text:  # else xarray notes the text, secrets included
            dataset.encoding["source"] = shown
        return IcechunkAccessor.mark(
            dataset, Origin(repr(at), repository, session, at.group, branch)
        )

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether it is a URL with a step ``|icechunk:``; other places may be anything."""
        return is_icechunk_url(filename_or_obj)
