"""Checksums of chunks: kept wherever a chunk goes, compared when it is read, never in the way."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import ForkSession, Packing, Repository
from icechunk_async.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    RepositoryConfig,
)
from icechunk_async.engine.files import manifests as manifest_files
from icechunk_async.errors import ChunkDamagedError
from icechunk_async.format.crc import KNOWN, sum_of
from icechunk_async.format.digests import CONTENT_ROOT
from icechunk_async.format.layout import sums_key
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.seekable import writing as manifest_seek_write
from icechunk_async.format.sums import ManifestSums
from icechunk_async.storage import Retrieved, open_storage
from icechunk_async.storage.policies.cache import CacheOptions
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import array_document, make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from icechunk_async import Session
    from icechunk_async.storage import RangeRequest, Storage

PROTOTYPE = default_buffer_prototype()
SPECS = pytest.mark.parametrize("spec", [1, 2])


def chunk(number: int, size: int = 1000) -> bytes:
    """Return bytes that no other chunk has, more than are stored inline."""
    return number.to_bytes(4) * (size // 4)


async def filled(
    repository: Repository, count: int = 4, path: str = "a", *, message: str = "filled"
) -> None:
    """Commit an array with some chunks, and room for more."""
    session = await repository.writable_session("main")
    await make_array(session, path, (2 * count,), (1,))
    for number in range(count):
        await write(session, f"{path}/c/{number}", chunk(number))
    await session.commit(message)


@asynccontextmanager
async def made(**options: Any) -> AsyncGenerator[Repository]:
    """Open a new repository that keeps sums."""
    async with Repository.create(memory_url(), sums=True, **options) as repository:
        yield repository


async def unknown_in(repository: Repository, path: str = "/a") -> list[int]:
    """Return the chunks of an array that have no sum, and check the sums of all others."""
    session = await repository.readonly_session("main")
    workspace = session.workspace
    refs = await workspace.refs_of(workspace.array_state(path))
    unknown: list[int] = []
    for row, coords in enumerate(refs.coords.tolist()):
        code = 0 if refs.sums is None else int(refs.sums[row])
        data = await workspace.read_chunk(path, tuple(coords))
        assert data is not None
        assert code in (0, sum_of(data))
        if code == 0:
            unknown.append(*coords)
    return unknown


@SPECS
@pytest.mark.parametrize("packing", [None, Packing(5_000, 2_000)])
async def test_chunks_have_the_sums_of_their_bytes(spec: int, packing: Packing | None) -> None:
    """Written through an event loop and on a thread, alone and in packs."""
    async with made(spec_version=spec, packing=packing) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (20,), (1,))
        for number in range(10):
            await write(session, f"a/c/{number}", chunk(number))
        for number in range(10, 20):
            value = PROTOTYPE.buffer.from_bytes(chunk(number))
            session.store.set_sync(f"a/c/{number}", value)
        await session.commit("both ways")
        assert await unknown_in(repository) == []


async def test_nothing_is_written_or_computed_unless_asked_for() -> None:
    """Sums are off by default."""
    async with Repository.create(memory_url()) as repository:
        await filled(repository)
        assert not repository.sums
        assert not [key for key in await objects(repository.storage) if key.startswith("sums/")]
        assert await unknown_in(repository) == [0, 1, 2, 3]
        info = await repository.lookup_snapshot(await repository.lookup_branch("main"))
        assert CONTENT_ROOT not in info.metadata


async def test_the_setting_is_stored_beside_that_of_packing() -> None:
    """It counts for all who open the repository; an argument overrides it for one."""
    url, packing = memory_url(), Packing(5_000, 2_000)
    async with Repository.create(url, sums=True, packing=packing) as repository:
        assert repository.sums
    async with Repository.open(url) as repository:
        assert repository.sums
        assert repository.packing == packing
    async with Repository.open(url, sums=False) as repository:
        assert not repository.sums
        await repository.save_sums()
    async with Repository.open(url) as repository:
        assert not repository.sums
        assert repository.packing == packing
        await repository.save_packing()
    async with Repository.open(url, sums=True) as repository:
        await repository.save_sums()
        document = await repository.get_metadata()
        assert document["icechunk-async"] == {
            "packing": {"target_bytes": 5_000, "max_chunk_bytes": 2_000},
            "sums": True,
        }


async def test_a_new_manifest_takes_the_sums_of_unchanged_chunks_from_the_old() -> None:
    """In a repository object that has seen none of it, and again in the next."""
    url = memory_url()
    async with Repository.create(url, sums=True) as repository:
        await filled(repository)
    for number in (1, 3):
        async with Repository.open(url) as repository:
            session = await repository.writable_session("main")
            await write(session, f"a/c/{number}", chunk(100 + number))
            await session.commit("changed")
            assert await unknown_in(repository) == []


async def test_chunks_of_writers_without_sums_stay_unknown() -> None:
    """Beside those of others, in the same manifest."""
    url = memory_url()
    async with Repository.create(url, sums=False) as repository:
        await filled(repository)
    async with Repository.open(url, sums=True) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", chunk(100))
        await write(session, "a/c/5", chunk(105))
        await session.commit("with sums")
        assert await unknown_in(repository) == [0, 2, 3]


async def _shift(session: Session) -> None:
    await session.shift_array("/a", [1])


async def _grow(session: Session) -> None:
    await write(session, "a/zarr.json", array_document((50,), (1,)))
    await write(session, "a/c/40", chunk(40))


async def _delete_one(session: Session) -> None:
    await session.store.delete("a/c/0")


async def _fork(session: Session) -> None:
    await write(session, "a/c/1", chunk(101))
    fork = await session.fork()
    await write(fork, "a/c/2", chunk(102))
    travelled = ForkSession.from_bytes(fork.to_bytes(), fork.origin)
    await session.merge(travelled)


@pytest.mark.parametrize("change", [_shift, _grow, _delete_one, _fork])
async def test_sums_stay_with_their_chunks(change: Callable[[Session], Awaitable[None]]) -> None:
    """Wherever references go: to other places, into larger grids, through other processes."""
    async with made() as repository:
        await filled(repository)
        session = await repository.writable_session("main")
        await change(session)
        await session.commit("changed")
        assert await unknown_in(repository) == []


async def test_forks_that_open_their_repository_keep_sums() -> None:
    """As the repository is set, or as the session's was opened."""
    url = memory_url()
    async with Repository.create(url) as repository:
        await filled(repository)
    async with Repository.open(url, sums=True) as repository:
        session = await repository.writable_session("main")
        fork = await session.fork()
        elsewhere = ForkSession.from_bytes(fork.to_bytes(), fork.origin)
        async with elsewhere.attached():
            await write(elsewhere, "a/c/6", chunk(6))
        await session.merge(elsewhere)
        await session.commit("from elsewhere")
        assert await unknown_in(repository) == [0, 1, 2, 3]


