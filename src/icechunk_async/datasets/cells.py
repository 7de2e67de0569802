"""The cells that fulfil conditions, as a lazy array of xarray; the others are missing.

Needs `xarray`.
"""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio.to_thread
import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import dtypes, indexing

from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.zarr.queries.selection import SelectedCells

__all__ = ["Asked", "Part", "Selected", "check_lazy", "lazy_array", "queried_name"]

_EXACT_DOUBLES: Final = np.uint64(1 << 53)
"""All integers up to this are doubles."""


def check_lazy(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if arguments ask for arrays of Dask."""
    if "chunks" in kwargs:
        raise InvalidInputError(
            "The array is lazy without Dask. Leave 'chunks' out, and call '.chunk()' on the result."
        )


def queried_name(dataset: xarray.Dataset, conditions: str) -> str:
    """Return the name of the array, of those that conditions name, with the most axes.

    Raises:
        InvalidInputError: there is no condition, or one cannot be understood.
        NodeNotFoundError: there is no such array.
    """
    names = columns_of(*parse_where(conditions, "The condition"))
    for name in names:
        if name not in dataset.variables:
            raise NodeNotFoundError(
                f"A condition is about {name!r}, and the group has no such array. It has "
                f"{', '.join(map(str, dataset.variables))}.",
                path=name,
            )
    if not names:
        raise InvalidInputError(
            'There is no condition. Give at least one, such as "t2m > 320 and lat > 60".'
        )
    return max(names, key=lambda it: dataset.variables[it].ndim)


def lazy_array(dataset: xarray.Dataset, name: str, selected: Selected) -> xarray.DataArray:
    """Return selected cells of an array as an array with the coordinates of its dataset."""
    variable = dataset.variables[name]
    lazy = indexing.LazilyIndexedArray(selected)
    coords = {it: at for it, at in dataset.coords.items() if set(at.dims) <= set(variable.dims)}
    coords.pop(name, None)
    return xarray.DataArray(
        xarray.Variable(variable.dims, lazy, variable.attrs), coords=coords, name=name
    )


class Part:
    """A part of an array that is filled with the cells that fulfil conditions.

    Attributes:
        region: the part as slices without steps, which conditions are asked for.
        found: its cells, missing until they are placed.
    """

    def __init__(self, key: tuple[Any, ...], variable: xarray.Variable) -> None:
        """Steps, and axes of a single place, are taken from the part around it."""
        spans: list[slice] = []
        inner: list[Any] = []
        for it, length in zip(key, variable.shape, strict=True):
            places = range(length)[it] if isinstance(it, slice) else range(it, it + 1)
            spans.append(slice(min(places), max(places) + 1) if places else slice(0, 0))
            inner.append(slice(None, None, places.step) if isinstance(it, slice) else 0)
        dtype, missing = dtypes.maybe_promote(variable.dtype)
        self.region = tuple(spans)
        self.found = np.full([it.stop - it.start for it in spans], missing, dtype)
        self._inner = tuple(inner)

    def place(self, cells: SelectedCells, values: Any) -> None:
        """Place the values of a box where its cells fulfil the conditions."""
        corner = zip(cells.box, self.region, strict=True)
        box = [slice(b.start - s.start, b.stop - s.start) for b, s in corner]
        place: tuple[Any, ...] = (*box, ...)
        part = self.found[place]  # a view, also where there are no axes
        chosen = values[cells.mask]
        if self.found.dtype.kind == "f" and chosen.dtype.kind in "iu":
            _check_doubles(chosen)
        part[cells.mask] = chosen

    def result(self) -> Any:
        """Return the cells that the key names."""
        return self.found[self._inner]


def _check_doubles(integers: Any) -> None:
    """Raise InvalidInputError if an integer has no double that is equal to it."""
    magnitudes = np.abs(integers).astype(np.uint64)
    large = magnitudes[magnitudes > _EXACT_DOUBLES]
    # Zeros at the end of a binary number belong to the exponent.
    rounded = large // (large & (~large + np.uint64(1))) > _EXACT_DOUBLES
    if rounded.any():
        value = int(integers[magnitudes > _EXACT_DOUBLES][rounded][0])
        raise InvalidInputError(
            f"The value {value} fulfils the conditions, and no double is equal to it. Integers "
            "become doubles, since other values are missing. Use 'Session.where', and read the "
            "array where its masks say."
        )


class Asked(Protocol):
    """A session of code that blocks; a dataset pickles as it does."""

    def where(
        self, conditions: str, *, group: str, region: Sequence[slice]
    ) -> Iterable[SelectedCells]:
        """Iterate over the cells that fulfil conditions, chunk by chunk."""
        ...


class Selected(BackendArray):
    """The cells of a variable that fulfil conditions, read part by part."""

    def __init__(
        self, session: Asked, conditions: str, group: str, variable: xarray.Variable
    ) -> None:
        """Read from a session when values are asked for."""
        self.shape = variable.shape
        self.dtype, _ = dtypes.maybe_promote(variable.dtype)
        self.session = session
        self.conditions = conditions
        self.group = group
        self.variable = variable

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part; blocks."""
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._read
        )

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read a part in a thread."""
        return await anyio.to_thread.run_sync(self.__getitem__, key)

    def _read(self, key: tuple[Any, ...]) -> Any:
        part = Part(key, self.variable)
        if part.found.size:
            for cells in self.session.where(self.conditions, group=self.group, region=part.region):
                part.place(cells, self.variable[cells.box].to_numpy())
        return part.result()
