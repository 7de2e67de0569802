"""Undo, revert and restore: what they bring back, what they refuse, and what they cost."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from icechunk_async import Repository, SnapshotId
from icechunk_async.engine.versions.feed import changes_in_box
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    FormatError,
    InvalidInputError,
    MergeConflictError,
    NodeNotFoundError,
    NotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.manifest.chunk import VirtualChunk
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import group_document, make_array, memory_url, read, write
from tests.unit.engine.versions.stories import Story, contents_at


async def numbers(repository: Repository, **chunks: int) -> SnapshotId:
    """Commit chunks of the array ``a`` of ten chunks, by number: ``c3=7``."""
    session = await repository.writable_session("main")
    if await read(session, "zarr.json") is None:
        await write(session, "zarr.json", group_document())
        await make_array(session, "a", (10,), (1,))
        await make_array(session, "b", (10,), (1,))
    for name, value in chunks.items():
        await write(session, f"a/c/{name[1:]}", bytes([value]))
    return await session.commit(f"{chunks}")


async def values(repository: Repository) -> dict[int, int]:
    """Return the chunks of ``a``."""
    found = await contents_at(repository)
    return {int(key[4:]): data[0] for key, data in found.items() if key.startswith("a/c/")}


async def test_undo_moves_the_branch_back_by_one_commit(repository: Repository) -> None:
    """The commit can still be read by its id, and brought back."""
    first = await numbers(repository, c0=1)
    second = await numbers(repository, c0=2)
    assert await repository.undo() == first
    assert await values(repository) == {0: 1}
    assert await repository.lookup_branch("main") == first
    await repository.reset_branch("main", second)
    assert await values(repository) == {0: 2}


async def test_undo_refuses_the_first_snapshot_and_what_is_no_branch(
    repository: Repository,
) -> None:
    """Nothing is moved."""
    first = await repository.lookup_branch("main")
    with pytest.raises(InvalidInputError, match="nothing to undo"):
        await repository.undo()
    await repository.create_tag("v1", first)
    with pytest.raises(BranchNotFoundError, match="'v1' is a tag"):
        await repository.undo("v1")
    with pytest.raises(BranchNotFoundError, match="no branch 'trial'"):
        await repository.undo("trial")


async def test_undo_never_drops_a_commit_that_it_did_not_see(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch is moved only from the tip that was looked at."""
    await numbers(repository, c0=1)
    await numbers(repository, c0=2)
    from icechunk_async.engine.versions import plans

    look = plans.parent_of_tip

    async def overtaken(engine: object, branch: str) -> object:
        seen = await look(engine, branch)  # type: ignore[arg-type]
        await numbers(repository, c0=3)
        return seen

    monkeypatch.setattr(plans, "parent_of_tip", overtaken)
    with pytest.raises(ConflictError):
        await repository.undo()
    assert await values(repository) == {0: 3}


async def test_revert_takes_back_one_commit_and_keeps_later_ones(repository: Repository) -> None:
    """The message and the properties say what was taken back."""
    await numbers(repository, c0=1, c1=1)
    bad = await numbers(repository, c1=9, c2=9)
    await numbers(repository, c3=3)
    report = await repository.revert(bad, metadata={"author": "me"})
    assert await values(repository) == {0: 1, 1: 1, 3: 3}
    assert report.snapshot_id is not None
    assert report.changes.updated_chunks["/a"].tolist() == [[1], [2]]
    info = await repository.lookup_snapshot(report.snapshot_id)
    assert info.message.startswith("Revert \"{'c1': 9, 'c2': 9}\"")
    assert str(bad) in info.message
    assert info.metadata["author"] == "me"
    assert "reverted" in info.metadata["icechunk-async"]  # type: ignore[operator]


async def test_revert_reports_what_later_commits_changed_again(repository: Repository) -> None:
    """Nothing is published; a dry run reports the same without an error."""
    await numbers(repository, c0=1)
    bad = await numbers(repository, c0=9, c1=9)
    await numbers(repository, c0=5)
    tip = await repository.lookup_branch("main")
    with pytest.raises(MergeConflictError, match="Nothing was published") as caught:
        await repository.revert(bad)
    planned = await repository.revert(bad, dry_run=True)
    assert planned == caught.value.context["report"]
    (conflict,) = planned.conflicts
    assert (conflict.path, conflict.coords) == ("/a", ((0,),))
    assert [it.message for it in conflict.branch_commits] == ["{'c0': 5}"]
    assert await repository.lookup_branch("main") == tip


async def test_reverting_what_was_undone_already_commits_nothing(repository: Repository) -> None:
    """There is nothing left to change."""
    await numbers(repository, c0=1)
    bad = await numbers(repository, c0=9)
    await numbers(repository, c0=1)
    await repository.restore("main~2", paths=["a"])
    tip = await repository.lookup_branch("main")
    report = await repository.revert(bad)
    assert report.snapshot_id is None
    assert report.changes.is_empty()
    assert await repository.lookup_branch("main") == tip


