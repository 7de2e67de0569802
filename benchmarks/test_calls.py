"""Single calls about chunks, and reads of virtual chunks in no order.

Blocking classes of both engines on the local disk, and their stores on Zarr's event loop.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.sync import sync

from benchmarks.one_chunk import ENGINES, PROTOTYPE
from benchmarks.peers import PACKAGES, PREFIX, chunked, create, open_repository, tip_store
from benchmarks.references import CHUNK_BYTES, FILES, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

CALLS = 1000


@pytest.mark.parametrize("session", ["reads", "writes"])
def test_chunk_type(contest: Contest, tmp_path: Path, session: str) -> None:
    """Ask how a chunk is stored, of an array that was read before."""
    made = create("official", str(tmp_path), inline=512).writable_session("main")
    chunked(made.store, CALLS, 80)[:] = 1
    made.commit("filled")
    work: dict[str, Callable[[], None]] = {}
    for engine in ENGINES:
        repository = open_repository(engine, str(tmp_path))
        opened: Any = (
            repository.readonly_session("main")
            if session == "reads"
            else repository.writable_session("main")
        )
        # Loads the manifest, which the question is not about.
        assert sync(opened.store.get("a/c/0", PROTOTYPE)) is not None
        work[engine] = partial(_ask_all, opened)
    contest.race(
        f"chunk_type, a session that {session}", work, operations=CALLS, targets={"official": 1}
    )


def _ask_all(session: Any) -> None:
    for number in range(CALLS):
        session.chunk_type("/a", [number])


def test_set_list(contest: Contest, tmp_path: Path) -> None:
    """Set virtual references from a list of `VirtualChunkSpec`; not committed."""
    count = contest.pick(1000, 1_000_000)
    stores: dict[str, Any] = {}
    specs: dict[str, list[Any]] = {}
    for engine in ENGINES:
        session = create(engine, str(tmp_path / engine)).writable_session("main")
        chunked(session.store, count, CHUNK_BYTES // 8 * 8)
        stores[engine] = session.store
        spec = PACKAGES[engine].VirtualChunkSpec
        specs[engine] = [
            spec([number], f"{PREFIX}source-{number % FILES}", number * 100, 100)
            for number in range(count)
        ]

    def setting(engine: str) -> Callable[[], None]:
        return lambda: stores[engine].set_virtual_refs("a", specs[engine], validate_containers=True)

    contest.race(
        f"set_virtual_refs with a list of {count:,}",
        {engine: setting(engine) for engine in ENGINES},
        rounds=3,
        targets={"official": 1},
    )


@pytest.mark.parametrize("engine", ENGINES, ids=["ours", "official"])
@pytest.mark.parametrize("at_once", [1, 64])
def test_random_virtual_reads(contest: Contest, tmp_path: Path, engine: str, at_once: int) -> None:
    """Open, and read the first virtual chunks, in no order."""
    count, reads = contest.pick(2000, 1_000_000), contest.pick(20, 500)
    directory, source = str(tmp_path / "repository"), str(tmp_path / "source")
    prepare(engine, directory, source, count, spec=2)
    for number in range(-(-count // FILES)):
        Path(f"{source}-{number}").write_bytes(bytes(CHUNK_BYTES * FILES))
    keys = [f"a/c/{it}" for it in random.Random(7).sample(range(count), reads)]  # noqa: S311

    def reading(name: str) -> Callable[[], None]:
        return lambda: sync(_get(tip_store(name, directory), keys, at_once))

    contest.race(
        f"open, and read {reads} of {count:,} virtual chunks by "
        f"{'us' if engine == 'ours' else 'the official engine'}, {at_once} at a time",
        {name: reading(name) for name in ENGINES},
        operations=reads,
        targets={"official": 1},
    )


@pytest.mark.parametrize("at_once", [1, 64])
def test_more_virtual_reads(contest: Contest, tmp_path: Path, at_once: int) -> None:
    """Read virtual chunks in no order, of a repository in use."""
    count, reads = contest.pick(2000, 100_000), contest.pick(20, 2000)
    directory, source = str(tmp_path / "repository"), str(tmp_path / "source")
    prepare("official", directory, source, count, spec=2)
    for number in range(-(-count // FILES)):
        Path(f"{source}-{number}").write_bytes(bytes(CHUNK_BYTES * FILES))
    keys = [f"a/c/{it}" for it in random.Random(7).sample(range(count), reads)]  # noqa: S311
    stores = {name: tip_store(name, directory) for name in ENGINES}

    def reading(name: str) -> Callable[[], None]:
        return lambda: sync(_get(stores[name], keys, at_once))

    contest.race(
        f"read virtual chunks of 100 B in no order, {at_once} at a time",
        {name: reading(name) for name in ENGINES},
        operations=reads,
        targets={"official": 4},
    )


async def _get(store: Store, keys: list[str], at_once: int) -> None:
    pending = iter(keys)

    async def worker() -> None:
        for key in pending:
            found = await store.get(key, PROTOTYPE)
            assert found is not None
            assert len(found) == CHUNK_BYTES

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