async def test_compaction_and_rewriting_keep_sums() -> None:
    """Chunks lie elsewhere then, and manifests are others."""
    url = memory_url()
    async with Repository.create(url, sums=True, packing=Packing(5_000, 2_000)) as repository:
        await filled(repository, 10)
        session = await repository.writable_session("main")
        for number in range(0, 10, 2):
            await write(session, f"a/c/{number}", chunk(100 + number))
        await session.commit("every second")
        report = await repository.compact("main", min_live_share=0.9)
        assert report.chunks > 0
        assert await unknown_in(repository) == []
    by_three: Any = (ManifestSplitCondition.any_array(), {ManifestSplitDimCondition.Any(): 3})
    manifest = ManifestConfig(splitting=ManifestSplittingConfig.from_dict(dict([by_three])))
    config = RepositoryConfig(manifest=manifest)
    async with Repository.open(url, config=config) as repository:
        await repository.rewrite_manifests("split", branch="main")
        tip = await repository.lookup_branch("main")
        assert len(await repository.list_manifest_files(tip)) > 1
        assert await unknown_in(repository) == []
        assert CONTENT_ROOT in (await repository.lookup_snapshot(tip)).metadata


async def test_compaction_refuses_damaged_chunks() -> None:
    """A new sum over damaged bytes would make them look right for ever."""
    async with made(packing=Packing(5_000, 2_000)) as repository:
        await filled(repository, 10)
        session = await repository.writable_session("main")
        for number in range(0, 10, 2):
            await write(session, f"a/c/{number}", chunk(100 + number))
        await session.commit("every second")
        await damage(repository.storage)
        with pytest.raises(ChunkDamagedError):
            await repository.compact("main", min_live_share=0.9)


