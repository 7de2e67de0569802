"""How the parts of the blocking repository reach the native one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync.portal import run, run_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.sync.handles import RepositoryHandle

    type Question[T] = Callable[[AsyncRepository], Awaitable[T]]

__all__ = ["Asking"]


class Asking:
    """A base of the parts: asks the native repository and blocks, or is awaited."""

    _repository: RepositoryHandle

    def _ask[T](self, question: Question[T]) -> T:
        return run(self._repository.ask(question))

    async def _ask_async[T](self, question: Question[T]) -> T:
        return await run_async(self._repository.ask(question))
