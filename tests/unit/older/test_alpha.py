"""Repositories of the alpha: references, commits, time travel, and all that it cannot express."""

from __future__ import annotations

import asyncio
import json
import pickle
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime import clock
from icechunk_async.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
)
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.engine.history.numbers import encode_number
from icechunk_async.errors import (
    BranchExistsError,
    BranchNotFoundError,
    ConflictError,
    FormatError,
    InvalidInputError,
    InvalidRefNameError,
    OutcomeUnknownError,
    RebaseFailedError,
    RepositoryExistsError,
    RepositoryNotFoundError,
    SnapshotNotFoundError,
    TagExistsError,
    UnsafeStorageError,
    UnsupportedBySpecError,
)
from icechunk_async.format.ids import NodeId
from icechunk_async.storage import open_storage
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from icechunk_async.zarr import VirtualChunkSpec
from tests.helpers import array_document, make_array, memory_url, objects, read, write
from tests.unit.older import older_tools
from tests.unit.older.older_tools import OnlyCreates, commit
from tests.unit.older.schemas import check_objects

created = partial(older_tools.created, "alpha")


async def test_every_document_is_valid_by_the_schemas() -> None:
    """Of a history with all types, attributes inline and in files, references of every kind."""
    fills = {
        "bool": True, "int8": -1, "int64": -(2**63), "uint64": 2**64 - 1, "float16": "NaN",
        "float32": 0.1, "float64": "-Infinity", "complex64": ["NaN", -0.0], "complex128": [1, 2.5],
        "r16": "AQI=",
    }  # fmt: skip
    async with created(config=RepositoryConfig(inline_chunk_threshold_bytes=4)) as repository:
        session = await repository.writable_session("main")
        for data_type, fill in fills.items():
            await make_array(
                session,
                f"types/{data_type}",
                (3, 2),
                (2, 1),
                data_type=data_type,
                fill_value=fill,
                dimension_names=["y", None],
                attributes={"long": "ä" * 20_000, "nested": {"list": [None, True, 1e300]}},
            )
        await write(session, "a/c/5", b"more than four")
        session.store.set_virtual_ref(
            "a/c/6", "s3://b/k", offset=2, length=3, validate_container=False
        )
        await session.commit("types", {"author": "somebody", "numbers": [1, 2.5]})
        await repository.create_branch("dev", await repository.lookup_branch("main"))
        await repository.create_tag("v1", await repository.lookup_branch("main"))
        await repository.delete_branch("dev")
        counts = check_objects(await objects(repository.storage))
    assert counts["snapshot"] == 3
    assert counts["reference"] == 3 + 2 + 1
    assert counts["manifest"] == 2
    assert counts["other"] >= 2  # a chunk, and a file of attributes


async def test_large_attributes_are_stored_once_for_all_commits() -> None:
    """Until they change; small ones stay in the snapshot."""
    async with created() as repository:
        for attributes in ({"x": "y" * 30_000}, {"x": "y" * 30_000, "z": 1}):
            session = await repository.writable_session("main")
            document = array_document((10,), (1,), attributes=attributes)
            await write(session, "a/zarr.json", document)
            await session.commit("attributes")
            await commit(repository, 2)
        files = await objects(repository.storage)
        assert len([key for key in files if key.startswith("a/")]) == 2
        assert max(len(data) for key, data in files.items() if key.startswith("s/")) < 20_000
        session = await repository.readonly_session("main")
        document = json.loads(await read(session, "a/zarr.json") or b"")
        assert document["attributes"] == {"x": "y" * 30_000, "z": 1}


async def test_a_document_is_read_back_as_zarr_writes_it() -> None:
    """White space, which the alpha does not store, changes at once and not at the commit."""
    async with created() as repository:
        session = await repository.writable_session("main")
        root = await zarr.api.asynchronous.open_group(session.store, mode="r+")
        array = await root.create_array(
            "z", shape=(4, 6), chunks=(2, 3), dtype="f4", fill_value=np.nan, attributes={"ü": [1]}
        )
        before = await read(session, "z/zarr.json")
        assert before == await _zarr_document(array)
        await session.commit("array")
        again = await repository.readonly_session("main")
        assert await read(again, "z/zarr.json") == before
        session = await repository.writable_session("main")
        spaced = json.dumps(json.loads(before or b""), indent=7).encode()
        await write(session, "z/zarr.json", spaced)
        assert await read(session, "z/zarr.json") == before
        assert not session.has_uncommitted_changes


