"""Reading, writing and publishing through sessions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime import clock
from icechunk_async.errors import (
    BranchNotFoundError,
    ConflictError,
    InvalidCoordinatesError,
    InvalidInputError,
    NodeExistsError,
    NodeNotFoundError,
    NothingToCommitError,
    ReadOnlyError,
    RepositoryNotFoundError,
    SessionStateError,
    SnapshotNotFoundError,
    UnsupportedBySpecError,
)
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.session import SessionMode
from tests.helpers import array_document, group_document, make_array, memory_url, read, write


async def test_commit_is_visible_to_later_sessions(filled: Repository) -> None:
    """A reader keeps its snapshot; a new one sees the commit."""
    before = await filled.readonly_session("main")
    session = await filled.writable_session("main")
    await write(session, "a/c/1", b"\x07")
    assert await read(session, "a/c/1") == b"\x07"
    snapshot_id = await session.commit("seven")
    after = await filled.readonly_session("main")
    assert await read(before, "a/c/1") == b"\x01"
    assert await read(after, "a/c/1") == b"\x07"
    assert after.snapshot_id == snapshot_id == session.snapshot_id
    assert await filled.lookup_branch("main") == snapshot_id


async def test_a_committed_session_only_reads(filled: Repository) -> None:
    """It stands on its own commit; writing and committing again are refused."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"\x02")
    await session.commit("two")
    assert session.mode is SessionMode.READONLY
    assert await read(session, "a/c/2") == b"\x02"
    with pytest.raises(ReadOnlyError, match=r"committed.*writable_session"):
        await session.commit("again")
    with pytest.raises(ValueError, match="read-only"):
        await write(session, "a/c/3", b"\x03")


async def test_nothing_to_commit_is_refused_unless_asked_for(filled: Repository) -> None:
    """An empty commit is an error, except with allow_empty; equal metadata is no change."""
    session = await filled.writable_session("main")
    await write(session, "a/zarr.json", array_document((10,), (1,)))
    assert not session.has_uncommitted_changes
    with pytest.raises(NothingToCommitError):
        await session.commit("nothing")
    empty = await session.commit("empty", allow_empty=True)
    assert (await filled.lookup_snapshot(empty)).message == "empty"


async def test_a_session_that_changed_nothing_can_be_flushed(filled: Repository) -> None:
    """The flush marks the base of the session. Its branch does not move."""
    session = await filled.writable_session("main")
    tip = session.snapshot_id
    flushed = await session.flush("mark")
    assert session.snapshot_id == flushed != tip
    assert (await filled.lookup_snapshot(flushed)).message == "mark"
    assert await filled.lookup_branch("main") == tip


