"""Hooks after commit: told of everything that was published, and they never undo it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

from icechunk_async import Repository, Transaction
from icechunk_async.engine.commit import hooks as module
from icechunk_async.errors import InvalidInputError, NothingToCommitError
from tests.helpers import memory_url, read, write
from tests.unit.engine.proposals.places import begin, commit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async import SnapshotId
    from icechunk_async.results import CommitEvent


class Noting:
    """Notes what it is told of."""

    def __init__(self) -> None:
        self.events: list[CommitEvent] = []

    async def __call__(self, event: CommitEvent) -> None:
        """Note an event."""
        self.events.append(event)

    def last(self) -> tuple[str, str, SnapshotId, SnapshotId | None]:
        """Return and forget what it was told of; there must be one event."""
        (event,) = self.events
        self.events.clear()
        return event.kind, event.branch, event.snapshot.id, event.previous_id


@pytest.fixture
def noting() -> Noting:
    """Return a hook."""
    return Noting()


@pytest.fixture
async def hooked(spec: int, noting: Noting) -> AsyncIterator[Repository]:
    """Open a repository with a hook, and with branches."""
    async with Repository.create(
        memory_url(), spec_version=spec, after_commit=[noting]
    ) as repository:
        await begin(repository, "side", "other")
        noting.events.clear()
        yield repository


async def test_hooks_are_told_of_all_that_moves_a_branch(
    hooked: Repository, noting: Noting
) -> None:
    """Commits, merges and their like, resets, and proposals, with the tip before."""
    base = await hooked.lookup_branch("main")
    session = await hooked.writable_session("side")
    await write(session, "a/c/1", b"\x01")
    side = await session.commit("one", {"who": "ops"})
    (event,) = noting.events
    assert (event.snapshot.message, event.snapshot.metadata["who"]) == ("one", "ops")
    assert event.snapshot.parent_id == base
    assert noting.last() == ("commit", "side", side, base)

    merged = (await hooked.merge("side")).snapshot_id
    assert noting.last() == ("commit", "main", merged, base)
    assert merged is not None
    assert await hooked.undo() == base
    assert noting.last() == ("reset", "main", base, merged)
    await hooked.fast_forward("main", to=merged)
    assert noting.last() == ("reset", "main", merged, base)
    reverted = (await hooked.revert("main")).snapshot_id
    assert noting.last() == ("commit", "main", reverted, merged)
    squashed = await hooked.squash("main", since=base)
    assert noting.last() == ("commit", "main", squashed, reverted)
    await hooked.reset_branch("main", base)
    assert noting.last() == ("reset", "main", base, None)

    proposal = await hooked.propose("side")
    assert noting.events == []  # nothing is published yet
    accepted = await proposal.accept()
    assert noting.last() == ("commit", "main", accepted, base)

    async with hooked.transaction("other", message="block") as store:
        await write(store.session, "a/c/2", b"\x02")
    noting.last()
    pending = await hooked.begin_merge("other")
    by_hand = await pending.commit()
    assert noting.last() == ("commit", "main", by_hand, accepted)
    rewritten = await hooked.rewrite_manifests("anew", branch="main")
    assert noting.last()[:3] == ("commit", "main", rewritten)


async def test_amendments_name_what_they_replaced(noting: Noting) -> None:
    """The old tip is not the parent."""
    async with Repository.create(memory_url(), after_commit=[noting]) as repository:
        await begin(repository)
        tip = await commit(repository, "main", c1=1)
        noting.events.clear()
        session = await repository.writable_session("main")
        await write(session, "a/c/2", b"\x02")
        amended = await session.amend("better")
        assert noting.last() == ("amend", "main", amended, tip)


async def test_nothing_is_told_where_nothing_was_published(
    hooked: Repository, noting: Noting
) -> None:
    """Flushed snapshots, refusals, dry runs, and transactions that had landed before."""
    session = await hooked.writable_session("main")
    with pytest.raises(NothingToCommitError):
        await session.commit("nothing")
    await session.flush("detached")
    await hooked.merge("side", dry_run=True)
    assert noting.events == []
    for expected in (1, 1):
        session = await hooked.writable_session("main")
        await write(session, "a/c/3", b"\x03")
        await session.commit("once", once=Transaction("app", 1))
        assert len(noting.events) == expected


async def test_a_hook_that_fails_undoes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged and kept; the other hooks run, and the commit stands."""
    noting = Noting()

    async def broken(event: CommitEvent) -> None:
        raise RuntimeError(f"no mail for {event.branch}")

    def plain(event: CommitEvent) -> None:
        """Be no async function."""

    url = memory_url()
    async with Repository.create(url):
        pass
    async with Repository.open(url, after_commit=[broken, plain, noting]) as repository:  # type: ignore[list-item]
        tip = await begin(repository)
        assert await repository.lookup_branch("main") == tip
        assert [it.snapshot.id for it in noting.events] == [tip]
        found = {it.hook: it for it in repository.hook_failures}
        assert found["broken"].error == "RuntimeError: no mail for main"
        assert "no async function" in found["plain"].error
        assert found["broken"].event.snapshot.id == tip
        assert "the hook broken failed" in caplog.text
        for _ in range(60):
            await commit(repository, "main", c1=len(noting.events))
        assert len(repository.hook_failures) == 100
    async with Repository.open(url) as repository:
        assert repository.hook_failures == []


