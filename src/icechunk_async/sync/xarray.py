"""Writing xarray's datasets into sessions, and reading them.

xarray's own Zarr writer encodes variables and decides where they go. Arrays that are not computed
yet are kept apart, and forks of the session write them. Needs `xarray`, and `dask[array]` for
datasets of Dask arrays.
"""

# Dask and xarray are only partly typed.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import xarray
import zarr
from xarray.backends.common import ArrayWriter
from xarray.backends.writers import dump_to_store
from xarray.backends.zarr import ZarrStore

from icechunk_async.sync.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableMapping

    from zarr.abc.store import Store

    from icechunk_async.sync.session import ForkSession, Session

    type Mode = Literal["w", "w-", "a", "a-", "r+", "r"]
    type Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]

__all__ = ["Lazy", "open_dataset", "to_icechunk", "write_known"]


def to_icechunk(
    obj: xarray.DataArray | xarray.Dataset,
    session: Session,
    *,
    group: str | None = None,
    mode: Mode | None = None,
    safe_chunks: bool = True,
    align_chunks: bool = False,
    append_dim: Hashable | None = None,
    region: Region | None = None,
    encoding: Mapping[Any, Any] | None = None,
    chunkmanager_store_kwargs: MutableMapping[Any, Any] | None = None,
    split_every: int | None = None,
) -> None:
    """Write a dataset into a group of a writable session; nothing is committed.

    Arrays in memory are written at once. The workers of Dask's scheduler compute and write Dask
    arrays, each in a fork of the session, and the forks are merged.

    Args:
        obj: a dataset, or an array, which is written as a dataset of one variable.
        session: a writable session.
        group: path of the group; the root if None.
        mode: `"w"` replaces the group, `"w-"` fails if it exists, `"a"` writes or replaces
            variables, `"a-"` appends to those that have `append_dim` and adds new ones,
            `"r+"` changes values of what exists. None: `"a"` with `append_dim`, `"r+"`
            with `region`, else `"w-"`.
        safe_chunks: raise an error for Dask chunks that do not fit the chunks of the array.
        align_chunks: rechunk Dask arrays so that they fit.
        append_dim: dimension to append along.
        region: the part of existing arrays to write: slices by dimension, or `"auto"` to find
            them by the coordinates.
        encoding: of variables, by name.
        chunkmanager_store_kwargs: for `dask.array.store`.
        split_every: the number of change sets that are merged at a time.

    Raises:
        ValueError: as `xarray.Dataset.to_zarr`. The session may have some of the changes.
        InvalidInputError: two Dask chunks share a chunk of the array. The session may have some
            of the changes.
        ReadOnlyError: the session only reads.
    """
    lazy = write_known(
        obj,
        session.store,
        group=group,
        mode=mode,
        safe_chunks=safe_chunks,
        align_chunks=align_chunks,
        append_dim=append_dim,
        region=region,
        encoding=encoding,
    )
    if lazy.sources:
        fork = session.fork()
        session.merge(lazy.write(fork, chunkmanager_store_kwargs, split_every))


def open_dataset(
    session: Session | ForkSession, group: str | None = None, **kwargs: Any
) -> xarray.Dataset:
    """Open a group of a session as a dataset that reads its values when they are needed.

    Args:
        session: any session.
        group: path of the group; the root if None.
        kwargs: for `xarray.open_dataset`, such as `chunks`, `decode_times` or
            `drop_variables`.

    Raises:
        FileNotFoundError: there is no such group.
    """
    return xarray.open_dataset(
        cast("Any", session.store),  # not in xarray's types
        engine="zarr",
        group=group,
        consolidated=False,
        zarr_format=3,
        **kwargs,
    )


@dataclass(frozen=True, slots=True)
class Lazy:
    """Arrays that are not computed yet, with their targets."""

    sources: list[Any] = field(default_factory=list[Any])
    paths: list[str] = field(default_factory=list[str])
    regions: list[tuple[slice, ...]] = field(default_factory=list[tuple[slice, ...]])

    def write(
        self,
        fork: ForkSession,
        store_kwargs: MutableMapping[Any, Any] | None,
        split_every: int | None,
    ) -> ForkSession:
        """Compute and write everything through a fork; return the fork to merge."""
        from icechunk_async.sync.dask import store_dask  # noqa: PLC0415 - not without Dask

        store = fork.store
        return store_dask(
            sources=self.sources,
            targets=[zarr.open_array(store, path=path, mode="r+") for path in self.paths],
            regions=self.regions,
            split_every=split_every,
            **(store_kwargs or {}),
        )


class _Writer(ArrayWriter):
    """Writes arrays in memory, and keeps the others."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = Lazy()

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Write or keep an array."""
        if not _is_dask(source):
            super().add(source, target, region)
            return
        places = _in_full(region, target.shape)
        self.lazy.sources.append(source)
        self.lazy.paths.append(target.path)
        self.lazy.regions.append(places)


def write_known(
    obj: xarray.DataArray | xarray.Dataset,
    store: Store,
    *,
    group: str | None,
    mode: Mode | None,
    safe_chunks: bool,
    align_chunks: bool,
    append_dim: Hashable | None,
    region: Region | None,
    encoding: Mapping[Any, Any] | None,
) -> Lazy:
    """Write metadata and all arrays that are in memory; return the others.

    Args as for `to_icechunk`.
    """
    dataset = _as_dataset(obj)
    for variable in dataset.variables.values():
        if variable.size == 0:
            variable.load()  # Dask has no blocks to write for it
    zarr_store = ZarrStore.open_group(
        store,
        mode=mode or _default_mode(append_dim, region),
        group=group,
        zarr_format=3,
        consolidated=False,
        append_dim=append_dim,
        write_region=region,
        safe_chunks=safe_chunks,
        align_chunks=align_chunks,
    )
    # The same steps as in Dataset.to_zarr, with another writer.
    dataset = zarr_store._validate_and_autodetect_region(dataset)  # noqa: SLF001
    wanted = dict(encoding or {})
    zarr_store._validate_encoding(wanted)  # noqa: SLF001
    writer = _Writer()
    dump_to_store(dataset, zarr_store, writer, encoding=wanted)
    return writer.lazy


def _as_dataset(obj: xarray.DataArray | xarray.Dataset) -> xarray.Dataset:
    if isinstance(obj, xarray.Dataset):
        return obj
    if not isinstance(obj, xarray.DataArray):
        raise InvalidInputError(
            f"A {type(obj).__name__} cannot be written; pass an xarray Dataset or DataArray."
        )
    name = obj.name if obj.name is not None else "__xarray_dataarray_variable__"
    if name in obj.coords or name in obj.dims:
        raise InvalidInputError(
            f"The array is named {name!r} as one of its coordinates; rename it to write it."
        )
    return obj.to_dataset(name=name)


def _default_mode(append_dim: Hashable | None, region: Region | None) -> Mode:
    if append_dim is not None:
        return "a"
    return "r+" if region is not None else "w-"


def _is_dask(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "dask"


def _in_full(region: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return a region of slices with both ends, so that workers need not know the shape."""
    whole = region if region is not None else (slice(None),) * len(shape)
    return tuple(slice(*it.indices(size)) for it, size in zip(whole, shape, strict=True))
