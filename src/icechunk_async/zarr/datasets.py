"""xarray's datasets in a Zarr store, with xarray's own writer.

That encodes variables and decides where they go. Arrays that are not computed yet are kept apart
for the caller, who knows how they are computed. Needs `xarray`.
"""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from dataclasses import field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray
from xarray import conventions
from xarray.backends.common import ArrayWriter
from xarray.backends.writers import dump_to_store
from xarray.backends.zarr import ZarrStore

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from zarr import Array
    from zarr.abc.store import Store

    type Mode = Literal["w", "w-", "a", "a-", "r+", "r"]
    type Region = Mapping[str, slice | Literal["auto"]] | Literal["auto"]

__all__ = ["Lazy", "check_lengths", "write_known"]


# Every calendar has it, and nanoseconds from any day that they reach reach this one.
_A_DAY: Final = "1970-01-01"


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
    """Says of arrays that are there in which calendar they count, and checks what is written."""

    def store(self, variables: Mapping[Hashable, xarray.Variable], *args: Any, **kw: Any) -> None:
        """Write variables, unless some would not fit, or cannot be encoded."""
        check_lengths(self.arrays(), variables, self._append_dim)
        if find_spec("cftime") is None:
            self._check_calendars(variables)
        super().store(variables, *args, **kw)

    # By trying, with what xarray does then: it also takes what it cannot parse to `cftime`.
    def _check_calendars(self, variables: Mapping[Hashable, xarray.Variable]) -> None:
        """Raise MissingDriverError for times that only `cftime` can count."""
        there = frozenset(self.array_keys())
        for name, variable in variables.items():
            if variable.dtype.kind != "M":
                continue
            try:
                encoding = variable.encoding
                if name in there:
                    found = self.open_store_variable(str(name))
                    encoding = conventions.decode_cf_variable(name, found).encoding
                # In the variable's resolution, and as floats: whether integers would do depends on
                # the values.
                asked = {it: encoding[it] for it in ("units", "calendar") if it in encoding}
                asked["dtype"] = np.dtype(np.float64)
                day = xarray.Variable((), np.array(_A_DAY, variable.dtype), encoding=asked)
                conventions.encode_cf_variable(day)
            except (AttributeError, ImportError, ValueError) as error:
                missing = error.__cause__ if isinstance(error, ValueError) else error
                if not isinstance(missing, AttributeError | ImportError):
                    raise
                raise MissingDriverError(
                    f"The times of {name!r} count from a day, or by a calendar, for which xarray "
                    "needs cftime, which is not installed. Install it with: pip install cftime. "
                    "No variable was written.",
                    module="cftime",
                ) from error

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


def check_lengths(
    arrays: Iterable[tuple[str, Array[Any]]],
    variables: Mapping[Hashable, xarray.Variable],
    append_dim: Hashable | None,
) -> None:
    """Raise InvalidInputError if arrays that have a dimension in common would differ along it.

    Args:
        arrays: those that a group has, with their names.
        variables: what is written.
        append_dim: the dimension along which it is appended to arrays that are there.
    """
    # xarray opens a group only if its arrays agree, and `Dataset.to_zarr` looks at each alone.
    before = {name: _lengths(array) for name, array in arrays}
    written = {str(name): dict(variable.sizes) for name, variable in variables.items()}
    after = written | before
    for name in written.keys() & before.keys():
        if written[name].keys() != before[name].keys():
            return  # xarray refuses other dimensions itself
        if append_dim in written[name]:
            after[name] = before[name] | {
                append_dim: before[name][append_dim] + written[name][append_dim]
            }
    for dim in {dim for lengths in after.values() for dim in lengths}:
        if len(set(_along(before, dim).values())) > 1:
            continue  # they differ already; this may be a step of mending them
        lengths = _along(after, dim)
        if len(set(lengths.values())) > 1:
            new = [it for it in lengths if it not in before]
            missing = [it for it in lengths if it not in written] if dim == append_dim else []
            raise InvalidInputError(_uneven(dim, lengths, missing, new))


def _lengths(array: Array[Any]) -> dict[Hashable, int]:
    names: tuple[str | None, ...] = getattr(array.metadata, "dimension_names", None) or ()
    return {name: size for name, size in zip(names, array.shape, strict=False) if name is not None}


def _along(arrays: Mapping[str, Mapping[Hashable, int]], dim: Hashable) -> dict[str, int]:
    return {name: lengths[dim] for name, lengths in arrays.items() if dim in lengths}


def _uneven(dim: Hashable, lengths: Mapping[str, int], missing: list[str], new: list[str]) -> str:
    """Return a sentence on the lengths along a dimension, and one on the remedy."""
    one_of_each = {length: name for name, length in lengths.items()}
    each = ", ".join(f"{name!r} {length}" for length, name in sorted(one_of_each.items()))
    text = f"Along {dim!r} lengths would differ, as {each}, and xarray opens no such group."
    if missing:
        text += (
            f" The dataset lacks {_listed(missing)}: append to all variables that have the "
            "dimension in one call."
        )
    if new:
        text += (
            f" The group has no {_listed(new)} yet: write new variables in full length, in a call "
            "without append_dim, or write them to another group."
        )
    return text + " Nothing was written."


def _listed(names: list[str]) -> str:
    some = [repr(it) for it in sorted(names)[:5]]
    more = len(names) - len(some)
    return " and ".join([*some, *([f"{more} more"] if more else [])])


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
