"""Chunks that share objects: the official engine reads, commits on, expires and collects them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Packing, Repository
from icechunk_async.conflicts import ConflictDetector
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from icechunk_async import Session

    type Values = npt.NDArray[np.uint16]

ZARR: Any = zarr
ASYNC: Any = zarr.api.asynchronous


SPECS = pytest.mark.parametrize("spec", [1, 2])
SMALL: Final = Packing(target_bytes=20_000, max_chunk_bytes=4_000)
SHAPE, CHUNKS = (30, 1_000), (1, 500)
"""60 chunks of 1000 bytes; the array itself makes them."""


def values(seed: int) -> Values:
    """Return the values of an array."""
    return np.random.default_rng(seed).integers(0, 60_000, SHAPE, np.uint16)


async def opened(session: Session, mode: str) -> Any:
    """Open the array ``a`` of a session of ours."""
    return await ASYNC.open_array(store=session.store, path="a", mode=mode)


async def change(session: Session, place: Any, data: Values) -> None:
    """Write a part of the array ``a``."""
    array = await opened(session, "r+")
    await array.setitem(place, data)


async def build(root: Path, spec: int) -> Values:
    """Write 60 chunks to three objects, and then two in three of them again to two more."""
    data = values(0)
    async with Repository.create(root, spec_version=spec, packing=SMALL) as repository:
        session = await repository.writable_session("main")
        array = await ASYNC.create_array(
            session.store, name="a", shape=SHAPE, chunks=CHUNKS, dtype="u2", compressors=None
        )
        await array.setitem(slice(None), data)
        await session.commit("whole")
        assert number_of_objects(root) == 3
        for part in (slice(0, 30, 3), slice(1, 30, 3)):
            session = await repository.writable_session("main")
            data[part] = values(1)[part]
            await change(session, (part, slice(None)), data[part])
            await session.commit("changed")
    assert number_of_objects(root) == 5
    return data


def number_of_objects(root: Path) -> int:
    """Count chunk objects."""
    return len(list((root / "chunks").iterdir()))


def array_of(store: Any, mode: str = "r") -> Any:
    """Open the array ``a``."""
    return ZARR.open_array(store, path="a", mode=mode)


def theirs(official: Any) -> Any:
    """Return the array as the official engine has it."""
    return array_of(official.readonly_session("main").store)


async def ours(root: Path) -> Values:
    """Return the array as we have it."""
    async with Repository.open(root) as repository:
        session = await repository.readonly_session("main")
        array = await opened(session, "r")
        found: Values = await array.getitem(slice(None))
        return found


@SPECS
async def test_official_engine_reads_packed_chunks(spec: int, tmp_path: Path) -> None:
    """Whole chunks, parts of them, and what they are."""
    data = await build(tmp_path, spec)
    official = open_official(tmp_path)
    assert (theirs(official)[:] == data).all()
    store = official.readonly_session("main").store
    prototype = default_buffer_prototype()
    whole = data[7, 500:].tobytes()
    for request, expected in (
        (RangeByteRequest(10, 30), whole[10:30]),
        (OffsetByteRequest(990), whole[990:]),
        (SuffixByteRequest(8), whole[-8:]),
    ):
        assert (await store.get("a/c/7/1", prototype, request)).to_bytes() == expected
    assert await store.getsize("a/c/7/1") == 1_000


@SPECS
async def test_both_engines_commit_on_packed_chunks_in_turns(spec: int, tmp_path: Path) -> None:
    """Each keeps the other's chunks where they are."""
    data = await build(tmp_path, spec)
    official = open_official(tmp_path)
    for turn in range(2, 5):
        session = official.writable_session("main")
        array_of(session.store, "r+")[turn] = values(turn)[turn]
        session.commit("theirs")
        data[turn] = values(turn)[turn]
        assert (await ours(tmp_path) == data).all()
        async with Repository.open(tmp_path, packing=SMALL) as repository:
            writer = await repository.writable_session("main")
            data[turn + 10] = values(turn)[turn]
            await change(writer, (turn + 10, slice(None)), data[turn + 10])
            await writer.commit("ours")
        assert (theirs(official)[:] == data).all()
    assert number_of_objects(tmp_path) == 5 + 3 * 2 + 3


