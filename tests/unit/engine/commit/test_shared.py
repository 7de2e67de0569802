"""Small arrays share manifests: few objects a commit, little read for one array, little garbage."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
)
from icechunk_async.engine.commit import flush, shared
from icechunk_async.engine.commit.conflicts import BasicConflictSolver
from icechunk_async.engine.commit.shared import Waiting, grouped, is_mostly_garbage, may_share
from icechunk_async.engine.upkeep.rewrite import plan_rewriting
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, VirtualChunk
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot.nodes import Nodes
from icechunk_async.storage import Data, Expected, Storage, Version, open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.virtual_time import VirtualTimeLoop
from tests.helpers import examples, make_array, memory_url, objects, read, write
from tests.unit.format.samples import manifest_id, node_id

if TYPE_CHECKING:
    from icechunk_async import Session
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.snapshot import Snapshot

SPECS = pytest.mark.parametrize("spec", [1, 2])
CHUNK = b"x" * 1000  # more than is stored inline
ID = ChunkId(bytes(12))


def native(count: int, length: int = 1) -> ChunkRefs:
    """Return references to chunk objects."""
    return ChunkRefs.build(
        np.arange(count, dtype=np.uint32)[:, None],
        Kind.NATIVE,
        objects=np.zeros(count, np.uint32),
        lengths=np.full(count, length, np.uint64),
        chunk_ids=np.frombuffer(ID, np.uint8)[None, :],
    )


def waiting(number: int, count: int, size_bytes: int = 0) -> Waiting:
    """Return references of one array."""
    return Waiting(node_id(number), native(count), size_bytes, replaces=False)


def sizes(groups: list[list[Waiting]]) -> list[int]:
    """Return the number of arrays in each group."""
    return [len(it) for it in groups]


def test_a_manifest_is_shared_up_to_a_number_of_references_arrays_and_bytes() -> None:
    """The first bound that is reached counts, so a reader of one array never gets much more."""
    assert sizes(list(grouped([]))) == []
    assert sizes(list(grouped(waiting(it, 20) for it in range(120)))) == [50, 50, 20]
    assert sizes(list(grouped(waiting(it, 1) for it in range(130)))) == [64, 64, 2]
    assert sizes(list(grouped(waiting(it, 1, 1 << 14) for it in range(9)))) == [4, 4, 1]
    assert sizes(list(grouped([waiting(0, 5000, 1 << 20), waiting(1, 1)]))) == [1, 1]
    # An array has one cell in a manifest.
    assert sizes(list(grouped(waiting(it % 3, 1) for it in range(8)))) == [3, 3, 2]


@pytest.mark.parametrize(
    ("refs", "shares"),
    [
        (native(100), True),
        (native(101), False),
        (ChunkRefs.from_mapping(1, {(0,): InlineChunk(bytes(16_000))}), True),
        (ChunkRefs.from_mapping(1, {(0,): InlineChunk(bytes(17_000))}), False),
        (ChunkRefs.from_mapping(1, {(0,): VirtualChunk("s3://b/" + "k" * 16_000, 0, 1)}), True),
        (ChunkRefs.from_mapping(1, {(0,): VirtualChunk("s3://b/" + "k" * 17_000, 0, 1)}), False),
        (ChunkRefs.from_mapping(1, {(0,): VirtualChunk("s3://b/k", 0, 1, "e" * 17_000)}), False),
        (
            ChunkRefs.from_mapping(
                1, {(it,): VirtualChunk("s3://b/" + "k" * 9_000, it, 1) for it in range(99)}
            ),
            True,
        ),
    ],
)
def test_only_arrays_of_few_references_and_bytes_share(refs: ChunkRefs, shares: object) -> None:
    """A location that many references have counts once, since it is stored once."""
    assert (may_share(refs) is not None) == shares


def test_a_manifest_is_mostly_garbage_by_references_or_by_bytes() -> None:
    """Half of either is enough to stay."""

    def of(*arrays: ChunkRefs) -> Manifest:
        return Manifest(manifest_id(1), {node_id(it): refs for it, refs in enumerate(arrays)})

    ten, nine, large = native(10), native(9), native(1, 100)
    assert not is_mostly_garbage(of(ten, ten), [ten])
    assert is_mostly_garbage(of(ten, nine), [nine])
    assert is_mostly_garbage(of(ten, large), [ten])
    assert is_mostly_garbage(of(ten, large), [large])
    assert not is_mostly_garbage(of(large, large), [large])


async def planted(repository: Repository, arrays: int, chunks: int, data: bytes = b"x") -> str:
    """Commit new arrays."""
    session = await repository.writable_session("main")
    for number in range(arrays):
        await make_array(session, f"a{number:04}", (100,), (1,))
        for chunk in range(chunks):
            await write(session, f"a{number:04}/c/{chunk}", data)
    return str(await session.commit("planted"))


async def tip(repository: Repository) -> Snapshot:
    """Return the snapshot of the main branch."""
    session = await repository.readonly_session("main")
    return session.workspace.base


def uses(snapshot: Snapshot) -> Counter[ManifestId]:
    """Count the arrays of each manifest."""
    return Counter(
        ref.manifest_id
        for node in snapshot.nodes.values()
        if node.array is not None
        for ref in node.array.manifests
    )


@SPECS
async def test_a_thousand_arrays_are_twenty_manifests(spec: int) -> None:
    """Of twenty chunks each; each commit counted by its objects and bytes."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, spec_version=spec) as repository:
            session = await repository.writable_session("main")
            for number in range(1000):
                await make_array(session, f"a{number:04}", (100,), (1,))
                for chunk in range(20):
                    await write(session, f"a{number:04}/c/{chunk}", b"x")
            storage.forget()
            await session.commit("planted")
            # Twenty manifests, a snapshot, a log, and the reference or the repo info.
            assert storage.requests["put"] == 23
            snapshot = await tip(repository)
            assert len(snapshot.manifests) == 20
            assert set(uses(snapshot).values()) == {50}
            stored = {k: v for k, v in (await objects(plain)).items() if k.startswith("manifests/")}
            assert sum(map(len, stored.values())) < 100_000
            listed = {f"manifests/{it.id}": it.size_bytes for it in snapshot.manifests.values()}
            assert listed == {key: len(data) for key, data in stored.items()}
            assert {it.num_chunk_refs for it in snapshot.manifests.values()} == {1000}

            session = await repository.writable_session("main")
            await write(session, "a0777/c/3", b"y")
            storage.forget()
            await session.commit("one")
            assert storage.requests["put"] == 4
            changed = await tip(repository)
            assert len(changed.manifests) == 21  # the others keep theirs
            assert sorted(uses(changed).values()) == [1, 49, *[50] * 19]
            (new,) = changed.manifests.keys() - snapshot.manifests.keys()
            assert changed.manifests[new].num_chunk_refs == 20  # and only its own are written