async def _zarr_document(array: Any) -> bytes:
    from zarr.core.buffer import default_buffer_prototype

    document: bytes = array.metadata.to_buffer_dict(default_buffer_prototype())[
        "zarr.json"
    ].to_bytes()
    return document


async def test_concurrent_commits_are_rebased_without_logs() -> None:
    """Disjoint chunks are joined, the same chunk is a conflict."""
    async with created() as repository:
        first, second, third = [await repository.writable_session("main") for _ in range(3)]
        await write(first, "a/c/2", b"1")
        await write(second, "a/c/3", b"2")
        await make_array(second, "b", (2,), (1,))
        await write(third, "a/c/2", b"3")
        await first.commit("first")
        await second.commit("second", rebase_with=BasicConflictSolver())
        with pytest.raises(RebaseFailedError, match="chunk double update"):
            await third.commit("third", rebase_with=ConflictDetector())
        session = await repository.readonly_session("main")
        assert [await read(session, f"a/c/{n}") for n in range(4)] == [b"\x00", b"\x01", b"1", b"2"]
        messages = [info.message async for info in repository.ancestry(branch="main")]
        assert messages == ["second", "first", "filled", "Repository initialized"]


class _FixedRandom(clock.SystemClock):
    """Chooses the same number for every node at first."""

    def __init__(self) -> None:
        self.numbers = 0

    def random_bytes(self, size_bytes: int) -> bytes:
        if size_bytes == 4:
            self.numbers += 1
            return (7 + self.numbers // 3).to_bytes(4)
        return super().random_bytes(size_bytes)


async def test_nodes_that_chose_one_number_stay_apart() -> None:
    """Two sessions, and forks of one, number their nodes before they know of each other."""
    with clock.use_clock(_FixedRandom()):
        async with created() as repository:
            one, other = [await repository.writable_session("main") for _ in range(2)]
            for session, name in ((one, "x"), (other, "y")):
                await make_array(session, name, (2,), (1,))
                await write(session, f"{name}/c/0", name.encode())
            await one.commit("x")
            forks = [await other.fork() for _ in range(2)]  # the nodes of "other" have numbers now
            for fork, name in zip(forks, ("p", "q"), strict=True):
                await make_array(fork, name, (2,), (1,))
                await write(fork, f"{name}/c/1", name.encode())
                await fork.fork()  # and so have those of the fork
            await other.merge(*forks)
            await other.commit("y", rebase_with=BasicConflictSolver(), allow_missing_forks=True)
            session = await repository.readonly_session("main")
            for name, chunk in (("x", 0), ("y", 0), ("p", 1), ("q", 1)):
                assert await read(session, f"{name}/c/{chunk}") == name.encode()
                assert await read(session, f"{name}/c/{1 - chunk}") is None
            ids = [node.id for node in session.workspace.base.nodes.values()]
            assert len(set(ids)) == len(ids) == 6
            assert all(node_id < NodeId(b"\0\0\0\1\0\0\0\0") for node_id in ids)


async def test_branches_move_by_new_files_and_nothing_is_removed() -> None:
    """Create, reset, delete, create again: each adds a file."""
    async with created() as repository:
        storage = repository.storage
        root = [info.id async for info in repository.ancestry(branch="main")][-1]
        tip = await repository.lookup_branch("main")
        await repository.create_branch("dev", root)
        with pytest.raises(BranchExistsError):
            await repository.create_branch("dev", root)
        await repository.reset_branch("dev", tip)
        await repository.delete_branch("dev")
        assert await repository.list_branches() == {"main"}
        for what in (
            repository.lookup_branch,
            repository.delete_branch,
            repository.writable_session,
        ):
            with pytest.raises(BranchNotFoundError, match="'dev'"):
                await what("dev")
        await repository.create_branch("dev", root)
        assert await repository.branches() == {"main": tip, "dev": root}
        files = sorted(key for key in await objects(storage) if key.startswith("r/dev/"))
        assert files == [f"r/dev/{encode_number(n)}.json" for n in (3, 2, 1, 0)]
        with pytest.raises(InvalidRefNameError, match="cannot be deleted"):
            await repository.delete_branch("main")
        for name in ("a/b", "", "ä", ".x", "x.json"):
            with pytest.raises(InvalidRefNameError):
                await repository.create_branch(name, root)


async def test_a_commit_to_a_deleted_branch_is_refused() -> None:
    """Also by a session, and by a handle, that saw the branch before."""
    async with created() as repository, Repository.open(repository.storage) as other:
        await repository.create_branch("dev", await repository.lookup_branch("main"))
        session = await other.writable_session("dev")
        await write(session, "a/c/2", b"2")
        await repository.delete_branch("dev")
        with pytest.raises(ConflictError, match="is gone"):
            await session.commit("too late")
        with pytest.raises(BranchNotFoundError):
            await other.lookup_branch("dev")


async def test_tags_are_created_once() -> None:
    """And never deleted."""
    async with created() as repository:
        tip = await repository.lookup_branch("main")
        await repository.create_tag("v1", tip)
        await commit(repository, 2)
        with pytest.raises(TagExistsError):
            await repository.create_tag("v1", await repository.lookup_branch("main"))
        assert await repository.tags() == {"v1": tip}
        assert (await repository.readonly_session(tag="v1")).snapshot_id == tip
        with pytest.raises(UnsupportedBySpecError, match=r"no deletion of tags.*upgrade"):
            await repository.delete_tag("v1")


class _Minutes(clock.SystemClock):
    """Shows a minute later each time."""

    def __init__(self) -> None:
        self.minutes = 0

    def now_us(self) -> int:
        self.minutes += 1
        return 1_700_000_000_000_000 + self.minutes * 60_000_000


async def test_as_of_follows_resets_and_deletions() -> None:
    """The files of a branch tell where it was at each time."""
    with clock.use_clock(_Minutes()):
        async with created() as repository:
            states: list[tuple[datetime, Any]] = []

            async def note() -> None:
                tip = await repository.lookup_branch("dev")
                states.append((clock.from_us(clock.now_us()), tip))

            await repository.create_branch("dev", await repository.lookup_branch("main"))
            await note()
            for chunk in range(2, 8):
                await commit(repository, chunk, "dev")
                await note()
            await repository.reset_branch("dev", states[2][1])
            await note()
            gone = clock.from_us(clock.now_us())
            await repository.delete_branch("dev")
            deleted = clock.from_us(clock.now_us())
            await repository.create_branch("dev", states[5][1])
            await note()
            for moment, tip in states:
                session = await repository.readonly_session("dev", as_of=moment)
                assert session.snapshot_id == tip
            session = await repository.readonly_session("dev", as_of=gone)
            assert session.snapshot_id == states[2][1]
            for moment in (deleted, datetime(2001, 1, 1, tzinfo=UTC)):
                with pytest.raises(SnapshotNotFoundError):
                    await repository.readonly_session("dev", as_of=moment)
            # Before it was created a branch has the history of what it was created at.
            early = states[0][0] - timedelta(minutes=2)
            session = await repository.readonly_session("dev", as_of=early)
            assert session.snapshot_id == states[0][1]


async def test_a_branch_with_a_gap_in_its_numbers_is_damaged() -> None:
    """However it came: nothing is read of it, and other branches can be used."""
    url = memory_url()
    async with open_storage(url) as storage, created(storage) as repository:
        await repository.create_branch("dev", await repository.lookup_branch("main"))
        for chunk in (2, 3):
            await commit(repository, chunk, "dev")
        await storage.delete([f"r/dev/{encode_number(1)}.json"])
        async with Repository.open(storage) as again:
            for what in (
                again.lookup_branch("dev"),
                again.writable_session("dev"),
                again.branches(),
            ):
                with pytest.raises(FormatError, match="gap"):
                    await what
            await again.lookup_branch("main")
            await commit(again, 4)
        audit = await repository.engine.history.audit()
        assert [it.key for it in audit.faults] == ["r/dev/"]
        await storage.delete([f"r/main/{encode_number(n)}.json" for n in (0, 1)])
        with pytest.raises(FormatError, match="number 1, is missing"):
            async with Repository.open(storage):
                pass


async def test_a_gap_far_below_is_found_by_an_audit() -> None:
    """The tip is read without listing all numbers."""
    async with created() as repository:
        for chunk in range(2, 8):
            await commit(repository, chunk)
        await repository.storage.delete([f"r/main/{encode_number(2)}.json"])
        await repository.lookup_branch("main")
        (fault,) = (await repository.engine.history.audit()).faults
        assert "number 2, is missing" in fault.detail


async def test_two_layouts_in_one_place_are_refused() -> None:
    """Which of them is meant nobody knows."""
    from icechunk_async.engine.history import opening

    way = next(it for it in opening.other_ways() if it.name == "alpha")
    async with created() as repository:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "other_ways", lambda: (way, way))
            with pytest.raises(FormatError, match="2 layouts"):
                async with Repository.open(repository.storage):
                    pass


