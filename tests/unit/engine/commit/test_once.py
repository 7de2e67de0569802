"""Exactly-once commits: a transaction lands on a branch once, however often it is tried."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import pytest

from icechunk_async import Repository, RepositoryConfig, Transaction
from icechunk_async.config import StorageRetriesSettings, StorageSettings
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.errors import (
    ConflictError,
    InvalidInputError,
    NothingToCommitError,
    OutcomeUnknownError,
    ReadOnlyError,
    RebaseFailedError,
    StorageUnavailableError,
)
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import group_document, make_array, memory_url, read, write

if TYPE_CHECKING:
    from icechunk_async import Session
    from icechunk_async.storage import Data, Expected, Storage, Version

# The stored names: streams that began with earlier versions must be recognised for ever.
NEWEST, OWN = "spark-transactions", "spark-transaction"
TIMES = "spark-transaction-times"
HELD = {NEWEST: {"daily": 7}}
ONCE = Transaction("daily", 8)


async def begin(repository: Repository, chunk: int = 2, data: bytes = b"data") -> Session:
    """Begin a session that wrote a chunk."""
    session = await repository.writable_session("main")
    await write(session, f"a/c/{chunk}", data)
    return session


async def messages(repository: Repository) -> list[str]:
    """Return the messages of the main branch, newest first."""
    return [info.message async for info in repository.ancestry(branch="main")]


@pytest.mark.parametrize(("app_id", "version"), [("", 0), ("daily", -1), ("daily", 1 << 63)])
def test_transaction_without_a_name_or_a_storable_version_is_refused(
    app_id: str, version: int
) -> None:
    """An empty name would make applications share their versions."""
    with pytest.raises(InvalidInputError, match="A transaction needs"):
        Transaction(app_id, version)


async def test_commit_records_its_transaction_under_the_stored_names(filled: Repository) -> None:
    """Beside those of other applications; properties of the caller stay."""
    await (await begin(filled)).commit("other", once=Transaction("hourly", 3))
    session = await begin(filled)
    tip = await session.commit("daily", {"by": "me"}, once=ONCE)
    info = await filled.lookup_snapshot(tip)
    second = int(info.written_at.timestamp())
    assert info.metadata[TIMES] == [second, pytest.approx(second, abs=60)]
    assert {name: it for name, it in info.metadata.items() if name != TIMES} == {
        "by": "me",
        NEWEST: {"hourly": 3, "daily": 8},
        OWN: {"app-id": "daily", "version": 8},
    }
    assert not session.already_committed


@pytest.mark.parametrize("version", [7, 8])
async def test_transaction_on_the_branch_is_not_committed_again(
    filled: Repository, version: int
) -> None:
    """An older version is not committed either. The session reads the snapshot of the record."""
    landed = await (await begin(filled)).commit("first", once=ONCE)
    again = await begin(filled, 3)
    assert await again.commit("again", once=Transaction("daily", version)) == landed
    assert again.already_committed
    assert again.read_only
    assert (again.snapshot_id, again.has_uncommitted_changes) == (landed, False)
    assert await read(again, "a/c/2") == b"data"
    assert await read(again, "a/c/3") is None
    with pytest.raises(ReadOnlyError, match="committed"):
        await again.commit("once more", once=ONCE)
    assert (await messages(filled))[:2] == ["first", "filled"]


async def test_newer_and_other_transactions_are_committed(filled: Repository) -> None:
    """Versions of one application say nothing of another."""
    for once in (ONCE, Transaction("daily", 9), Transaction("hourly", 1)):
        session = await begin(filled)
        await session.commit(f"{once.app_id} {once.version}", once=once)
        assert not session.already_committed
    assert (await messages(filled))[:3] == ["hourly 1", "daily 9", "daily 8"]


async def test_session_without_changes_finds_its_transaction_before_it_is_refused(
    filled: Repository,
) -> None:
    """A batch of no rows is recorded only where an empty commit is asked for."""
    empty = await filled.writable_session("main")
    with pytest.raises(NothingToCommitError):
        await empty.commit("empty", once=ONCE)
    landed = await empty.commit("empty", once=ONCE, allow_empty=True)
    assert await (await filled.writable_session("main")).commit("again", once=ONCE) == landed


@pytest.mark.parametrize("solver", [None, ConflictDetector(), BasicConflictSolver()])
async def test_loser_of_a_race_between_two_tries_returns_the_winner(
    filled: Repository, solver: BasicConflictSolver | None
) -> None:
    """No solver is consulted, and nothing is committed twice."""
    one, other = await begin(filled), await begin(filled)
    landed = await one.commit("one", once=ONCE)
    assert await other.commit("other", once=ONCE, rebase_with=solver) == landed
    assert other.already_committed
    assert (await messages(filled))[:2] == ["one", "filled"]


async def test_lost_race_with_others_is_still_a_conflict(filled: Repository) -> None:
    """Clashing changes still fail a rebase. The session keeps its changes."""
    session = await begin(filled)
    await (await begin(filled)).commit("others", once=Transaction("hourly", 1))
    with pytest.raises(ConflictError):
        await session.commit("mine", once=ONCE)
    with pytest.raises(RebaseFailedError):
        await session.commit("mine", once=ONCE, rebase_with=ConflictDetector())
    assert session.has_uncommitted_changes
    await session.commit("mine", once=ONCE, rebase_with=BasicConflictSolver())
    assert (await messages(filled))[:3] == ["mine", "others", "filled"]


async def test_rebased_transaction_records_those_of_the_winner(filled: Repository) -> None:
    """The record is that of the snapshot which the commit lands on."""
    session = await begin(filled)
    await (await begin(filled, 3)).commit("others", once=Transaction("hourly", 1))
    tip = await session.commit("mine", once=ONCE, rebase_with=ConflictDetector())
    found = (await filled.lookup_snapshot(tip)).metadata
    assert found[NEWEST] == {"hourly": 1, "daily": 8}


class TwinDuringRebase:
    """Commits the same transaction elsewhere while it decides, then gives up."""

    def __init__(self, repository: Repository) -> None:
        """Commit to this repository."""
        self.repository = repository

    async def solve(self, clash: object) -> list[object]:
        """Be first once more."""
        del clash
        await (await begin(self.repository, 4)).commit("twin", once=ONCE)
        raise RebaseFailedError("the solver gave up")


async def test_twin_that_lands_during_a_rebase_is_found(filled: Repository) -> None:
    """A failed rebase asks once more before it says so."""
    session = await begin(filled)
    await (await begin(filled)).commit("others")
    await session.commit("mine", once=ONCE, rebase_with=TwinDuringRebase(filled))  # type: ignore[arg-type]
    assert session.already_committed
    assert (await messages(filled))[:3] == ["twin", "others", "filled"]


REFERENCES = ("repo", "refs/branch.main/ref.json")
ONE_TRY = RepositoryConfig(storage=StorageSettings(retries=StorageRetriesSettings(max_tries=1)))
"""For a storage that stays silent: the pauses between tries take real time."""


class Silent(WrappedStorage):
    """Gives no answer to writes of a reference, nor to any read from then on."""

    def __init__(self, storage: Storage, fate: Literal["landed", "lost", "late"]) -> None:
        super().__init__(storage)
        self.fate = fate
        self.silent = False
        self.late: list[tuple[str, bytes, Expected]] = []

    async def before(self, operation: str, key: str) -> None:
        """Refuse reads once a write got no answer."""
        if self.silent and operation.startswith("get"):
            raise StorageUnavailableError("gone silent")

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write a reference, lose it, or keep it for later; and say nothing."""
        if key not in REFERENCES:
            return await self.wrapped.put(key, data, if_version=if_version)
        if self.fate == "landed":
            await self.wrapped.put(key, data, if_version=if_version)
        elif self.fate == "late":
            self.late.append((key, bytes(data), if_version))
        self.silent = True
        raise OutcomeUnknownError("no reply")