async def test_restore_of_paths_leaves_everything_else(repository: Repository) -> None:
    """Also the neighbour that changed meanwhile."""
    await numbers(repository, c0=1)
    session = await repository.writable_session("main")
    await write(session, "a/c/0", b"\x09")
    await write(session, "b/c/0", b"\x09")
    await make_array(session, "d", (1,), (1,))
    await session.commit("both")
    await repository.restore("main~1", paths=["/a"])
    found = await contents_at(repository)
    assert (found["a/c/0"], found["b/c/0"]) == (b"\x01", b"\x09")
    assert "d/zarr.json" in found
    await repository.restore("main~2", paths=["d", "b"])
    assert set(await contents_at(repository)) == {
        "zarr.json",
        "a/zarr.json",
        "a/c/0",
        "b/zarr.json",
    }


async def test_restore_brings_back_a_deleted_array_with_its_group(repository: Repository) -> None:
    """A group that is missing meanwhile comes back without its other members."""
    session = await repository.writable_session("main")
    await write(session, "zarr.json", group_document())
    await write(session, "g/zarr.json", group_document(n=1))
    for name in ("g/x", "g/y"):
        await make_array(session, name, (4,), (1,))
        await write(session, f"{name}/c/2", b"\x05")
    await session.commit("made")
    session = await repository.writable_session("main")
    await session.store.delete_dir("g")
    await session.commit("deleted")
    report = await repository.restore("main~1", paths=["g/x"])
    assert report.changes.new_groups == {"/g"}
    found = await contents_at(repository)
    assert set(found) == {"zarr.json", "g/zarr.json", "g/x/zarr.json", "g/x/c/2"}


async def test_restore_of_a_region_brings_back_whole_chunks_by_reference(
    repository: Repository,
) -> None:
    """The rest of the array stays, and no chunk object is written."""
    await numbers(repository, **{f"c{at}": 1 for at in range(10)})
    first = await repository.lookup_branch("main")
    await numbers(repository, **{f"c{at}": 2 for at in range(10)})
    await repository.restore(first, paths=["a"], region=[slice(2, 5)])
    assert await values(repository) == {at: 1 if 2 <= at < 5 else 2 for at in range(10)}


async def test_regions_that_cannot_be_restored_are_refused(repository: Repository) -> None:
    """Each with the sentence that says why."""
    await numbers(repository, c0=1)
    session = await repository.writable_session("main")
    await make_array(session, "wide", (10,), (4,))
    await session.commit("wide")
    await numbers(repository, c0=2)
    for region, wanted in (
        ([slice(1, 4)], "multiple of 4"),
        ([slice(0, 6)], "multiple of 4"),
        ([slice(0, 8, 2)], "step 1"),
        ([slice(0, 8), slice(None)], "1 axes"),
    ):
        with pytest.raises(InvalidInputError, match=wanted):
            await repository.restore("main~1", paths=["wide"], region=region)
    with pytest.raises(InvalidInputError, match="name the array"):
        await repository.restore("main~1", region=[slice(None)])
    with pytest.raises(InvalidInputError, match="2 paths"):
        await repository.restore("main~1", paths=["a", "b"], region=[slice(None)])
    with pytest.raises(NodeNotFoundError, match="whole array"):
        await repository.restore("main~2", paths=["wide"], region=[slice(None)])
    with pytest.raises(NodeNotFoundError, match="nothing to restore"):
        await repository.restore("main~1", paths=["nowhere"])
    with pytest.raises(InvalidInputError, match="a collection of paths, not by 'wide'"):
        await repository.restore("main~1", paths="wide")


async def test_names_that_name_nothing_are_refused_with_what_there_is(
    repository: Repository,
) -> None:
    """Branches, tags, steps back, and beginnings of ids."""
    first = await numbers(repository, c0=1)
    await numbers(repository, c0=2)
    await repository.create_tag("release-1", first)
    with pytest.raises(NotFoundError, match="Is the tag 'release-1' meant"):
        await repository.restore("release_1")
    with pytest.raises(NotFoundError, match="Branches here: main"):
        await repository.restore("x")
    with pytest.raises(SnapshotNotFoundError, match="has only 2 before it"):
        await repository.restore("main~3")
    report = await repository.restore(str(first)[:6].lower(), dry_run=True)
    assert report.source_id == first
    assert (await repository.restore("release-1~0", dry_run=True)).source_id == first
    with pytest.raises(NotFoundError, match="not a branch"):
        await repository.restore("000000")


async def test_revert_and_restore_survive_earlier_garbage_collection(
    repository: Repository,
) -> None:
    """Old chunks that snapshots of the history need are not taken for lost."""
    await numbers(repository, c0=1)
    bad = await numbers(repository, c0=2)
    await numbers(repository, c1=1)
    await repository.garbage_collect(datetime.now(UTC))
    await repository.revert(bad)
    await repository.garbage_collect(datetime.now(UTC))
    assert await values(repository) == {0: 1, 1: 1}
    assert (await repository.check_references()).is_whole


