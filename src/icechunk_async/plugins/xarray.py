"""The engine of xarray: ``xarray.open_dataset(url, engine="icechunk-async")``."""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import xarray
from xarray.backends import BackendEntrypoint, ZarrBackendEntrypoint
from zarr.errors import ContainsArrayError, GroupNotFoundError

from icechunk_async._runtime.blocking.tracebacks import Shortened
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.plugins.accessor import IcechunkAccessor, Origin
from icechunk_async.sync.errors import translated
from icechunk_async.sync.urls import repository_at, session_at, with_ref
from icechunk_async.urls import IcechunkURL, is_icechunk_url, veiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from icechunk_async.sync.repository import Repository
    from icechunk_async.sync.session import Session

__all__ = ["IcechunkBackend"]

_AS_STORED: Final = {"mode": "r", "consolidated": False, "zarr_format": 3}
_OF_SESSIONS: Final = frozenset({"as_of", "branch", "snapshot_id", "tag"})
_FORMS: Final = "'repo/|icechunk:@branch.NAME', '@tag.NAME', '@as-of.TIME' or '@SNAPSHOT_ID'"


class IcechunkBackend(BackendEntrypoint):
    """Opens groups of repositories; xarray finds it through an entry point."""

    supports_groups: ClassVar[bool] = True
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
            InvalidInputError: the URL cannot be understood, or names a ref beside ``ref``; or an
                argument such as ``branch`` or ``tag`` is given, which a session takes.
            FileNotFoundError: there is no such group.
        """
        with Shortened():
            place = _Place.at(
                str(filename_or_obj), group, ref, storage_options, authorize_virtual_chunk_access
            )
            read = ZarrBackendEntrypoint().open_dataset
            dataset = place.read(read, drop_variables=drop_variables, **decoders)
            return place.marked(dataset, place.url.group)

    def open_groups_as_dict(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | None = None,
        ref: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        authorize_virtual_chunk_access: Mapping[str, Any] | None = None,
        **decoders: Any,
    ) -> dict[str, xarray.Dataset]:
        """Open a group and all below it, as datasets by their paths in it; see `open_dataset`."""
        with Shortened():
            place = _Place.at(
                str(filename_or_obj), group, ref, storage_options, authorize_virtual_chunk_access
            )
            read = ZarrBackendEntrypoint().open_groups_as_dict
            found = place.read(read, drop_variables=drop_variables, **decoders)
            return {
                # Each dataset of the tree knows its own group, so that it can be written back
                # alone.
                path: place.marked(dataset, f"{place.url.group}/{path.strip('./')}".strip("/"))
                for path, dataset in found.items()
            }

    def open_datatree(self, filename_or_obj: Any, **options: Any) -> xarray.DataTree:
        """Open a group and all below it as a tree; the arguments are those of `open_dataset`."""
        return xarray.DataTree.from_dict(self.open_groups_as_dict(filename_or_obj, **options))

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether it is a URL with a step ``|icechunk:``; other places may be anything."""
        return is_icechunk_url(filename_or_obj)


@dataclass(frozen=True, slots=True)
class _Place:
    """The repository and the session that datasets are read from."""

    text: str
    url: IcechunkURL
    repository: Repository
    session: Session
    branch: str | None

    @classmethod
    def at(
        cls,
        text: str,
        group: str | None,
        ref: str | None,
        storage_options: Mapping[str, Any] | None,
        authorize_virtual_chunk_access: Mapping[str, Any] | None,
    ) -> Self:
        """Open the repository and a session."""
        with translated():
            url = with_ref(IcechunkURL.parse(text), ref, group)
        repository = repository_at(url, None, authorize_virtual_chunk_access, storage_options)
        if ref is None:
            return cls(text, url, repository, session_at(repository, url), url.read_branch)
        session = repository.readonly_session(ref=ref)
        # `ref` may be anything. Only a branch can be committed to, by `dataset.icechunk.commit`.
        branch = ref if ref in repository.list_branches() else None
        return cls(text, url, repository, session, branch)

    def read[T](self, read: Callable[..., T], **decoders: Any) -> T:
        """Let xarray read; its errors about groups have the text of the store, over many lines."""
        # xarray would say that these are unknown decoders.
        if named := sorted(_OF_SESSIONS.intersection(decoders)):
            with translated():
                raise InvalidInputError(
                    f"The engine takes no {named[0]}=. Name a branch, a tag or a snapshot with "
                    f"ref=, or in the URL: {_FORMS}."
                )
        group, snapshot_id = self.url.group, self.session.snapshot_id
        try:
            return read(self.session.store, group=group or None, **_AS_STORED, **decoders)
        except GroupNotFoundError:
            raise FileNotFoundError(
                f"There is no group {group or '/'!r} in snapshot {snapshot_id}. Name one with "
                "'group', or at the end of the URL."
            ) from None
        except ContainsArrayError:
            raise FileNotFoundError(
                f"There is an array and no group at {group!r} in snapshot {snapshot_id}. Open the "
                "group above it: a dataset is a group."
            ) from None

    def marked(self, dataset: xarray.Dataset, group: str) -> xarray.Dataset:
        """Note on a dataset where it was opened, and return it."""
        if (shown := veiled(self.text)) != self.text:  # else xarray notes it, secrets included
            dataset.encoding["source"] = shown
        origin = Origin(repr(self.url), self.repository, self.session, group, self.branch)
        return IcechunkAccessor.mark(dataset, origin)