async def prepare(storage: Storage, spec: int) -> None:
    """Create a repository with an array."""
    async with Repository.create(storage, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        await session.commit("array")


@pytest.mark.parametrize("fate", ["landed", "lost", "late"])
async def test_new_session_after_a_lost_reply_commits_once(
    spec: int, fate: Literal["landed", "lost", "late"]
) -> None:
    """A restarted process knows nothing of the earlier try."""
    async with open_storage(memory_url()) as plain:
        await prepare(plain, spec)
        silent = Silent(plain, fate)
        async with Repository.open(silent, config=ONE_TRY) as repository:
            session = await begin(repository)
            with pytest.raises(OutcomeUnknownError):
                await session.commit("try", once=ONCE)
        async with Repository.open(plain) as repository:
            again = await begin(repository)
            for key, data, if_version in silent.late:  # between the session's begin and its commit
                await plain.put(key, data, if_version=if_version)
            await again.commit("try", once=ONCE)
            assert again.already_committed == (fate != "lost")
            assert await messages(repository) == ["try", "array", "Repository initialized"]


async def test_snapshot_amended_away_in_doubt_is_recognised_by_its_transaction() -> None:
    """The commit landed unheard and somebody amended it: its id is gone, its record is not."""
    async with open_storage(memory_url()) as plain:
        await prepare(plain, 2)
        silent = Silent(plain, "landed")
        async with Repository.open(silent, config=ONE_TRY) as unlucky:
            session = await begin(unlucky)
            with pytest.raises(OutcomeUnknownError):
                await session.commit("try", once=ONCE)
            async with Repository.open(plain) as repository:
                amended = await (await begin(repository, 3)).amend("amended")
            silent.silent = False
            assert await session.commit("try", once=ONCE) == amended
        async with Repository.open(plain) as repository:
            assert await messages(repository) == ["amended", "array", "Repository initialized"]


async def test_transaction_is_found_below_commits_that_record_none(filled: Repository) -> None:
    """Commits of other libraries have no record. The walk continues to the nearest one."""
    landed = await (await begin(filled)).commit("held", once=ONCE)
    for number in range(3):
        await _commit_without_record(filled, f"official {number}")
    again = await begin(filled, 3)
    assert await again.commit("again", once=ONCE) == landed
    tip = await (await begin(filled, 3)).commit("next", once=Transaction("hourly", 1))
    assert (await filled.lookup_snapshot(tip)).metadata[NEWEST] == {"daily": 8, "hourly": 1}


async def _commit_without_record(repository: Repository, message: str) -> None:
    """Commit as a library does that knows nothing of transactions: the property is not there."""
    session = await begin(repository, 9)
    await session.commit(message, {NEWEST: None})


async def test_expired_ancestry_does_not_forget_a_transaction(filled: Repository) -> None:
    """Later commits repeat the record, so that the tip is enough."""
    await (await begin(filled)).commit("held", once=ONCE)
    await (await begin(filled, 3)).commit("later")
    await filled.expire_snapshots(datetime.now(UTC))
    again = await begin(filled, 4)
    await again.commit("again", once=ONCE)
    assert again.already_committed
    assert (await messages(filled))[:1] == ["later"]


async def test_session_whose_base_expired_finds_its_transaction(filled: Repository) -> None:
    """It began before the transaction was committed elsewhere, and history was cut since."""
    session = await begin(filled, 4)
    await (await begin(filled)).commit("held", once=ONCE)
    await (await begin(filled, 3)).commit("later")
    await filled.expire_snapshots(datetime.now(UTC))
    await session.commit("again", once=ONCE, rebase_with=ConflictDetector())
    assert session.already_committed
    assert (await messages(filled))[:1] == ["later"]


async def test_later_snapshots_repeat_the_record(filled: Repository, spec: int) -> None:
    """Commits, also rebased ones, and amendments; other properties are not repeated."""
    behind = await filled.writable_session("main")
    await write(behind, "behind/zarr.json", group_document())
    session = await filled.writable_session("main")
    await session.commit("held", {**HELD, "by": "Spark"}, allow_empty=True)
    await behind.commit("rebased", {"by": "others"}, rebase_with=ConflictDetector())
    session = await filled.writable_session("main")
    await write(session, "g/zarr.json", group_document())
    tip = await (session.commit("more") if spec == 1 else session.amend("amended"))
    found = [info async for info in filled.ancestry(branch="main")]
    told = [
        {name: it for name, it in info.metadata.items() if not name.startswith("__")}
        for info in found
    ]
    assert told[0] == HELD
    if spec == 1:
        assert told[1] == {**HELD, "by": "others"}
    await filled.expire_snapshots(found[0].written_at)
    assert (await filled.lookup_snapshot(tip)).metadata == HELD
    session = await filled.writable_session("main")
    newer = {NEWEST: {"daily": 8}}
    newest = await session.commit("newer", newer, allow_empty=True)
    assert (await filled.lookup_snapshot(newest)).metadata == newer


@pytest.mark.parametrize("method", ["amend", "new_commit"])
async def test_rewritten_manifests_repeat_the_record(
    filled: Repository, spec: int, method: Literal["amend", "new_commit"]
) -> None:
    """The record must remain when older snapshots have expired."""
    if spec == 1 and method == "amend":
        pytest.skip("format version 1 has no amendments")
    session = await filled.writable_session("main")
    await session.commit("held", HELD, allow_empty=True)
    await filled.rewrite_manifests("rewritten", branch="main", commit_method=method)
    await filled.expire_snapshots(datetime.now(UTC))
    session = await filled.writable_session("main")
    await write(session, "g/zarr.json", group_document())
    tip = await filled.lookup_snapshot(await session.commit("more"))
    assert tip.metadata[NEWEST] == HELD[NEWEST]
