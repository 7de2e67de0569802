"""Queries as lazy values of xarray, computed when they are loaded. Needs `xarray`.

Two kinds: aggregates, a dataset whose variables share what was computed, so that a part of all of
them costs one query; and the cells of an array that fulfil conditions, the others missing. A
pickled copy opens its repository where it is used.
"""


# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
import numpy as np
import xarray
from anyio.lowlevel import RunVar
from xarray.backends import BackendArray
from xarray.core import dtypes, indexing

from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.zarr.queries.by_chunk import answered
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.predicates import columns_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from icechunk_async.session import AnySession
    from icechunk_async.zarr.queries.arrays import Box
    from icechunk_async.zarr.queries.by_chunk import Question
    from icechunk_async.zarr.queries.selection import SelectedCells

__all__ = [
    "Answers",
    "Asked",
    "Part",
    "Selected",
    "answer_dataset",
    "check_lazy",
    "lazy_array",
    "names_of",
    "queried_name",
]

_TURNS: Final = RunVar[WeakKeyDictionary["Answers", anyio.Lock]]("turns")
"""The locks of each event loop: threads may run several loops, and a lock wakes waiters of one."""
_WITH_ATTRIBUTES: Final = frozenset({"min", "max", "mean"})
"""Aggregates that are values of the array, in its units."""
_EXACT_DOUBLES: Final = np.uint64(1 << 53)
"""All integers up to this are doubles."""


class Handle(Protocol):
    """A session, in this process or opened again in another; pickles."""

    async def ask[T](self, question: Callable[[AnySession], Awaitable[T]], /) -> T:
        """Ask, on the loop of code that blocks."""
        ...


class Answers:
    """The answers to a question, as far as anybody asked."""

    def __init__(
        self, question: Question, handle: Handle, native: AnySession | None = None
    ) -> None:
        """Ask a handle, or on the caller's loop if there is an open session."""
        self.question = question
        self._handle = handle
        self._native = native
        # Set after the values (`_keep`). Threads and loops have separate locks: two may ask for the
        # same, of one snapshot, and write equal values.
        self._known = np.zeros(question.shape, bool)
        self._values = {
            name: np.zeros(question.shape, question.dtype(name)) for name in question.names
        }
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Answers, (self.question, self._handle)

    def __deepcopy__(self, memo: object) -> Answers:
        """Copies of a dataset share what was computed."""
        return self

    def get(self, name: str, key: tuple[Any, ...]) -> Any:
        """Return a part of an answer; blocks."""
        with self._lock:
            part = self._unknown(key)
            if part is not None:
                self._keep(part, run(self._asking(part)))
        return self._values[name][(*key, ...)].copy()

    async def get_async(self, name: str, key: tuple[Any, ...]) -> Any:
        """Return a part of an answer."""
        async with self._turn():
            part = self._unknown(key)
            if part is not None and self._native is not None:
                self._keep(part, await answered(self._native.store, self.question, part))
            elif part is not None:
                self._keep(part, await run_async(self._asking(part)))
        return self._values[name][(*key, ...)].copy()

    def _turn(self) -> anyio.Lock:
        turns = _TURNS.get(None)
        if turns is None:
            turns = WeakKeyDictionary()
            _TURNS.set(turns)
        return turns.setdefault(self, anyio.Lock())

    async def _asking(self, part: Box) -> dict[str, Any]:
        return await self._handle.ask(lambda it: answered(it.store, self.question, part))

    def _unknown(self, key: tuple[Any, ...]) -> Box | None:
        """Return the part around what a key names; None if that is known, or nothing."""
        if np.all(self._known[key]):
            return None
        # A box around the key, without its steps: a query takes boxes, and what is more is known
        # afterwards.
        spans = [
            range(length)[it] if isinstance(it, slice) else (it,)
            for it, length in zip(key, self.question.shape, strict=True)
        ]
        return tuple(slice(min(it), max(it) + 1) for it in spans)

    def _keep(self, part: Box, found: Mapping[str, Any]) -> None:
        place: tuple[Any, ...] = (*part, ...)  # a view, also where there are no axes
        for name, values in found.items():
            self._values[name][place] = values
        self._known[part] = True


class _Answer(BackendArray):
    """One of the answers."""

    def __init__(self, answers: Answers, name: str) -> None:
        self.answers = answers
        self.name = name
        self.shape = answers.question.shape
        self.dtype = answers.question.dtype(name)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._get
        )

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        return await indexing.async_explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._get_async
        )

    def _get(self, key: tuple[Any, ...]) -> Any:
        return self.answers.get(self.name, key)

    async def _get_async(self, key: tuple[Any, ...]) -> Any:
        return await self.answers.get_async(self.name, key)


def answer_dataset(answers: Answers, around: xarray.Dataset | None) -> xarray.Dataset:
    """Return answers as a dataset, with coordinates from that of the array's group."""
    question = answers.question
    variables: dict[str, xarray.Variable] = {}
    for name in question.names:
        lazy = indexing.LazilyIndexedArray(_Answer(answers, name))
        attributes = question.attributes if name in _WITH_ATTRIBUTES else {}
        variables[name] = xarray.Variable(question.dims, lazy, attributes)
    coords: dict[str, xarray.Variable] = {}
    for name, size in zip(question.dims, question.sizes, strict=True):
        if around is not None and name in around.coords:
            # The coordinate of a block of `size` cells is that of its first.
            coords[name] = around.variables[name][::size]
    return xarray.Dataset(variables, coords=coords)


def names_of(given: Sequence[str] | str) -> list[str]:
    """Return names, or the one that is given, each once."""
    return list(dict.fromkeys([given] if isinstance(given, str) else given))


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
    # The least int64 has no positive one, and stays; as uint64 it is 2**63, which is right.
    magnitudes = np.abs(integers).astype(np.uint64)
    large = magnitudes[magnitudes > _EXACT_DOUBLES]
    # Zeros at the end of a binary number belong to the exponent.
    # `x & -x` is the lowest bit that is set. 2**53 + 2 is 2 * (2**52 + 1), and so a double.
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
        # As xarray's `where` does: integers become doubles, since no integer can be missing.
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
