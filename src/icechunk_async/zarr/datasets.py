"""xarray's datasets in a Zarr store, with xarray's own writer.

That encodes variables and decides where they go. Arrays that are not computed yet are kept apart
for the caller, who knows how they are computed. Needs `xarray`.
"""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

import xarray
from xarray.backends.common import ArrayWriter
from xarray.backends.writers import dump_to_store
from xarray.backends.zarr import ZarrStore

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from zarr.abc.store import Store

    type Mode = Literal["w", "w-", "a", "a-", "r+", "r"]
    type Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]

__all__ = ["Lazy", "write_known"]


@dataclass(frozen=True, slots=True)
class Lazy:
    """Arrays that are not computed yet, with their targets."""

    sources: list[Any] = field(default_factory=list[Any])
    paths: list[str] = field(default_factory=list[str])
    regions: list[tuple[slice, ...]] = field(default_factory=list[tuple[slice, ...]])


# xarray hands each array to a writer, and computes what is lazy at the end, all of it with the one
# store that it was given. Workers need a store each, of a fork.
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


class _Store(ZarrStore):
    """Says of arrays that are there in which calendar they count."""

    def open_store_variable(self, name: str) -> xarray.Variable:
        """Return an array; one of times that names no calendar has the one that CF means then."""
        # xarray reads such times by that one, and would add others by the calendar of NumPy: both
        # differ before 1582, so that 2000-01-02 in `days since 0001-01-01` became 1999-12-31.
        variable: xarray.Variable = super().open_store_variable(name)
        units = variable.attrs.get("units")
        if isinstance(units, str) and " since " in units:
            variable.attrs.setdefault("calendar", "standard")
        return variable


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

    Arguments are those of `icechunk_async.sync.xarray.to_icechunk`.
    """
    _check_kept(mode, append_dim, region)
    dataset = _as_dataset(obj)
    for variable in dataset.variables.values():
        if variable.size == 0:
            variable.load()  # Dask has no blocks to write for it
    zarr_store = _Store.open_group(
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


def _check_kept(mode: Mode | None, append_dim: Hashable | None, region: Region | None) -> None:
    """Raise InvalidInputError where what is to be added to would be deleted first."""
    if mode not in ("w", "w-") or (append_dim is None and region is None):
        return
    given = f"append_dim={append_dim!r}" if append_dim is not None else f"region={region!r}"
    raise InvalidInputError(
        f"{given} adds to arrays that are there, and mode={mode!r} writes new ones in their place. "
        "Leave one of the two out. Nothing was written."
    )


def _as_dataset(obj: xarray.DataArray | xarray.Dataset) -> xarray.Dataset:
    if isinstance(obj, xarray.Dataset):
        return obj
    if not isinstance(obj, xarray.DataArray):
        raise InvalidInputError(
            f"A {type(obj).__name__} cannot be written; pass an xarray Dataset or DataArray."
        )
    # The name that `DataArray.to_zarr` gives to arrays without one.
    name = obj.name if obj.name is not None else "__xarray_dataarray_variable__"
    if name in obj.coords or name in obj.dims:
        raise InvalidInputError(
            f"The array is named {name!r} as one of its coordinates; rename it to write it."
        )
    return obj.to_dataset(name=name)


def _default_mode(append_dim: Hashable | None, region: Region | None) -> Mode:
    # As in `Dataset.to_zarr`.
    if append_dim is not None:
        return "a"
    return "r+" if region is not None else "w-"


def _is_dask(source: Any) -> bool:
    # By name: an import of dask takes long, and who has no Dask array does not need it.
    return type(source).__module__.partition(".")[0] == "dask"


def _in_full(region: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return a region of slices with both ends, so that workers need not know the shape."""
    whole = region if region is not None else (slice(None),) * len(shape)
    return tuple(slice(*it.indices(size)) for it, size in zip(whole, shape, strict=True))
