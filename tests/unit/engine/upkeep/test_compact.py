"""Compaction: sparse objects are left empty, chunks stay what they are, nobody is disturbed."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Packing, Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.upkeep.compact import LiveShares
from icechunk_async.errors import BranchNotFoundError, InvalidInputError
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import NativeChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from icechunk_async.storage import Retrieved

SMALL = Packing(target_bytes=10_000, max_chunk_bytes=2_000)


def chunk(number: int) -> bytes:
    """Return bytes that no other chunk has."""
    return number.to_bytes(4) * 250


@pytest.fixture
async def packed(spec: int) -> AsyncIterator[Repository]:
    """Open a repository of 100 chunks in ten objects, of which one is whole and nine a third."""
    async with Repository.create(memory_url(), spec_version=spec, packing=SMALL) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1_000,), (1,))
        await bounded_map(lambda it: write(session, f"a/c/{it}", chunk(it)), range(100), limit=1)
        await session.commit("whole")
        session = await repository.writable_session("main")
        for number in changed():
            await write(session, f"a/c/{number}", chunk(1_000 + number))
        await session.commit("changed")
        yield repository


def changed() -> list[int]:
    """Return the chunks that were written again."""
    return [number for number in range(90) if number % 3]


async def contents(repository: Repository) -> list[bytes | None]:
    """Return all chunks of the tip of main."""
    session = await repository.readonly_session("main")
    return [await read(session, f"a/c/{number}") for number in range(100)]


EXPECTED = [chunk(number + (1_000 if number in set(changed()) else 0)) for number in range(100)]


async def chunk_objects(repository: Repository) -> set[str]:
    """Return the keys of all chunk objects."""
    return {key for key in await objects(repository.storage) if key.startswith("chunks/")}


async def test_compaction_empties_sparse_objects(packed: Repository) -> None:
    """Their chunks move, the others stay, and garbage collection frees them in the end."""
    before = await chunk_objects(packed)
    assert len(before) == 10 + 6
    report = await packed.compact("main", dry_run=True)
    assert (report.objects, report.chunks, report.bytes_written) == (9, 30, 30_000)
    assert (report.bytes_released, report.snapshot_id) == (90_000, None)
    assert await chunk_objects(packed) == before

    report = await packed.compact("main", metadata={"why": "space"})
    assert (report.objects, report.chunks, report.bytes_written) == (9, 30, 30_000)
    assert report.snapshot_id is not None
    assert report.snapshot_id == await packed.lookup_branch("main")
    info = await packed.lookup_snapshot(report.snapshot_id)
    assert (info.message, info.metadata["why"]) == ("Compact chunk objects", "space")
    assert len(await chunk_objects(packed) - before) == 3
    assert await contents(packed) == EXPECTED
    assert not (await packed.diff(from_branch="main", to_branch="main")).updated_chunks

    now = datetime.now(UTC)
    await packed.expire_snapshots(now)
    assert (await packed.garbage_collect(datetime.now(UTC))).chunks_deleted == 9
    assert await contents(packed) == EXPECTED
    assert (await packed.chunk_storage_stats()).native_bytes == 100_000
    again = await packed.compact("main")
    assert (again.objects, again.snapshot_id) == (0, None)


async def test_compaction_commit_touches_nothing(packed: Repository) -> None:
    """A writer who began before it commits without a conflict, on the same chunks."""
    session = await packed.writable_session("main")
    await write(session, "a/c/0", b"newer")
    report = await packed.compact("main")
    assert report.snapshot_id is not None
    await session.commit("after", rebase_with=ConflictDetector())
    assert await contents(packed) == [b"newer", *EXPECTED[1:]]


@pytest.mark.parametrize("spec", [2], indirect=True)
async def test_compaction_yields_to_other_writers(spec: int) -> None:
    """Chunks that others change, delete or reshape meanwhile keep their values."""

    class Meddling(WrappedStorage):
        """Lets others commit at the first read of a chunk."""

        others: Any = None

        async def get(self, key: str, byte_range: Any = None) -> Retrieved:
            if key.startswith("chunks/") and self.others is not None:
                others, self.others = self.others, None
                await others()
            return await super().get(key, byte_range)

    async with open_storage(memory_url()) as plain:
        storage = Meddling(plain)
        async with Repository.create(storage, spec_version=spec, packing=SMALL) as repository:
            session = await repository.writable_session("main")
            for path in ("a", "b", "c"):
                await make_array(session, path, (100,), (1,))
                for number in range(10):
                    await write(session, f"{path}/c/{number}", chunk(number))
            await session.commit("whole")
            session = await repository.writable_session("main")
            for path in ("a", "b", "c"):
                for number in range(6):
                    await session.store.delete(f"{path}/c/{number}")
            await session.commit("sparse")

            async def others() -> None:
                meddler = await repository.writable_session("main")
                await write(meddler, "a/c/8", b"theirs")
                await meddler.store.delete("a/c/9")
                await meddler.store.delete("b/zarr.json")
                await make_array(meddler, "c", (8,), (1,))
                await meddler.commit("meanwhile")

            storage.others = others
            report = await repository.compact("main")
            assert storage.others is None
            assert report.snapshot_id == await repository.lookup_branch("main")
            reader = await repository.readonly_session("main")
            found = [await read(reader, f"a/c/{number}") for number in range(6, 10)]
            assert found == [chunk(6), chunk(7), b"theirs", None]
            assert await read(reader, "b/zarr.json") is None
            assert [await read(reader, f"c/c/{it}") for it in (6, 7, 8)] == [
                chunk(6),
                chunk(7),
                None,
            ]


async def test_compaction_leaves_unpacked_chunks_alone(spec: int) -> None:
    """Objects that hold one chunk are used as a whole, or not at all."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        for number in range(5):
            await write(session, f"a/c/{number}", chunk(number))
        await session.commit("unpacked")
        session = await repository.writable_session("main")
        await write(session, "a/c/0", chunk(7))
        await session.commit("changed")
        assert (await repository.compact("main", min_live_share=1.0)).objects == 0


