"""An event loop whose clock jumps: waiting takes no time, and durations are exact.

With a storage that waits one second a request, the seconds that an operation takes are the
requests that had to follow one another.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VirtualTimeLoop"]


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would sleep until its next timer, moves its clock there instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Without a timer it really waits: something else has to wake the loop.
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            # Only if nothing is ready: time stands still while there is something to do.
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For ``asyncio.Runner(loop_factory=VirtualTimeLoop)``; not for work done by threads."""

    def __init__(self) -> None:
        """Begin at time 0."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop began."""
        return self._jumping.now

    def call_exception_handler(self, context: Mapping[str, object]) -> None:
        """Fail the test if a callback raised an exception."""
        # asyncio only logs these, and the test would pass.
        error = context.get("exception")
        if isinstance(error, BaseException):
            raise error
        super().call_exception_handler(dict(context))
