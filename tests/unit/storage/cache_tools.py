"""A storage that counts its reads, with a cache around it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icechunk_async._runtime import clock
from icechunk_async.storage import CacheOptions, Capabilities, StorageDescription, open_storage
from icechunk_async.storage.policies.cache import Cached
from icechunk_async.storage.policies.disk_cache import DiskTier
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import Retrieved, Storage

__all__ = [
    "Counting",
    "TickingClock",
    "cache_of",
    "files_of",
    "get",
    "is_empty",
    "opened",
    "tier",
    "used",
]


class Counting(WrappedStorage):
    """Memory that says that it is shared, under a URL of a service, and counts reads."""

    url = "s3://bucket/prefix"
    options: dict[str, object] | None = None
    reads = 0
    gate: asyncio.Event | None = None
    reached: asyncio.Event | None = None

    async def before(self, operation: str, key: str) -> None:
        """Count, and wait while a gate is closed."""
        if operation == "get":
            self.reads += 1

    async def after(self, operation: str, key: str) -> None:
        """Wait with the answer while a gate is closed."""
        if operation == "get" and self.gate is not None and self.reached is not None:
            self.reached.set()
            await self.gate.wait()

    @property
    def capabilities(self) -> Capabilities:
        """Promise to be shared."""
        return Capabilities()

    @property
    def description(self) -> StorageDescription:
        """Be somewhere else."""
        return StorageDescription(self.url, self.options or {})


@dataclass
class TickingClock:
    """Goes on by a second whenever it is asked."""

    us: int = 1_700_000_000_000_000

    def now_us(self) -> int:
        """Return the time."""
        self.us += 1_000_000
        return self.us

    def random_bytes(self, size_bytes: int) -> bytes:
        """Return the system's."""
        return clock.SystemClock().random_bytes(size_bytes)


def cache_of(storage: Storage, **options: Any) -> Cached:
    """Wrap a storage whose immutable keys begin with ``chunks/``."""
    return Cached(storage, CacheOptions(**options), immutable=lambda key: key.startswith("chunks/"))


@asynccontextmanager
async def opened() -> AsyncIterator[Counting]:
    """Open an empty storage."""
    async with open_storage(memory_url()) as storage:
        yield Counting(storage)


async def get(storage: Storage, key: str, *arguments: Any) -> bytes:
    """Read bytes."""
    found: Retrieved = await storage.get(key, *arguments)
    return bytes(found.data)


def tier(directory: Path, capacity_bytes: int = 1 << 30, place: str = "s3://bucket") -> DiskTier:
    """Make a handle of a cache directory, as another process would."""
    return DiskTier(directory, capacity_bytes, place)


def files_of(directory: Path) -> list[Path]:
    """Return the files of a cache directory, but for the ledger; oldest use first."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "ledger"]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def is_empty(directory: Path) -> bool:
    """Return whether nothing was made in a directory."""
    return not any(directory.iterdir())


def used(directory: Path) -> int:
    """Return the room that the files of a cache directory take, in whole blocks."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files_of(directory))
