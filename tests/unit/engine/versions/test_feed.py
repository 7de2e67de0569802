"""The change feed: applied to one snapshot it gives the other, and it costs what differs."""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.engine.versions.feed import changes_in_box, places_of_changes
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.zarr_document import parse_document
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.versions import CellChanges, ChunkChange, ChunkChanges, NodeChange
from tests.helpers import group_document, make_array, memory_url, read, write
from tests.unit.engine.versions.stories import Story, contents_at

if TYPE_CHECKING:
    from icechunk_async import SnapshotId
    from icechunk_async.versions import Change

SEEDS = range(1000 if os.environ.get("EXAMPLES") == "all" else 3)


async def feed(repository: Repository, *refs: object, **options: object) -> list[Change]:
    """Return the whole feed between two refs."""
    found = [it async for it in repository.changes(*refs, **options)]  # type: ignore[arg-type]
    return [it for it in found if not isinstance(it, CellChanges)]


async def apply(repository: Repository, branch: str, changes: list[Change]) -> None:
    """Make the changes of a feed on a branch: deletions, groups, moves, then everything else."""
    nodes = [it for it in changes if isinstance(it, NodeChange)]
    moved = [it for it in nodes if it.kind == "moved"]
    gone = [it.path for it in nodes if it.kind == "deleted"]
    await _move_aside(repository, branch, [it for it in moved if is_below(it, gone)])
    session = await repository.writable_session(branch)
    for it in nodes:
        if it.kind == "deleted":
            session.workspace.delete_node(it.path)
    for it in nodes:
        if it.kind == "created" and not it.is_array:
            session.workspace.set_node(it.path, it.after or b"", None)
    await session.commit("deletions and groups", allow_empty=True)
    await _move(repository, branch, moved)
    session = await repository.writable_session(branch)
    for it in nodes:
        if it.kind in {"created", "updated"}:
            document = parse_document(it.after or b"", it.path)
            session.workspace.set_node(it.path, it.after or b"", document.array)
    for chunks in changes:
        if isinstance(chunks, ChunkChanges):
            grid = session.workspace.array(chunks.path).array.grid  # type: ignore[union-attr]
            inside = (chunks.coords < np.array(grid)).all(axis=1)  # else resizing removed it
            gone = chunks.coords[(chunks.kinds == ChunkChange.REMOVED) & inside]
            session.workspace.set_refs(chunks.path, ChunkRefs.build(gone, Kind.DELETED))
            session.workspace.set_refs(chunks.path, chunks.after._refs)
    await session.commit("the rest", allow_empty=True)


def is_below(change: NodeChange, groups: list[str]) -> bool:
    """Return whether a node that moved was below one of some groups."""
    return any((change.previous_path or "").startswith(f"{it}/") for it in groups)


async def _move_aside(repository: Repository, branch: str, moves: list[NodeChange]) -> None:
    """Take nodes out of groups that are about to be deleted."""
    if moves:
        session = await repository.rearrange_session(branch)
        for number, it in enumerate(moves):
            origin = session.workspace.base.nodes.path_of(it.node_id)
            assert origin is not None
            await session.move(session.workspace.changes.moves.place(origin), f"/aside{number}")
        await session.commit("aside")


async def _move(repository: Repository, branch: str, moves: list[NodeChange]) -> None:
    if not moves:
        return
    session = await repository.rearrange_session(branch)
    for it in sorted(moves, key=lambda it: it.path.count("/")):
        origin = session.workspace.base.nodes.path_of(it.node_id)
        assert origin is not None
        now = session.workspace.changes.moves.place(origin)
        if now != it.path:  # else its group took it along
            await session.move(now, it.path)
    await session.commit("moves")


