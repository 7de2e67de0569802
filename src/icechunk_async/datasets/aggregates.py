"""Lazy aggregates: a dataset of xarray whose values are computed when they are loaded.

All variables share what was computed, so that a part of them costs one query. A pickled copy
opens its repository where it is used. Needs `xarray`.
"""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

import anyio
import numpy as np
import xarray
from anyio.lowlevel import RunVar
from xarray.backends import BackendArray
from xarray.core import indexing

from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async.zarr.queries.by_chunk import answered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from icechunk_async.session import AnySession
    from icechunk_async.zarr.queries.arrays import Box
    from icechunk_async.zarr.queries.by_chunk import Question

__all__ = ["Answers", "answer_dataset", "names_of"]

_TURNS: Final = RunVar[WeakKeyDictionary["Answers", anyio.Lock]]("turns")
"""The locks of each event loop: threads may run several loops, and a lock wakes waiters of one."""
_WITH_ATTRIBUTES: Final = frozenset({"min", "max", "mean"})
"""Aggregates that are values of the array, in its units."""


def names_of(given: Sequence[str] | str) -> list[str]:
    """Return names, or the one that is given, each once."""
    return list(dict.fromkeys([given] if isinstance(given, str) else given))


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
                self._keep(part, await answered(self._native, self.question, part))
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
        return await self._handle.ask(lambda it: answered(it, self.question, part))

    def _unknown(self, key: tuple[Any, ...]) -> Box | None:
        """Return the part around what a key names; None if that is known, or nothing."""
        if np.all(self._known[key]):
            return None
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
            coords[name] = around.variables[name][::size]
    return xarray.Dataset(variables, coords=coords)
