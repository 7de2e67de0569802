"""Groups of arrays as lazy datasets of xarray, also where dimensions have no names."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import xarray
import zarr
from xarray.backends import BackendArray
from xarray.core import indexing

from icechunk_async.errors import NodeNotFoundError
from icechunk_async.spark.budget import shared_handle
from icechunk_async.sync.handles import Source
from icechunk_async.sync.portal import run
from icechunk_async.sync.session import Session
from icechunk_async.sync.session_handles import SessionHandle
from icechunk_async.sync.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.snapshot import Node
    from icechunk_async.repository import Repository
    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.sync.handles import RepositoryHandle
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["arrays_of", "ask", "nodes_of", "open_array", "open_group", "session_of", "workspace_of"]


def open_array(store: IcechunkStore, path: str, *, write: bool = False) -> zarr.Array[Any]:
    """Open an array that is there.

    Args:
        store: of a session.
        path: of the array.
        write: it may be changed.

    Raises:
        FileNotFoundError: there is none.
    """
    opening = cast("Any", zarr.open_array)  # pyright: ignore[reportUnknownMemberType]
    array: zarr.Array[Any] = opening(store, path=path, mode="r+" if write else "r", zarr_format=3)
    return array


def workspace_of(session: Session) -> Workspace:
    """Return what a session knows of its nodes and references; blocks where it must be opened."""
    handle = session._session  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return handle.now().workspace


def _handle(options: ReadOptions) -> RepositoryHandle:
    """Return the open repository that all tasks of this process share."""
    config = None if options.budget is None else options.budget.of_task()
    storage = Storage.from_url(options.url, **options.storage)
    source = Source(storage, config, options.virtual or None)
    return shared_handle(source)


def ask[T](options: ReadOptions, question: Callable[[Repository], Awaitable[T]]) -> T:
    """Return a question to the repository; blocks."""

    async def answer() -> T:
        return await question(await handle.repository())

    handle = _handle(options)
    return run(answer())


def session_of(options: ReadOptions) -> Session:
    """Return a session of the pinned snapshot; it opens when it is used."""
    assert options.snapshot_id is not None  # planning pins it
    return Session(SessionHandle(_handle(options), None, snapshot_id=options.snapshot_id))


def arrays_of(options: ReadOptions) -> dict[str, Any]:
    """Return the arrays of a group, as Zarr has them.

    Raises:
        NodeNotFoundError: there is no such group.
    """
    opening = cast("Any", zarr.open_group)  # pyright: ignore[reportUnknownMemberType]
    try:
        group = opening(session_of(options).store, path=options.group, mode="r", zarr_format=3)
    except FileNotFoundError:
        raise NodeNotFoundError(
            f"There is no group {options.group or '/'!r} in snapshot {options.snapshot_id}. Name "
            "one with the option 'group'.",
            path=options.group,
        ) from None
    return dict(group.arrays())


def nodes_of(options: ReadOptions) -> dict[str, Node]:
    """Return what the snapshot knows of the arrays of a group, by name."""
    root = f"/{options.group}" if options.group else "/"
    inside = f"{root.rstrip('/')}/"

    async def find(repository: Repository) -> dict[str, Node]:
        session = await repository.readonly_session(snapshot_id=options.snapshot_id)
        nodes = session.workspace.base.nodes
        names = (path.removeprefix(inside) for path in nodes.below(root))
        found = ((name, nodes[inside + name]) for name in names if "/" not in name)
        return {name: node for name, node in found if node.array is not None}

    return ask(options, find)


def open_group(options: ReadOptions) -> xarray.Dataset:
    """Open the arrays of a group, whose values are read when they are asked for.

    Raises:
        NodeNotFoundError: there is no such group.
    """
    arrays = arrays_of(options)
    store: Any = session_of(options).store
    opening = cast("Any", xarray.open_dataset)  # pyright: ignore[reportUnknownMemberType]
    if all(_is_named(array) for array in arrays.values()):
        with warnings.catch_warnings():
            # How times without a calendar will be read in future versions.
            warnings.simplefilter("ignore")
            dataset: xarray.Dataset = opening(
                store,
                engine="zarr",
                group=options.group or None,
                consolidated=False,
                zarr_format=3,
                chunks=None,
                mask_and_scale=options.decode,
                decode_times=options.decode,
                create_default_indexes=False,
            )
        return dataset
    return _by_position(arrays, decode=options.decode)


def _names(array: zarr.Array[Any]) -> tuple[str | None, ...]:
    return getattr(array.metadata, "dimension_names", None) or (None,) * array.ndim


def _is_named(array: zarr.Array[Any]) -> bool:
    return None not in _names(array)


def _by_position(arrays: Mapping[str, zarr.Array[Any]], *, decode: bool) -> xarray.Dataset:
    """Name dimensions ``dim_0`` and so on where they have no names.

    Arrays that differ in length along such a dimension each get their own.
    """
    lengths: dict[str, int] = {}
    variables: dict[str, xarray.Variable] = {}
    for name, array in arrays.items():
        dims: list[str] = []
        for axis, (given, length) in enumerate(zip(_names(array), array.shape, strict=True)):
            dim = given or f"dim_{axis}"
            if lengths.setdefault(dim, length) != length:
                dim = f"{name}_{dim}"
                lengths[dim] = length
            dims.append(dim)
        lazy = indexing.LazilyIndexedArray(_Stored(array))
        variable = xarray.Variable(dims, lazy, dict(array.attrs))
        variable.encoding = {"preferred_chunks": {}, "chunks": array.chunks}
        variables[name] = variable
    coords = {name: it for name, it in variables.items() if it.dims == (name,)}
    dataset = xarray.Dataset({name: it for name, it in variables.items() if name not in coords})
    dataset.coords.update(xarray.Coordinates(coords, indexes={}))
    return xarray.decode_cf(dataset, mask_and_scale=decode, decode_times=decode)


class _Stored(BackendArray):
    """An array of Zarr that is read when it is indexed."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> Any:
        return self.array[key]
