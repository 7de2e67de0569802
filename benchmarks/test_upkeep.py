"""Keep a repository small.

200 commits on the local disk, each of which writes some of the chunks of one array again, so that
half of all chunks are garbage once the history has expired. Everybody has a copy, by hard links.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from benchmarks.contest import FLOOR
from benchmarks.floors import sync_a_file
from benchmarks.peers import create, open_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zarr.abc.store import Store

    from benchmarks.contest import Contest

PROTOTYPE = default_buffer_prototype()
NODE = (
    b'{"zarr_format":3,"node_type":"array","shape":[%d],"data_type":"uint8",'
    b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[1]}},'
    b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"/"}},'
    b'"codecs":[{"name":"bytes"}],"fill_value":0}'
)


async def _write(store: Store, keys: list[str]) -> None:
    pending = iter(keys)

    async def worker() -> None:
        for key in pending:
            await store.set(key, PROTOTYPE.buffer.from_bytes(key.encode()))

    async with asyncio.TaskGroup() as group:
        for _ in range(32):
            group.create_task(worker())


def _fill(directory: str, commits: int, chunks_each: int) -> None:
    repository = create("ours", directory, inline=0)
    total = commits * chunks_each // 2
    for number in range(commits):
        session = repository.writable_session("main")
        if number == 0:
            node = PROTOTYPE.buffer.from_bytes(NODE % total)
            asyncio.run(session.store.set("a/zarr.json", node))
        first = number * chunks_each % total
        asyncio.run(_write(session.store, [f"a/c/{first + it}" for it in range(chunks_each)]))
        session.commit(f"commit {number}")


def _expire(repository: Any) -> None:
    assert repository.expire_snapshots(datetime.now(UTC))


def _collect(repository: Any) -> None:
    assert repository.garbage_collect(datetime.now(UTC)).chunks_deleted > 0


def _delete_half(directory: Path) -> None:
    paths = list((directory / "chunks").iterdir())
    for path in paths[: len(paths) // 2]:
        path.unlink()


@pytest.mark.parametrize("step", ["expire", "collect"])
def test_upkeep(contest: Contest, tmp_path: Path, step: str) -> None:
    """Expire all but the last of 200 snapshots; collect what is garbage then."""
    commits, chunks = contest.pick((6, 10), (200, 500))
    made = str(tmp_path / "made")
    _fill(made, commits, chunks)
    if step == "collect":
        _expire(open_repository("official", made))

    def fresh(name: str) -> Any:
        copy = tmp_path / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(made, copy, copy_function=os.link)
        return copy if name == FLOOR else open_repository(name, str(copy))

    work: Callable[[Any], None] = _expire if step == "expire" else _collect
    least = sync_a_file if step == "expire" else _delete_half
    title = (
        f"expire all but the last of {commits} snapshots"
        if step == "expire"
        else f"collect garbage: {commits} snapshots, half of {commits * chunks:,} chunks"
    )
    contest.race(
        title,
        {"ours": work, "official": work, FLOOR: least},
        rounds=3,
        warmup_rounds=0,
        setup=fresh,
        targets={"official": 2},
        floor="write a small file and sync it"
        if step == "expire"
        else "list the chunks' files and delete half of them, on one thread",
        note="on the local disk",
    )
