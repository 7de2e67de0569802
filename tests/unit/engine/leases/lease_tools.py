"""A storage with its own clock, and processes whose clocks are wrong."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async.storage import ObjectInfo, open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from icechunk_async.session import Session
    from icechunk_async.storage import (
        Data,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = ["CHUNK", "DAY", "HOUR", "MINUTE", "TimedStorage", "World", "filled", "process"]

CHUNK = b"x" * 600
"""More than is stored inline."""
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class World:
    """The time that is right."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def wait(self, duration: timedelta) -> None:
        """Let time pass for everybody."""
        self.now += duration

    @contextmanager
    def clock_wrong_by(self, skew: timedelta) -> Generator[None]:
        """Run on a machine whose clock is wrong."""
        with clock.use_clock(_SkewedClock(self, skew)):
            yield


class _SkewedClock(clock.SystemClock):
    def __init__(self, world: World, skew: timedelta) -> None:
        self._world = world
        self._skew = skew

    def now_us(self) -> int:
        return clock.to_us(self._world.now + self._skew)

    def elapsed_us(self) -> int:
        """Be right: nobody sets this one."""
        return clock.to_us(self._world.now)


class TimedStorage(LatencyStorage):
    """Dates objects by the world's clock, in whole seconds if asked to. It counts requests."""

    def __init__(self, storage: Storage, world: World, *, tells_on_read: bool = True) -> None:
        super().__init__(storage, seconds=0)
        self._world = world
        self._tells = tells_on_read
        self.times: dict[str, datetime] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write an object."""
        version = await super().put(key, data, if_version=if_version)
        # Cut to seconds, as HTTP's Last-Modified is.
        self.times[key] = self._world.now.replace(microsecond=0)
        return version

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object."""
        found = await super().get(key, byte_range)
        return replace(found, last_modified=self.times.get(key) if self._tells else None)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects."""
        entries = super().list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        async for entry in entries:
            if isinstance(entry, ObjectInfo):
                yield replace(entry, last_modified=self.times.get(entry.key, self._world.now))
            else:
                yield entry


@asynccontextmanager
async def filled(
    world: World, spec: int = 2, *, tells_on_read: bool = True
) -> AsyncIterator[TimedStorage]:
    """Make a repository with a group and an array ``a`` of 100 chunks, one of them written."""
    with world.clock_wrong_by(timedelta(0)):
        async with open_storage(memory_url()) as plain:
            storage = TimedStorage(plain, world, tells_on_read=tells_on_read)
            async with Repository.create(storage, spec_version=spec) as repository:
                session = await repository.writable_session("main")
                await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
                await make_array(session, "a", (100,), (1,))
                await write(session, "a/c/0", CHUNK)
                await session.commit("filled")
            storage.forget()
            yield storage


@asynccontextmanager
async def process(
    storage: Storage, *, lease: timedelta | bool = True
) -> AsyncIterator[tuple[Repository, Session]]:
    """Open the repository as another process would, and begin a leased session."""
    async with Repository.open(storage) as repository:
        yield repository, await repository.writable_session("main", lease=lease)