@SPECS
async def test_one_array_is_read_from_a_shared_manifest_in_one_request(spec: int) -> None:
    """Of less than 64 KiB, and the next arrays in it cost none."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain, spec_version=spec) as repository:
            await planted(repository, 64, 15, CHUNK)
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.readonly_session("main")
            await session.store.exists("a0000/zarr.json")
            storage.forget()
            assert await read(session, "a0000/c/0") == CHUNK
            assert storage.requests == {"get": 2}
            assert await read(session, "a0063/c/14") == CHUNK
            assert storage.requests == {"get": 3}
            (info,) = session.workspace.base.manifests.values()
            assert info.size_bytes < 1 << 16


def split(length: int, condition: ManifestSplitCondition | None = None) -> RepositoryConfig:
    """Return a configuration that divides manifests along every axis."""
    rules: Any = {
        condition or ManifestSplitCondition.any_array(): {ManifestSplitDimCondition.Any(): length}
    }
    splitting = ManifestSplittingConfig.from_dict(rules)
    return RepositoryConfig(manifest=ManifestConfig(splitting=splitting))


async def test_large_arrays_have_manifests_of_their_own() -> None:
    """Small ones lie together, also those that are split: by their first cells, and so on."""
    config = split(2, ManifestSplitCondition.name_matches("split"))
    async with Repository.create(memory_url(), config=config) as repository:
        session = await repository.writable_session("main")
        for name, chunks in (("a", 3), ("large", 101), ("split", 4), ("splits", 3), ("z", 100)):
            await make_array(session, name, (200,), (1,))
            for chunk in range(chunks):
                await write(session, f"{name}/c/{chunk}", b"x")
        await session.commit("five")
        snapshot = await tip(repository)
        of = {path: node.array for path, node in snapshot.nodes.items()}
        names = {
            path: [it.manifest_id for it in array.manifests] for path, array in of.items() if array
        }
        assert names["/a"] == names["/z"] == names["/split"][:1]
        assert names["/split"] == names["/splits"]
        assert len(set(names["/split"])) == 2
        assert len({*names["/large"], *names["/split"]}) == 3


async def appended(repository: Repository, arrays: int, chunk: int) -> None:
    """Commit one more chunk of arrays."""
    session = await repository.writable_session("main")
    for number in range(arrays):
        await make_array(session, f"a{number:04}", (chunk + 1,), (1,))
        await write(session, f"a{number:04}/c/{chunk}", b"%d" % chunk)
    await session.commit("append")


@SPECS
async def test_appends_to_many_split_arrays_write_few_manifests(spec: int) -> None:
    """Those of the last cells; what is full is neither read nor written again."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        config = replace(split(4), inline_chunk_threshold_bytes=0)
        async with Repository.create(storage, config=config, spec_version=spec) as repository:
            for chunk in range(10):
                storage.forget()
                await appended(repository, 100, chunk)
                # Two manifests, a snapshot, a log, and the reference or the repo info.
                assert storage.requests["put"] == 100 + 5
        async with Repository.open(storage) as repository:
            snapshot = await tip(repository)
            assert len(snapshot.manifests) == 3 * 2
            assert sorted(set(uses(snapshot).values())) == [36, 64]
            storage.forget()
            await appended(repository, 100, 10)
            assert len([key for _, key in storage.log if key.startswith("manifests/")]) == 2 + 2
            session = await repository.readonly_session("main")
            for chunk in range(11):
                assert await read(session, f"a0070/c/{chunk}") == b"%d" % chunk
            assert (await repository.verify("length")).is_healthy