async def test_a_large_manifest_that_is_changed_in_place_keeps_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The changed rows get theirs, all others keep them."""
    monkeypatch.setattr(manifest_seek_write, "MIN_SEEKABLE_BYTES", 1 << 18)
    monkeypatch.setattr(manifest_files, "MIN_SEEKABLE_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(manifest_files, "_MIN_PATCHED_FILE_BYTES", 1 << 16)
    count, url = 20_000, memory_url()
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 1 << 32, count).astype(np.uint64) | np.uint64(KNOWN)
    ids = rng.integers(0, 256, (count, 12)).astype(np.uint8)
    refs = ChunkRefs.build(
        np.arange(count, dtype=np.uint32)[:, None],
        Kind.NATIVE,
        objects=np.arange(count, dtype=np.uint32),
        lengths=np.full(count, 1000, np.uint64),
        chunk_ids=ids,
        sums=codes,
    )
    async with Repository.create(url, sums=True) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((count,), (1,)))
        session.workspace.set_refs("/a", refs)
        await session.commit("many")
    async with Repository.open(url) as repository:
        session = await repository.writable_session("main")
        for number in (7, 19_000):
            await write(session, f"a/c/{number}", chunk(number))
            codes[number] = sum_of(chunk(number))
        await session.commit("two others")
        (info,) = await repository.list_manifest_files(session.snapshot_id)
        found = await repository.engine.assets.sums.read(info.id)
        assert found is not None
        assert found.head.is_complete
        (sums,) = found.arrays.values()
        assert sums.codes().tolist() == codes.tolist()
        manifest = await repository.engine.assets.manifests.read(info.id)
        (array,) = manifest.arrays.values()
        assert array.lengths[[7, 8, 19_000]].tolist() == [1000, 1000, 1000]
        data = (await repository.storage.get(f"manifests/{info.id}")).data
        assert found.head.manifest_digest == hashlib.sha256(data).digest()


@SPECS
def test_a_commit_with_sums_is_two_requests_in_a_row_as_well(spec: int) -> None:
    """A sidecar for each manifest and a list of digests are stored beside the other files."""

    async def scenario() -> tuple[float, dict[str, int]]:
        async with open_storage(memory_url()) as plain:
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.create(storage, spec_version=spec, sums=True) as repository:
                await filled(repository)
                session = await repository.writable_session("main")
                await write(session, "a/c/1", chunk(101))
                storage.forget()
                begin = asyncio.get_running_loop().time()
                await session.commit("second")
                return asyncio.get_running_loop().time() - begin, dict(storage.requests)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seconds, requests = runner.run(scenario())
    backups = {"copy": 1} if spec == 2 else {"list_prefix": 1}  # notes of collections
    # A manifest, its sidecar, a list, a snapshot, a log, and the reference or the repo info.
    assert requests == {"put": 6, **backups}
    assert seconds == 2


# Reading


class Flipping(WrappedStorage):
    """A storage whose reads of chunks are damaged ``times`` times."""

    def __init__(self, storage: Storage) -> None:
        """Damage nothing yet."""
        super().__init__(storage)
        self.times = 0

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read, and flip a bit of a chunk."""
        found = await super().get(key, byte_range)
        if not key.startswith("chunks/") or self.times == 0:
            return found
        self.times -= 1
        data = bytearray(found.data)
        data[len(data) // 2] ^= 1
        return Retrieved(bytes(data), found.version, found.size_bytes)


async def damage(storage: Storage) -> None:
    """Flip a bit in the middle of every chunk object."""
    for key, data in (await objects(storage)).items():
        if key.startswith("chunks/"):
            wrong = bytearray(data)
            wrong[len(wrong) // 2] ^= 1
            await storage.put(key, bytes(wrong))


@SPECS
async def test_damaged_chunk_raises_before_its_bytes_are_handed_out(spec: int) -> None:
    """The error says which chunk, where it lies, and both sums."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec, sums=True) as repository:
        await filled(repository)
        await damage(repository.storage)
    async with Repository.open(url, verify_reads=True) as repository:
        session = await repository.readonly_session("main")
        with pytest.raises(ChunkDamagedError, match=r"Chunk \(2,\) of '/a' is damaged") as raised:
            await read(session, "a/c/2")
        context = raised.value.context
        ref = (await session.workspace.find_chunk("/a", (2,))).ref  # type: ignore[union-attr]
        assert context["object"] == f"chunks/{ref.chunk_id}"  # type: ignore[union-attr]
        assert (context["offset"], context["length"]) == (0, 1000)
        assert context["expected"] == f"{sum_of(chunk(2)) - KNOWN:08x}"
        assert context["found"] != context["expected"]
        with pytest.raises(ChunkDamagedError):
            session.store.get_sync("a/c/3")
    async with Repository.open(url) as repository:  # without asking for it nothing is compared
        assert await read(await repository.readonly_session("main"), "a/c/2") != chunk(2)


async def test_verified_reads_are_counted() -> None:
    """Whole chunks with and without a sum, and parts; inline chunks are not looked at."""
    url = memory_url()
    async with Repository.create(url, sums=False) as repository:
        await filled(repository, 1)
    async with Repository.open(url, sums=True, verify_reads=True) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", chunk(1))
        await session.commit("with a sum")
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/0") == chunk(0)
        assert await read(session, "a/c/1") == chunk(1)
        value = session.store.get_sync("a/c/1")
        assert value is not None
        part = await session.store.get("a/c/1", PROTOTYPE, RangeByteRequest(0, 4))
        whole = await session.store.get("a/c/1", PROTOTYPE, RangeByteRequest(0, 1000))
        assert part is not None
        assert whole is not None
        counts = repository.verified_reads
        assert counts is not None
        assert (counts.verified, counts.without_sum, counts.partial) == (3, 1, 1)
    async with Repository.open(url) as repository:
        assert repository.verified_reads is None


@pytest.mark.parametrize("cache", [None, CacheOptions()])
async def test_damage_on_the_way_is_read_again_past_the_cache(cache: CacheOptions | None) -> None:
    """A flipped bit of a network costs one more request; a cache does not keep it."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain, sums=True) as repository:
            await filled(repository)
        storage = Flipping(plain)
        async with Repository.open(storage, verify_reads=True, cache=cache) as repository:
            session = await repository.readonly_session("main")
            storage.times = 1
            assert await read(session, "a/c/2") == chunk(2)
            assert await read(session, "a/c/2") == chunk(2)
            storage.times = 2
            with pytest.raises(ChunkDamagedError):
                await read(session, "a/c/3")


async def test_damage_on_a_disk_that_caches_is_noticed(tmp_path: Any) -> None:
    """Chunks from a cache are compared like others."""
    root, cache = tmp_path / "repository", CacheOptions(directory=tmp_path / "cache")
    async with Repository.create(root.as_uri(), sums=True) as repository:
        await filled(repository)
    for _ in range(2):
        async with Repository.open(root.as_uri(), verify_reads=True, cache=cache) as repository:
            session = await repository.readonly_session("main")
            assert await read(session, "a/c/2") == chunk(2)
            counts = repository.verified_reads
            assert counts is not None
            assert counts.verified == 1


async def test_hostile_sidecars_change_no_data(caplog: pytest.LogCaptureFixture) -> None:
    """Damaged ones, and a sound one of another manifest, make sums unknown, with a warning."""
    url = memory_url()
    async with Repository.create(url, sums=True) as repository:
        await filled(repository)
        (info,) = await repository.list_manifest_files(await repository.lookup_branch("main"))
        good = (await repository.storage.get(sums_key(info.id))).data
        other = ManifestSums.decode(good, info.id)
        moved = ManifestSums(
            type(other.head)(info.id, other.head.manifest_digest, is_complete=True),
            {(key[0], 1): type(it).of(it.codes()[:2]) for key, it in other.arrays.items()},
        )
        bad = [b"", bytes(good)[:-1], os.urandom(200), moved.encode()]
        for data in bad:
            await repository.storage.put(sums_key(info.id), data)
            caplog.clear()
            async with Repository.open(url, verify_reads=True) as reader:
                session = await reader.readonly_session("main")
                assert await read(session, "a/c/1") == chunk(1)
                assert session.store.get_sync("a/c/2") is not None
                counts = reader.verified_reads
                assert counts is not None
                assert (counts.verified, counts.without_sum) == (0, 2)
            assert "taken for unknown" in caplog.text
            async with Repository.open(url) as writer:
                session = await writer.writable_session("main")
                await write(session, "a/c/1", chunk(1))
                await session.commit("over it")
                assert await unknown_in(writer) == [0, 2, 3]
                await writer.reset_branch("main", (await anext(first_but_one(writer))).id)


async def first_but_one(repository: Repository) -> AsyncGenerator[Any]:
    """Iterate over the ancestors of the tip."""
    async for info in repository.ancestry(snapshot_id=await repository.lookup_branch("main")):
        if info.message != "over it":
            yield info


# Upkeep


async def test_garbage_collection_deletes_the_sums_of_what_it_deletes() -> None:
    """And of nothing else."""
    async with made() as repository:
        await filled(repository)
        first = await repository.lookup_branch("main")
        session = await repository.writable_session("main")
        await write(session, "a/c/1", chunk(101))
        await session.commit("second")
        second = await repository.lookup_branch("main")
        (kept,) = await repository.list_manifest_files(first)
        (gone,) = await repository.list_manifest_files(second)
        await repository.reset_branch("main", first)
        await asyncio.sleep(0.01)
        report = await repository.garbage_collect(datetime.now(UTC))
        assert report.sums_deleted == 2
        left = {key for key in await objects(repository.storage) if key.startswith("sums/")}
        assert left == {sums_key(kept.id), f"sums/{first}"}
        assert sums_key(gone.id) not in left
        assert await unknown_in(repository) == []


async def test_a_copy_has_the_sums() -> None:
    """Also those of what was committed since an earlier copy."""
    target = memory_url()
    async with made() as repository:
        await filled(repository)
        await repository.copy_to(target)
        session = await repository.writable_session("main")
        await write(session, "a/c/1", chunk(101))
        await session.commit("second")
        await repository.copy_to(target)
        wanted = {
            key: data
            for key, data in (await objects(repository.storage)).items()
            if key.startswith("sums/")
        }
        async with Repository.open(target) as copy:
            found = await objects(copy.storage)
            assert {key: found.get(key) for key in wanted} == wanted
            assert await unknown_in(copy) == []


# Adding sums, and content roots


@SPECS
async def test_added_sums_are_those_of_the_chunks_that_are_there(spec: int) -> None:
    """Whole afterwards; a second call reads no chunk; the next commit records a root."""
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        await filled(repository)
    async with open_storage(url) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage, sums=True) as repository:
            done = await repository.add_sums(branch="main")
            assert (done.manifests, done.manifests_completed, done.chunks) == (1, 1, 4)
            assert (done.bytes_read, done.unreadable) == (4000, ())
            storage.forget()
            again = await repository.add_sums()
            assert (again.manifests_completed, again.chunks) == (0, 0)
            assert not [it for it in storage.log if "chunks/" in it[1]]
            assert await unknown_in(repository) == []
            content = await repository.check_content()
            assert content.root is not None
            assert (content.is_right, content.recorded) == (True, None)
    async with Repository.open(url, sums=True) as repository:
        session = await repository.writable_session("main")
        await session.commit("root", allow_empty=True)
        found = await repository.check_content()
        assert (found.recorded, found.is_right) == (content.root, True)


async def test_sums_are_added_beside_those_that_are_known() -> None:
    """A root that was recorded before stays right, and later commits say more."""
    url = memory_url()
    async with Repository.create(url) as repository:
        await filled(repository)
        await filled(repository, path="b")
    async with Repository.open(url, sums=True) as repository:
        await repository.add_sums()
        session = await repository.writable_session("main")
        await make_array(session, "c", (4,), (1,))
        await session.commit("recorded")
        assert (await repository.check_content()).is_right
    async with Repository.open(url, sums=False) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/1", chunk(101))
        await session.commit("by another writer")
        assert (await repository.check_content()).root is None
    async with Repository.open(url, sums=True) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/c/2", chunk(102))
        await session.commit("by us")
        middle = session.snapshot_id
        assert await unknown_in(repository) == [0, 1, 3]
        report = await repository.check_content()
        assert (report.incomplete, report.is_right, report.problems) == (1, False, ())
        assert report.recorded == report.root  # it vouches for the manifests
        assert (await repository.add_sums()).chunks == 3
        assert (await repository.check_content(snapshot_id=middle)).problems == ()
        session = await repository.writable_session("main")
        await write(session, "b/c/1", chunk(201))
        await session.commit("on top")
        assert (await repository.check_content()).is_right


async def test_chunks_that_cannot_be_read_stay_without_a_sum() -> None:
    """They are listed, and all others get theirs."""
    async with Repository.create(memory_url()) as repository:
        await filled(repository)
        session = await repository.readonly_session("main")
        handle = await session.workspace.find_chunk("/a", (2,))
        assert handle is not None
        key = f"chunks/{getattr(handle.ref, 'chunk_id')}"  # noqa: B009
        await repository.storage.delete([key])
        done = await repository.add_sums()
        assert done.chunks == 3
        (message,) = done.unreadable
        assert key in message
        report = await repository.check_content()
        assert (report.incomplete, report.is_right) == (1, False)


async def test_what_a_cache_holds_does_not_hide_what_the_content_root_vouches_for() -> None:
    """Manifests, sidecars and the list are read from the storage."""
    url = memory_url()
    async with Repository.create(url, sums=True) as repository:
        await filled(repository)
    options = CacheOptions(memory_bytes=1 << 24)
    async with open_storage(url) as storage, Repository.open(url, cache=options) as repository:
        report = await repository.check_content()
        assert report.is_right
        (manifest_id,) = (await repository.readonly_session("main")).workspace.base.manifests
        for key in (
            f"manifests/{manifest_id}",
            sums_key(manifest_id),
            f"sums/{report.snapshot_id}",
        ):
            good = bytes((await repository.storage.get(key)).data)
            await storage.put(key, good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
            assert not (await repository.check_content()).is_right
            await storage.put(key, good)
        assert (await repository.check_content()).is_right


async def test_content_root_notices_every_object_that_it_vouches_for() -> None:
    """A flipped bit of a manifest's file, of a sidecar, of the list; a lost object."""
    async with made() as repository:
        await filled(repository)
        report = await repository.check_content()
        assert report.is_right
        assert report.root == report.recorded
        (manifest_id,) = (await repository.readonly_session("main")).workspace.base.manifests
        keys = [f"manifests/{manifest_id}", sums_key(manifest_id), f"sums/{report.snapshot_id}"]
        for key in keys:
            good = bytes((await repository.storage.get(key)).data)
            wrong = bytearray(good)
            wrong[-20] ^= 1
            for bad in (bytes(wrong), None):
                if bad is None:
                    await repository.storage.delete([key])
                else:
                    await repository.storage.put(key, bad)
                found = await repository.check_content()
                assert not found.is_right
                assert found.problems
            await repository.storage.put(key, good)
        assert (await repository.check_content()).is_right


async def test_equal_contents_have_one_root_and_others_another() -> None:
    """An empty commit keeps it; any change of a document or a chunk makes another."""
    async with made() as repository:
        await filled(repository)
        roots = [(await repository.check_content()).root]
        for change in ("nothing", "a/zarr.json", "a/c/1"):
            session = await repository.writable_session("main")
            if change == "a/zarr.json":
                await make_array(session, "a", (8,), (1,), attributes={"unit": "K"})
            elif change == "a/c/1":
                await write(session, "a/c/1", chunk(100))
            await session.commit(change, allow_empty=True)
            report = await repository.check_content()
            assert report.is_right
            roots.append(report.root)
        assert roots[0] == roots[1]
        assert len(set(roots)) == 3


async def test_digests_can_be_checked_with_ordinary_tools(tmp_path: Any) -> None:
    """As the documentation says: the list has the format of sha256sum."""
    async with Repository.create(tmp_path.as_uri(), sums=True) as repository:
        await filled(repository)
        report = await repository.check_content()
    data = (tmp_path / "sums" / str(report.snapshot_id)).read_bytes()
    assert hashlib.sha256(data).hexdigest() == report.root
    lines = [line.split("  ") for line in data.decode().splitlines() if not line.startswith("#")]
    assert [key.partition("/")[0] for _, key in lines] == ["manifests", "sums"]
    for digest, key in lines:
        assert hashlib.sha256((tmp_path / key).read_bytes()).hexdigest() == digest


async def test_content_check_notices_other_nodes_and_manifests() -> None:
    """Also of a snapshot that records no root itself."""
    async with Repository.create(memory_url()) as repository:
        await filled(repository)
        await filled(repository, path="b")
        tip = await repository.lookup_branch("main")
        await repository.add_sums()
        assert (await repository.check_content()).is_right
        key = f"sums/{tip}"
        good = bytes((await repository.storage.get(key)).data)
        lines = good.splitlines(keepends=True)
        for bad, why in (
            (good.replace(b'"/a"', b'"/c"'), "nodes"),
            (b"".join(lines[:-2]), "manifests"),
        ):
            await repository.storage.put(key, bad)
            (problem,) = (await repository.check_content()).problems
            assert why in problem
