"""Where a dataset of many versions reads: in the open repository, or where a pickle of it arrives.

What is computed, in any thread or process, runs on the loop of code that blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async._runtime.blocking.portal import run, run_async
from icechunk_async.sync.handles.repositories import RepositoryHandle, Source

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.engine.open import Engine

__all__ = ["Elsewhere", "Here"]


class Elsewhere:
    """A repository that opens where it is needed, in this process or another."""

    def __init__(self, handle: RepositoryHandle) -> None:
        """Read through a handle of the facade."""
        self._handle = handle

    def run[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `Home`."""
        return run(self._handle.ask(lambda it: question(it.engine)))

    async def run_async[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `Home`."""
        return await run_async(self._handle.ask(lambda it: question(it.engine)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (self._handle,)


class Here:
    """An open native repository; a pickled copy opens it elsewhere."""

    def __init__(self, engine: Engine) -> None:
        """Read while the repository is open."""
        self._engine = engine

    def run[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `Home`."""

        async def ask() -> T:
            return await question(self._engine)

        return run(ask())

    async def run_async[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """As `Home`: on the caller's own loop."""
        return await question(self._engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (RepositoryHandle(Source.of(self._engine.origin)),)