class Weighs(LatencyStorage):
    """Counts the bytes that are written, by folder."""

    def __init__(self, storage: Storage, *, seconds: float) -> None:
        super().__init__(storage, seconds=seconds)
        self.written: Counter[str] = Counter()

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write."""
        self.written[key.partition("/")[0]] += len(data)
        return await super().put(key, data, if_version=if_version)


def test_an_append_to_a_long_archive_writes_little_more() -> None:
    """Twenty times as long: ids of full cells in the snapshot. In two round trips."""

    async def scenario(length: int) -> tuple[Counter[str], float]:
        async with open_storage(memory_url()) as plain:
            config = replace(split(15), inline_chunk_threshold_bytes=0)
            async with Repository.create(plain, config=config) as repository:
                await planted_evenly(repository, 32, length)
                await repository.save_config()
            storage = Weighs(plain, seconds=1)
            async with Repository.open(storage) as repository:
                for chunk in (length, length + 1):
                    session = await repository.writable_session("main")
                    for number in range(32):
                        await make_array(session, f"a{number:04}", (chunk + 1,), (1,))
                        await write(session, f"a{number:04}/c/{chunk}", b"%d" % chunk)
                    storage.written.clear()
                    began = asyncio.get_running_loop().time()
                    await session.commit("append")
                    seconds = asyncio.get_running_loop().time() - began
                return storage.written, seconds

    found = []
    for length in (15, 300):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            found.append(runner.run(scenario(length)))
    (short, seconds), (long, later) = found
    assert seconds == later == 2
    assert long["manifests"] < short["manifests"] + 100 < 3_000
    assert long["snapshots"] < short["snapshots"] + 19 * 60
    assert long["transactions"] < short["transactions"] + 100


async def planted_evenly(repository: Repository, arrays: int, length: int) -> None:
    """Commit arrays of some chunks, each of other bytes."""
    session = await repository.writable_session("main")
    for number in range(arrays):
        await make_array(session, f"a{number:04}", (length,), (1,))
        for chunk in range(length):
            await write(session, f"a{number:04}/c/{chunk}", b"%d" % chunk)
    await session.commit("planted")


async def test_a_commit_across_cells_shares_each_of_them() -> None:
    """So does the first commit under new rules, which divides what is there, and a rewrite."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            await planted(repository, 10, 7)
        async with Repository.open(plain, config=split(3)) as repository:
            await appended(repository, 10, 7)
            assert list(uses(await tip(repository)).values()) == [10, 10, 10]
            await repository.rewrite_manifests("again", branch="main")
            assert list(uses(await tip(repository)).values()) == [10, 10, 10]
            session = await repository.readonly_session("main")
            values = [await read(session, f"a0009/c/{chunk}") for chunk in range(8)]
            assert values == [b"x"] * 7 + [b"7"]


