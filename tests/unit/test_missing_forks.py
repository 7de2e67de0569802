"""Forks that were handed out and did not come back: their session does not commit without them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from icechunk_async import ForkSession, Repository
from icechunk_async.errors import InvalidInputError, SessionStateError
from icechunk_async.sync import Repository as BlockingRepository
from icechunk_async.sync import in_memory_storage
from tests.helpers import memory_url, read, write

if TYPE_CHECKING:
    from icechunk_async import Session


def travelled(fork: ForkSession) -> ForkSession:
    """Return a copy from another process."""
    copy = pickle.loads(pickle.dumps(fork))
    assert isinstance(copy, ForkSession)
    return copy


@pytest.mark.parametrize("how", ["commit", "amend", "flush"])
async def test_nothing_is_published_while_a_fork_is_missing(filled: Repository, how: str) -> None:
    """Neither a fork that wrote something, nor one that may have."""
    if how == "amend" and filled.spec_version == 1:
        pytest.skip("format version 1 has no amendments")
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"2")
    first, second = await session.fork(), await session.fork()
    await write(first, "a/c/3", b"3")
    assert session.unmerged_forks == tuple(sorted([first.fork_id, second.fork_id]))
    publish = {"commit": session.commit, "amend": session.amend, "flush": session.flush}[how]
    with pytest.raises(SessionStateError, match=r"2 fork\(s\).*allow_missing_forks") as caught:
        await publish("too early")
    assert caught.value.context["forks"] == session.unmerged_forks
    await session.merge(travelled(first))
    with pytest.raises(SessionStateError, match=f"1 fork.*{second.fork_id}"):
        await publish("too early")
    session.discard_fork(second)
    snapshot_id = await publish("now")
    reader = await filled.readonly_session(snapshot_id=snapshot_id)
    assert await read(reader, "a/c/3") == b"3"


async def test_a_commit_may_be_told_to_leave_forks_behind(filled: Repository) -> None:
    """Also by their names, of which only those that it waits for can be given."""
    session = await filled.writable_session("main")
    await write(session, "a/c/2", b"2")
    fork = await session.fork()
    with pytest.raises(InvalidInputError, match=f"waits for: {fork.fork_id}"):
        session.discard_fork(fork.fork_id, "nobody")
    assert session.unmerged_forks == (fork.fork_id,)
    await session.commit("without it", allow_missing_forks=True)


async def _tree(session: Session) -> tuple[ForkSession, ForkSession]:
    outer = await session.fork()
    await write(outer, "a/c/3", b"3")
    inner = await outer.fork()
    await write(inner, "a/c/4", b"4")
    return outer, inner


async def test_a_fork_of_a_fork_is_missing_with_it(filled: Repository) -> None:
    """If the outer one comes back without it; wherever it was made."""
    session = await filled.writable_session("main")
    outer, inner = await _tree(session)
    assert outer.unmerged_forks == travelled(outer).unmerged_forks == (inner.fork_id,)
    await session.merge(travelled(outer))
    with pytest.raises(SessionStateError, match=inner.fork_id):
        await session.commit("without the inner one")
    session.discard_fork(inner.fork_id)
    await session.commit("given up")


async def test_forks_that_were_merged_into_others_are_not_missing(filled: Repository) -> None:
    """Neither a fork of a fork, nor a sibling, attached or not."""
    session = await filled.writable_session("main")
    outer, inner = await _tree(session)
    await outer.merge(travelled(inner))
    sibling, far = travelled(await session.fork()), travelled(await session.fork())
    await far.merge(sibling)
    await session.merge(travelled(outer), travelled(far))
    assert session.unmerged_forks == ()
    await session.commit("all of them")


async def test_a_failed_merge_leaves_its_forks_missing(filled: Repository) -> None:
    """They can be merged or discarded later."""
    session = await filled.writable_session("main")
    other = await filled.writable_session("main")
    fork, strange = await session.fork(), await other.fork()
    with pytest.raises(SessionStateError, match="another session"):
        await session.merge(fork, strange)
    assert session.unmerged_forks == (fork.fork_id,)


async def test_a_session_that_continues_another_waits_for_what_that_one_waited_for(
    filled: Repository,
) -> None:
    """The root knows which forks of it were handed out before it was sent."""
    gone = await filled.writable_session("main")
    root = await gone.fork()
    forks = [await root.fork() for _ in range(2)]
    session = await filled.writable_session("main")
    await session.resume(travelled(root), travelled(forks[0]))
    assert session.unmerged_forks == (forks[1].fork_id,)


def test_the_facade_commits_as_the_official_engine_does() -> None:
    """Unless it is asked to wait."""
    repository = BlockingRepository.create(in_memory_storage())
    session = repository.writable_session("main")
    fork = session.fork()
    assert list(session.unmerged_forks) == [fork.fork_id]
    with pytest.raises(SessionStateError, match="1 fork"):
        session.commit("waits", allow_empty=True, allow_missing_forks=False)
    session.discard_fork(fork)
    assert not session.unmerged_forks
    session.fork()
    session.commit("does not wait", allow_empty=True)


async def test_nobody_waits_for_forks_of_other_repositories() -> None:
    """Sessions begin without any."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        assert session.unmerged_forks == ()