@pytest.mark.parametrize("seed", SEEDS)
async def test_applying_the_feed_of_two_snapshots_to_one_gives_the_other(seed: int) -> None:
    """Of any two: on one branch or on two, in either direction, also where history expired."""
    story = Story(random.Random(seed), amends=True)
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        for _ in range(2):
            await story.commit(repository)
        await repository.create_branch("side", await repository.lookup_branch("main"))
        for _ in range(2):
            await story.commit(repository)
            await story.commit(repository, "side")
        if seed % 3 == 0:  # of some of the commits between the states only the traces are left
            gone = [it async for it in repository.ancestry()][1]
            await repository.expire_snapshots(gone.written_at)
            await story.commit(repository)
        ends = [it.id async for it in repository.ancestry()][:4]
        ends.append(await repository.lookup_branch("side"))
        for number in range(3):
            one, other = random.Random(seed + number).sample(ends, 2)
            changes = await feed(repository, one, other, net=True)
            assert {it.snapshot_id for it in changes} <= {other}
            await repository.create_branch(f"copy{number}", one)
            await apply(repository, f"copy{number}", changes)
            wanted = await contents_at(repository, snapshot_id=other)
            assert await contents_at(repository, branch=f"copy{number}") == wanted


@pytest.mark.parametrize("seed", SEEDS)
async def test_changes_found_box_by_box_are_those_of_the_feed(seed: int) -> None:
    """Work that is divided by boxes, as Spark's, finds the same, where its plan says."""
    story = Story(random.Random(seed), moves=False)
    async with Repository.create(memory_url(), spec_version=1 + seed % 2) as repository:
        await story.begin(repository)
        for _ in range(4):
            await story.commit(repository)
        ends = [it.id async for it in repository.ancestry()][:4]
        engine = repository.engine
        for one, other in [*itertools.pairwise(ends[::-1]), (ends[0], ends[3])]:
            before, after = await engine.assets.snapshot(one), await engine.assets.snapshot(other)
            places = await places_of_changes(engine, before, after, within=lambda _: True)
            wanted, found = set(), set()
            for change in await feed(repository, one, other):
                if isinstance(change, ChunkChanges):
                    wanted |= told(change)
                    if before.nodes.path_of(change.node_id) is not None:
                        listed = {tuple(it) for it in places[change.path].tolist()}
                        assert listed >= {tuple(it) for it in change.coords.tolist()}
            for path, node in after.nodes.items():
                if node.array is None:
                    continue
                anew = path in before.nodes and before.nodes[path].id != node.id
                for low, high in ((0, 3), (3, 10)):
                    part = await changes_in_box(
                        engine, None if anew else before, after, path, ((low, high),)
                    )
                    found |= set() if part is None else told(part)
            assert found == wanted


def told(change: ChunkChanges) -> set[tuple[str, tuple[int, ...], int]]:
    """Return the chunks of a part of a feed, with what happened to them."""
    rows = zip(change.coords.tolist(), change.kinds.tolist(), strict=True)
    return {(change.path, tuple(at), kind) for at, kind in rows}


async def test_boxes_of_an_array_that_was_made_anew_differ_as_a_whole(
    repository: Repository,
) -> None:
    """Chunks of both are changed, and those of one side came or went; other ranks have none."""
    first = await prepared(repository)
    session = await repository.writable_session("main")
    same = await session.workspace.find_chunk("/a", (0,))
    assert same is not None
    await session.store.delete_dir("a")
    await make_array(session, "a", (6000,), (600,))
    session.workspace.set_ref("/a", (0,), same.ref)
    await write(session, "a/c/9", b"9" * 600)
    await session.commit("anew")
    engine = repository.engine
    before = await engine.assets.snapshot(first)
    after = await engine.assets.snapshot(await repository.lookup_branch("main"))
    found = await changes_in_box(engine, before, after, "/a", ((0, 10),))
    assert found is not None
    assert found.kinds.tolist() == [1, *[2] * 7, 0]
    assert found.before is not None
    assert len(found.before) == 8
    assert await changes_in_box(engine, before, after, "/a", ((0, 10), (0, 1))) is None
    assert await changes_in_box(engine, before, after, "/nowhere", ((0, 10),)) is None
    whole = await changes_in_box(engine, None, after, "/a", ((0, 10),))
    assert whole is not None
    assert whole.kinds.tolist() == [0, 0]


