"""Merging forks: what goes together, every clash by name, and cost in proportion to changes."""

from __future__ import annotations

import gc
import pickle
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.conflicts import MergeClash, MergeClashKind
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet
from icechunk_async.engine.changes.merge import ForkPoint, Merger
from icechunk_async.engine.changes.wire import ForkState, decode_fork, encode_fork
from icechunk_async.errors import MergeFailedError
from icechunk_async.format.ids import NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import Node
from tests.helpers import make_array, memory_url, read, write
from tests.unit.engine.changes.fork_cases import (
    ARRAY,
    CLASHES,
    FLAT,
    GROUP,
    MARKED,
    MARKED_2,
    SMALL,
    TOGETHER,
    steps,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

K = MergeClashKind
BASE = SnapshotId(b"b" * 12)


def clashes_of(error: MergeFailedError) -> list[MergeClash]:
    """Return the clashes that an error reports."""
    clashes: Any = error.context["clashes"]
    return list(clashes)


def described(error: MergeFailedError) -> list[tuple[str, str, Any]]:
    """Return the clashes that an error reports, without the number of the fork."""
    return sorted((it.kind.name, it.path, it.coords) for it in clashes_of(error))


@pytest.mark.parametrize("name", CLASHES)
async def test_clashes_are_reported_and_nothing_is_merged(filled: Repository, name: str) -> None:
    """Between two forks, a fork and its session, and forks that travelled; all in one error."""
    first, second, clashes = CLASHES[name]
    expected = sorted((kind.name, path, coords) for kind, path, coords in clashes)
    session, busy = [await filled.writable_session("main") for _ in range(2)]
    one, two = await session.fork(), await session.fork()
    await steps(one, first)
    await steps(two, second)
    with pytest.raises(MergeFailedError) as raised:
        await session.merge(one, two)
    assert described(raised.value) == expected
    assert {it.fork for it in clashes_of(raised.value)} == {1}
    assert not session.has_uncommitted_changes
    assert pickle.loads(pickle.dumps(raised.value)).context == raised.value.context
    fork = await busy.fork()  # of a session that does itself what the first fork did
    await steps(busy, first)
    await steps(fork, second)
    before = str(busy.status())
    with pytest.raises(MergeFailedError) as raised:
        await busy.merge(fork)
    assert described(raised.value) == expected
    assert str(busy.status()) == before
    left, right = (ForkSession.from_bytes(it.to_bytes()) for it in (one, two))
    data = left.to_bytes()
    with pytest.raises(MergeFailedError) as raised:
        await left.merge(right)  # in a tree, where nothing is open
    assert described(raised.value) == expected
    assert left.to_bytes() == data
    await session.merge(one)
    assert session.has_uncommitted_changes


@pytest.mark.parametrize("name", TOGETHER)
async def test_compatible_changes_are_merged(filled: Repository, name: str) -> None:
    """At once, one after the other, twice, and as a tree: the last one merged counts."""
    first, second, expected = TOGETHER[name]
    preparing = await filled.writable_session("main")
    await write(preparing, "g/zarr.json", GROUP)
    await preparing.commit("group")
    for way in ("at once", "one by one", "twice", "tree"):
        session = await filled.writable_session("main")
        one, two = await session.fork(), await session.fork()
        await steps(one, first)
        await steps(two, second)
        if way == "at once":
            await session.merge(one, two)
        elif way == "tree":
            left, right = (ForkSession.from_bytes(it.to_bytes()) for it in (one, two))
            await left.merge(right)
            await session.merge(left)
        else:
            await session.merge(one)
            await session.merge(two)
            if way == "twice":
                await session.merge(two)
        assert {key: await read(session, key) for key in expected} == expected, way
        flushed = await session.flush("detached")
        reader = await filled.readonly_session(snapshot_id=flushed)
        assert {key: await read(reader, key) for key in expected} == expected, way


async def test_changes_from_before_the_fork_do_not_clash(filled: Repository) -> None:
    """A fork may change, delete or remake what its session had changed when it began."""
    session = await filled.writable_session("main")
    await write(session, "a/zarr.json", MARKED)
    await write(session, "a/c/5", b"5")
    await write(session, "n/zarr.json", ARRAY)
    await write(session, "m/zarr.json", ARRAY)
    await write(session, "m/c/0", b"m")
    forks = [await session.fork() for _ in range(4)]
    await write(forks[0], "a/zarr.json", MARKED_2)
    await write(forks[1], "a/c/5", b"new")
    await write(forks[1], "n/c/1", b"1")
    await write(forks[1], "n/zarr.json", MARKED)
    await forks[2].store.delete_dir("m")
    await write(forks[2], "m/zarr.json", FLAT)
    await write(forks[3], "a/c/6", b"6")
    await write(session, "k/zarr.json", ARRAY)
    await session.merge(*forks)
    expected = {
        "a/zarr.json": MARKED_2,
        "a/c/5": b"new",
        "a/c/6": b"6",
        "n/c/1": b"1",
        "n/zarr.json": MARKED,
        "m/zarr.json": FLAT,
        "m/c/0": None,
        "k/zarr.json": ARRAY,
    }
    assert {key: await read(session, key) for key in expected} == expected
    assert session.status().new_arrays == {"/n", "/m", "/k"}
    assert not session.status().deleted_arrays
    late = await session.fork()
    await write(late, "n/c/2", b"2")
    await session.store.delete_dir("n")
    with pytest.raises(MergeFailedError) as raised:
        await session.merge(late)
    assert clashes_of(raised.value) == [MergeClash(K.DELETED_AND_CHANGED, "/n", ((2,),))]


async def test_forks_of_one_state_are_merged_one_by_one(filled: Repository) -> None:
    """Neither an earlier merge nor a later fork is a reason to refuse a merge."""
    session = await filled.writable_session("main")
    await write(session, "n/zarr.json", ARRAY)
    forks = [await session.fork() for _ in range(3)]
    for place, fork in enumerate(forks):
        await write(fork, f"n/c/{place}", b"%d" % place)
        await session.merge(fork)
    late = await session.fork()
    await write(late, "n/c/3", b"3")
    await session.merge(late, forks[0])
    assert [await read(session, f"n/c/{place}") for place in range(4)] == [b"0", b"1", b"2", b"3"]


async def test_chunks_cut_off_by_a_fork_do_not_come_back(filled: Repository) -> None:
    """A chunk that one fork wrote outside of the grid that another made is gone for good."""
    for order in (slice(None), slice(None, None, -1)):
        session = await filled.writable_session("main")
        forks = [await session.fork() for _ in range(2)]
        await write(forks[0], "a/zarr.json", SMALL)
        await write(forks[1], "a/c/8", b"8")
        await session.merge(*forks[order])
        await write(session, "a/zarr.json", ARRAY)
        assert await read(session, "a/c/8") is None


async def test_overlaps_can_be_refused(filled: Repository) -> None:
    """Chunks that several forks set are named, with the array and who came later."""
    session = await filled.writable_session("main")
    forks = [await session.fork() for _ in range(3)]
    for fork, chunks in zip(forks, ((1, 2), (3, 4), (4, 1)), strict=True):
        for chunk in chunks:
            await write(fork, f"a/c/{chunk}", b"x")
    with pytest.raises(MergeFailedError, match=r"'/a' was written by both \(2 chunk") as raised:
        await session.merge(*forks, allow_overlaps=False)
    assert clashes_of(raised.value) == [MergeClash(K.WRITTEN_BY_BOTH, "/a", ((1,), (4,)), 2)]
    assert not session.has_uncommitted_changes
    await session.merge(*forks[:2], allow_overlaps=False)


def fork_bytes(node_id: NodeId, base_id: SnapshotId, start: int, count: int) -> bytes:
    """Return a fork that wrote ``count`` chunks of an array, from chunk ``start`` on."""
    places = np.arange(start, start + count)
    coords = np.stack([places // 1000, places % 1000], axis=1).astype(np.uint32)
    rng = np.random.Generator(np.random.PCG64(start))
    changes = ArrayChanges(2)
    changes.set_many(
        ChunkRefs.build(
            coords,
            Kind.NATIVE,
            objects=np.arange(count, dtype=np.uint32),
            lengths=rng.integers(900_000, 1_000_000, count, np.uint64),
            chunk_ids=rng.integers(0, 256, (count, 12), np.uint8),
        )
    )
    return encode_fork(ForkState(b"s" * 12, base_id, ChangeSet(chunks={node_id: changes})))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_merging_hundreds_of_forks_is_nearly_linear(
    monkeypatch: pytest.MonkeyPatch, *, one_by_one: bool
) -> None:
    """700 forks of 100 chunks: seconds, a few copies of each, and a few times their bytes."""
    node_id, base_id, point = NodeId.random(), SnapshotId.random(), ForkPoint(ChangeSet())
    forks = [fork_bytes(node_id, base_id, 100 * index, 100) for index in range(700)]
    assert max(map(len, forks)) < 100 * 25 + 500
    states = [decode_fork(data) for data in forks]
    rows = 0
    concat = ChunkRefs.concat

    def counting(parts: Sequence[ChunkRefs]) -> ChunkRefs:
        nonlocal rows
        rows += sum(map(len, parts))
        return concat(parts)

    monkeypatch.setattr(ChunkRefs, "concat", counting)
    gc.collect()
    tracemalloc.start()
    began = time.thread_time()
    changes = ChangeSet()
    if one_by_one:
        for state in states:
            merger = Merger(changes, BASE)
            merger.add(state.changes, point)
            changes = merger.finish()
    else:
        merger = Merger(changes, BASE)
        for state in states:
            merger.add(state.changes, point)
        changes = merger.finish()
    seconds = time.thread_time() - began
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    blocks: list[ChunkRefs] = getattr(changes.chunks[node_id], "_blocks")  # noqa: B009
    assert len(blocks) < 20  # each lookup may search them all
    merged = changes.chunks[node_id].columns()
    assert len(merged) == 70_000
    assert merged.find((69, 999)) == 69_999
    assert rows < 70_000 * 12  # a quadratic merge copies 350 times as many as there are
    assert seconds < 10
    assert peak_bytes < 70_000 * 45 * 6


async def test_merging_gives_what_one_session_would(spec: int) -> None:
    """Random work split among forks and merged equals the same work in one session."""
    rng = np.random.Generator(np.random.PCG64(7))
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        session = await repository.writable_session("main")
        for name in "abc":
            await make_array(session, name, (6, 6), (1, 1))
        await session.commit("arrays")
        split, whole = [await repository.writable_session("main") for _ in range(2)]
        forks = [await split.fork() for _ in range(5)]
        for number, fork in enumerate(forks):  # merged in this order
            for _ in range(20):
                key = f"{'abc'[rng.integers(3)]}/c/{rng.integers(6)}/{rng.integers(6)}"
                for target in (fork, whole):
                    await write(target, key, b"%d" % number * (1 + 600 * (number % 2)))
        await split.merge(*forks)
        assert str(split.status()) == str(whole.status())
        for key in [key async for key in whole.store.list()]:
            assert await read(split, key) == await read(whole, key)


def test_the_same_node_of_a_merged_fork_is_no_clash() -> None:
    """A fork merged again is what it was; one whose new node changed meanwhile clashes."""
    node = Node(NodeId.random(), "/n", b"1")
    point = ForkPoint(ChangeSet())
    merger = Merger(ChangeSet(), BASE)
    merger.add(ChangeSet(new={"/n": node}), point)
    merger.add(ChangeSet(new={"/n": node}), point)
    assert merger.finish().new == {"/n": node}
    merger.add(ChangeSet(new={"/n": Node(node.id, "/n", b"2")}), point)
    with pytest.raises(MergeFailedError, match="created by both"):
        merger.finish()