async def test_a_hook_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time the commit returns."""
    monkeypatch.setattr(module, "SECONDS", 0.01)

    async def hangs(event: CommitEvent) -> None:
        await anyio.sleep_forever()

    async with Repository.create(memory_url(), after_commit=[hangs]) as repository:
        await begin(repository)
        assert [it.error for it in repository.hook_failures] == ["it was stopped after 0.01 s"]


async def test_a_hook_may_commit_to_the_branch() -> None:
    """It does not run in the turn of the commit that it is told of."""
    async with Repository.create(memory_url()) as first:
        url = first.storage.description.url
        await begin(first, "side")
        await commit(first, "side", c1=1)

    async def index(event: CommitEvent) -> None:
        if event.snapshot.message != "index":
            session = await repository.writable_session("main")
            await write(session, "a/c/9", b"\x09")
            await session.commit("index")

    async with Repository.open(url, after_commit=[index]) as repository:
        async with asyncio.timeout(20):
            await repository.merge("side")
        assert repository.hook_failures == []
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/9") == b"\x09"


async def test_hooks_that_commit_for_ever_are_stopped() -> None:
    """After some levels; every commit that was made stands, and the rest is a failure."""
    async with Repository.create(memory_url()) as first:
        url = first.storage.description.url
        await begin(first)

    async def again(event: CommitEvent) -> None:
        number = len(str(event.snapshot.message))
        session = await repository.writable_session("main")
        await write(session, "a/c/1", bytes([number]))
        await session.commit("x" * (number + 1))

    async with Repository.open(url, after_commit=[again]) as repository:
        async with asyncio.timeout(20):
            await commit(repository, "main", c2=2)
        (failure,) = repository.hook_failures
        assert "was not called: hooks that commit called each other 8 times" in failure.error
        assert failure.event.snapshot.id == await repository.lookup_branch("main")
        await commit(repository, "main", c2=3)  # and from the start again
        assert len(repository.hook_failures) == 2


async def test_whatever_a_hook_raises_the_commit_returns() -> None:
    """The end of the process, and the cancellation of something that it waited for, too."""

    async def exits(event: CommitEvent) -> None:
        raise SystemExit(3)

    async def cancels(event: CommitEvent) -> None:
        waiting = asyncio.create_task(anyio.sleep_forever())
        waiting.cancel()
        await waiting

    for hooks in ([exits], [cancels], [exits, cancels]):
        async with Repository.create(memory_url(), after_commit=hooks) as repository:
            await begin(repository)
            found = sorted(it.hook for it in repository.hook_failures)
            assert found == sorted(it.__name__ for it in hooks)


async def test_a_cancelled_hook_leaves_the_commit() -> None:
    """The caller gave up while the hook ran."""
    begun = asyncio.Event()

    async def waits(event: CommitEvent) -> None:
        begun.set()
        await anyio.sleep_forever()

    url = memory_url()
    async with Repository.create(url) as first:
        await begin(first)
    async with Repository.open(url, after_commit=[waits]) as repository:
        task = asyncio.create_task(commit(repository, "main", c5=5))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        session = await repository.readonly_session("main")
        assert await read(session, "a/c/5") == b"\x05"


async def test_what_cannot_be_called_is_refused() -> None:
    """When the repository is opened."""
    with pytest.raises(InvalidInputError, match="is no hook"):
        async with Repository.create(memory_url(), after_commit=["mail"]):  # type: ignore[list-item]
            pass