@SPECS
async def test_official_engine_collects_packed_chunks(spec: int, tmp_path: Path) -> None:
    """An object stays while a chunk in it is used, and goes with the last one."""
    data = await build(tmp_path, spec)
    official = open_official(tmp_path)
    official.expire_snapshots(older_than=datetime.now(UTC))
    official.garbage_collect(delete_object_older_than=datetime.now(UTC))
    assert number_of_objects(tmp_path) == 5, "each still holds chunks of the tip"
    assert (theirs(official)[:] == data).all()
    assert (await ours(tmp_path) == data).all()

    async with Repository.open(tmp_path) as repository:
        report = await repository.compact("main")
    assert (report.objects, report.chunks) == (3, 20)
    assert number_of_objects(tmp_path) == 6
    official = open_official(tmp_path)
    assert (theirs(official)[:] == data).all()
    official.expire_snapshots(older_than=datetime.now(UTC))
    collected = official.garbage_collect(delete_object_older_than=datetime.now(UTC))
    assert collected.chunks_deleted == 3
    assert number_of_objects(tmp_path) == 3
    assert (theirs(official)[:] == data).all()
    assert (await ours(tmp_path) == data).all()


@SPECS
async def test_compaction_is_no_conflict_for_the_official_engine(spec: int, tmp_path: Path) -> None:
    """A writer who began before it commits after it, on the same chunks."""
    data = await build(tmp_path, spec)
    official = open_official(tmp_path)
    session = official.writable_session("main")
    array_of(session.store, "r+")[2] = values(9)[2]
    data[2] = values(9)[2]
    async with Repository.open(tmp_path) as repository:
        assert (await repository.compact("main")).chunks == 20
    session.commit("after", rebase_with=icechunk.ConflictDetector())
    assert (theirs(official)[:] == data).all()
    assert (await ours(tmp_path) == data).all()


@SPECS
async def test_we_rebase_onto_their_commits(spec: int, tmp_path: Path) -> None:
    """Packed chunks are not written again."""
    data = await build(tmp_path, spec)
    async with Repository.open(tmp_path, packing=SMALL) as repository:
        writer = await repository.writable_session("main")
        data[4] = values(7)[4]
        await change(writer, (4, slice(None)), data[4])
        session = open_official(tmp_path).writable_session("main")
        array_of(session.store, "r+")[5] = values(8)[5]
        data[5] = values(8)[5]
        session.commit("theirs")
        await writer.commit("ours", rebase_with=ConflictDetector())
    assert (await ours(tmp_path) == data).all()
    assert (theirs(open_official(tmp_path))[:] == data).all()


async def test_the_official_engine_keeps_the_setting(tmp_path: Path) -> None:
    """Through its commits, its configuration, its metadata and its upkeep."""
    await build(tmp_path, 2)
    official = open_official(tmp_path)
    kept = {"packing": {"target_bytes": 20_000, "max_chunk_bytes": 4_000}}
    assert official.get_metadata() == {"icechunk-async": kept}
    official.update_metadata({"owner": "them"})
    official.save_config()
    official.create_tag("t", official.lookup_branch("main"))
    official.expire_snapshots(older_than=datetime.now(UTC))
    official.garbage_collect(delete_object_older_than=datetime.now(UTC))
    async with Repository.open(tmp_path) as repository:
        assert repository.packing == SMALL
        assert await repository.get_metadata() == {"owner": "them", "icechunk-async": kept}


@SPECS
async def test_statistics_count_bytes(spec: int, tmp_path: Path) -> None:
    """Ours are exact; the official engine counts an object as long as one of its chunks."""
    await build(tmp_path, spec)
    async with Repository.open(tmp_path) as repository:
        stats = await repository.chunk_storage_stats()
    stored = sum(path.stat().st_size for path in (tmp_path / "chunks").iterdir())
    assert stats.native_bytes == stored == 100_000
    official = open_official(tmp_path).chunk_storage_stats()
    assert official.native_bytes == 5 * 1_000, "see docs/how-to/packed-chunks.md"
