"""Chunks whose coordinates do not fit their array, as the official engine lets them slip in."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.engine.upkeep.collect import GarbageReport
from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
from tests.helpers import objects, read, write

if TYPE_CHECKING:
    from icechunk_async import Session

GOLDEN = Path(__file__).parents[2] / "format" / "golden" / "spec2-strays-by-2.3.0"
CHUNKS = {
    "scalar/c": b"\x07",
    "line/c/0": b"\1\1",
    "line/c/1": b"\1\1",
    "plane/c/0/0": b"\2" * 4,
    "plane/c/0/1": b"\2" * 4,
    "changed/c/0/0": None,
}
STORED_BYTES = 39
"""Of all references, as the official engine counts them."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A repository of the official engine to read and write."""
    shutil.copytree(GOLDEN, tmp_path / "repo")
    (tmp_path / "repo" / "answers.json").unlink()
    return (tmp_path / "repo").as_uri()


async def chunks(session: Session) -> dict[str, bytes | None]:
    """Read every chunk."""
    return {key: await read(session, key) for key in CHUNKS}


async def test_chunks_that_fit_are_read(url: str) -> None:
    """The official engine reads the same chunks."""
    async with Repository.open(url) as repository:
        assert await chunks(await repository.readonly_session("main")) == CHUNKS


async def test_chunks_that_fit_survive_a_rewrite_of_their_manifest(url: str) -> None:
    """The others are left behind, and boxes fit from then on."""
    written = {"line/c/0": b"xy", "plane/c/0/1": b"wxyz", "changed/c/0/0": b"abcd"}
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        for key, data in written.items():
            await write(session, key, data)
        await session.commit("Write")
    async with Repository.open(url) as repository:
        session = await repository.readonly_session("main")
        assert await chunks(session) == CHUNKS | written


async def test_stray_chunks_are_counted_and_not_collected(url: str) -> None:
    """The official engine keeps such references, and counts them."""
    async with Repository.open(url) as repository:
        before = await objects(repository.storage)
        assert await repository.garbage_collect(datetime.now(UTC)) == GarbageReport()
        after = await objects(repository.storage)
        assert {key for key in before if key.startswith("manifests/")} <= after.keys()
        stats = await repository.chunk_storage_stats()
        assert stats == ChunkStorageStats(0, 0, STORED_BYTES)
