"""Counting the bytes of chunks: each byte once, however many chunks share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async import Repository
from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import NativeChunk, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.helpers import make_array, memory_url, write

if TYPE_CHECKING:
    from icechunk_async.format.manifest.chunk import ChunkRef


async def test_an_empty_repository_has_nothing(repository: Repository) -> None:
    """The first snapshot has no chunks."""
    assert await repository.chunk_storage_stats() == ChunkStorageStats(0, 0, 0)


async def test_native_and_inline_chunks_of_all_snapshots_count(repository: Repository) -> None:
    """Old snapshots and other branches count. Unreachable chunks do not."""
    session = await repository.writable_session("main")
    await make_array(session, "a", (10,), (1,))
    await write(session, "a/c/0", b"x" * 1000)
    await write(session, "a/c/1", b"y" * 100)
    first = await session.commit("first")
    await repository.create_branch("side", first)
    for branch, number in (("main", 2), ("side", 3)):
        session = await repository.writable_session(branch)
        await write(session, f"a/c/{number}", b"z" * 2000)
        await session.commit("more")
    lost = await repository.writable_session("main")
    await write(lost, "a/c/4", b"w" * 5000)
    stats = await repository.chunk_storage_stats()
    # The inline chunk is in the first manifest and in each of the two that followed.
    assert stats == ChunkStorageStats(5000, 0, 300)
    assert stats.non_virtual_bytes() == 5300
    assert stats.total_bytes() == 5300
    await repository.delete_branch("side")
    assert await repository.chunk_storage_stats() == ChunkStorageStats(3000, 0, 200)


async def _with_refs(repository: Repository, refs: dict[tuple[int, ...], ChunkRef]) -> None:
    session = await repository.writable_session("main")
    await make_array(session, "a", (100,), (1,))
    columns = ChunkRefs.from_mapping(1, dict(refs)).sort()
    session.workspace.set_refs("/a", columns)
    await session.commit("references")


async def test_an_object_of_many_chunks_counts_each_byte_once(repository: Repository) -> None:
    """Chunks may be any parts of it and overlap."""
    packed, other = ChunkId.random(), ChunkId.random()
    refs: dict[tuple[int, ...], ChunkRef] = {
        (number,): NativeChunk(packed, 100 * number, 100) for number in range(10)
    }
    refs[10,] = NativeChunk(packed, 950, 100)
    refs[11,] = NativeChunk(packed, 2000, 7)
    refs[12,] = NativeChunk(other, 0, 50)
    refs[13,] = NativeChunk(other, 0, 50)
    await _with_refs(repository, refs)
    assert await repository.chunk_storage_stats() == ChunkStorageStats(1050 + 7 + 50, 0, 0)


async def test_virtual_bytes_are_counted_by_location_and_range(repository: Repository) -> None:
    """The same range of one object counts once, of another object again."""
    refs: dict[tuple[int, ...], ChunkRef] = {
        (0,): VirtualChunk("s3://bucket/one", 0, 100),
        (1,): VirtualChunk("s3://bucket/one", 0, 100),
        (2,): VirtualChunk("s3://bucket/one", 100, 10, etag='"x"'),
        (3,): VirtualChunk("s3://bucket/two", 0, 100),
    }
    await _with_refs(repository, refs)
    assert await repository.chunk_storage_stats() == ChunkStorageStats(0, 210, 0)


async def test_progress_tells_of_snapshots_then_of_manifests() -> None:
    """Snapshots, then manifests."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await write(session, "a/c/0", b"x" * 1000)
        await session.commit("first")
        told: list[tuple[str, int, int | None]] = []
        await repository.chunk_storage_stats(
            progress=lambda it: told.append((it.phase, it.done, it.total))
        )
    assert told == [
        ("reading snapshots", 1, None),
        ("reading snapshots", 2, None),
        ("reading manifests", 1, 1),
    ]
