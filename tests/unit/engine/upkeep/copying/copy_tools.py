"""Storages that break, count or interfere, and looking at copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import RepositoryNotFoundError, StorageUnavailableError
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import objects
from tests.unit.engine.upkeep.upkeep_tools import read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.storage import Storage

__all__ = ["MARK", "Breaking", "Busy", "Counting", "shown_by", "stored"]

MARK = "copies/state.json"


class Breaking(WrappedStorage):
    """A storage that is lost after a number of writes: every later request fails."""

    writes_left = 10**9

    async def before(self, operation: str, key: str) -> None:
        """Fail, or count."""
        del key
        if operation in ("put", "delete", "copy"):
            self.writes_left -= 1
        if self.writes_left < 0:
            raise StorageUnavailableError("the process was killed")


class Counting(WrappedStorage):
    """Counts requests by operation."""

    def __init__(self, storage: Storage) -> None:
        """Begin with none."""
        super().__init__(storage)
        self.requests: list[tuple[str, str]] = []

    async def before(self, operation: str, key: str) -> None:
        """Count."""
        self.requests.append((operation, key))


class Busy(WrappedStorage):
    """A storage that runs other work when an operation reaches a key."""

    def __init__(
        self, storage: Storage, at: tuple[str, str], work: Callable[[], Awaitable[object]]
    ) -> None:
        """Run ``work`` once, before the first operation ``at[0]`` on keys that begin so."""
        super().__init__(storage)
        self._at = at
        self._work: Callable[[], Awaitable[object]] | None = work

    async def before(self, operation: str, key: str) -> None:
        """Run the other work."""
        wanted, prefix = self._at
        if self._work is not None and operation == wanted and key.startswith(prefix):
            work, self._work = self._work, None
            await work()


async def stored(storage: Storage) -> dict[str, bytes]:
    """Return all objects but the note of the copies."""
    found = {key: bytes(data) for key, data in (await objects(storage)).items()}
    found.pop(MARK, None)
    return found


async def shown_by(url: str) -> dict[str, dict[str, bytes | None]]:
    """Return all that a copy shows; nothing if there is no repository yet."""
    try:
        return await read_all(url)
    except RepositoryNotFoundError:
        return {}