async def prepared(repository: Repository, **options: object) -> SnapshotId:
    """Commit an array ``a`` of eight chunks."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await make_array(session, "a", (4800,), (600,), **options)
    for at in range(8):
        await write(session, f"a/c/{at}", bytes([at]) * 600)
    return await session.commit("prepared")


async def test_chunks_say_whether_they_are_new_changed_or_gone(repository: Repository) -> None:
    """With references on both sides where they are asked for."""
    first = await prepared(repository)
    session = await repository.writable_session("main")
    await make_array(session, "a", (6000,), (600,))
    await write(session, "a/c/9", b"9" * 600)
    await write(session, "a/c/3", b"3" * 600)
    await session.store.delete("a/c/5")
    await session.commit("changed")
    document, chunks = await feed(repository, first, "main", before=True)
    assert isinstance(document, NodeChange)
    assert isinstance(chunks, ChunkChanges)
    assert (document.kind, document.path, document.previous_path) == ("updated", "/a", None)
    assert chunks.coords.tolist() == [[3], [5], [9]]
    assert chunks.kinds.tolist() == [1, 2, 0]
    assert chunks.after.coords.tolist() == [[3], [9]]
    assert chunks.before is not None
    assert chunks.before.coords.tolist() == [[3], [5]]
    (_, plain) = await feed(repository, first, "main")
    assert isinstance(plain, ChunkChanges)
    assert plain.before is None


async def test_commits_are_told_one_by_one_where_that_is_asked_for(
    repository: Repository,
) -> None:
    """Setting and setting back is in them, and not in the net feed."""
    first = await prepared(repository)
    ids = []
    for data in (b"x" * 600, bytes([3]) * 600):
        session = await repository.writable_session("main")
        await write(session, "a/c/3", data)
        ids.append(await session.commit("again"))
    told = await feed(repository, first, "main", net=False)
    assert [it.snapshot_id for it in told] == ids
    await repository.create_branch("side", first)
    session = await repository.writable_session("side")
    await write(session, "a/c/0", b"s" * 600)
    await session.commit("aside")
    with pytest.raises(InvalidInputError, match="net=True"):
        await feed(repository, "side", "main", net=False)
    assert len(await feed(repository, "side", "main")) == 1


async def test_chunks_rewritten_with_equal_bytes_are_absent_when_sums_are_known() -> None:
    """Without sums they are in the feed: their objects differ."""
    for sums in (True, False):
        async with Repository.create(memory_url(), sums=sums) as repository:
            first = await prepared(repository)
            session = await repository.writable_session("main")
            for at in range(4):
                await write(session, f"a/c/{at}", bytes([at]) * 600)
            await write(session, "a/c/7", b"7" * 600)
            await session.commit("again")
            (chunks,) = await feed(repository, first, "main")
            assert isinstance(chunks, ChunkChanges)
            wanted = [[7]] if sums else [[0], [1], [2], [3], [7]]
            assert chunks.coords.tolist() == wanted


async def test_batches_are_as_large_as_asked_for(repository: Repository) -> None:
    """And together they are everything."""
    first = await prepared(repository)
    session = await repository.writable_session("main")
    for at in range(8):
        await write(session, f"a/c/{at}", b"n" * 600)
    await session.commit("all")
    batches = [it async for it in repository.changes(first, "main", batch_size=3)]
    assert [len(it) for it in batches if isinstance(it, ChunkChanges)] == [3, 3, 2]
    with pytest.raises(InvalidInputError, match="at least 1"):
        await feed(repository, first, "main", batch_size=0)


async def test_what_moved_with_its_group_is_not_listed() -> None:
    """Whether logs tell what was moved, or both states are compared."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for path in ("", "g/", "g/inner/", "h/"):
            await write(session, f"{path}zarr.json", group_document())
        for name in ("g/a", "g/inner/b"):
            await make_array(session, name, (6,), (3,))
        base = await session.commit("made")
        await repository.create_branch("side", base)
        session = await repository.rearrange_session("main")
        await session.move("/g", "/h/g")
        await session.move("/h/g/inner/b", "/b")
        await session.commit("moved")
        session = await repository.writable_session("side")
        await session.commit("nothing", allow_empty=True)
        for start in (base, "side"):
            moves = [
                it for it in await feed(repository, start, "main") if isinstance(it, NodeChange)
            ]
            assert [(it.kind, it.previous_path, it.path) for it in moves] == [
                ("moved", "/g/inner/b", "/b"),
                ("moved", "/g", "/h/g"),
            ]


