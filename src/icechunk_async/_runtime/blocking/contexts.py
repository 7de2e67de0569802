"""Asynchronous context managers in ``with`` blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.blocking.tracebacks import managed

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractAsyncContextManager

__all__ = ["blocking"]


@managed
def blocking[T](manager: AbstractAsyncContextManager[T]) -> Generator[T]:
    """Enter and leave an asynchronous context manager on the portal's loop; blocks."""
    entered = run(_enter(manager))
    try:
        yield entered
    except BaseException as error:
        if not run(_leave(manager, error)):
            raise
    else:
        run(_leave(manager, None))


async def _enter[T](manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _leave[T](manager: AbstractAsyncContextManager[T], error: BaseException | None) -> bool:
    if error is None:
        return bool(await manager.__aexit__(None, None, None))
    return bool(await manager.__aexit__(type(error), error, error.__traceback__))
