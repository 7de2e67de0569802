"""A time limit for all calls within a block."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

__all__ = ["bounded", "deadline", "is_set"]

_until: ContextVar[float | None] = ContextVar("icechunk_async_deadline", default=None)


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Limit the time of all calls of the facade in the block, with reads and writes of stores.

    When the time is over, a call is cancelled, ends, and raises `TimeoutError`; later calls in
    the block raise it at once. Of nested deadlines the earliest counts. A deadline does not
    concern other threads and tasks, unless they run in a copy of the context.

    A commit that is cut off may have been published. Commit the same session again to find out.
    """
    until = time.monotonic() + seconds
    outer = _until.get()
    token = _until.set(until if outer is None else min(outer, until))
    try:
        yield
    finally:
        _until.reset(token)


def is_set() -> bool:
    """Return whether a deadline is in force here."""
    return _until.get() is not None


async def bounded[T](work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until the deadline in force, if there is one.

    Raises:
        TimeoutError: the deadline passed; the work was cancelled and has ended.
    """
    until = _until.get()
    if until is None:
        return await work
    remaining = until - time.monotonic()
    if remaining <= 0:
        work.close()
        raise TimeoutError("The deadline had passed before the call began; nothing was done.")
    scope = asyncio.timeout(remaining)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise  # a timeout of the work itself
        raise TimeoutError(
            "The deadline passed and the call was cancelled. What it changes may have been "
            "changed; read to find out, or commit the same session again."
        ) from error
