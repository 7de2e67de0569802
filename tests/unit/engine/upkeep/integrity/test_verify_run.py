"""Running a verification: samples, refs, interruptions, costs, caches, and what it says."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, override

import numpy as np
import pytest
import zarr.api.asynchronous as za
from zarr.codecs import BytesCodec, Crc32cCodec

from icechunk_async import Repository
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.upkeep.integrity import verify as steps
from icechunk_async.engine.upkeep.integrity.pieces import Pieces
from icechunk_async.errors import InvalidInputError, NotFoundError, PermissionDeniedError
from icechunk_async.format.sums import ManifestSums
from icechunk_async.storage import open_storage
from icechunk_async.storage.policies.cache import CacheOptions
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import VerifyReport
from tests.helpers import make_array, memory_url, write
from tests.unit.engine.upkeep.upkeep_tools import commit, littered

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.ids import ManifestId
    from icechunk_async.storage import RangeRequest, Retrieved, Storage

CHUNKS = 40


class Counting(WrappedStorage):
    """Counts reads by folder, and fails after some of chunks."""

    def __init__(self, storage: Storage, fail_after: int | None = None) -> None:
        """Wrap a storage."""
        super().__init__(storage)
        self.reads: Counter[str] = Counter()
        self.listings = 0
        self._left = fail_after

    @override
    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Count."""
        folder = key.partition("/")[0]
        self.reads[folder] += 1
        if folder == "chunks" and self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise PermissionDeniedError("on purpose")
        return await super().get(key, byte_range)

    @override
    async def before(self, operation: str, key: str) -> None:
        """Count."""
        self.listings += operation == "list_prefix"


async def checked(url: str, *, packing: Packing | None = None, commits: int = 1) -> None:
    """Create a repository whose codec adds checksums to chunks."""
    async with Repository.create(url, packing=packing) as repository:
        session = await repository.writable_session("main")
        array = await za.create_array(
            store=session.store,
            name="a",
            shape=(CHUNKS * 600,),
            chunks=(600,),
            dtype="uint8",
            serializer=BytesCodec(),
            compressors=[Crc32cCodec()],
        )
        await array.setitem(slice(None), np.arange(CHUNKS * 600, dtype="uint8"))
        await session.commit("all")
        for number in range(1, commits):
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a")
            await array.setitem(slice(600 * number, 600 * number + 600), 7)
            await session.commit(f"change {number}")


async def flip(storage: Storage, key: str, at: int = 5) -> None:
    """Flip one byte."""
    data = bytearray((await storage.get(key)).data)
    data[at] ^= 1
    await storage.put(key, bytes(data))


async def chunk_keys(storage: Storage) -> list[str]:
    """Return the keys of chunk objects."""
    return [it.key async for it in storage.list_prefix("chunks/")]  # type: ignore[union-attr]


async def test_each_object_is_read_once_however_many_snapshots_need_it() -> None:
    """Ten manifests refer to the same chunks."""
    url = memory_url()
    await checked(url, commits=10)
    async with open_storage(url) as storage:
        counting = Counting(storage)
        async with Repository.open(counting) as repository:
            counting.reads.clear()
            report = await repository.verify()
    assert report.is_healthy
    assert (report.snapshots, report.manifests, report.chunks) == (11, 10, CHUNKS + 9)
    assert (report.chunks_read, report.bytes_read) == (CHUNKS + 9, 604 * (CHUNKS + 9))
    assert counting.listings == 2  # of chunks, and of proposals
    assert counting.reads == {
        "repo": 1,
        "snapshots": 11,
        "transactions": 11,
        "manifests": 10,
        "sums": 10,
        "chunks": CHUNKS + 9,
    }


async def test_chunks_that_lie_together_are_read_with_one_request() -> None:
    """A pack costs one read, and a damaged chunk in it is named by its place."""
    url = memory_url()
    await checked(url, packing=Packing(1 << 20, 1 << 10))
    async with open_storage(url) as storage:
        counting = Counting(storage)
        async with Repository.open(counting) as repository:
            counting.reads.clear()
            assert (await repository.verify()).is_healthy
            assert counting.reads["chunks"] == 1
            (key,) = await chunk_keys(storage)
            await flip(storage, key, 604 * 3 + 10)
            (found,) = (await repository.verify()).findings
    assert (found.location, found.problem, found.level) == (key, "undecodable", "decode")
    assert (found.offset, found.length, found.array) == (604 * 3, 604, "/a")
    assert found.coordinates is not None


async def test_a_flipped_byte_is_found_by_reading_and_check_says_that_it_did_not_read() -> None:
    """A check finds nothing, and its report says what was not looked at."""
    url = memory_url()
    await checked(url)
    async with open_storage(url) as storage, Repository.open(url) as repository:
        await flip(storage, (await chunk_keys(storage))[0])
        check = await repository.check_references()
        assert check.is_whole
        assert any("chunks were not compared with checksums" in it for it in check.not_looked_at)
        assert any("decoded" in it for it in check.not_looked_at)
        assert not (await repository.verify()).is_healthy