@SPECS
async def test_deleting_split_arrays_moves_all_cells_of_the_others_out(spec: int) -> None:
    """Of every manifest that is mostly garbage now; they share new ones, cell by cell."""
    async with Repository.create(memory_url(), config=split(2), spec_version=spec) as repository:
        await planted(repository, 5, 6)
        old = (await tip(repository)).manifests
        assert len(old) == 3
        session = await repository.writable_session("main")
        for number in range(3):
            await session.store.delete(f"a{number:04}/zarr.json")
        await write(session, "a0003/c/5", b"y")
        await session.commit("gone")
        snapshot = await tip(repository)
        assert not old.keys() & snapshot.manifests.keys()
        # What changed is likely to change again, so it is apart from what moved.
        assert sorted(uses(snapshot).values()) == [1, 1, 2, 2]
        assert {it.num_chunk_refs for it in snapshot.manifests.values()} == {2, 4}
        assert (await repository.verify("length")).is_healthy
        session = await repository.readonly_session("main")
        values = [await read(session, f"a0003/c/{it}") for it in range(6)]
        assert values == [b"x"] * 5 + [b"y"]
        assert [await read(session, f"a0004/c/{it}") for it in range(6)] == [b"x"] * 6


async def test_arrays_of_very_many_cells_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their references would all be in memory; a rewrite stores a manifest when it is made."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            await planted(repository, 10, 7)
        async with Repository.open(plain, config=split(3)) as repository:
            monkeypatch.setattr(flush, "_CELLS_TOGETHER", 2)
            await repository.rewrite_manifests("apart", branch="main")
            assert list(uses(await tip(repository)).values()) == [1] * 30
            monkeypatch.setattr(flush, "_CELLS_TOGETHER", 12)
            await repository.rewrite_manifests("fours", branch="main")
            assert sorted(uses(await tip(repository)).values()) == [2] * 3 + [4] * 6
            assert (await repository.verify("length")).is_healthy


