"""Contests about references, each in a separate process. Each function returns figures."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype

from benchmarks.machine import Meter
from benchmarks.peers import PACKAGES, PREFIX, create, open_repository
from icechunk_async import Repository

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import Store

CHUNK_BYTES = 100
FILES = 1000
PROTOTYPE = default_buffer_prototype()


def set_virtual(engine: str, directory: str, count: int, spec: int) -> dict[str, float]:
    """Set references from columns in memory, and commit."""
    repository = create(engine, directory, spec=spec)
    warm_up(engine)
    session = repository.writable_session("main")
    _array(session.store, count)
    columns = _columns(count, f"{PREFIX}source")
    with Meter(finds_memory=True) as meter:
        session.store.set_virtual_refs_arr("a", (count,), *columns)
        session.commit("references")
    return meter.figures()


def set_native(engine: str, count: int, spec: int) -> dict[str, float]:
    """Write chunks to memory, 64 at a time, and commit."""
    repository = create(engine, PACKAGES[engine].in_memory_storage(), spec=spec, inline=0)
    warm_up(engine)
    session = repository.writable_session("main")
    _array(session.store, count)
    # Apart from the commit: with 64 at a time it is the interpreter that is measured here.
    with Meter() as writing:
        asyncio.run(_write(session.store, count))
    with Meter(finds_memory=True) as commit:
        session.commit("references")
    return {
        **commit.figures(),
        "writing seconds": writing.seconds,
        "seconds in all": writing.seconds + commit.seconds,
    }


async def _write(store: Store, count: int) -> None:
    pending = iter(range(count))

    async def worker() -> None:
        for number in pending:
            await store.set(f"a/c/{number}", PROTOTYPE.buffer.from_bytes(b"%0100d" % number))

    async with asyncio.TaskGroup() as group:
        for _ in range(64):
            group.create_task(worker())


def prepare(
    engine: str, directory: str, source: str, count: int, spec: int, split: int | None = None
) -> dict[str, float]:
    """Make a repository whose array refers to files; the first of them exists."""
    Path(f"{source}-0").write_bytes(bytes(CHUNK_BYTES * FILES))
    session = create(engine, directory, spec=spec, split=split).writable_session("main")
    _array(session.store, count)
    session.store.set_virtual_refs_arr("a", (count,), *_columns(count, f"file://{source}"))
    session.commit("references")
    return {}


def open_cold(engine: str, directory: str) -> dict[str, float]:
    """Open a repository and read the first chunk."""
    warm_up(engine)
    with Meter(finds_memory=True) as meter:
        store = open_repository(engine, directory).readonly_session("main").store
        chunk = zarr.core.sync.sync(store.get("a/c/0", PROTOTYPE))
    assert len(chunk) == CHUNK_BYTES
    return meter.figures()


def iterate(engine: str, directory: str, count: int) -> dict[str, float]:
    """Open a repository, and take every reference from columns."""
    warm_up(engine)

    async def work(store: Any) -> int:
        total = 0
        async for batch in store.array_chunk_iterator("a"):
            total += len(batch[2])
            # Each column is used: one that is made when it is asked for would else cost nothing.
            assert int(batch[4].sum()) == CHUNK_BYTES * len(batch[2])
        return total

    with Meter(finds_memory=True) as meter:
        store = open_repository(engine, directory).readonly_session("main").store
        assert asyncio.run(work(store)) == count
    return meter.figures()


def iterate_columns(directory: str, count: int) -> dict[str, float]:
    """Do the same with our asynchronous classes: files are a table, not a text for each chunk."""
    warm_up("ours")

    async def work() -> int:
        total = 0
        async with Repository.open(f"file://{directory}") as repository:
            session = await repository.readonly_session("main")
            async for batch in session.array_chunk_iterator("a"):
                paths, codes = batch.path_table()
                assert len(paths) > int(codes.max())
                assert len(batch.coords) == len(codes) == len(batch.offsets)
                assert int(batch.lengths.sum()) == CHUNK_BYTES * len(batch)
                total += len(batch)
        return total

    with Meter(finds_memory=True) as meter:
        assert asyncio.run(work()) == count
    return meter.figures()


def change_one(engine: str, directory: str) -> dict[str, float]:
    """Open a repository, give one chunk another reference, and commit."""
    warm_up(engine)
    with Meter(finds_memory=True) as meter:
        session = open_repository(engine, directory).writable_session("main")
        session.store.set_virtual_ref("a/c/7", f"{PREFIX}new", offset=1, length=2)
        session.commit("one")
    return meter.figures()


def warm_up(engine: str) -> None:
    """Import and start what a process starts once."""
    with tempfile.TemporaryDirectory() as directory:
        session = create(engine, directory).writable_session("main")
        _array(session.store, 4)
        session.store.set_virtual_refs_arr("a", (4,), *_columns(4, f"{PREFIX}source"))
        session.commit("some")
        store = open_repository(engine, directory).readonly_session("main").store
        assert zarr.core.sync.sync(store.getsize("a/c/1")) == CHUNK_BYTES


def _array(store: Store, count: int) -> None:
    root = zarr.open_group(store, mode="w")
    root.create_array("a", shape=(count * CHUNK_BYTES,), chunks=(CHUNK_BYTES,), dtype="u1")


def _columns(
    count: int, source: str
) -> tuple[Sequence[str], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return locations, first bytes and lengths: a thousand chunks in each file."""
    names = [f"{source}-{number}" for number in range(-(-count // FILES))]
    return (
        [names[number // FILES] for number in range(count)],
        np.arange(count, dtype=np.uint64) % FILES * CHUNK_BYTES,
        np.full(count, CHUNK_BYTES, np.uint64),
    )
