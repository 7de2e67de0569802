"""A bounded number of requests at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from icechunk_async.errors import IcechunkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = ["for_each"]


async def for_each[T](
    work: Callable[[T], Awaitable[object]], items: Iterable[T], *, limit: int
) -> None:
    """Await ``work`` of every item, at most ``limit`` at a time.

    Raises:
        IcechunkError: what failed first; what was under way was finished, nothing more was begun.

    Cancellation: what is under way is cancelled and waited for.
    """
    pending = iter(items)
    failures: list[IcechunkError] = []

    async def worker() -> None:
        for item in pending:  # shared: each item goes to one worker
            if failures:
                return
            try:
                await work(item)
            except IcechunkError as error:
                failures.append(error)

    # A backend may use nothing of the library but the contract and its errors.
    async with anyio.create_task_group() as tasks:  # noqa: TID251
        for _ in range(limit):
            tasks.start_soon(worker)
    if failures:
        raise failures[0]
