"""Call functions of users, which may block, from the loop of code that blocks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["call_in_thread", "unblocked"]


async def call_in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a thread that does not count among those of the event loop.

    If it uses a repository, it waits for work that threads do, and could hold all that there are.
    An async function runs on the caller's loop. Cancellation: a thread goes to its end.
    """
    own = CapacityLimiter(1)
    found = await to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=own)
    return await found if inspect.isawaitable(found) else found


def unblocked(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the async function, of the same name, that calls a function in a thread."""

    async def run(*arguments: object) -> Any:
        return await call_in_thread(function, *arguments)

    run.__name__ = getattr(function, "__name__", type(function).__name__)
    return run