async def test_a_place_is_recognised() -> None:
    """By opening, by asking, and by refusing to create another repository there."""
    url = memory_url()
    async with open_storage(url) as storage:
        assert await Repository.fetch_layout(storage) is None
        with pytest.raises(RepositoryNotFoundError, match="'r/main/'"):
            async with Repository.open(storage):
                pass
        async with created(storage) as repository:
            assert (repository.layout, repository.spec_version) == ("alpha", 0)
            assert "alpha" in repr(repository)
        assert await Repository.exists(storage)
        assert await Repository.fetch_layout(storage) == "alpha"
        assert await Repository.fetch_spec_version(storage) == 0
        for options in ({}, {"check_clean_root": False}, {"layout": "alpha"}):
            with pytest.raises(RepositoryExistsError):
                async with Repository.create(storage, **options):
                    pass
        async with Repository.open_or_create(storage) as repository:
            assert repository.layout == "alpha"
    with pytest.raises(InvalidInputError, match=r"no layout 'beta'.*'alpha'"):
        async with Repository.create(memory_url(), layout="beta"):
            pass


async def test_of_racing_creators_one_wins() -> None:
    """The other is told, also where it would have created another kind."""
    async with open_storage(memory_url()) as storage:

        async def create() -> bool:
            try:
                async with Repository.create(storage, layout="alpha"):
                    return True
            except RepositoryExistsError:
                return False

        assert sorted(await asyncio.gather(create(), create(), create())) == [False, False, True]