async def test_what_expired_is_named(repository: Repository) -> None:
    """Neither is guessed: the error says what is gone."""
    await numbers(repository, c0=1)
    expired = await numbers(repository, c0=2)
    kept = await numbers(repository, c0=3)
    await repository.expire_snapshots(datetime.now(UTC))
    if repository.spec_version > 1:  # format 1 forgets it with its files
        with pytest.raises(SnapshotNotFoundError):
            await repository.revert(expired)
    with pytest.raises(SnapshotNotFoundError, match="Restore a snapshot or some paths"):
        await repository.revert(kept)
    await repository.garbage_collect(datetime.now(UTC))
    with pytest.raises(SnapshotNotFoundError, match="collected"):
        await repository.restore(expired)


@pytest.mark.parametrize("chunks", [1, 200])
async def test_reverting_costs_what_the_commit_changed(chunks: int) -> None:
    """No chunk is read or written, however many there are."""
    async with open_storage(memory_url()) as plain:
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.create(storage, probe=False) as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            await make_array(session, "a", (600 * chunks,), (600,))
            for at in range(chunks):
                await write(session, f"a/c/{at}", bytes(600))
            await session.commit("made")
            session = await repository.writable_session("main")
            for at in range(chunks):
                await write(session, f"a/c/{at}", b"\x01" * 600)
            await session.commit("changed")
        async with Repository.open(storage) as repository:
            storage.forget()
            await repository.revert("main")
            assert storage.requests.total() <= 16
            assert not any(key.startswith("chunks/") for _, key in storage.log)


async def test_undo_brings_back_references_to_virtual_chunks(repository: Repository) -> None:
    """References are brought back, and the files that they lead to are not looked at."""
    await numbers(repository, c0=1)
    for offset in (0, 100):
        session = await repository.writable_session("main")
        session.workspace.set_ref("/a", (1,), VirtualChunk("s3://nowhere/file", offset, 10))
        await session.commit(f"offset {offset}")
    await repository.revert("main")
    session = await repository.readonly_session("main")
    handle = await session.workspace.find_chunk("/a", (1,))
    assert handle is not None
    assert getattr(handle.ref, "offset", None) == 0
    await repository.restore("main~3")
    session = await repository.readonly_session("main")
    assert await session.workspace.find_chunk("/a", (1,)) is None


async def test_two_who_restore_at_once_lose_nothing(repository: Repository) -> None:
    """The one that comes second works its changes out again."""
    await numbers(repository, c0=1, c1=1)
    one = await numbers(repository, c0=2)
    other = await numbers(repository, c1=2)
    from icechunk_async._runtime.concurrency import gather

    await gather(repository.revert(one), repository.revert(other))
    assert await values(repository) == {0: 1, 1: 1}
    assert len([it async for it in repository.ancestry()]) == 6


def test_stories_are_repeatable() -> None:
    """The same seed draws the same changes."""
    one, other = Story(random.Random(1)), Story(random.Random(1))
    assert [one.chance.random() for _ in range(3)] == [other.chance.random() for _ in range(3)]


DAMAGED = [
    b"no JSON",
    b"[]",
    b"[" * 100_000,
    b'{"chunk_grid": "regular"}',
    b'{"chunk_grid": {"name": "regular", "configuration": []}}',
    b'{"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}}',
    b'{"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [true]}}}',
    b'{"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}}',
]


@pytest.mark.parametrize("document", DAMAGED)
async def test_regions_of_an_array_with_a_damaged_document_are_a_format_error(
    document: bytes,
) -> None:
    """Sessions refuse such documents; what is stored may hold anything."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        await numbers(repository, c0=1)
        assets = repository.engine.assets
        tip = await assets.snapshot(await repository.lookup_branch("main"))
        node = replace(tip.nodes["/a"], user_data=document)
        hostile = replace(
            tip, id=SnapshotId.random(), parent_id=tip.id, nodes=tip.nodes.edited([node])
        )
        await assets.put_snapshot(hostile)
        await repository.create_branch("hostile", hostile.id)
        with pytest.raises(FormatError, match="'/a'"):
            await repository.blame("a", [slice(0, 5)], ref="hostile")
        with pytest.raises(FormatError, match="'/a'"):
            await repository.restore("hostile", paths=["a"], region=[slice(0, 5)])


@pytest.mark.parametrize("document", DAMAGED[:4])
async def test_a_box_of_an_array_with_a_damaged_document_is_a_format_error(
    repository: Repository, document: bytes
) -> None:
    """Whether its chunks can be compared is not known then."""
    await numbers(repository, c0=1)
    tip = await repository.engine.assets.snapshot(await repository.lookup_branch("main"))
    node = replace(tip.nodes["/a"], user_data=document)
    hostile = replace(tip, id=SnapshotId.random(), nodes=tip.nodes.edited([node]))
    for pair in ((tip, hostile), (hostile, tip)):
        with pytest.raises(FormatError, match="'/a'"):
            await changes_in_box(repository.engine, *pair, "/a", ((0, 10),))
