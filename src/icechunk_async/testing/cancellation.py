"""Cancelling a coroutine at each of its awaits in turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

__all__ = ["cancelled_at_each_await"]

_MAX_AWAITS = 10_000


async def cancelled_at_each_await[T](
    begin: Callable[[int], Coroutine[Any, Any, T]],
) -> AsyncIterator[asyncio.Task[T]]:
    """Begin a coroutine again and again, cancelling it one turn of the event loop later each time.

    Yields each finished task, cancelled or not, so that the caller can look at what it left
    behind; ends after the first one that was done before it could be cancelled. Storage without
    latency should be wrapped so that each request takes at least one turn of the loop.

    Args:
        begin: answers a fresh coroutine; gets the number of the try, from 0.
    """
    for turns in range(_MAX_AWAITS):
        task = asyncio.ensure_future(begin(turns))  # noqa: TID251 -- the task is the subject
        for _ in range(turns):
            if task.done():
                break
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.wait([task])
        yield task
        if finished:
            return
    raise AssertionError(f"still not done after {_MAX_AWAITS} turns of the event loop")