async def test_configurations_are_numbered_too() -> None:
    """The alpha has no place for them; of racing changes one is refused."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=3)
    async with created(config=config) as repository:
        async with Repository.open(repository.storage) as again:
            assert again.config.effective_inline_chunk_threshold_bytes == 3
            changed = RepositoryConfig(inline_chunk_threshold_bytes=9)
            async with again.reopen(changed) as one, again.reopen(changed) as other:
                await one.save_config()
                history = other.engine.history
                stored = await history.load_config()
                await history.save_config(changed, stored)
                with pytest.raises(ConflictError, match="configuration"):
                    await history.save_config(config, stored)
        async with Repository.open(repository.storage) as again:
            assert again.config.effective_inline_chunk_threshold_bytes == 9


async def test_splitting_makes_several_manifests() -> None:
    """Each lists the corners of its box, and a change rewrites only the one it falls in."""
    splitting = ManifestSplittingConfig(((_ANY, ((ManifestSplitDimCondition.Any(), 4),)),))
    config = RepositoryConfig(manifest=ManifestConfig(splitting=splitting))
    async with created(config=config) as repository:
        session = await repository.writable_session("main")
        for chunk in range(10):
            await write(session, f"a/c/{chunk}", bytes([chunk]))
        await session.commit("all")
        before = await _extents(repository)
        assert sorted(before.values()) == [[[0], [3]], [[4], [7]], [[8], [9]]]
        await commit(repository, 5)
        after = await _extents(repository)
        assert sorted(after.values()) == sorted(before.values())
        assert len(before.keys() & after.keys()) == 2
        async with Repository.open(repository.storage) as again:
            session = await again.readonly_session("main")
            for chunk in range(10):
                assert await read(session, f"a/c/{chunk}") == bytes([chunk])


_ANY = ManifestSplitCondition.AnyArray()


async def _extents(repository: Repository) -> dict[str, Any]:
    tip = await repository.lookup_branch("main")
    document = json.loads((await objects(repository.storage))[f"s/{tip}"])
    refs = document["nodes"]["/a"]["node_data"]["Array"][1]
    return {str(it["object_id"]): it["extents"] for it in refs}


_RECTILINEAR = {
    "name": "rectilinear",
    "configuration": {"kind": "inline", "chunk_shapes": [[1, 3]]},
}


@pytest.mark.parametrize(
    ("document", "what"),
    [
        (array_document((4,), (2,), data_type="string", fill_value=""), "data type is 'string'"),
        (array_document((4,), (2,), data_type="bfloat16"), "bfloat16"),
        (
            array_document(
                (4,), (2,), data_type={"name": "numpy.datetime64", "configuration": {"unit": "s"}}
            ),
            "datetime64",
        ),
        (array_document((4,), (2,), fill_value=256), "256"),
        (array_document((4,), (2,), fill_value=None), "fill value"),
        (array_document((4,), (1,), chunk_grid=_RECTILINEAR), "rectilinear"),
        (array_document((0,), (0,)), "length 0"),
        (array_document((4,), (2,), extra={"must_understand": False}), "'extra'"),
        (array_document((4,), (2,), attributes={"x": float("nan")}), "no JSON form"),
        (array_document((4,), (2,), codecs=[{"name": "bytes", "other": 1}]), "other"),
        (b'{"zarr_format": 3, "node_type": "group", "consolidated_metadata": {}}', "consolidated"),
    ],
)
async def test_documents_beyond_the_alpha_are_refused(document: bytes, what: str) -> None:
    """When they are written, with the way out; the session can be used afterwards."""
    async with created() as repository:
        session = await repository.writable_session("main")
        with pytest.raises(UnsupportedBySpecError, match=rf"(?s)alpha.*{what}.*upgrade"):
            await write(session, "new/zarr.json", document)
        assert not session.has_uncommitted_changes


async def test_operations_beyond_the_alpha_are_refused() -> None:
    """Each names itself and the migration, and changes nothing."""
    async with created() as repository:
        before = await objects(repository.storage)
        session = await repository.writable_session("main")
        now = datetime.now(UTC) - timedelta(hours=1)
        tip = await repository.lookup_branch("main")
        refused = {
            "amendments": lambda: session.amend("again"),
            "moves": lambda: repository.rearrange_session("main"),
            "expiration": lambda: repository.expire_snapshots(now),
            "collection": lambda: repository.garbage_collect(now),
            "compaction": lambda: repository.compact("main"),
            "statistics": repository.chunk_storage_stats,
            "verification": repository.verify,
            "copies": lambda: repository.copy_to(memory_url()),
            "upkeep": lambda: repository.inspect_snapshot(tip),
            "checksums": repository.add_sums,
            "leases": lambda: repository.writable_session("main", lease=True),
            "metadata": repository.get_metadata,
            "status": repository.get_status,
            "feature flags": repository.feature_flags,
        }
        for what, call in refused.items():
            with pytest.raises(
                UnsupportedBySpecError, match=rf"(?s)alpha layout has no .*{what}.*upg"
            ):
                await call()
        with pytest.raises(UnsupportedBySpecError, match="checksums"):
            async with Repository.open(repository.storage, sums=True):
                pass
        spec = VirtualChunkSpec([0], "s3://b/k", 0, 3, etag_checksum='"e"')
        with pytest.raises(UnsupportedBySpecError, match="ETags"):
            session.store.set_virtual_refs("a", [spec], validate_containers=False)
        assert await objects(repository.storage) == before
        session.store.set_virtual_refs(
            "a", [VirtualChunkSpec([0], "s3://b/k", 0, 3)], validate_containers=False
        )
        await session.commit("virtual")
        check_objects(await objects(repository.storage))


async def test_storage_without_conditional_updates_is_enough() -> None:
    """A repository of format 2 is refused there."""
    async with open_storage(memory_url()) as plain:
        storage = OnlyCreates(plain)
        with pytest.raises(UnsafeStorageError, match="conditional update"):
            async with Repository.create(storage):
                pass
        async with created(storage) as repository:
            await commit(repository, 2)
            await repository.create_branch("dev", await repository.lookup_branch("main"))
            await repository.delete_branch("dev")
            await repository.create_tag("v1", await repository.lookup_branch("main"))
            await repository.save_config()
        async with Repository.open(storage) as repository:
            session = await repository.readonly_session("main")
            assert await read(session, "a/c/2") == b"\x02"


@pytest.mark.parametrize("seed", range(8))
async def test_lost_replies_are_settled_by_the_number(seed: int) -> None:
    """A commit is told to have landed exactly if it did."""
    async with open_storage(memory_url()) as plain, created(plain):
        rates = FaultRates(lost_replies=0.3, lost_requests=0.2, refusals=0.1)
        storage = FaultyStorage(plain, rates, seed=seed, affects=lambda key: key.startswith("r/"))
        told: list[str] = []
        for number in range(10):
            try:
                async with Repository.open(storage) as repository:
                    session = await repository.writable_session("main")
                    await write(session, "a/c/2", bytes([number]))
                    await session.commit(str(number))
            except OutcomeUnknownError:
                told.append(f"{number}?")
            except Exception:  # noqa: BLE001, S112 -- the service was busy
                continue
            else:
                told.append(str(number))
        async with Repository.open(plain) as repository:
            landed = [info.message async for info in repository.ancestry(branch="main")][::-1][2:]
        certain = [it for it in told if not it.endswith("?")]
        assert [it for it in landed if it in certain] == certain
        assert set(landed) <= {it.rstrip("?") for it in told}


def test_requests_are_few() -> None:
    """One listing tells that nothing moved; a commit needs no look before."""

    async def run() -> None:
        async with open_storage(memory_url()) as plain, created(plain):
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                storage.forget()
                await repository.lookup_branch("main")
                assert storage.requests == {"list_prefix": 1}
                await write(session, "a/c/2", b"2")
                storage.forget()
                began = asyncio.get_running_loop().time()
                await session.commit("one")
                assert asyncio.get_running_loop().time() - began == pytest.approx(3)
                assert storage.requests == {"get": 1, "put": 3}  # the manifest that it changes
                async with Repository.open(plain) as other:
                    await commit(other, 3)
                storage.forget()
                await repository.lookup_branch("main")
                assert storage.requests == {"list_prefix": 1, "get": 1}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def test_ancestry_is_read_ahead() -> None:
    """Twenty snapshots in a row of five requests, as each lists its ancestors."""

    async def run() -> None:
        async with open_storage(memory_url()) as plain:
            async with created(plain) as repository:
                for _ in range(18):
                    await commit(repository, 2)
            async with Repository.open(LatencyStorage(plain, seconds=1)) as repository:
                began = asyncio.get_running_loop().time()
                found = [info async for info in repository.ancestry(branch="main")]
                assert len(found) == 20
                assert asyncio.get_running_loop().time() - began <= 6

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


async def test_sessions_fork_across_processes() -> None:
    """Changes with ids of 16 bytes travel as bytes."""
    async with created(config=RepositoryConfig(inline_chunk_threshold_bytes=0)) as repository:
        session = await repository.writable_session("main")
        fork = pickle.loads(pickle.dumps(await session.fork()))
        async with fork.attached():
            await write(fork, "a/c/7", b"seven")
        await session.merge(fork)
        await session.commit("merged")
        again = await repository.readonly_session("main")
        assert await read(again, "a/c/7") == b"seven"