async def test_arrays_are_compared_a_few_at_a_time() -> None:
    """The first are told before the manifests of the others are read, and held in memory."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, probe=False) as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            for number in range(40):
                await make_array(session, f"a{number:02}", (3,), (3,))
                await write(session, f"a{number:02}/c/0", b"xyz")
            await session.commit("made")
        async with Repository.open(storage) as repository:
            storage.forget()
            changes = repository.changes("main~1", "main")
            async for change in changes:
                if isinstance(change, ChunkChanges):
                    break
            read_manifests = {key for _, key in storage.log if key.startswith("manifests/")}
            assert len(read_manifests) <= 8
            rest = [it async for it in changes if isinstance(it, ChunkChanges)]
            assert len(rest) == 39


async def test_manifests_that_both_snapshots_use_are_not_read() -> None:
    """On two branches, where no log tells what differs."""
    from icechunk_async.config import (
        ManifestConfig,
        ManifestSplitCondition,
        ManifestSplitDimCondition,
        ManifestSplittingConfig,
        RepositoryConfig,
    )

    split = ManifestSplittingConfig.from_dict(
        {ManifestSplitCondition.AnyArray(): {ManifestSplitDimCondition.Any(): 100}}
    )
    config = RepositoryConfig(manifest=ManifestConfig(splitting=split))
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, probe=False, config=config) as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            await make_array(session, "a", (10_000,), (1,))
            for at in range(0, 10_000, 10):
                await write(session, f"a/c/{at}", b"x")
            base = await session.commit("a hundred manifests")
            await repository.create_branch("side", base)
            for branch, at in (("main", 10), ("side", 9000)):
                session = await repository.writable_session(branch)
                await write(session, f"a/c/{at}", b"y")
                await session.commit(branch)
        async with Repository.open(storage) as repository:
            storage.forget()
            (chunks,) = await feed(repository, "main", "side")
            assert isinstance(chunks, ChunkChanges)
            assert chunks.coords.tolist() == [[10], [9000]]
            read_manifests = [key for _, key in storage.log if key.startswith("manifests/")]
            assert len(read_manifests) == 4


async def test_one_change_among_many_is_found_by_its_log() -> None:
    """Neither side's manifest is decoded as a whole."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await make_array(session, "a", (100_000,), (1,))
        coords = np.arange(100_000, dtype=np.uint32)[:, None]
        ref = await session.workspace.store_object(b"x")
        refs = ChunkRefs.build(
            coords,
            Kind.NATIVE,
            lengths=np.ones(100_000, np.uint64),
            chunk_ids=np.frombuffer(ref.chunk_id, np.uint8).reshape(1, 12),
        )
        session.workspace.set_refs("/a", refs)
        first = await session.commit("many")
        session = await repository.writable_session("main")
        await write(session, "a/c/777", b"y")
        await session.commit("one")
        (chunks,) = await feed(repository, first, "main")
        assert chunks.coords.tolist() == [[777]]  # type: ignore[union-attr]
        assert await read(await repository.readonly_session("main"), "a/c/777") == b"y"
