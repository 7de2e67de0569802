"""A method that blocks and its `_async` twin, from one declaration.

    @awaited
    async def lookup_branch_async(self, branch: str) -> str:
        \"\"\"Return the id of the snapshot at the tip of a branch.\"\"\"
        return str(await self.handle.ask(lambda it: it.lookup_branch(branch)))

    lookup_branch = blocking(lookup_branch_async)

Both have the signature and the docstring that are written once, for type checkers as well. The
body always runs on the portal's loop. A plain function that returns a coroutine can be declared
in the same way: what it does before it returns is done on the caller's thread, so warnings point
to the caller's line.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from icechunk_async.sync.bridge.portal import run, run_async

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["awaited", "blocking"]


def awaited[**P, T](
    work: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that any event loop can await; `work` runs on the portal's."""

    @functools.wraps(work)
    async def method(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_async(work(*args, **kwargs))

    return method


def blocking[**P, T](twin: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the function that blocks until the work of an `awaited` one is done.

    The twin of a class or static method is wrapped again: `classmethod(blocking(open_async))`.
    """
    declared: Any = getattr(twin, "__func__", twin)
    work: Callable[P, Coroutine[Any, Any, T]] = declared.__wrapped__

    @functools.wraps(work)
    def method(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(work(*args, **kwargs))

    method.__name__ = method.__name__.removesuffix("_async")
    method.__qualname__ = method.__qualname__.removesuffix("_async")
    return method
