"""Many small arrays, and questions about commits.

Blocking classes of both engines on the local disk. Ours is synced to the disk when a commit
returns, the official engine's is not. Questions are about what the process wrote or read before.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.sync import sync

from benchmarks.one_chunk import ENGINES, PROTOTYPE
from benchmarks.peers import create, open_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

CHUNKS = 20
CALLS = 100
FOLDERS = ("manifests", "snapshots", "transactions")
GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
ARRAY = (
    b'{"zarr_format":3,"node_type":"array","shape":[100000],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},'
    b'"codecs":[{"name":"bytes"}],"fill_value":0}'
)
SIZES = pytest.mark.parametrize("arrays", [1, 30, 1_000])
CHANGES = pytest.mark.parametrize("changes", [10, 20_000])


async def _put(store: Store, key: str, data: bytes) -> None:
    await store.set(key, PROTOTYPE.buffer.from_bytes(data))


async def _plant(store: Store, arrays: int, chunks: int = CHUNKS) -> None:
    await _put(store, "zarr.json", GROUP)
    for number in range(arrays):
        await _put(store, f"a{number}/zarr.json", ARRAY)
        for chunk in range(chunks):
            await _put(store, f"a{number}/c/{chunk}", b"x")


async def _change(store: Store, arrays: int, chunk: int) -> None:
    for number in range(arrays):
        await _put(store, f"a{number}/c/{chunk % CHUNKS}", b"y")


def _commit(session: Any) -> None:
    session.commit("all")


@SIZES
def test_new(contest: Contest, tmp_path: Path, arrays: int) -> None:
    """Commit arrays of 20 chunks that lie in manifests."""
    arrays = contest.pick(min(arrays, 30), arrays)
    numbers = count()

    def planted(name: str) -> Any:
        directory = str(tmp_path / f"{name}-{next(numbers)}")
        session = create(name, directory).writable_session("main")
        sync(_plant(session.store, arrays))
        return session

    work = dict.fromkeys(ENGINES, _commit)
    contest.race(f"commit {arrays:,} new arrays of 20 chunks", work, rounds=5, setup=planted)


@SIZES
def test_changed(contest: Contest, tmp_path: Path, arrays: int) -> None:
    """Change a chunk in each array, and commit."""
    arrays = contest.pick(min(arrays, 30), arrays)
    numbers = count()
    for engine in ENGINES:
        session = create(engine, str(tmp_path / engine)).writable_session("main")
        sync(_plant(session.store, arrays))
        session.commit("planted")
    repositories = {it: open_repository(it, str(tmp_path / it)) for it in ENGINES}

    def changed(name: str) -> Any:
        session = repositories[name].writable_session("main")
        sync(_change(session.store, arrays, next(numbers)))
        return session

    work = dict.fromkeys(ENGINES, _commit)
    contest.race(f"commit a chunk in each of {arrays:,} arrays", work, rounds=7, setup=changed)


@pytest.mark.parametrize("chunks", [42, 420])
def test_append(contest: Contest, tmp_path: Path, chunks: int) -> None:
    """Append a chunk to each of 142 arrays, and commit; manifests are split at ten chunks."""
    arrays, chunks = contest.pick((5, 12), (142, chunks))
    numbers = count(chunks)
    for engine in ENGINES:
        repository = create(engine, str(tmp_path / engine), inline=0, split=10)
        # Stored, so that both engines split as it says when they open the repository.
        repository.save_config()
        session = repository.writable_session("main")
        sync(_plant(session.store, arrays, chunks))
        session.commit("planted")
    repositories = {it: open_repository(it, str(tmp_path / it)) for it in ENGINES}

    def appended(name: str) -> Any:
        session = repositories[name].writable_session("main")
        sync(_append(session.store, arrays, next(numbers)))
        return session

    work = dict.fromkeys(ENGINES, _commit)
    title = f"append to each of {arrays} arrays of {chunks} chunks"
    contest.race(title, work, rounds=7, setup=appended)
    kilobytes: dict[str, list[float]] = {}
    for engine in ENGINES:
        session = appended(engine)
        before = _size_bytes(tmp_path / engine)
        session.commit("one more")
        kilobytes[engine] = [(_size_bytes(tmp_path / engine) - before) / 1000]
    contest.add(f"{title}: manifests, snapshot, log", kilobytes, metric="KB")


def _size_bytes(root: Path) -> int:
    """Return the size of the manifests, snapshots and logs."""
    files = [it for it in root.rglob("*") if it.is_file()]
    return sum(it.stat().st_size for it in files if it.parent.name in FOLDERS)


async def _append(store: Store, arrays: int, chunk: int) -> None:
    for number in range(arrays):
        await _put(store, f"a{number}/c/{chunk}", b"y")


@CHANGES
def test_status(contest: Contest, tmp_path: Path, changes: int) -> None:
    """Ask a session what it changed."""
    changes, calls = _numbers(contest, changes)
    work: dict[str, Callable[[], None]] = {}
    for engine in ENGINES:
        session = create(engine, str(tmp_path / engine)).writable_session("main")
        sync(_plant(session.store, 1))
        sync(_fill(session.store, changes, b"x"))
        work[engine] = _repeated(session.status, calls)
    contest.race(f"status of {changes:,} changes", work, operations=calls)


@CHANGES
def test_difference(contest: Contest, tmp_path: Path, changes: int) -> None:
    """Ask a repository how two commits of this process differ."""
    changes, calls = _numbers(contest, changes)
    work: dict[str, Callable[[], None]] = {}
    for engine in ENGINES:
        repository = create(engine, str(tmp_path / engine))
        session = repository.writable_session("main")
        sync(_plant(session.store, 1))
        first = session.commit("first")
        session = repository.writable_session("main")
        sync(_fill(session.store, changes, b"y"))
        last = session.commit("last")
        ask = partial(repository.diff, from_snapshot_id=first, to_snapshot_id=last)
        work[engine] = _repeated(ask, calls)
    contest.race(f"difference of two commits, {changes:,} changes", work, operations=calls)


def _numbers(contest: Contest, changes: int) -> tuple[int, int]:
    """Return the number of changes, and of calls."""
    # Enough calls that a turn takes milliseconds, and few enough that it takes no minute.
    return contest.pick(10, changes), contest.pick(1, CALLS if changes < 1000 else 3)


async def _fill(store: Store, changes: int, data: bytes) -> None:
    for number in range(changes):
        await _put(store, f"a0/c/{number}", data)


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            call()

    return work
