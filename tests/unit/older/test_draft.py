"""Repositories of the first draft: references, commits, limits, and all that it cannot express."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.engine.files.manifests import BlockingManifestFiles
from icechunk_async.engine.history.draft import layout as draft_layout
from icechunk_async.engine.history.draft.layout import DraftLayout
from icechunk_async.errors import (
    BranchExistsError,
    BranchNotFoundError,
    ConflictError,
    FormatError,
    InvalidRefNameError,
    MissingDriverError,
    RepositoryExistsError,
    SnapshotNotFoundError,
    TagExistsError,
    UnsafeStorageError,
    UnsupportedBySpecError,
)
from icechunk_async.format.ids import ChunkId, NodeId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import Node, Nodes
from icechunk_async.storage import BlockingStorage, SuffixRange, open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.zarr import VirtualChunkSpec
from tests.helpers import array_document, make_array, memory_url, objects, read, write
from tests.unit.older import older_tools
from tests.unit.older.older_tools import OnlyCreates, commit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async.storage import Data, RangeRequest, Retrieved, Version


created = partial(older_tools.created, "first-draft")


async def _state(repository: Repository) -> Any:
    return json.loads(bytes((await repository.storage.get("state.json")).data))


async def test_large_attributes_are_stored_once_for_all_commits() -> None:
    """Until they change; small ones stay in the structure file."""
    async with created() as repository:
        for attributes in ({"x": "y" * 30_000}, {"x": "y" * 30_000, "z": 1}):
            session = await repository.writable_session("main")
            document = array_document((10,), (1,), attributes=attributes)
            await write(session, "a/zarr.json", document)
            await session.commit("attributes")
            await commit(repository, 2)
        files = await objects(repository.storage)
        stored = {key: data for key, data in files.items() if key.startswith("a/")}
        assert len(stored) == 2
        rows = [pq.read_table(io.BytesIO(it)).to_pydict()["attrs"] for it in stored.values()]
        assert sorted(len(json.loads(it[0])) for it in rows) == [1, 2]
        session = await repository.readonly_session("main")
        document = json.loads(await read(session, "a/zarr.json") or b"")
        assert document["attributes"] == {"x": "y" * 30_000, "z": 1}


async def test_concurrent_commits_are_rebased_and_conflicts_are_found() -> None:
    """There are no logs: what others touched is found by comparing their snapshots."""
    async with created() as repository:
        sessions = [await repository.writable_session("main") for _ in range(3)]
        for session, chunk in zip(sessions, (2, 3, 2), strict=True):
            await write(session, f"a/c/{chunk}", b"%d" % chunk)
        await sessions[0].commit("two")
        await sessions[1].commit("three", rebase_with=ConflictDetector())
        with pytest.raises(ConflictError, match="chunk"):
            await sessions[2].commit("two again", rebase_with=ConflictDetector())
        session = await repository.readonly_session("main")
        assert [await read(session, f"a/c/{it}") for it in (2, 3)] == [b"2", b"3"]


async def test_branches_and_tags_share_one_list() -> None:
    """Created once, moved, deleted; no tag has a branch's name, or the other way round."""
    async with created() as repository:
        tip = await repository.lookup_branch("main")
        await repository.create_branch("dev", tip)
        await repository.create_tag("v1", tip)
        with pytest.raises(BranchExistsError):
            await repository.create_branch("dev", tip)
        with pytest.raises(TagExistsError):
            await repository.create_tag("v1", tip)
        with pytest.raises(InvalidRefNameError, match="one list"):
            await repository.create_tag("dev", tip)
        with pytest.raises(InvalidRefNameError, match="one list"):
            await repository.create_branch("v1", tip)
        with pytest.raises(InvalidRefNameError):
            await repository.create_branch("two\nlines", tip)
        first = [it async for it in repository.ancestry(branch="main")][-1].id
        await repository.reset_branch("dev", first)
        assert await repository.branches() == {"main": tip, "dev": first}
        refs = (await _state(repository))["refs"]
        assert refs["dev"] == {"name": "dev", "snapshot-id": str(first), "type": "branch"}
        assert refs["v1"] == {"name": "v1", "snapshot-id": str(tip), "type": "tag"}
        with pytest.raises(ConflictError):
            await repository.reset_branch("dev", tip, from_snapshot_id=tip)
        with pytest.raises(SnapshotNotFoundError):
            await repository.create_tag("v2", "0" * 20)
        await repository.delete_branch("dev")
        with pytest.raises(BranchNotFoundError):
            await commit(repository, 2, "dev")
        with pytest.raises(InvalidRefNameError):
            await repository.delete_branch("main")


