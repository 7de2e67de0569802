"""The record of transactions is bounded, and can be told to forget; within it once is once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Transaction
from icechunk_async._runtime import clock
from icechunk_async.engine.commit.once import Record, RecordedTransaction, newest_transactions
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId
from tests.helpers import write

if TYPE_CHECKING:
    from icechunk_async import Repository

NEWEST, TIMES = "spark-transactions", "spark-transaction-times"
DAY = 86_400
HERE = SnapshotId(b"s" * 12)


class _Clock(clock.SystemClock):
    """A clock that a test sets, in seconds."""

    seconds = 1_700_000_000

    def now_us(self) -> int:
        """Return the time that was set."""
        return self.seconds * 1_000_000


def _record(times: dict[str, int | None]) -> Record:
    newest = {
        name: RecordedTransaction(1, None if at is None else datetime.fromtimestamp(at, UTC))
        for name, at in times.items()
    }
    return Record(HERE, HERE, newest)


def _names(record: Record, app_id: str) -> set[str]:
    """Return the names that a commit on top records."""
    properties = record.properties_with(Transaction(app_id, 2))
    found = newest_transactions(properties)
    assert found is not None
    assert found[app_id] == RecordedTransaction(2, datetime.fromtimestamp(_Clock.seconds, UTC))
    return set(found)


def test_names_are_kept_for_thirty_days_and_a_hundred_at_most() -> None:
    """The oldest go first; one that commits again is new. Names without a time count as new."""
    now = _Clock.seconds
    with clock.use_clock(_Clock()):
        assert _names(_record({"old": now - 30 * DAY, "older": now - 30 * DAY - 1}), "a") == {
            "a",
            "old",
        }
        assert _names(_record({"old": now - 40 * DAY}), "old") == {"old"}
        many = _record({f"{number:03}": now - number for number in range(150)})
        assert _names(many, "a") == {"a", *(f"{number:03}" for number in range(99))}
        assert _names(many, "149") == {"149", *(f"{number:03}" for number in range(99))}
        untimed: dict[str, int | None] = {"untimed": None}
        assert _names(_record({**untimed, "old": now - 31 * DAY}), "a") == {"a", "untimed"}
        again = _record({"untimed": None}).properties_with(Transaction("a", 1))
        assert again[TIMES] == [now, now]


def test_a_thousand_names_cost_a_snapshot_no_more_than_a_hundred() -> None:
    """Bytes of its properties as JSON; with all names it would be ten times as many."""
    hands, record = _Clock(), Record(HERE, HERE, {})
    sizes: dict[int, int] = {}
    with clock.use_clock(hands):
        for number in range(1, 1001):
            hands.seconds += 60
            properties = record.properties_with(Transaction(f"job-{number:016}", number))
            sizes[number] = len(json.dumps(properties))
            record = Record(HERE, HERE, newest_transactions(properties) or {})
    assert sizes[1000] < sizes[100] * 1.1 < 5_000


@pytest.mark.parametrize("time", [True, "noon", 1.5, 1 << 80, -(1 << 80), None])
def test_times_that_are_none_are_unknown(time: object) -> None:
    """Anybody can write properties of a snapshot."""
    found = newest_transactions({NEWEST: {"a": 3}, TIMES: [time]})  # type: ignore[list-item]
    assert found == {"a": RecordedTransaction(3)}
    assert newest_transactions({NEWEST: {"a": 3}, TIMES: [1, 2]}) == {"a": RecordedTransaction(3)}


async def test_forgotten_by_number_and_by_age_is_committed_again(filled: Repository) -> None:
    """Names that are recorded are not; no commit has more than a hundred."""
    hands = _Clock()
    with clock.use_clock(hands):
        for number in range(120):
            hands.seconds += 1
            session = await filled.writable_session("main")
            await session.commit("one", allow_empty=True, once=Transaction(f"job {number}", 0))
        known = await filled.recorded_transactions()
        assert list(known) == sorted(f"job {number}" for number in range(20, 120))
        for name, made in (("job 20", False), ("job 19", True)):
            session = await filled.writable_session("main")
            await session.commit("again", allow_empty=True, once=Transaction(name, 0))
            assert session.already_committed != made
        hands.seconds += 31 * DAY
        session = await filled.writable_session("main")
        await session.commit("later", allow_empty=True, once=Transaction("a", 0))
        assert list(await filled.recorded_transactions()) == ["a"]


async def test_names_can_be_forgotten(filled: Repository) -> None:
    """In a commit that changes nothing else, on top of what others committed meanwhile."""
    for name in ("a", "b", "c"):
        session = await filled.writable_session("main")
        await session.commit(name, allow_empty=True, once=Transaction(name, 7))
    with pytest.raises(InvalidInputError, match="records no transaction of 'x'"):
        await filled.forget_transactions(["a", "x"])
    tip = await filled.forget_transactions("a")
    assert tip == await filled.lookup_branch("main")
    known = await filled.recorded_transactions("main")
    assert {it: found.version for it, found in known.items()} == {"b": 7, "c": 7}
    assert (await filled.diff(from_branch="main", to_snapshot_id=tip)).is_empty()
    session = await filled.writable_session("main")
    await session.commit("again", allow_empty=True, once=Transaction("a", 0))
    assert not session.already_committed
    await filled.forget_transactions(iter(["a", "b", "c"]))
    assert await filled.recorded_transactions() == {}
    session = await filled.writable_session("main")
    await session.commit("again", allow_empty=True, once=Transaction("b", 7))
    assert not session.already_committed


async def test_forgetting_loses_no_race(filled: Repository) -> None:
    """Another transaction lands between: it stays recorded, and so does its work."""
    session = await filled.writable_session("main")
    await session.commit("a", allow_empty=True, once=Transaction("a", 1))
    slow = await filled.writable_session("main")
    other = await filled.writable_session("main")
    await write(other, "a/c/5", b"5")
    await other.commit("b", once=Transaction("b", 1))
    await slow.publisher.forget({"a"})
    known = await filled.recorded_transactions()
    assert {it: found.version for it, found in known.items()} == {"b": 1}
    assert [it.message async for it in filled.ancestry(branch="main")][:2] == [
        "Forgot the transactions of a",
        "b",
    ]
