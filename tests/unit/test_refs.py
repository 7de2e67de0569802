"""Branches and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from icechunk_async.errors import (
    BranchExistsError,
    BranchNotFoundError,
    ConflictError,
    InvalidRefNameError,
    SnapshotNotFoundError,
    TagDeletedError,
    TagExistsError,
    TagNotFoundError,
    UnsupportedBySpecError,
    WrongTypeError,
)
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.format.operations_log import (
    BranchCreated,
    BranchDeleted,
    BranchReset,
    NewCommit,
    RepoInitialized,
    TagCreated,
    TagDeleted,
)
from tests.helpers import write

if TYPE_CHECKING:
    from icechunk_async import Repository

NOWHERE = SnapshotId(bytes(12))


async def test_branches_can_be_created_reset_and_deleted(filled: Repository) -> None:
    """Created at a snapshot, committed to, deleted; main stays."""
    tip = await filled.lookup_branch("main")
    await filled.create_branch("dev", tip)
    assert await filled.list_branches() == {"main", "dev"}
    session = await filled.writable_session("dev")
    await write(session, "a/c/2", b"\x02")
    new = await session.commit("on dev")
    assert await filled.lookup_branch("dev") == new
    assert await filled.lookup_branch("main") == tip
    await filled.delete_branch("dev")
    assert await filled.list_branches() == {"main"}
    with pytest.raises(BranchNotFoundError, match="'dev'"):
        await filled.lookup_branch("dev")


async def test_deleted_tag_names_are_never_reused(filled: Repository) -> None:
    """A tag cannot move; a deleted one cannot come back."""
    tip = await filled.lookup_branch("main")
    await filled.create_tag("v1", tip)
    await filled.create_tag("v2", str(INITIAL_SNAPSHOT_ID))
    assert await filled.list_tags() == {"v1", "v2"}
    assert (await filled.readonly_session(tag="v1")).snapshot_id == tip
    with pytest.raises(TagExistsError, match="do not move"):
        await filled.create_tag("v1", INITIAL_SNAPSHOT_ID)
    await filled.delete_tag("v1")
    assert await filled.list_tags() == {"v2"}
    with pytest.raises(TagNotFoundError, match="'v1'"):
        await filled.lookup_tag("v1")
    with pytest.raises(TagNotFoundError, match="'v1'"):
        await filled.delete_tag("v1")
    with pytest.raises(TagDeletedError, match="never used again"):
        await filled.create_tag("v1", tip)


async def test_bad_refs_change_nothing(filled: Repository, spec: int) -> None:
    """Taken names, unknown snapshots and branches, main, and names that cannot be stored."""
    tip = await filled.lookup_branch("main")
    with pytest.raises(BranchExistsError, match="'main'"):
        await filled.create_branch("main", tip)
    with pytest.raises(SnapshotNotFoundError):
        await filled.create_branch("dev", NOWHERE)
    with pytest.raises(SnapshotNotFoundError):
        await filled.create_tag("v1", NOWHERE)
    with pytest.raises(SnapshotNotFoundError):
        await filled.reset_branch("main", NOWHERE)
    with pytest.raises(BranchNotFoundError):
        await filled.reset_branch("dev", tip)
    with pytest.raises(BranchNotFoundError):
        await filled.delete_branch("dev")
    with pytest.raises(InvalidRefNameError, match="cannot be deleted"):
        await filled.delete_branch("main")
    if spec == 1:
        for name in ("a/b", "", ".hidden", "räume", "two words"):
            with pytest.raises(InvalidRefNameError, match="letters, digits"):
                await filled.create_branch(name, tip)
    else:
        for name in ("", " ", "v1\n", " v1", "\ud800"):
            for create in (filled.create_branch, filled.create_tag):
                with pytest.raises(InvalidRefNameError, match="one or more characters"):
                    await create(name, tip)
        for given in (None, 5, b"v1"):
            with pytest.raises(WrongTypeError, match="is text, not a"):
                await filled.create_tag(cast("str", given), tip)
    assert await filled.list_branches() == {"main"}
    assert await filled.list_tags() == set()


async def test_a_branch_resets_only_from_where_it_was_expected(filled: Repository) -> None:
    """Compare-and-set: the building block of publishing."""
    tip = await filled.lookup_branch("main")
    with pytest.raises(ConflictError, match="expected at"):
        await filled.reset_branch("main", tip, from_snapshot_id=INITIAL_SNAPSHOT_ID)
    await filled.reset_branch("main", INITIAL_SNAPSHOT_ID, from_snapshot_id=tip)
    assert await filled.lookup_branch("main") == INITIAL_SNAPSHOT_ID


async def test_operations_log_records_changes_of_refs(filled: Repository, spec: int) -> None:
    """Every change of the repository, newest first, across backups."""
    if spec == 1:
        with pytest.raises(UnsupportedBySpecError, match="no operations log"):
            _ = [update async for update in filled.ops_log()]
        return
    tip = await filled.lookup_branch("main")
    await filled.create_branch("dev", tip)
    await filled.reset_branch("dev", INITIAL_SNAPSHOT_ID)
    await filled.delete_branch("dev")
    await filled.create_tag("v1", tip)
    await filled.delete_tag("v1")
    details = [update.detail async for update in filled.ops_log()]
    assert details == [
        TagDeleted("v1", tip),
        TagCreated("v1"),
        BranchDeleted("dev", INITIAL_SNAPSHOT_ID),
        BranchReset("dev", tip),
        BranchCreated("dev"),
        NewCommit("main", tip),
        RepoInitialized(),
    ]