async def test_format_1_refuses_to_amend_before_it_looks_for_changes() -> None:
    """Writing something first would not help."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        session = await repository.writable_session("main")
        with pytest.raises(UnsupportedBySpecError):
            await session.amend("nothing")


async def test_discarded_changes_are_gone(filled: Repository) -> None:
    """The session looks like its base again and can still be used."""
    session = await filled.writable_session("main")
    await write(session, "a/c/0", b"\x09")
    await make_array(session, "b", (1,), (1,))
    session.discard_changes()
    assert not session.has_uncommitted_changes
    assert session.status().is_empty()
    assert await read(session, "a/c/0") == b"\x00"
    assert await read(session, "b/zarr.json") is None


async def test_status_names_what_changed(filled: Repository) -> None:
    """New, updated and deleted nodes and chunks, by path."""
    session = await filled.writable_session("main")
    await write(session, "g/zarr.json", group_document())
    await make_array(session, "g/b", (4,), (2,))
    await write(session, "g/b/c/1", b"\x01\x02")
    await write(session, "a/c/5", b"\x05")
    await session.store.delete("a/c/0")
    await write(session, "zarr.json", group_document(note="changed"))
    status = session.status()
    assert (status.new_groups, status.new_arrays) == (frozenset({"/g"}), frozenset({"/g/b"}))
    assert (status.updated_groups, status.updated_arrays) == (frozenset({"/"}), frozenset[str]())
    assert {path: coords.tolist() for path, coords in status.updated_chunks.items()} == {
        "/a": [[0], [5]],
        "/g/b": [[1]],
    }
    await session.store.delete("a/zarr.json")
    status = session.status()
    assert status.deleted_arrays == {"/a"}
    assert list(status.updated_chunks) == ["/g/b"]


async def test_a_node_made_and_deleted_in_one_session_leaves_no_trace(filled: Repository) -> None:
    """Nothing to commit remains, and recreating it is new again."""
    session = await filled.writable_session("main")
    await make_array(session, "b", (2,), (1,))
    await write(session, "b/c/0", b"\x01")
    await session.store.delete("b/zarr.json")
    assert not session.has_uncommitted_changes


async def test_recreated_node_has_no_old_chunks(filled: Repository) -> None:
    """The new array is another node, in the session and after the commit."""
    session = await filled.writable_session("main")
    await session.store.delete("a/zarr.json")
    await make_array(session, "a", (10,), (1,))
    assert await read(session, "a/c/0") is None
    await write(session, "a/c/3", b"\x03")
    status = session.status()
    assert status.deleted_arrays == status.new_arrays == {"/a"}
    await session.commit("recreated")
    reader = await filled.readonly_session("main")
    assert [await read(reader, f"a/c/{i}") for i in (0, 1, 3)] == [None, None, b"\x03"]


async def test_deleting_a_group_deletes_all_below_it(filled: Repository) -> None:
    """Siblings whose names start with the same letters stay."""
    session = await filled.writable_session("main")
    for path in ("g", "g/sub", "g-sibling"):
        await write(session, f"{path}/zarr.json", group_document())
    await make_array(session, "g/sub/x", (1,), (1,))
    await session.commit("groups")
    session = await filled.writable_session("main")
    await session.store.delete("g/zarr.json")
    await session.commit("deleted")
    reader = await filled.readonly_session("main")
    assert sorted([key async for key in reader.store.list()]) == [
        "a/c/0",
        "a/c/1",
        "a/zarr.json",
        "g-sibling/zarr.json",
        "zarr.json",
    ]


@pytest.mark.parametrize("reopen", [False, True], ids=["same session", "after a commit"])
async def test_chunks_cut_off_by_shrinking_do_not_come_back(
    filled: Repository, *, reopen: bool
) -> None:
    """Shrinking and growing again gives fill values, not old data."""
    session = await filled.writable_session("main")
    await write(session, "a/c/5", b"\x05")
    await write(session, "a/zarr.json", array_document((1,), (1,)))
    if reopen:
        await session.commit("shrunk")
        session = await filled.writable_session("main")
    await write(session, "a/zarr.json", array_document((10,), (1,)))
    assert [await read(session, f"a/c/{i}") for i in (0, 1, 5)] == [b"\x00", None, None]
    await session.commit("grown")
    reader = await filled.readonly_session("main")
    assert [await read(reader, f"a/c/{i}") for i in (0, 1, 5)] == [b"\x00", None, None]


async def test_an_array_may_change_its_rank(filled: Repository) -> None:
    """Old chunks are gone, new ones have the new rank."""
    session = await filled.writable_session("main")
    await write(session, "a/zarr.json", array_document((2, 2), (1, 1)))
    assert await read(session, "a/c/0") is None
    await write(session, "a/c/1/1", b"\x09")
    await session.commit("two axes")
    reader = await filled.readonly_session("main")
    assert [key async for key in reader.store.list_prefix("a/c")] == ["a/c/1/1"]


async def test_an_array_that_had_axes_for_a_while_has_no_old_chunk(filled: Repository) -> None:
    """The only chunk of no axes is gone as any other: for the session as for later readers."""
    session = await filled.writable_session("main")
    await make_array(session, "n", (), ())
    await write(session, "n/c", b"old")
    await session.commit("no axes")
    session = await filled.writable_session("main")
    await make_array(session, "n", (4,), (2,))
    await make_array(session, "n", (), ())
    assert await read(session, "n/c") is None
    assert [key async for key in session.store.list_prefix("n")] == ["n/zarr.json"]
    await session.commit("no axes again")
    assert await read(await filled.readonly_session("main"), "n/c") is None


async def test_bad_writes_store_nothing(filled: Repository) -> None:
    """Wrong rank, outside of the grid, no array, no bytes, wrong type: refused."""
    session = await filled.writable_session("main")
    with pytest.raises(InvalidCoordinatesError, match=r"2 coordinates.*1 axes"):
        await write(session, "a/c/0/0", b"x")
    with pytest.raises(InvalidCoordinatesError, match="outside of the grid"):
        await write(session, "a/c/10", b"x")
    with pytest.raises(NodeNotFoundError, match="nothing is there"):
        await write(session, "b/c/0", b"x")
    with pytest.raises(NodeNotFoundError, match="there is a group"):
        await write(session, "c/0", b"x")
    with pytest.raises(InvalidInputError, match="no bytes"):
        await write(session, "a/c/0", b"")
    with pytest.raises(NodeExistsError, match="Delete it first"):
        await write(session, "a/zarr.json", group_document())
    assert not session.has_uncommitted_changes


async def test_the_inline_threshold_decides_where_chunks_live(spec: int) -> None:
    """A chunk of the threshold's length is inline, one byte more makes an object."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=4)
    async with Repository.create(f"memory://inline{spec}", spec_version=spec, config=config) as it:
        session = await it.writable_session("main")
        await make_array(session, "a", (2,), (1,))
        await write(session, "a/c/0", b"1234")
        await write(session, "a/c/1", b"12345")
        await session.commit("both")
        chunks = [entry async for entry in it.storage.list_prefix("chunks/")]
        assert len(chunks) == 1
        reader = await it.readonly_session("main")
        assert await read(reader, "a/c/0") == b"1234"
        assert await read(reader, "a/c/1") == b"12345"


