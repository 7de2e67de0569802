"""Reading a branch as of a time: what it was then, whatever was done to it since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async._runtime import clock
from icechunk_async.errors import SnapshotNotFoundError
from tests.helpers import group_document, memory_url, objects, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.format.ids import SnapshotId

HOUR_US = 3_600_000_000
BEGAN_US = 1_700_000_000_000_000


class Hands(clock.SystemClock):
    """A clock that is set by hand, and ticks a little each time that it is read."""

    def __init__(self) -> None:
        """Begin at hour 0."""
        self.now = BEGAN_US

    def now_us(self) -> int:
        """Return the time, a microsecond later each time."""
        self.now += 1
        return self.now

    def set(self, hour: float) -> None:
        """Set it to an hour."""
        self.now = BEGAN_US + int(hour * HOUR_US)


@pytest.fixture
def hands() -> Iterator[Hands]:
    """Decide the time."""
    with clock.use_clock(hands := Hands()):
        yield hands


async def commit(
    repository: Repository, hands: Hands, hour: int, branch: str = "main"
) -> SnapshotId:
    """Commit at an hour."""
    hands.set(hour)
    session = await repository.writable_session(branch)
    await write(session, "zarr.json", group_document(hour=hour))
    return await session.commit(f"hour {hour}")


async def tip(repository: Repository, hour: float, branch: str = "main") -> SnapshotId | str:
    """Return the snapshot read as of half an hour after an hour, or the reason for none."""
    moment = clock.from_us(BEGAN_US + int((hour + 0.5) * HOUR_US))
    try:
        return (await repository.readonly_session(branch, as_of=moment)).snapshot_id
    except SnapshotNotFoundError as error:
        return "dropped" if "dropped from the history" in str(error) else "none yet"


async def tips(repository: Repository, count: int) -> list[SnapshotId | str]:
    """Return the snapshots read of ``main`` for the first hours."""
    return [await tip(repository, hour) for hour in range(count)]


def kept(entries: int) -> RepositoryConfig:
    """Return a configuration with which the log continues in backups after some entries."""
    return RepositoryConfig(num_updates_per_repo_info_file=entries)


@pytest.mark.parametrize("entries", [1, 2, 1000])  # in the repo object, before backups are read
async def test_a_reset_changes_nothing_of_the_time_before_it(hands: Hands, entries: int) -> None:
    """The branch was at commits that its ancestry does not have any more."""
    async with Repository.create(memory_url(), config=kept(entries)) as repository:
        root = await repository.lookup_branch("main")
        a, b = [await commit(repository, hands, hour) for hour in (1, 2)]
        hands.set(3)
        await repository.reset_branch("main", a)
        c = await commit(repository, hands, 4)
        hands.set(5)
        await repository.reset_branch("main", b)
        for number in range(3):  # changes of other things say nothing about it
            await repository.create_branch(f"other {number}", a)
        assert await tips(repository, 7) == [root, a, b, a, c, b, b]
        assert await tip(repository, -2) == "none yet"


async def test_format_1_knows_the_ancestry_of_now(hands: Hands) -> None:
    """It has no log: before a reset it tells what the branch would have had."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        root = await repository.lookup_branch("main")
        a, _ = [await commit(repository, hands, hour) for hour in (1, 2)]
        hands.set(3)
        await repository.reset_branch("main", a)
        assert (await tips(repository, 4))[1:] == [a, a, a]
        assert await tip(repository, -2) in (root, "none yet")


async def test_an_amended_commit_was_the_tip_until_then(hands: Hands) -> None:
    """Its replacement has the same parent."""
    async with Repository.create(memory_url()) as repository:
        root = await repository.lookup_branch("main")
        a = await commit(repository, hands, 1)
        hands.set(2)
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document(hour=2))
        b = await session.amend("amended")
        assert await tips(repository, 3) == [root, a, b]


@pytest.mark.parametrize("entries", [1, 1000])
async def test_what_expired_is_not_replaced_by_something_older(hands: Hands, entries: int) -> None:
    """The log still says that the branch was at a snapshot that is gone."""
    async with Repository.create(memory_url(), config=kept(entries)) as repository:
        root = await repository.lookup_branch("main")
        made = [await commit(repository, hands, hour) for hour in range(1, 5)]
        hands.set(5)
        await repository.expire_snapshots(clock.from_us(BEGAN_US + int(3.5 * HOUR_US)))
        assert await tips(repository, 6) == [root, *["dropped"] * 3, made[3], made[3]]


async def test_a_reset_over_expired_snapshots_is_told(hands: Hands) -> None:
    """Where the branch came from expired, and where it went to did not."""
    async with Repository.create(memory_url()) as repository:
        root = await repository.lookup_branch("main")
        a, _ = [await commit(repository, hands, hour) for hour in (1, 2)]
        await repository.create_tag("kept", a)
        hands.set(3)
        await repository.reset_branch("main", a)
        c = await commit(repository, hands, 4)
        hands.set(5)
        await repository.expire_snapshots(clock.from_us(BEGAN_US + int(4.5 * HOUR_US)))
        assert await tips(repository, 6) == [root, a, "dropped", a, c, c]


async def test_a_branch_has_the_history_of_what_it_was_created_at(hands: Hands) -> None:
    """Unless there was another of that name before, which counts for its own time."""
    async with Repository.create(memory_url()) as repository:
        root = await repository.lookup_branch("main")
        a, b = [await commit(repository, hands, hour) for hour in (1, 2)]
        hands.set(3)
        await repository.create_branch("x", a)
        c = await commit(repository, hands, 4, "x")
        assert [await tip(repository, hour, "x") for hour in range(5)] == [root, a, a, a, c]
        hands.set(5)
        await repository.delete_branch("x")
        hands.set(6)
        await repository.create_branch("x", b)
        found = [await tip(repository, hour, "x") for hour in range(7)]
        assert found == [root, a, a, a, c, b, b]


async def test_a_log_that_was_cut_off_leaves_the_ancestry(hands: Hands) -> None:
    """Somebody removed the backups in which it continues."""
    async with Repository.create(memory_url(), config=kept(1)) as repository:
        root = await repository.lookup_branch("main")
        a, b = [await commit(repository, hands, hour) for hour in (1, 2)]
        storage = repository.storage
        await storage.delete([key for key in await objects(storage) if "overwritten/" in key])
        assert await tips(repository, 3) == [root, a, b]
