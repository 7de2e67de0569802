"""Write datasets of VirtualiZarr into a session.

VirtualiZarr's ``to_icechunk`` insists on a store of the official engine. The functions that it
calls take any store that sets references in columns, as ours does.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread
import zarr
from zarr.storage import StorePath

from icechunk_async._runtime import clock
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.format.paths import check_path
from icechunk_async.zarr.store import Hierarchy, IcechunkStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zarr.core.buffer import Buffer

    type Region = Literal["auto"] | Mapping[str, Literal["auto"] | slice]

__all__ = ["write_virtual_dataset"]


class _Store(IcechunkStore):
    """Accepts the leading slash that VirtualiZarr leaves in keys."""

    async def set(self, key: str, value: Buffer) -> None:
        """Write a value."""
        await super().set(key.lstrip("/"), value)


async def write_virtual_dataset(
    session: Hierarchy,
    dataset: Any,
    *,
    group: str = "/",
    mode: Literal["w", "w-", "a"] | None = None,
    append_dim: str | None = None,
    region: Region | None = None,
    validate_containers: bool = True,
    last_updated_at: datetime | None = None,
) -> None:
    """Write a dataset or a tree of datasets that VirtualiZarr opened into a session.

    Does what ``dataset.vz.to_icechunk`` does with a store of the official engine: variables made
    of references stay where they are, variables that were loaded are copied.

    Args:
        session: a writable session, or a fork of one.
        dataset: an ``xarray.Dataset`` or ``xarray.DataTree``.
        group: path of the group that it becomes.
        mode: ``"w-"`` refuses a group that exists, ``"w"`` replaces it, ``"a"`` adds to it. None
            stands for ``"w-"``, and with ``append_dim`` or ``region`` for the group that exists.
        append_dim: the dimension along which to append to what the group has.
        region: the part of the existing arrays that it replaces, by whole chunks; as for
            ``xarray.Dataset.to_zarr``. Not for trees.
        validate_containers: refuse locations that no container covers, before anything is written.
        last_updated_at: refuse to read sources that were modified after this; by default after a
            second from now.

    Raises:
        VirtualContainerError: no container covers a location; nothing was written.
        InvalidInputError: arguments contradict each other, or arrays that have ``append_dim`` would
            have different lengths; nothing was written.
        MissingDriverError: VirtualiZarr is not installed.
        zarr.errors.ContainsGroupError, ValueError: the group exists, or what is there does not fit.

    Cancellation: writing continues to its end on a thread.

    Cost: one call in columns for each variable; a request for each chunk of what is copied.
    """
    try:
        # Imported when it is needed: VirtualiZarr is optional, and has no types.
        writers: Any = import_module("virtualizarr.writers.icechunk")
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "Writing virtual datasets needs VirtualiZarr, which is not installed. Install it with: "
            "pip install virtualizarr",
            module=error.name,
        ) from error
    session.workspace.check_writable()
    existing = append_dim is not None or region is not None
    if existing and mode in ("w", "w-"):
        raise InvalidInputError(
            f"mode={mode!r} makes a new group, and append_dim and region need one that exists. "
            "Leave mode out, or give 'a'."
        )
    base = check_path(group)
    parts = list(_parts(dataset, base))
    if len(parts) > 1 and region is not None:
        raise InvalidInputError("A region is of one dataset. Write the tree's groups one by one.")
    locations = session.workspace.virtual.locations
    # VirtualiZarr's own default. The format keeps whole seconds: a source written in this second
    # would look younger than the guard.
    moment = last_updated_at or datetime.fromtimestamp(clock.now_us() / 1e6, UTC) + timedelta(
        seconds=1
    )
    store = _Store(session)

    def write() -> None:
        if validate_containers:
            # All before the first write, so that an error leaves the session unchanged.
            for location in {it for _, part in parts for it in _locations(part)}:
                locations.normalize(location)
        if region is None and (append_dim is not None or mode == "a"):
            _check_lengths(store, parts, append_dim)
        for path, part in parts:
            place = StorePath(store, path.strip("/"))
            opened = zarr.open_group(  # pyright: ignore[reportUnknownMemberType]
                place, mode="r+" if existing else mode or "w-", zarr_format=3
            )
            writers.write_virtual_dataset_to_icechunk_group(
                vds=part,
                store=store,
                group=opened,
                append_dim=append_dim,
                region=region,
                last_updated_at=moment,
            )

    # VirtualiZarr calls Zarr, which blocks.
    await anyio.to_thread.run_sync(write)


def _check_lengths(
    store: IcechunkStore, parts: Iterable[tuple[str, Any]], append_dim: str | None
) -> None:
    """Raise InvalidInputError if a group that exists would get arrays of different lengths."""
    from icechunk_async.zarr.datasets import check_lengths  # noqa: PLC0415 -- needs xarray

    adds = append_dim is not None
    for path, part in parts:
        if not adds and store.workspace.node(path) is None:
            continue  # it becomes a new group
        there = zarr.open_group(  # pyright: ignore[reportUnknownMemberType]
            StorePath(store, path.strip("/")), mode="r"
        )
        # Without `append_dim`, arrays of the same names are replaced.
        kept = [it for it in there.arrays() if adds or it[0] not in part.variables]
        check_lengths(kept, part.variables, append_dim)


def _parts(dataset: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Return the datasets of a tree, each with the path of its group, upper ones first."""
    if not hasattr(dataset, "subtree"):
        yield path, dataset
        return
    for node in dataset.subtree:
        below = node.relative_to(dataset)
        place = path if below == "." else check_path(f"{path}/{below}")
        # The top takes coordinates from its parents, which are not written. Groups below it find
        # theirs in the groups above them.
        yield place, node.to_dataset(inherit=below == ".")


def _locations(dataset: Any) -> Iterable[str]:
    """Return the locations that a dataset refers to."""
    for variable in dataset.variables.values():
        manifest = getattr(variable.data, "manifest", None)
        if manifest is not None:
            yield from manifest.iter_nonempty_paths()
