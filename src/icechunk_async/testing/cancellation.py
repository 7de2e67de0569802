"""Cancel a coroutine exactly where it waits for the n-th time."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from types import coroutine
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

__all__ = ["at_every_wait"]

_MOST_WAITS: Final = 1000


async def at_every_wait(start: Callable[[int], Coroutine[Any, Any, object]]) -> AsyncIterator[int]:
    """Cancel ``start(n)`` where it waits for the n-th time, for n = 0, 1, 2, ...

    Yields:
        ``n`` after each cancelled run. The iteration ends when a run completes.
    """
    for n in range(_MOST_WAITS):
        if not await _was_cancelled(start(n), n):
            return
        yield n
    raise AssertionError(f"the operation still waits after {_MOST_WAITS} times")


async def _was_cancelled(operation: Coroutine[Any, Any, object], n: int) -> bool:
    task = asyncio.current_task()
    assert task is not None  # only called by a test
    try:
        reached = await _cancel_at(operation, n, task)
    except asyncio.CancelledError:
        # Else the task of the test would count as cancelled, and its later timeouts would end it.
        task.uncancel()
        return True
    assert not reached, "the operation continued after it was cancelled"
    return False


@coroutine
def _cancel_at(
    operation: Coroutine[Any, Any, object], n: int, task: asyncio.Task[object]
) -> Generator[Any, Any, bool]:
    """Run ``operation`` step by step within the current task, which is cancelled at step ``n``."""
    loop = task.get_loop()
    step: Callable[[], Any] = partial(operation.send, None)
    for index in count():
        try:
            awaited = step()
        except StopIteration:
            # True if it waited for the n-th time, was cancelled there, and ended as if nothing had
            # been.
            return index > n
        if index == n:
            # In the next turn: the task has to wait for what this step returned before it can be
            # cancelled there.
            loop.call_soon(task.cancel)
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001 - it is the operation's to handle
            step = partial(operation.throw, error)
        else:
            step = partial(operation.send, value)
    raise AssertionError  # count() does not end
