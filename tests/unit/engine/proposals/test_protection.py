"""Protected branches change by proposals only, for all who write with this library."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Packing, Repository
from icechunk_async.errors import (
    BranchNotFoundError,
    BranchProtectedError,
    ChecksFailedError,
    FormatError,
    InvalidInputError,
    UnsupportedBySpecError,
)
from icechunk_async.storage import open_storage
from tests.helpers import make_array, memory_url, objects, write
from tests.unit.engine.proposals.places import Counting, begin, commit, contents

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from icechunk_async.storage import Storage


@pytest.fixture
async def protected() -> AsyncIterator[Repository]:
    """Open a repository whose ``main`` is protected, with a branch ``side`` that is ahead."""
    async with Repository.create(memory_url()) as repository:
        await begin(repository, "side")
        await commit(repository, "main", c0=9)
        await commit(repository, "side", c1=1)
        await repository.protect_branch()
        yield repository


WAYS: dict[str, Callable[[Repository], Awaitable[Any]]] = {
    "writable_session": lambda it: it.writable_session("main"),
    "rearrange_session": lambda it: it.rearrange_session("main"),
    "merge": lambda it: it.merge("side"),
    "begin_merge": lambda it: it.begin_merge("side"),
    "cherry_pick": lambda it: it.cherry_pick("side"),
    "revert": lambda it: it.revert("main"),
    "restore": lambda it: it.restore("main~1"),
    "undo": lambda it: it.undo(),
    "fast_forward": lambda it: it.fast_forward("main", to="main"),
    "squash": lambda it: it.squash("main", since="main~1"),
    "rewrite_manifests": lambda it: it.rewrite_manifests("anew", branch="main"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_direct_changes_are_refused_before_anything_is_uploaded(
    protected: Repository, way: str
) -> None:
    """With a sentence that says what to do."""
    before = await objects(protected.storage)
    if way == "fast_forward":
        await protected.create_branch("ahead", await protected.lookup_branch("main"))
        ahead = await commit(protected, "ahead", c2=2)
        before = await objects(protected.storage)
        with pytest.raises(BranchProtectedError, match=r"Repository\.propose"):
            await protected.fast_forward("main", to=ahead)
    else:
        with pytest.raises(BranchProtectedError, match=r"changes only by proposals.*propose"):
            await WAYS[way](protected)
    assert await objects(protected.storage) == before


async def test_compaction_is_refused_before_it_rewrites_anything() -> None:
    """It would upload all that it moves; what it would do can be seen."""
    packing = Packing(target_bytes=10_000, max_chunk_bytes=2_000)
    async with Repository.create(memory_url(), packing=packing) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (60,), (1,))
        for number in range(60):
            await write(session, f"a/c/{number}", bytes([number]) * 1_000)
        await session.commit("whole")
        session = await repository.writable_session("main")
        for number in [it for it in range(60) if it % 10 > 2]:  # each object is sparse then
            await write(session, f"a/c/{number}", bytes([number + 100]) * 1_000)
        await session.commit("changed")
        await repository.protect_branch()
        before = await objects(repository.storage)
        assert (await repository.compact("main", dry_run=True)).chunks
        with pytest.raises(BranchProtectedError, match=r"unprotect_branch"):
            await repository.compact("main")
        assert await objects(repository.storage) == before
        await repository.unprotect_branch()
        assert (await repository.compact("main")).chunks


async def test_resets_and_deletions_are_refused(protected: Repository) -> None:
    """Of other branches than ``main``, too."""
    await protected.protect_branch("side")
    base = (await protected.lookup_snapshot(await protected.lookup_branch("main"))).parent_id
    assert base is not None
    before = await objects(protected.storage)
    with pytest.raises(BranchProtectedError):
        await protected.reset_branch("main", base)
    with pytest.raises(BranchProtectedError):
        await protected.delete_branch("side")
    assert await objects(protected.storage) == before
    await protected.expire_snapshots(datetime.now(UTC), delete_expired_branches=True)
    assert "side" in await protected.branches()


@pytest.mark.parametrize("how", ["commit", "amend"])
async def test_a_session_from_before_is_refused_at_its_commit(how: str) -> None:
    """Also by a process that did not see the protection: the state it replaces has it."""
    url = memory_url()
    async with Repository.create(url) as repository, open_storage(url) as storage:
        await begin(repository)
        tip = await commit(repository, "main", c0=1)
        async with Repository.open(storage) as other:  # an open storage shares nothing
            session = await other.writable_session("main")
            await write(session, "a/c/1", b"\x01")
            await repository.protect_branch()
            with pytest.raises(BranchProtectedError):
                await getattr(session, how)("direct")
            assert await repository.lookup_branch("main") == tip
            await repository.unprotect_branch()
            assert await repository.protected_branches() == {}
            if how == "commit":
                await other.lookup_branch("main")
                await session.commit("allowed again")


async def test_other_branches_stay_open_and_a_proposal_gets_in(protected: Repository) -> None:
    """The setting is for everyone who opens the repository."""
    await commit(protected, "side", c2=2)
    async with Repository.open(protected.storage.description.url) as other:
        assert await other.protected_branches() == {"main": frozenset()}
        with pytest.raises(BranchProtectedError):
            await other.writable_session("main")
        proposal = await other.propose("side")
        await proposal.accept()
    assert await contents(await protected.readonly_session("main")) == {0: 9, 1: 1, 2: 2}


async def test_a_branch_may_ask_for_checks(protected: Repository) -> None:
    """They must have passed on the very state, for every proposal."""
    await protected.protect_branch("main", checks=["counting"])
    assert await protected.protected_branches() == {"main": frozenset({"counting"})}
    before = await protected.lookup_branch("main")
    proposal = await protected.propose("side")
    with pytest.raises(ChecksFailedError, match="'counting' was not run"):
        await proposal.accept()
    with pytest.raises(ChecksFailedError, match="'counting' failed"):
        await proposal.accept(checks=[Counting("no")])
    assert await protected.lookup_branch("main") == before
    candidate = proposal.candidate
    with pytest.raises(BranchProtectedError, match="asks for checks that did not pass"):
        await protected.engine.history.reset_branch(
            "main", candidate.snapshot_id, approved=frozenset({"another"})
        )
    assert await proposal.accept(checks=[Counting()]) == await protected.lookup_branch("main")


async def test_changing_metadata_does_not_lift_protection(protected: Repository) -> None:
    """Nor do other settings."""
    await protected.set_metadata({"title": "x"})
    await protected.update_metadata({"icechunk-async": {"packing": None}})
    await protected.save_sums()
    assert await protected.protected_branches() == {"main": frozenset()}
    await protected.unprotect_branch()
    await protected.unprotect_branch()
    await protected.set_metadata({"title": "y"})
    assert await protected.get_metadata() == {"title": "y"}
    await commit(protected, "main", c3=3)


@pytest.mark.parametrize(
    "stored", [7, {"main": 7}, {"main": {"checks": 1}}, {"main": {"checks": [1]}}]
)
async def test_a_damaged_setting_protects_all_branches(protected: Repository, stored: Any) -> None:
    """Until it is set anew."""
    await protected.engine.state_to_change("metadata").merge_metadata(
        lambda _: {"icechunk-async": {"protected": stored}}
    )
    with pytest.raises(FormatError, match="protect_branch"):
        await protected.writable_session("side")
    with pytest.raises(FormatError):
        await protected.protected_branches()
    await protected.protect_branch()
    await commit(protected, "side", c4=4)


async def test_copies_are_protected_as_well(protected: Repository) -> None:
    """The setting is copied with the repository."""
    target = memory_url()
    await protected.copy_to(target)
    async with Repository.open(target) as copy:
        assert await copy.protected_branches() == {"main": frozenset()}
        with pytest.raises(BranchProtectedError):
            await copy.writable_session("main")


async def test_what_cannot_be_protected_is_refused(protected: Repository) -> None:
    """Is said in one sentence."""
    with pytest.raises(BranchNotFoundError):
        await protected.protect_branch("nowhere")
    with pytest.raises(InvalidInputError, match="one text"):
        await protected.protect_branch(checks="counting")
    async with Repository.create(memory_url(), spec_version=1) as old:
        with pytest.raises(UnsupportedBySpecError, match="has no protection of branches"):
            await old.protect_branch()
        with pytest.raises(UnsupportedBySpecError):
            await old.unprotect_branch()
        assert await old.protected_branches() == {}


async def test_a_protection_that_lands_during_a_commit_wins(protected: Repository) -> None:
    """Either the commit was before, or it is refused: both are decided by one object."""
    await protected.unprotect_branch()
    storage: Storage = protected.storage

    async def write_until_refused() -> int:
        landed = 0
        async with Repository.open(storage.description.url) as mine:
            while True:
                try:
                    await commit(mine, "main", c5=landed % 200)
                except BranchProtectedError:
                    return landed
                landed += 1

    writer = asyncio.create_task(write_until_refused())
    async for _ in protected.watch("main", poll_seconds=0.001):
        break  # one landed
    await protected.protect_branch()
    tip = await protected.lookup_branch("main")
    await writer
    assert await protected.lookup_branch("main") == tip
