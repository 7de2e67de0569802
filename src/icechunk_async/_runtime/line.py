"""A line: tasks of one process that want to do the same thing do it in the order of their arrival.

The tasks may run on any number of event loops, each in its own thread. A line saves work and makes
waiting fair; nothing may depend on it, because who holds a turn for too long is overtaken.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.processes import generation

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from types import TracebackType
    from typing import Self

__all__ = ["Line", "Place"]

_inside: Final[ContextVar[frozenset[int]]] = ContextVar("icechunk_lines", default=frozenset())
"""The lines in which the running task, or one that started it, has its turn."""


class Line:
    """Places in the order of arrival; the first one has its turn. Usable from any thread."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()  # held over no await
        self._places: deque[Place] = deque()
        self._generation = generation()

    def join(self, prepare: Callable[[], None] = lambda: None) -> Place:
        """Return the last place, as a ``with`` block that leaves it.

        It has its turn at once if the line is empty, or if this is part of the work of a turn,
        which waits for it. ``prepare``, which must be quick, is called first if the place is really
        in the line: for all such places in the order of the line.
        """
        if self._generation != generation():  # those who wait are tasks of the parent process
            self._lock, self._places, self._generation = threading.Lock(), deque(), generation()
        place = Place(self)
        if id(self) in _inside.get():
            place.has_turn = True
            return place
        with self._lock:
            prepare()
            self._places.append(place)
            if self._places[0] is place:
                place.has_turn = True
        return place

    def head(self) -> tuple[Place | None, int]:
        """Return the place that has its turn, and how many signs of life it has given."""
        with self._lock:
            first = self._places[0] if self._places else None
            return first, 0 if first is None else first.signs

    def remove(self, place: Place) -> None:
        """Take a place out of the line, and let the next have its turn; again does nothing."""
        with self._lock:
            if place not in self._places:
                return
            self._places.remove(place)
            while self._places and not self._places[0].has_turn:
                if self._places[0].call():
                    return
                self._places.popleft()  # its event loop has ended, and with it who waited


class Place:
    """A place in a line, of a task that runs on the event loop that it was made on."""

    __slots__ = ("_called", "_line", "_loop", "_token", "has_turn", "signs")

    def __init__(self, line: Line) -> None:
        """Make a place that is not in the line yet; use `Line.join`."""
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._called: asyncio.Future[None] = self._loop.create_future()
        self.has_turn = False
        """Whether it is, or was, the first."""
        self.signs = 0
        self._token: Token[frozenset[int]] | None = None

    def __enter__(self) -> Self:
        """Begin the block."""
        self._token = _inside.set(_inside.get() | {id(self._line)})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the line."""
        self._line.remove(self)
        if self._token is not None:
            with suppress(ValueError):  # an abandoned generator is closed elsewhere
                _inside.reset(self._token)

    def give_sign(self) -> None:
        """Tell those behind that this turn is still at work."""
        self.signs += 1

    async def wait(self, patience: Callable[[], float]) -> None:
        """Wait for the turn.

        Args:
            patience: returns for how many seconds the first may give no sign of life. After that
                it is taken out of the line. Its work continues, beside those behind it.

        Cancellation: no effect; the place is left with the block.
        """
        while not self.has_turn:
            # Remembered before the wait: only a first that is the same afterwards and gave no sign
            # meanwhile is taken out. A line that moved has another first.
            first, signs = self._line.head()
            await asyncio.wait([self._called], timeout=patience())
            if first is not None and (first, signs) == self._line.head():
                self._line.remove(first)

    def call(self) -> bool:
        """Give it its turn; return False if nobody can be waiting any more."""
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed
            return False
        self.has_turn = True
        return True

    def _wake(self) -> None:
        if not self._called.done():
            self._called.set_result(None)