async def test_each_snapshot_is_later_than_the_one_before() -> None:
    """The file has milliseconds, of which many commits can be in one."""
    async with created() as repository:
        for chunk in range(2, 6):
            await commit(repository, chunk)
        times = [it.flushed_at async for it in repository.ancestry(branch="main")]
        assert times == sorted(set(times), reverse=True)
        assert all(it % 1000 == 0 for it in times)
        session = await repository.readonly_session("main")
        assert session.workspace.base.flushed_at == times[0]
    async with Repository.open(repository.storage.description.url) as again:
        session = await again.readonly_session("main")
        assert session.workspace.base.flushed_at == times[0]


async def test_configurations_are_in_the_state_file() -> None:
    """A change that somebody else made meanwhile is not written over."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=7)
    async with created(config=config) as repository:
        await commit(repository, 2)
        url = repository.storage.description.url
        async with Repository.open(url) as again:
            assert again.config.effective_inline_chunk_threshold_bytes == 7
        assert (
            "inline_chunk_threshold_bytes" in (await _state(repository))["icechunk-async"]["config"]
        )


async def test_members_that_others_added_stay() -> None:
    """Of the state file and of its snapshots."""
    async with created() as repository:
        state = await _state(repository)
        state["theirs"] = {"deep": [1]}
        state["snapshots"][0]["theirs"] = "x"
        await repository.storage.put("state.json", json.dumps(state).encode())
        await commit(repository, 2)
        now = await _state(repository)
        assert now["theirs"] == {"deep": [1]}
        assert now["snapshots"][:-1] == state["snapshots"]


async def test_two_layouts_in_one_place_are_refused() -> None:
    """Nothing says which one is meant."""
    async with open_storage(memory_url()) as storage, open_storage(memory_url()) as other:
        async with Repository.create(storage, layout="alpha"):
            pass
        async with created(other):
            pass
        for key, data in (await objects(other)).items():
            await storage.put(key, data)
        with pytest.raises(FormatError, match=r"2 layouts.*'r/main/' and 'state\.json'"):
            async with Repository.open(storage):
                pass


async def test_of_racing_creators_one_wins() -> None:
    """The others find its repository."""

    async def create(storage: Any) -> bool:
        try:
            async with Repository.create(storage, layout="first-draft", check_clean_root=False):
                return True
        except RepositoryExistsError:
            return False

    async with open_storage(memory_url()) as storage:
        made = await asyncio.gather(*(create(storage) for _ in range(4)))
        assert made.count(True) == 1


@pytest.mark.parametrize(
    ("document", "what"),
    [
        (array_document((65536,), (1,)), "65535"),
        (array_document((4,), (65536,)), "65535"),
        (array_document((4,), (4,), data_type="string", fill_value=""), "data type"),
        (array_document((4,), (4,), storage_transformers=[{"name": "x"}]), "transformers"),
    ],
)
async def test_documents_beyond_the_draft_are_refused_when_they_are_set(
    document: bytes, what: str
) -> None:
    """Lengths have 16 bits. Nothing is changed, and the session can be committed."""
    async with created() as repository:
        session = await repository.writable_session("main")
        with pytest.raises(UnsupportedBySpecError, match=what):
            await write(session, "b/zarr.json", document)
        assert not session.has_uncommitted_changes
        await make_array(session, "b", (65535,), (65535,))
        await session.commit("the greatest")


async def test_references_beyond_the_draft_are_refused() -> None:
    """Checksums of virtual chunks, files that are no URLs, chunks of 4 GiB."""
    async with created() as repository:
        session = await repository.writable_session("main")
        specs = [VirtualChunkSpec([2], "s3://b/k", 0, 1, etag_checksum="x")]
        with pytest.raises(UnsupportedBySpecError, match="ETags"):
            session.store.set_virtual_refs("a", specs, validate_containers=False)
        assert not session.has_uncommitted_changes
        layout, longest = DraftLayout(), NativeChunk(ChunkId(bytes(12)), 0, (1 << 32) - 1)
        layout.check_refs("/a", ChunkRefs.from_mapping(1, {(0,): longest}))
        longer = replace(longest, length=1 << 32)
        with pytest.raises(UnsupportedBySpecError, match="4294967296 bytes"):
            layout.check_ref("/a", longer)
        with pytest.raises(UnsupportedBySpecError, match="4294967296 bytes"):
            layout.check_refs("/a", ChunkRefs.from_mapping(1, {(0,): longer}))
        with pytest.raises(UnsupportedBySpecError, match="no URLs"):
            layout.check_ref("/a", VirtualChunk("data.nc", 0, 1))


def test_nodes_get_numbers_of_16_bits_until_there_are_none() -> None:
    """Those that are taken are never chosen; one node too many is refused."""
    layout = DraftLayout()
    base = Nodes(Node(NodeId(it.to_bytes(8)), f"/{it}", b"") for it in range(65_534))
    new = [NodeId(b"\xff" * 8), NodeId(b"\xfe" * 8)]
    chosen = layout.numbered(new, base)
    assert sorted(int.from_bytes(it) for it in chosen.values()) == [65_534, 65_535]
    with pytest.raises(UnsupportedBySpecError, match="16 bits"):
        layout.numbered([*new, NodeId(b"\xfd" * 8)], base)
    assert layout.numbered([NodeId((65_535).to_bytes(8))], base) == {}


async def test_operations_beyond_the_draft_are_refused() -> None:
    """Each names migration."""
    async with created() as repository:
        tip = await repository.lookup_branch("main")
        await repository.create_tag("v1", tip)
        session = await repository.writable_session("main")
        await write(session, "a/c/5", b"5")
        now = datetime.now(UTC)
        refused: list[Callable[[], Awaitable[object]]] = [
            lambda: session.amend("x"),
            lambda: repository.delete_tag("v1"),
            lambda: repository.expire_snapshots(now),
            lambda: repository.garbage_collect(now),
            repository.get_metadata,
            lambda: session.commit("x", {"message": "another"}),
        ]
        for it in refused:
            with pytest.raises(UnsupportedBySpecError, match="upgrade"):
                await it()
        await session.commit("still possible")


async def test_storage_without_conditional_updates_is_refused() -> None:
    """Two writers could both replace the state file."""
    async with open_storage(memory_url()) as storage:
        with pytest.raises(UnsafeStorageError, match="conditional update"):
            async with Repository.create(OnlyCreates(storage), layout="first-draft"):
                pass
        assert await objects(storage) == {}


@pytest.mark.parametrize("seed", range(6))
async def test_lost_replies_are_settled_by_marks(seed: int) -> None:
    """A write that landed without a reply is recognised, whatever it changed."""
    rates = FaultRates(lost_replies=0.5, lost_requests=0.2)
    async with open_storage(memory_url()) as plain, created(plain):
        faulty = FaultyStorage(plain, rates, seed=seed, affects=lambda key: key == "state.json")
        async with Repository.open(plain) as sound:
            tip = await sound.lookup_branch("main")
        async with Repository.open(faulty) as repository:
            await repository.create_tag("v1", tip)
            await repository.create_branch("dev", tip)
            await commit(repository, 2, "dev")
            await repository.delete_branch("dev")
        async with Repository.open(plain) as sound:
            assert await sound.tags() == {"v1": tip}
            assert list(await sound.branches()) == ["main"]


def test_requests_are_few() -> None:
    """A commit that nobody disturbs: the files at once, then the state file."""

    async def scenario() -> list[tuple[str, str]]:
        async with open_storage(memory_url()) as plain, created(plain):
            slow = LatencyStorage(plain, seconds=0.1)
            async with Repository.open(slow) as repository:
                session = await repository.writable_session("main")
                slow.log.clear()
                began = asyncio.get_running_loop().time()
                await write(session, "a/c/5", b"5")
                await session.commit("five")
                assert asyncio.get_running_loop().time() - began < 0.45
                return list(slow.log)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        log = runner.run(scenario())
    what = [(it, key[:2]) for it, key in log]
    assert sorted(what) == [("get", "i/"), ("put", "i/"), ("put", "s/"), ("put", "st")]


class _Counting(WrappedStorage):
    """Notes the bytes that are read of manifests."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.read: list[tuple[RangeRequest, int]] = []

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read, and note it."""
        found = await super().get(key, byte_range)
        if key.startswith("i/"):
            self.read.append((byte_range, len(found.data)))
        return found


async def test_a_lookup_in_a_large_manifest_reads_one_group_of_rows() -> None:
    """Two requests: the end of the file, and the group that can have the chunk; not the rest."""
    side = 400
    async with open_storage(memory_url()) as plain, created(plain) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "big", (side, side), (1, 1))
        coords = np.indices((side, side)).reshape(2, -1).T.astype(np.uint32)
        ids = np.random.default_rng(1).integers(0, 256, (side * side, 12), dtype=np.uint8)
        refs = ChunkRefs.build(
            coords,
            Kind.NATIVE,
            objects=np.arange(side * side, dtype=np.uint32),
            lengths=np.ones(side * side, np.uint64),
            chunk_ids=ids,
        )
        session.workspace.set_refs("/big", refs)
        await session.commit("big")
        files = await objects(plain)
        size = max(len(data) for key, data in files.items() if key.startswith("i/"))
        assert size > 2_000_000
        counting = _Counting(plain)
        async with Repository.open(counting) as again:
            reader = await again.readonly_session("main")
            workspace = reader.workspace
            found = await workspace.find_chunk("/big", (211, 7))
            assert found is not None
            assert found.ref == refs.ref(211 * side + 7)
            assert isinstance(counting.read[0][0], SuffixRange)
            assert len(counting.read) == 2
            assert sum(it for _, it in counting.read) < size // 5
            # Neighbours need nothing more, and what does not exist needs no other group.
            near = await workspace.find_chunk("/big", (211, 8))
            assert near is not None
            assert near.ref == refs.ref(211 * side + 8)
            assert len(counting.read) == 2
            assert await workspace.find_chunk("/a", (9,)) is None


class _CountingBlocking:
    """A storage without an event loop that counts reads."""

    def __init__(self, inner: BlockingStorage) -> None:
        self._inner = inner
        self.requests = 0

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read and count."""
        self.requests += 1
        return self._inner.get_blocking(key, byte_range)

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole object."""
        return self._inner.put_blocking(key, data)


async def test_a_small_manifest_is_read_once_without_an_event_loop() -> None:
    """Its size is not stored; the next lookup on the calling thread finds it in memory."""
    async with open_storage(memory_url()) as plain, created(plain) as repository:
        assert isinstance(plain, BlockingStorage)
        base = (await repository.readonly_session("main")).workspace.base
        (info,) = base.manifests.values()
        counting = _CountingBlocking(plain)
        files = BlockingManifestFiles(counting, WeightedCache(1000), DraftLayout())
        found = [files.find_ref(info.id, 0, base.nodes["/a"].id, (it,)) for it in (0, 1, 9)]
        assert found == [InlineChunk(b"\x00"), InlineChunk(b"\x01"), None]
        assert counting.requests == 1


async def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the repository is created or opened; nothing is written."""
    async with open_storage(memory_url()) as storage, open_storage(memory_url()) as empty:
        async with created(storage):
            pass
        monkeypatch.setattr(draft_layout, "find_spec", lambda _: None)
        with pytest.raises(MissingDriverError, match=r"icechunk-async\[parquet\]"):
            async with Repository.open(storage):
                pass
        with pytest.raises(MissingDriverError, match=r"icechunk-async\[parquet\]"):
            async with Repository.create(empty, layout="first-draft"):
                pass
        assert await objects(empty) == {}


async def test_ages_of_sessions_do_not_matter(tmp_path: Any) -> None:
    """Sessions of two handles, one of which has not seen what the other did."""
    async with created(tmp_path) as one, Repository.open(tmp_path) as other:
        early = await other.writable_session("main")
        await commit(one, 3)
        await write(early, "a/c/4", b"4")
        await early.commit("four", rebase_with=ConflictDetector())
        session = await one.readonly_session("main")
        assert [await read(session, f"a/c/{it}") for it in (3, 4)] == [b"\x03", b"4"]
        infos = [it async for it in one.ancestry(branch="main")]
        moment = infos[1].written_at + timedelta(microseconds=999)
        past = await one.readonly_session("main", as_of=moment)
        assert past.snapshot_id == infos[1].id
    assert "pyarrow" in sys.modules