async def test_deleting_arrays_looks_at_a_bounded_number_of_manifests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays of many cells leave many; the commit does not read all of them."""
    monkeypatch.setattr(flush, "_LOOKED_AT", 3)
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain, config=split(1)) as repository:
            await planted(repository, 5, 8)
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            for number in range(4):
                await session.store.delete(f"a{number:04}/zarr.json")
            storage.forget()
            await session.commit("gone")
            read_again = [k for op, k in storage.log if op == "get" and k.startswith("manifests/")]
            assert len(read_again) == 3
            assert (await repository.verify("length")).is_healthy
            session = await repository.readonly_session("main")
            assert [await read(session, f"a0004/c/{it}") for it in range(8)] == [b"x"] * 8


async def test_arrays_move_out_of_a_manifest_of_which_less_than_half_is_used() -> None:
    """In the commit that makes it so; until then they stay where they are."""
    async with Repository.create(memory_url(), config=NATIVE) as repository:
        await planted(repository, 10, 2)
        (old,) = (await tip(repository)).manifests
        for number in range(5):
            session = await repository.writable_session("main")
            await write(session, f"a{number:04}/c/0", b"y")
            await session.commit("change")
            assert uses(await tip(repository))[old] == 9 - number
        session = await repository.writable_session("main")
        await write(session, "a0005/c/0", b"y")
        await session.commit("change")
        snapshot = await tip(repository)
        assert old not in snapshot.manifests
        # Those that moved are not put to what changes: they would have to move again.
        assert sorted(uses(snapshot).values()) == [1] * 6 + [4]
        assert (await repository.verify("length")).is_healthy
        assert not any([await read(session, f"a{it:04}/c/1") != b"x" for it in range(10)])


NATIVE = RepositoryConfig(inline_chunk_threshold_bytes=0)


async def test_a_large_array_does_not_stay_behind_as_garbage() -> None:
    """An overwritten chunk of many bytes is not kept by a tiny array beside it."""
    async with Repository.create(memory_url(), config=NATIVE) as repository:
        session = await repository.writable_session("main")
        for name, data in (("large", CHUNK), ("t", b"x"), ("u", b"x")):
            await make_array(session, name, (9,), (1,))
            await write(session, f"{name}/c/0", data)
        await session.commit("first")
        for turn in range(3):
            session = await repository.writable_session("main")
            await write(session, "large/c/0", bytes([turn]) * 1000)
            await session.commit("again")
            assert sorted(uses(await tip(repository)).values()) == [1, 2]
        now = datetime.now(UTC)
        await repository.expire_snapshots(now)
        report = await repository.garbage_collect(datetime.now(UTC))
        assert report.chunks_deleted == 3
        assert (await repository.verify("length")).is_healthy


async def test_deleting_arrays_moves_the_others_out() -> None:
    """One request for their manifest; that of an array which shares with nobody is not read."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            await planted(repository, 10, 2)
            await planted_alone(repository)
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            for number in range(6):
                await session.store.delete(f"a{number:04}/zarr.json")
            await session.store.delete("alone/zarr.json")
            storage.forget()
            await session.commit("gone")
            assert storage.requests["get"] == 1
            assert sorted(uses(await tip(repository)).values()) == [4]
            assert (await repository.verify("length")).is_healthy


def test_manifests_of_deleted_arrays_are_read_at_once() -> None:
    """Their requests do not follow one another."""

    async def scenario() -> tuple[float, int]:
        async with open_storage(memory_url()) as plain:
            async with Repository.create(plain) as repository:
                await planted(repository, 150, 1)
            storage = LatencyStorage(plain, seconds=1)
            async with Repository.open(storage) as repository:
                session = await repository.writable_session("main")
                for number in range(150):
                    if number % 3:
                        await session.store.delete(f"a{number:04}/zarr.json")
                storage.forget()
                begin = asyncio.get_running_loop().time()
                await session.commit("gone")
                seconds = asyncio.get_running_loop().time() - begin
                about = [key for _, key in storage.log if key.startswith("manifests/")]
                assert sorted(uses(await tip(repository)).values()) == [50]
                return seconds, len(about)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seconds, requests = runner.run(scenario())
    assert requests == 3 + 1  # and the new one
    assert seconds == 3


async def test_a_rewrite_is_planned_though_a_manifest_is_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rewrite itself says that the repository is damaged."""
    async with Repository.create(memory_url()) as repository:
        await planted(repository, 3, 2)
        damaged = replace(await tip(repository), manifests={})

        async def opened(*_: object) -> Snapshot:
            return damaged

        monkeypatch.setattr(type(repository.engine.assets), "snapshot", opened)
        plan = await plan_rewriting(repository.engine, "main")
        assert (plan.arrays, plan.manifests) == (0, 1)


async def test_an_id_that_a_snapshot_lists_twice_moves_once() -> None:
    """Other writers may have damaged it."""
    async with Repository.create(memory_url()) as repository:
        await planted(repository, 3, 2)
        nodes = (await tip(repository)).nodes
        one = nodes["/a0000"]
        twice = Nodes([one, replace(one, path="/b"), nodes["/a0001"]])
        (manifest,) = uses(await tip(repository))
        assert twice.users([manifest]) == {manifest: [one.id, nodes["/a0001"].id]}


async def planted_alone(repository: Repository) -> None:
    """Commit one more array, which shares with nobody."""
    session = await repository.writable_session("main")
    await make_array(session, "alone", (9,), (1,))
    await write(session, "alone/c/0", b"x")
    await write(session, "alone/c/1", b"x")
    await session.commit("alone")


async def test_a_damaged_manifest_stops_no_commit_that_does_not_need_it() -> None:
    """The arrays that are lost with it can be deleted."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            await planted(repository, 4, 2)
            (old,) = (await tip(repository)).manifests
        await plain.put(f"manifests/{old}", b"damaged")
        async with Repository.open(plain) as repository:
            session = await repository.writable_session("main")
            for number in range(3):
                await session.store.delete(f"a{number:04}/zarr.json")
            await session.commit("gone")
            assert uses(await tip(repository)) == {old: 1}