async def test_wrong_sums_are_found_whether_the_chunk_or_the_sum_was_changed() -> None:
    """Each is named at the level *sums*, and not at the one below."""
    url = memory_url()
    async with Repository.create(url, sums=True) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2,), (1,))
        for number in range(2):
            await write(session, f"a/c/{number}", bytes([number]) * 600)
        await session.commit("two chunks")
        async with open_storage(url) as storage:
            sound = await repository.verify("sums")
            assert (sound.findings, sound.chunks_read) == ((), 2)
            assert not any("have none stored" in it.what for it in sound.not_looked_at)
            key = (await chunk_keys(storage))[0]
            await flip(storage, key)
            assert (await repository.verify("length")).is_healthy
            (found,) = (await repository.verify("sums")).findings
            assert (found.kind, found.location, found.problem) == ("chunk", key, "wrong sum")
            assert (found.level, found.array, found.length) == ("sums", "/a", 600)
            assert found.coordinates in ((0,), (1,))
            await flip(storage, key)
            assert (await repository.verify("sums")).is_healthy

            tip = await repository.lookup_branch("main")
            (name,) = [it.id for it in await repository.list_manifest_files(tip)]
            sidecar = f"sums/{name}"
            data = bytes((await storage.get(sidecar)).data)
            await storage.put(sidecar, _with_another_sum(data, name))
            (found,) = (await repository.verify("sums")).findings
            assert (found.kind, found.problem) == ("chunk", "wrong sum")
            assert found.coordinates == (0,)
            assert "CRC-32C" in found.detail
            await storage.put(sidecar, data)
            await flip(storage, sidecar, len(data) - 40)
            (found,) = (await repository.verify("sums")).findings
            assert (found.kind, found.location) == ("sums", sidecar)
            assert (found.problem, found.level) == ("unreadable", "sums")
            assert (await repository.verify("length")).is_healthy


def _with_another_sum(data: bytes, manifest_id: ManifestId) -> bytes:
    """Return a sidecar that is sound but for the sum of the first chunk."""
    sums = ManifestSums.decode(data, manifest_id)
    ((key, it),) = sums.arrays.items()
    crcs = it.crcs.copy()
    crcs[0] ^= 1
    return replace(sums, arrays={key: replace(it, crcs=crcs)}).encode()


async def test_what_a_cache_holds_does_not_hide_damage(tmp_path: Path) -> None:
    """Chunks, manifests and snapshots are read from the storage."""
    url = (tmp_path / "repo").as_uri()
    await checked(url)
    options = CacheOptions(memory_bytes=1 << 24)
    async with open_storage(url) as storage, Repository.open(url, cache=options) as repository:
        session = await repository.readonly_session("main")
        await (await za.open_array(store=session.store, path="a")).getitem(slice(None))
        key = (await chunk_keys(storage))[0]
        await flip(storage, key)
        assert {it.location for it in (await repository.verify()).findings} == {key}


@pytest.mark.parametrize("sample", [0.25, 10])
async def test_a_sample_is_drawn_by_its_seed(sample: float) -> None:
    """Equal seeds draw the same; the rest is counted as not looked at."""
    url = memory_url()
    await checked(url)
    async with open_storage(url) as storage:
        counting = Counting(storage)
        async with Repository.open(counting) as repository:
            seen: list[int] = []
            for seed in (1, 1, 2, 3):
                report = await repository.verify(sample=sample, seed=seed)
                seen.append(report.chunks_read)
                left = [it.count for it in report.not_looked_at if "not drawn" in it.what]
                assert left == [CHUNKS - report.chunks_read]
            assert seen[0] == seen[1]
            assert 0 < max(seen) < CHUNKS
            if sample == 10:
                assert seen == [10] * 4


def test_draws_are_spread_evenly() -> None:
    """Of a thousand pieces of one object, about a quarter is drawn at a share of a quarter."""
    ids = np.tile(np.arange(12, dtype=np.uint8), (1000, 1))
    none = np.zeros(1000, np.uint64)
    few, many = none.astype(np.uint32), none.astype(np.int64)
    offsets = np.arange(1000, dtype=np.uint64) * np.uint64(600)
    pieces = Pieces(ids, offsets, none, few, none, many, few, few)
    draws = pieces.draws(5)
    assert len(np.unique(draws)) == 1000
    assert 180 < int((draws < np.uint64(1 << 62)).sum()) < 320
    assert not np.array_equal(draws, pieces.draws(6))