async def test_commit_metadata_is_kept_and_defaults_are_laid_below(filled: Repository) -> None:
    """A commit's own properties win over the repository's defaults."""
    filled.default_commit_metadata.update({"author": "them", "level": 1})
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"\x02")
    snapshot_id = await session.commit("with metadata", {"author": "us", "runs": [1, 2.5, None]})
    info = await filled.lookup_snapshot(snapshot_id)
    assert info.metadata == {"author": "us", "level": 1, "runs": [1, 2.5, None]}
    assert info.message == "with metadata"


async def test_a_message_that_no_file_can_hold_is_refused_and_the_session_goes_on(
    filled: Repository,
) -> None:
    """Nothing is published."""
    old = await filled.lookup_branch("main")
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"\x02")
    with pytest.raises(InvalidInputError, match="lone surrogates"):
        await session.commit("half \ud800")
    assert await filled.lookup_branch("main") == old
    snapshot_id = await session.commit("whole")
    assert await filled.lookup_branch("main") == snapshot_id


async def test_amending_replaces_the_tip(filled: Repository, spec: int) -> None:
    """The number of commits does not change. The old tip can still be read by its id."""
    old = await filled.lookup_branch("main")
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"\x02")
    if spec == 1:
        with pytest.raises(UnsupportedBySpecError, match="migrate"):
            await session.amend("better")
        return
    new = await session.amend("better")
    history = [info.id async for info in filled.ancestry(branch="main")]
    assert history == [new, INITIAL_SNAPSHOT_ID]
    amended = await filled.readonly_session("main")
    assert [await read(amended, f"a/c/{i}") for i in (0, 2)] == [b"\x00", b"\x02"]
    replaced = await filled.readonly_session(snapshot_id=old)
    assert await read(replaced, "a/c/2") is None
    diff = await filled.diff(from_snapshot_id=INITIAL_SNAPSHOT_ID, to_branch="main")
    assert diff.new_arrays == {"/a"}
    assert diff.updated_chunks["/a"].tolist() == [[0], [1], [2]]


async def test_the_first_snapshot_cannot_be_amended(repository: Repository, spec: int) -> None:
    """There is nothing that it could replace."""
    session = await repository.writable_session("main")
    await make_array(session, "a", (1,), (1,))
    expected = SessionStateError if spec == 2 else UnsupportedBySpecError
    with pytest.raises(expected, match=r"Commit instead|migrate"):
        await session.amend("no")
    assert await session.commit("yes")


async def test_a_flushed_snapshot_is_on_no_branch_until_one_is_set_to_it(
    filled: Repository,
) -> None:
    """It reads by its id, and a branch can adopt it."""
    tip = await filled.lookup_branch("main")
    session = await filled.writable_session("main")
    await write(session, "a/c/3", b"\x03")
    detached = await session.flush("detached")
    assert await filled.lookup_branch("main") == tip
    assert session.read_only
    reader = await filled.readonly_session(snapshot_id=detached)
    assert await read(reader, "a/c/3") == b"\x03"
    assert (await filled.lookup_snapshot(detached)).parent_id == tip
    await filled.reset_branch("main", detached, from_snapshot_id=tip)
    assert await filled.lookup_branch("main") == detached


