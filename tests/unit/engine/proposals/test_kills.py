"""Killed at each write of proposing and accepting: nothing is half visible, and it can be ended."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.config import RepositoryConfig, StorageRetriesSettings, StorageSettings
from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PermissionDeniedError,
    ProposalStateError,
)
from icechunk_async.proposals import ProposalState
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import memory_url
from tests.unit.engine.proposals.places import Counting, begin, commit, contents

if TYPE_CHECKING:
    from icechunk_async import SnapshotId
    from icechunk_async.storage import Data, Expected, Storage, Version

ONE_TRY = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))


class Dying(WrappedStorage):
    """Is dead from one write on, before or after that write is carried out."""

    def __init__(self, storage: Storage, writes: int, *, carried_out: bool) -> None:
        super().__init__(storage)
        self.left = writes
        self.carried_out = carried_out
        self.dead = False

    async def before(self, operation: str, key: str) -> None:
        """Refuse if the process is dead."""
        if self.dead:
            raise PermissionDeniedError("dead (on purpose)")
        if operation == "copy":
            self._count()
            if self.dead and not self.carried_out:
                raise PermissionDeniedError("dead (on purpose)")

    def _count(self) -> None:
        self.left -= 1
        self.dead = self.left < 0

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write, or die."""
        await self.before("put", key)
        self._count()
        if not self.dead:
            return await self.wrapped.put(key, data, if_version=if_version)
        if self.carried_out:
            await self.wrapped.put(key, data, if_version=if_version)
        raise OutcomeUnknownError("no answer (on purpose)", key=key)


async def check_whole(repository: Repository, base: SnapshotId, check: Counting) -> None:
    """Assert that ``main`` has all of the proposal, checked, or nothing."""
    tip = await repository.lookup_branch("main")
    found = await contents(await repository.readonly_session("main"))
    if tip == base:
        assert found == {}
    else:
        assert found == {1: 1, 2: 2}
        assert tip in check.seen
        assert (await repository.lookup_snapshot(tip)).parent_id == base


@pytest.mark.sampled
@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("spec", [1, 2])
async def test_a_kill_while_proposing_leaves_the_branch_and_a_whole_proposal(
    spec: int, *, carried_out: bool
) -> None:
    """The branch is unchanged; a proposal that is there can be accepted."""
    for writes in range(100):
        url = memory_url()
        async with Repository.create(url, spec_version=spec) as repository:
            base = await begin(repository, "side")
            await commit(repository, "side", c1=1, c2=2)
            check = Counting()
            async with open_storage(url) as storage:
                dying = Dying(storage, writes, carried_out=carried_out)
                async with Repository.open(dying, config=ONE_TRY) as killed:
                    with suppress(IcechunkError):
                        await killed.propose("side", checks=[check])
            assert await repository.lookup_branch("main") == base
            open_ones = await repository.proposals()
            assert len(open_ones) <= 1
            proposal = (
                open_ones[0] if open_ones else await repository.propose("side", checks=[check])
            )
            await proposal.accept(checks=[check])
            assert await repository.lookup_branch("main") != base
            await check_whole(repository, base, check)
            if not dying.dead:
                assert writes > 5
                return
    raise AssertionError("it makes endless requests")


@pytest.mark.sampled
@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("spec", [1, 2])
async def test_a_kill_while_accepting_publishes_once_or_not_at_all(
    spec: int, *, moved: bool, carried_out: bool
) -> None:
    """It landed whole or not at all, and accepting again ends it, once."""
    for writes in range(100):
        url = memory_url()
        async with Repository.create(url, spec_version=spec) as repository:
            base = await begin(repository, "side")
            await commit(repository, "side", c1=1, c2=2)
            check = Counting()
            proposal_id = (await repository.propose("side", checks=[check])).id
            if moved:
                base = await commit(repository, "main", c1=1)
            async with open_storage(url) as storage:
                dying = Dying(storage, writes, carried_out=carried_out)
                async with Repository.open(dying, config=ONE_TRY) as killed:
                    with suppress(IcechunkError):
                        await (await killed.proposal(proposal_id)).accept(checks=[check])
            tip = await repository.lookup_branch("main")
            if tip == base and moved:
                found = await contents(await repository.readonly_session("main"))
                assert found == {1: 1}
            else:
                await check_whole(repository, base, check)
            proposal = await repository.proposal(proposal_id)
            if proposal.state is ProposalState.ACCEPTED:
                assert tip != base
                with pytest.raises(ProposalStateError):
                    await proposal.accept(checks=[check])
            else:
                published = await proposal.accept(checks=[check])
                assert tip in {base, published}
            assert (await repository.proposal(proposal_id)).state is ProposalState.ACCEPTED
            await check_whole(repository, base, check)
            if not dying.dead:
                assert writes > 2
                return
    raise AssertionError("it makes endless requests")