async def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: Any) -> None:
    """Chunks read before are not read again; earlier findings are in the report."""
    monkeypatch.setattr("icechunk_async.engine.upkeep.integrity.objects._PORTION_BYTES", 3000)
    url, state = memory_url(), tmp_path / "state.json"
    await checked(url)
    async with open_storage(url) as storage:
        keys = await chunk_keys(storage)
        await flip(storage, keys[2])
        await flip(storage, keys[-1])
        async with Repository.open(Counting(storage, fail_after=22)) as repository:
            with pytest.raises(PermissionDeniedError):
                await repository.verify(state=state)
        assert json.loads(state.read_text("utf-8"))["chunks_read"] == 20
        await commit_later(url)
        counting = Counting(storage)
        async with Repository.open(counting) as repository:
            with pytest.raises(InvalidInputError, match="same options"):
                await repository.verify("sums", state=state)
            counting.reads.clear()
            report = await repository.verify(state=state)
    assert counting.reads["chunks"] == CHUNKS - 20
    assert {it.location for it in report.findings} == {keys[2], keys[-1]}
    assert (report.snapshots, report.chunks_read) == (2, CHUNKS)  # not the later commit
    assert not state.exists()


async def commit_later(url: str) -> None:
    """Commit to a repository of `checked`."""
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "later", (600,), (600,))
        await write(session, "later/c/0", bytes(600))
        await session.commit("later")


async def test_another_file_is_not_taken_for_a_state(tmp_path: Path) -> None:
    """It is left unchanged."""
    url, state = memory_url(), tmp_path / "state.json"
    await checked(url)
    async with Repository.open(url) as repository:
        for text in ("no json", "[]", "{}", '{"schema": "other", "findings": []}'):
            state.write_text(text, "utf-8")
            with pytest.raises(InvalidInputError, match="not the state of a verification"):
                await repository.verify(state=state)
            assert state.read_text("utf-8") == text


async def test_chosen_refs_limit_what_is_looked_at() -> None:
    """A branch, a tag, a snapshot; with those before it, or alone."""
    url, line = await littered(2)
    async with Repository.open(url) as repository:
        await repository.create_tag("v1", line[1])
        counts = {
            (name, ancestry): (await repository.verify(refs=[name], ancestry=ancestry)).snapshots
            for name in ("main", "side", "v1", str(line[2]))
            for ancestry in (True, False)
        }
        assert counts == {
            ("main", True): 5,
            ("main", False): 1,
            ("side", True): 4,
            ("side", False): 1,
            ("v1", True): 2,
            ("v1", False): 1,
            (str(line[2]), True): 3,
            (str(line[2]), False): 1,
        }
        with pytest.raises(NotFoundError, match="no branch, tag or snapshot 'nobody'"):
            await repository.verify(refs=["nobody"])
        for sample in (0, 0.0, 1.5, -1, True):
            with pytest.raises(InvalidInputError, match="The sample is"):
                await repository.verify(sample=sample)
        with pytest.raises(InvalidInputError, match="no level 'deep'"):
            await repository.verify("deep")  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [1, 2])
async def test_what_is_collected_meanwhile_is_not_called_missing(
    spec: int, monkeypatch: Any
) -> None:
    """Snapshots that expire during a run are no damage."""
    url, _ = await littered(spec)
    async with Repository.open(url) as other:
        await commit(other, 1, "chunk 1 again")

    async def collect_first(*given: Any, **more: Any) -> Any:
        async with Repository.open(url) as other:
            await other.expire_snapshots(datetime.now(UTC))
            await other.garbage_collect(datetime.now(UTC))
        return await examine(*given, **more)

    examine = steps.examine
    monkeypatch.setattr(steps, "examine", collect_first)
    async with Repository.open(url) as repository:
        report = await repository.verify("length")
    assert report.findings == ()


async def test_report_is_plain_data_and_back() -> None:
    """Through JSON."""
    url = memory_url()
    await checked(url)
    async with open_storage(url) as storage, Repository.open(url) as repository:
        await flip(storage, (await chunk_keys(storage))[0])
        report = await repository.verify()
    document = json.loads(json.dumps(report.to_json()))
    assert VerifyReport.from_json(document) == report
    for bad in ({}, {**document, "schema": "x"}, {**document, "findings": [{"kind": "chunk"}]}):
        with pytest.raises(InvalidInputError):
            VerifyReport.from_json(bad)


async def test_unknown_codecs_are_not_called_damage() -> None:
    """Chunks that cannot be judged here are counted."""
    url = memory_url()
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        codecs = [{"name": "bytes"}, {"name": "nobody.knows.this"}]
        await make_array(session, "a", (1200,), (600,), codecs=codecs)
        await write(session, "a/c/0", bytes(600))
        await session.commit("unknown")
        report = await repository.verify()
    assert report.is_healthy
    (left,) = [it for it in report.not_looked_at if "can be decoded" in it.what]
    assert left.count == 1


async def test_a_chunk_of_another_size_is_undecodable() -> None:
    """Also without any checksum, and inside a manifest."""
    url = memory_url()
    async with Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (1200,), (600,))
        await write(session, "a/c/0", bytes(599))
        await write(session, "a/c/1", bytes(30))
        await session.commit("short")
        found = (await repository.verify()).findings
    assert {(it.kind, it.problem, it.array, it.coordinates) for it in found} == {
        ("chunk", "undecodable", "/a", (0,)),
        ("manifest", "undecodable", "/a", (1,)),
    }