async def test_compaction_refuses_shares_out_of_range(packed: Repository) -> None:
    """A share beyond the whole, or a branch that is not there."""
    for share in (0, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="min_live_share"):
            await packed.compact("main", min_live_share=share)
    with pytest.raises(BranchNotFoundError):
        await packed.compact("nowhere")


def test_live_shares_equal_a_plain_count() -> None:
    """This holds for any references and objects. Bytes that an array names twice count once."""
    rng = random.Random(5)
    ids = [ChunkId.random() for _ in range(20)]
    stored, sizes = ids[:15], [rng.randrange(1, 400) for _ in range(15)]
    shares = LiveShares(
        np.frombuffer(b"".join(stored), np.uint8).reshape(-1, 12), np.array(sizes, np.int64)
    )
    live: dict[ChunkId, int] = {}
    arrays: list[ChunkRefs] = []
    for _ in range(3):
        places = [NativeChunk(rng.choice(ids), rng.randrange(3), 7) for _ in range(60)]
        arrays.append(ChunkRefs.from_mapping(1, {(n,): it for n, it in enumerate(places)}))
        for it in set(places):
            live[it.chunk_id] = live.get(it.chunk_id, 0) + it.length
        shares.count(arrays[-1])
    expected = {
        it for it, size in zip(stored, sizes, strict=True) if 0 < live.get(it, 0) < 0.3 * size
    }
    sparse = shares.sparse(0.3)
    assert int(sparse.sum()) == len(expected) > 0
    for refs in arrays:
        rows = shares.within(refs, sparse)
        chosen = [ref for row in rows.tolist() if isinstance(ref := refs.ref(row), NativeChunk)]
        assert {it.chunk_id for it in chosen} <= expected
        count = sum(
            isinstance(ref := refs.ref(row), NativeChunk) and ref.chunk_id in expected
            for row in range(len(refs))
        )
        assert len(chosen) == count


async def test_a_reference_to_no_bytes_is_left_alone(packed: Repository) -> None:
    """No writer makes such a reference, and there is nothing to rewrite."""
    session = await packed.writable_session("main")
    found = await session.workspace.find_chunk("/a", (0,))
    assert found is not None
    assert isinstance(found.ref, NativeChunk)
    session.workspace.set_ref("/a", (500,), NativeChunk(found.ref.chunk_id, 0, 0))
    await session.commit("hostile")
    assert (await packed.compact("main")).chunks == 30
    assert await contents(packed) == EXPECTED