async def test_the_second_of_two_commits_on_one_base_is_refused(filled: Repository) -> None:
    """Nothing is published, and its changes are kept."""
    first = await filled.writable_session("main")
    second = await filled.writable_session("main")
    await write(first, "a/c/2", b"\x02")
    await write(second, "a/c/3", b"\x03")
    winner = await first.commit("first")
    with pytest.raises(ConflictError, match="another writer was first") as caught:
        await second.commit("second")
    assert caught.value.context["actual_parent"] == str(winner)
    assert second.has_uncommitted_changes
    assert await filled.lookup_branch("main") == winner


async def test_session_on_a_missing_ref_or_snapshot_is_refused(filled: Repository) -> None:
    """Unknown branches and snapshots, several names at once."""
    with pytest.raises(BranchNotFoundError, match="'nope'"):
        await filled.writable_session("nope")
    with pytest.raises(SnapshotNotFoundError):
        await filled.readonly_session(snapshot_id=SnapshotId(bytes(12)))
    with pytest.raises(InvalidInputError, match="not several"):
        await filled.readonly_session("main", tag="v1")
    with pytest.raises(InvalidInputError, match="base32"):
        await filled.readonly_session(snapshot_id="not an id")


async def test_as_of_reads_the_tip_of_that_time(filled: Repository) -> None:
    """A time between two commits reads the older one. A time before the first is an error."""
    first = await filled.lookup_branch("main")
    moment = (await filled.lookup_snapshot(first)).written_at
    session = await filled.writable_session("main")
    await write(session, "a/c/0", b"\x08")
    second = await session.commit("later")
    later = (await filled.lookup_snapshot(second)).written_at
    assert (await filled.readonly_session("main", as_of=moment)).snapshot_id == first
    assert (await filled.readonly_session("main", as_of=later)).snapshot_id == second
    just_before = later - timedelta(microseconds=1)
    assert (await filled.readonly_session("main", as_of=just_before)).snapshot_id == first
    with pytest.raises(SnapshotNotFoundError, match="no snapshot yet"):
        await filled.readonly_session("main", as_of=datetime(1999, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidInputError, match="as_of goes with a branch"):
        await filled.readonly_session(snapshot_id=first, as_of=moment)


class _StoppedClock(clock.SystemClock):
    """A clock far in the past that stands still."""

    def now_us(self) -> int:
        return 1_000_000


async def test_lagging_clock_does_not_break_commits(filled: Repository) -> None:
    """Times of snapshots and of the log still ascend."""
    with clock.use_clock(_StoppedClock()):
        for value in range(3):
            session = await filled.writable_session("main")
            await write(session, "a/c/0", bytes([value + 1]))
            await session.commit(f"commit {value}")
    times = [info.flushed_at async for info in filled.ancestry(branch="main")]
    assert times == sorted(set(times), reverse=True)
    assert len(times) == 5
    if filled.spec_version == 2:
        updates = [update.updated_at async for update in filled.ops_log()]
        assert updates == sorted(set(updates), reverse=True)


async def test_write_during_a_commit_is_refused_not_lost(filled: Repository) -> None:
    """A write that cannot be part of the commit raises an error."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"\x02")
    with session.publisher.exclusively(), pytest.raises(ReadOnlyError, match="being committed"):
        await write(session, "a/c/3", b"\x03")
    await write(session, "a/c/3", b"\x03")
    await session.commit("both")
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/3") == b"\x03"


@pytest.mark.parametrize("spec", [1, 2])
async def test_the_stored_configuration_is_read_without_opening(spec: int) -> None:
    """It is what was stored, not what a handle was opened with; a repository need not have one."""
    url, bare = memory_url(), memory_url()
    stored = RepositoryConfig(inline_chunk_threshold_bytes=7)
    async with Repository.create(url, spec_version=spec, config=stored):
        pass
    async with Repository.open(url, config=RepositoryConfig(max_concurrent_requests=3)):
        assert await Repository.fetch_config(url) == stored
    async with Repository.create(bare, spec_version=spec):
        pass
    assert await Repository.fetch_config(bare) is None
    with pytest.raises(RepositoryNotFoundError):
        await Repository.fetch_config(memory_url())
