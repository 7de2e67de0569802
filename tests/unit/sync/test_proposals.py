"""Proposals, protection, and merges settled by hand, for code that blocks."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import sync
from icechunk_async.proposals import ProposalState
from icechunk_async.sync.versions import Check
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.results import CommitEvent
    from icechunk_async.sync.versions import Proposal


@pytest.fixture
def repository() -> Iterator[sync.Repository]:
    """Open a repository with an array, and a branch ``side`` that changed it."""
    with sync.Repository.create(memory_url()) as repository:
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="a", data=np.zeros(10), chunks=(2,))
        repository.create_branch("side", session.commit("base"))
        write(repository, "side", 1.0)
        yield repository


def write(repository: sync.Repository, branch: str, value: float) -> None:
    """Commit the first chunk of the array to a branch."""
    session = repository.writable_session(branch)
    zarr.open_array(session.store, path="a")[:2] = value
    session.commit(f"{value}")


def value(session: Any) -> float:
    """Return the first value that a session sees."""
    found: Any = zarr.open_array(session.store, path="a", mode="r")[0]
    return float(found)


def positive(session: sync.Session, proposal: Proposal) -> str | None:
    """Look at the merged state, blocking."""
    assert proposal.into == "main"
    assert session.read_only
    return None if value(session) > 0 else "not positive"


def test_plain_functions_check_the_merged_state(repository: sync.Repository) -> None:
    """They get the facade's session and proposal, and may block."""
    repository.protect_branch("main", checks=["positive"])
    assert repository.protected_branches() == {"main": frozenset({"positive"})}
    with pytest.raises(sync.IcechunkError, match="is protected"):
        repository.writable_session("main")
    proposal = repository.propose("side", checks=[positive])
    assert proposal.passed
    assert [it.name for it in proposal.results] == ["positive"]
    assert value(proposal.session()) == 1.0
    assert value(repository.readonly_session("main")) == 0.0
    assert [it.id for it in repository.proposals()] == [proposal.id]
    assert "<h1>" in proposal.page()
    published = repository.proposal(proposal.id).accept()
    assert published == repository.lookup_branch("main")
    proposal.reload()
    assert proposal.state is ProposalState.ACCEPTED
    repository.unprotect_branch()
    write(repository, "main", 5.0)


def test_failures_and_async_checks(repository: sync.Repository) -> None:
    """Errors are the facade's."""

    async def later(session: sync.Session, proposal: Proposal) -> str | None:
        await asyncio.sleep(0)
        return f"at {session.snapshot_id}"

    proposal = repository.propose("side", checks=[Check("later", later)])
    with pytest.raises(
        sync.IcechunkError, match=f"'later' failed .at {proposal.candidate.snapshot_id}"
    ):
        proposal.accept()
    assert not proposal.passed
    proposal.run_checks([Check("later", positive)])
    proposal.refresh()
    proposal.close("no")
    assert (proposal.state, proposal.reason) == (ProposalState.CLOSED, "no")
    with pytest.raises(sync.IcechunkError, match="was closed"):
        proposal.accept()


async def test_every_method_has_an_awaitable_twin(repository: sync.Repository) -> None:
    """On any loop."""
    proposal = await repository.propose_async("side", checks=[positive])
    await proposal.reload_async()
    assert await proposal.accept_async() == await repository.lookup_branch_async("main")


def test_a_merge_is_settled_by_hand(repository: sync.Repository) -> None:
    """In a session of the facade."""
    write(repository, "main", 2.0)
    pending = repository.begin_merge("side")
    (conflict,) = pending.conflicts
    assert pending.report.conflicts == (conflict,)
    cells = next(iter(pending.cells(conflict)))
    assert set(cells.before.tolist()) == {2.0}
    with pytest.raises(sync.IcechunkError, match="are open"):
        pending.commit()
    zarr.open_array(pending.session.store, path="a")[:2] = 3.0
    pending.resolved(conflict)
    merged = pending.commit("by hand")
    assert merged == repository.lookup_branch("main")
    assert value(repository.readonly_session("main")) == 3.0
    write(repository, "side", 4.0)
    other = repository.begin_merge("side")
    other.take_source()
    resumed = repository.resume_merge(other.to_bytes())
    assert resumed.conflicts == ()
    resumed.commit()
    assert value(repository.readonly_session("main")) == 4.0
    write(repository, "side", 6.0)
    write(repository, "main", 7.0)
    kept = repository.begin_merge("side")
    kept.keep_branch()
    assert kept.conflicts == ()


def test_plain_functions_are_told_of_commits() -> None:
    """They run in threads; those that fail undo nothing, and none travels."""
    told: list[tuple[str, str, str]] = []

    def note(event: CommitEvent) -> None:
        time.sleep(0)  # it may block
        told.append((event.kind, event.branch, str(event.snapshot.id)))

    def broken(event: CommitEvent) -> None:
        raise RuntimeError("no mail")

    url = memory_url()
    with sync.Repository.create(url, after_commit=[note, broken]) as repository:
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="a", data=np.zeros(4))
        tip = session.commit("base")
        assert told == [("commit", "main", tip)]
        assert [it.error for it in repository.hook_failures] == ["RuntimeError: no mail"]
        again = pickle.loads(pickle.dumps(repository))
        assert again.hook_failures == []
        again.close()
