"""A storage with scripted failures, and helpers for the tests of policies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable

    from icechunk_async.storage import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = ["Scripted", "in_virtual_time", "with_memory"]


class Scripted(PassingStorage):
    """Raises the errors of ``script``, one per request; ``None`` lets a request pass."""

    def __init__(self, storage: Storage, script: Iterable[Exception | None] = ()) -> None:
        super().__init__(storage)
        self.script = list(script)
        self.asked: list[tuple[object, ...]] = []
        self.times: list[float] = []

    async def _step[T](self, call: Callable[[], Awaitable[T]], *what: object) -> T:
        self.asked.append(what)
        self.times.append(asyncio.get_running_loop().time())
        # Every request of a real storage gives others a turn; policies must bear it.
        await asyncio.sleep(0)
        error = self.script.pop(0) if self.script else None
        if error is None:
            return await call()
        raise error

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read, or fail."""
        return await self._step(lambda: self.wrapped.get(key, byte_range), "get", key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read, or fail."""
        return await self._step(lambda: self.wrapped.get_if_changed(key, version), "changed", key)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write, or fail."""
        return await self._step(
            lambda: self.wrapped.put(key, data, if_version=if_version), "put", key
        )

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete, or fail as a whole."""
        doomed = list(keys)
        return await self._step(lambda: self.wrapped.delete(doomed), "delete", *doomed)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """Fail before the entry whose turn it is in the script."""
        self.asked.append(("list", start_after))
        async for entry in self.wrapped.list_prefix(
            prefix, start_after=start_after, delimiter=delimiter
        ):
            error = self.script.pop(0) if self.script else None
            if error is not None:
                raise error
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy, or fail."""
        return await self._step(
            lambda: self.wrapped.copy(source, target, if_version=if_version), "copy", target
        )

    async def sync(self) -> None:
        """Pass on, or fail."""
        await self._step(self.wrapped.sync, "sync")


def in_virtual_time[T](scenario: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    """Run a scenario on a loop whose clock jumps; answer its result and how long it took."""
    with asyncio.Runner(debug=True, loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        began = loop.time()
        return runner.run(scenario()), loop.time() - began


async def with_memory[T](use: Callable[[Storage], Awaitable[T]]) -> T:
    """Use an empty storage in memory."""
    async with open_storage(memory_url()) as storage:
        return await use(storage)