async def test_a_lost_race_reuses_what_was_shared() -> None:
    """Only the array that the winner changed as well is written again."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with (
            Repository.create(storage) as repository,
            Repository.open(plain) as other,
        ):
            await planted(repository, 6, 2)
            loser = await repository.writable_session("main")
            winner = await other.writable_session("main")
            for number in range(6):
                await write(loser, f"a{number:04}/c/5", b"l")
            await write(winner, "a0002/c/6", b"w")
            await winner.commit("winner")
            storage.forget()
            await loser.commit("loser", rebase_with=BasicConflictSolver())
            manifests = [key for key in await objects(plain) if key.startswith("manifests/")]
            assert len(manifests) == 4  # of the first, the winner, the first try, the second
            assert sorted(uses(await tip(repository)).values()) == [1, 5]
            session = await repository.readonly_session("main")
            for number in range(6):
                assert await read(session, f"a{number:04}/c/5") == b"l"
            assert await read(session, "a0002/c/6") == b"w"
            assert (await repository.verify("length")).is_healthy


@SPECS
async def test_rewriting_leaves_no_garbage_and_shares_again(spec: int) -> None:
    """Also of arrays that were changed one by one; nothing is left to do then."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        await planted(repository, 9, 2)
        for number in range(3):
            session = await repository.writable_session("main")
            await write(session, f"a{number:04}/c/0", b"y")
            await session.commit("change")
        await repository.rewrite_manifests("again", branch="main")
        snapshot = await tip(repository)
        assert list(uses(snapshot).values()) == [9]
        assert [it.num_chunk_refs for it in snapshot.manifests.values()] == [18]
        assert (await repository.verify("length")).is_healthy


async def test_checksums_of_shared_manifests_are_kept() -> None:
    """One sidecar for each manifest, complete, also for arrays that moved out."""
    async with Repository.create(memory_url(), config=NATIVE, sums=True) as repository:
        await planted(repository, 5, 2, CHUNK)
        for number in range(3):
            session = await repository.writable_session("main")
            await write(session, f"a{number:04}/c/0", b"y" * 1000)
            await session.commit("change")
        stored = await objects(repository.storage)
        made = [key for key in stored if key.startswith("manifests/")]
        assert len(made) == 5  # the first, those of three changes, and one of those that moved
        assert {key.replace("manifests/", "sums/") for key in made} <= stored.keys()
        report = await repository.check_content()
        assert report.is_right
        assert (await repository.verify("sums")).is_healthy


NAMES = tuple("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.sampled_from(NAMES), st.integers(0, 5), st.sampled_from([0, 1000])
        ),
        st.tuples(st.just("chunk"), st.sampled_from(NAMES), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("delete"), st.sampled_from(NAMES), st.just(0), st.just(0)),
        st.tuples(st.just("shrink"), st.sampled_from(NAMES), st.integers(0, 5), st.just(0)),
        st.tuples(
            st.sampled_from(["commit", "commit", "amend", "rewrite", "collect", "reopen"]),
            st.just(""),
            st.just(0),
            st.just(0),
        ),
    ),
    max_size=30,
)


