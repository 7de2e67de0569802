"""Read through the store.

The snapshot and the manifest are cached, as they are after the first read. Ours is the native
asynchronous store; both engines read the same files.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from zarr.core.buffer import default_buffer_prototype

from benchmarks.contest import FLOOR
from benchmarks.peers import chunked, create, native_store, numbers, other_stores, tip_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

    type One = Callable[[Store, str], Awaitable[object]]

PROTOTYPE = default_buffer_prototype()
ENGINES = ("ours", "official")


class Stores:
    """An array in a repository and in a directory, open in everything that reads it."""

    def __init__(self, directory: str, count: int, chunk_bytes: int) -> None:
        """Write with the official engine and with zarr."""
        self.keys = [f"a/c/{i}" for i in range(count)]
        self.runner = asyncio.Runner()
        self._stack = ExitStack()
        data = numbers(count, chunk_bytes)
        session = create("official", directory).writable_session("main")
        chunked(session.store, count, chunk_bytes)[:] = data
        session.commit("filled")
        plain = f"{directory}-plain"
        self.stores: dict[str, Store] = {
            "ours": self._stack.enter_context(native_store(self.runner, directory)),
            "official": tip_store("official", directory),
            **other_stores(plain),
        }
        chunked(self.stores["zarr LocalStore"], count, chunk_bytes)[:] = data
        self.files = [str(Path(plain) / key) for key in self.keys]

    def close(self) -> None:
        """Close ours."""
        self._stack.close()
        self.runner.close()

    def each(
        self, one: One, keys: list[str], limit: int, names: tuple[str, ...]
    ) -> dict[str, Work]:
        """Return a contender for each store that does ``one`` for each key, ``limit`` at a time."""
        return {name: self._work(self.stores[name], one, keys, limit) for name in names}

    def _work(self, store: Store, one: One, keys: list[str], limit: int) -> Work:
        async def work() -> None:
            # Shared by the workers: each takes the next key, so that none waits for a slow one.
            pending = iter(keys)

            async def worker() -> None:
                for key in pending:
                    # A contender that finds nothing is fast, and wrong.
                    assert await one(store, key)

            if limit == 1:
                await worker()
                return
            async with asyncio.TaskGroup() as group:
                for _ in range(limit):
                    group.create_task(worker())

        return lambda: self.runner.run(work())

    def await_each(self, keys: list[str], limit: int) -> Work:
        """Return a contender that awaits a coroutine for each key, which does nothing."""
        return self._work(self.stores["ours"], _nothing, keys, limit)

    def read_files(self) -> None:
        """Read the same bytes with nothing in between."""
        for name in self.files:
            descriptor = os.open(name, os.O_RDONLY)
            os.read(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)


NOTHING = "await as many coroutines that do nothing"
type Work = Callable[[], object]


def _get(store: Store, key: str) -> Awaitable[object]:
    return store.get(key, PROTOTYPE)


async def _nothing(_store: Store, _key: str) -> object:
    return True


def _exists(store: Store, key: str) -> Awaitable[object]:
    return store.exists(key)


@pytest.fixture
def opened(directory: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Stores]]:
    """Return a function that makes stores. Close them in the end."""
    made: list[Stores] = []

    def make(count: int, chunk_bytes: int) -> Stores:
        made.append(Stores(directory, count, chunk_bytes))
        return made[-1]

    yield make
    for stores in made:
        stores.close()


@pytest.mark.parametrize("limit", [1, 64])
def test_get_10_kb(contest: Contest, opened: Callable[..., Stores], limit: int) -> None:
    """A native chunk of 10 KB, from the cache of the operating system."""
    count = contest.pick(50, 1000)
    stores = opened(count, 10_000)
    work = stores.each(
        _get, stores.keys, limit, (*ENGINES, "zarr LocalStore", "zarr ObjectStore (obstore)")
    )
    contest.race(
        f"store: get a local chunk of 10 KB, {limit} at a time",
        {**work, FLOOR: stores.read_files},
        operations=count,
        targets={"official": 12},
        floor="open, read and close the files",
    )


@pytest.mark.parametrize("limit", [1, 64])
def test_get_1_mb(contest: Contest, opened: Callable[..., Stores], limit: int) -> None:
    """A native chunk of 1 MB, from the cache of the operating system."""
    count = contest.pick(4, 128)
    stores = opened(count, 2**20)
    work = stores.each(
        _get, stores.keys, limit, (*ENGINES, "zarr LocalStore", "zarr ObjectStore (obstore)")
    )
    contest.race(
        f"store: get a local chunk of 1 MB, {limit} at a time",
        {**work, FLOOR: stores.read_files},
        operations=count,
        targets={"official": 20, "zarr LocalStore": 1},
        floor="open, read and close the files",
    )


def test_get_metadata(contest: Contest, opened: Callable[..., Stores]) -> None:
    """``zarr.json`` of an array."""
    count = contest.pick(50, 1000)
    stores = opened(2, 10_000)
    keys = ["a/zarr.json"] * count
    work = stores.each(_get, keys, 1, (*ENGINES, "zarr LocalStore"))
    contest.race(
        "store: get a metadata document",
        {**work, FLOOR: stores.await_each(keys, 1)},
        operations=count,
        targets={"official": 30},
        floor=NOTHING,
    )


def test_exists(contest: Contest, opened: Callable[..., Stores]) -> None:
    """Whether a chunk is there."""
    count = contest.pick(50, 1000)
    stores = opened(count, 1000)
    work = stores.each(_exists, stores.keys, 1, (*ENGINES, "zarr LocalStore"))
    contest.race(
        "store: tell whether a chunk exists",
        {**work, FLOOR: stores.await_each(stores.keys, 1)},
        operations=count,
        targets={"official": 15},
        floor=NOTHING,
    )


def test_get_inline(contest: Contest, opened: Callable[..., Stores]) -> None:
    """A chunk of 400 bytes, which the manifest holds."""
    count = contest.pick(50, 2000)
    stores = opened(count, 400)
    work = stores.each(_get, stores.keys, 64, (*ENGINES, "zarr LocalStore"))
    contest.race(
        "store: get an inline chunk of 400 B, 64 at a time",
        {**work, FLOOR: stores.await_each(stores.keys, 64)},
        operations=count,
        targets={"official": 8},
        floor=NOTHING,
    )
