"""Many proposers and committers at once: no state is ever visible that did not pass its checks."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import (
    BranchProtectedError,
    ChecksFailedError,
    ConflictError,
)
from icechunk_async.storage import open_storage
from tests.helpers import memory_url
from tests.unit.engine.proposals.places import begin, commit, contents

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import SnapshotId
    from icechunk_async.proposals import Proposal
    from icechunk_async.session import Session

WRITERS = 32


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where a repository can be made."""
    return memory_url() if request.param == "memory" else f"{tmp_path}/repository"


async def watched(repository: Repository, seen: set[SnapshotId]) -> None:
    """Note every tip of ``main`` that can be seen."""
    while True:
        seen.add(await repository.lookup_branch("main"))
        await asyncio.sleep(0)


async def accept(proposal: Proposal) -> bool:
    """Accept a proposal; return whether its checks let it."""
    while True:
        try:
            await proposal.accept()
        except ConflictError:  # others were first, each time it was tried
            continue
        except ChecksFailedError:
            return False
        return True


async def test_a_limit_on_the_whole_holds_whoever_is_first(url: str) -> None:
    """Each change alone is well, and only ten together are: exactly ten get in."""

    async def at_most_ten(session: Session, proposal: Proposal) -> str | None:
        del proposal
        found = await contents(session)
        return None if len(found) <= 10 else f"{len(found)} chunks"

    async with AsyncExitStack() as stack:
        repository = await stack.enter_async_context(Repository.create(url))
        base = await begin(repository)
        await repository.protect_branch("main", checks=["at_most_ten"])
        seen: set[SnapshotId] = set()
        watcher = asyncio.create_task(watched(repository, seen))

        async def propose(number: int) -> bool:
            # Every other writer shares nothing with the rest of the process, as another machine.
            place = url if number % 2 else await stack.enter_async_context(open_storage(url))
            mine = await stack.enter_async_context(Repository.open(place))
            await mine.create_branch(f"side-{number}", base)
            await commit(mine, f"side-{number}", **{f"c{number}": 1})
            with pytest.raises(BranchProtectedError):
                await commit(mine, "main", c39=1)
            proposal = await mine.propose(f"side-{number}", checks=[at_most_ten])
            assert proposal.passed or len(await contents(await proposal.session())) > 10
            return await accept(proposal)

        accepted = await asyncio.gather(*(propose(it) for it in range(WRITERS)))
        watcher.cancel()
        assert sum(accepted) == 10
        seen |= {info.id async for info in repository.ancestry(branch="main")}
        for snapshot_id in seen:
            session = await repository.readonly_session(snapshot_id=snapshot_id)
            assert len(await contents(session)) <= 10
        found = await contents(await repository.readonly_session("main"))
        assert set(found) == {it for it, landed in enumerate(accepted) if landed}
        ended = {it.id for it in await repository.proposals(include_ended=True)}
        assert len(ended - {it.id for it in await repository.proposals()}) == 10


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.thorough)])
async def test_no_state_becomes_visible_that_failed(url: str, seed: int) -> None:
    """Checks fail at random, and every state that was ever seen is one that passed."""
    chance = random.Random(seed)
    passed: set[SnapshotId] = set()

    async def moody(session: Session, proposal: Proposal) -> str | None:
        del proposal
        await asyncio.sleep(0)
        if chance.random() < 0.4:
            return "not today"
        passed.add(session.snapshot_id)
        return None

    async with Repository.create(url) as repository:
        base = await begin(repository)
        passed.add(base)
        seen: set[SnapshotId] = {base}
        await repository.protect_branch()
        watcher = asyncio.create_task(watched(repository, seen))

        async def propose(number: int) -> bool:
            async with Repository.open(url) as mine:
                await mine.create_branch(f"side-{number}", base)
                await commit(mine, f"side-{number}", **{f"c{number}": 1})
                return await accept(await mine.propose(f"side-{number}", checks=[moody]))

        accepted = await asyncio.gather(*(propose(it) for it in range(WRITERS)))
        watcher.cancel()
        seen |= {
            info.id
            async for info in repository.ancestry(branch="main")
            if info.parent_id is not None
        }
        assert seen <= passed
        assert 0 < sum(accepted) < WRITERS
        found = await contents(await repository.readonly_session("main"))
        assert set(found) == {it for it, landed in enumerate(accepted) if landed}