class Model:
    """A repository, and what its arrays hold, by path and chunk."""

    def __init__(self, repository: Repository, session: Session) -> None:
        self.repository, self.session = repository, session
        self.arrays: dict[str, dict[int, bytes]] = {}
        self.count = 0

    async def apply(self, kind: str, name: str, chunk: int, padding: int) -> None:
        """Do one step to both."""
        self.count += 1
        if kind == "write":
            if name not in self.arrays:
                self.arrays[name] = {}
            await make_array(self.session, name, (6,), (1,))
            data = b"%d" % self.count + b"." * padding
            await write(self.session, f"{name}/c/{chunk}", data)
            self.arrays[name][chunk] = data
        elif kind == "chunk":
            await self.session.store.delete(f"{name}/c/{chunk}")
            self.arrays.get(name, {}).pop(chunk, None)
        elif kind == "delete":
            await self.session.store.delete(f"{name}/zarr.json")
            self.arrays.pop(name, None)
        elif kind == "shrink" and name in self.arrays:
            await make_array(self.session, name, (chunk,), (1,))
            self.arrays[name] = {k: v for k, v in self.arrays[name].items() if k < chunk}
        elif kind in ("commit", "amend", "rewrite", "collect", "reopen"):
            await self.settle(kind)

    async def settle(self, kind: str) -> None:
        """Commit, do something with the repository, and compare all."""
        repository = self.repository
        await self.session.commit("commit", allow_empty=True)
        if kind == "amend":
            session = await repository.writable_session("main")
            await make_array(session, "f", (6,), (1,))
            await session.amend("amend", allow_empty=True)
            self.arrays.setdefault("f", {})
        elif kind == "rewrite":
            await repository.rewrite_manifests("again", branch="main")
        elif kind == "collect":
            await repository.expire_snapshots(datetime.now(UTC))
            await repository.garbage_collect(datetime.now(UTC))
        self.session = await repository.writable_session("main")
        await self.check()

    async def check(self) -> None:
        """Compare every key, the files, and the bound on garbage."""
        found: dict[str, bytes | None] = {}
        async for key in self.session.store.list():
            if "/c/" in key:
                found[key] = await read(self.session, key)
        wanted = {f"{k}/c/{it}": v for k, row in self.arrays.items() for it, v in row.items()}
        assert found == wanted
        assert (await self.repository.verify("length")).is_healthy
        snapshot = self.session.workspace.base
        for it in snapshot.manifests:
            manifest = await self.repository._engine.assets.manifests.get(it)
            assert not is_mostly_garbage(manifest, used(snapshot, manifest))


def used(snapshot: Snapshot, manifest: Manifest) -> list[ChunkRefs]:
    """Return the references of a manifest that some array uses."""
    return [
        manifest.refs(node.id, 1)
        for node in snapshot.nodes.values()
        if node.array is not None
        and any(ref.manifest_id == manifest.id for ref in node.array.manifests)
    ]


@examples(160)
@given(st.sampled_from([1, 2]), st.sampled_from([None, 1, 2, 3]), st.sampled_from([1, 2, 9]), STEPS)
def test_histories_equal_a_model(
    spec: int, length: int | None, fewest: int, steps: list[tuple[Any, ...]]
) -> None:
    """After any changes, moves and collections nothing is lost, and nothing old comes back.

    In manifests of any length of cells, whether arrays are merged together or one by one.
    """

    async def scenario() -> None:
        config = None if length is None else split(length)
        async with Repository.create(memory_url(), config=config, spec_version=spec) as repository:
            model = Model(repository, await repository.writable_session("main"))
            for step in steps:
                if step[0] == "amend" and spec == 1:
                    continue
                await model.apply(*step)
            await model.settle("commit")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_MOST_ARRAYS", 3)
        patch.setattr(flush, "_FEWEST_SMALL", fewest)
        asyncio.run(scenario())


async def test_chunks_of_arrays_that_left_a_manifest_are_not_verified() -> None:
    """Nobody reads the references that they left behind."""
    async with open_storage(memory_url()) as plain, Repository.create(plain) as repository:
        await planted(repository, 4, 2, CHUNK)
        session = await repository.writable_session("main")
        await session.store.delete("a0000/zarr.json")
        await session.store.delete_dir("a0000")
        await session.commit("gone")
        assert len((await tip(repository)).manifests) == 1
        assert (await repository.verify(refs=["main"], ancestry=False)).chunk_objects == 6
        assert (await repository.verify()).chunk_objects == 8
