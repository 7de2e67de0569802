"""Exactly-once commits: which transactions of which applications a branch holds already.

A commit can name the transaction that it is. Its snapshot records the newest version of every
application that committed to the branch with one, and every later snapshot of this library
repeats that record. So the tip alone shows whether a transaction was committed, also after older
snapshots have expired; if another library committed since, the nearest snapshot of this one
does. A branch moves only from the snapshot whose record was read, so two commits of one
transaction cannot both land.

Every snapshot of the history holds the record, so it is bounded: a commit with a transaction leaves
out applications that have not committed for 30 days, and those that committed longest ago if there
are more than 100. What is forgotten can be committed again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from icechunk_async.engine.history import History
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot

__all__ = [
    "Record",
    "RecordedTransaction",
    "Transaction",
    "newest_transactions",
    "record_of",
    "repeated",
]

# Part of what is stored. The names are those of the first writer that committed this way, and
# stay so that its streams still recognise their batches.
_NEWEST: Final = "spark-transactions"
_TIMES: Final = "spark-transaction-times"
_OWN: Final = "spark-transaction"
# Every snapshot holds the list, so it must stay small.
_MAX_NAMES: Final = 100
_MAX_AGE_SECONDS: Final = 30 * 86_400
_MAX_VERSION: Final = (1 << 63) - 1
"""The largest integer that a snapshot's properties can hold."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Names a commit, so that committing it again changes nothing.

    A branch remembers the newest version of an application for 30 days, and until a hundred others
    have committed since. After that the same transaction counts as new.

    Attributes:
        app_id: names the application; the same whenever the same work is tried again.
        version: counts up from one commit of this application to the next.
    """

    app_id: str
    version: int

    def __post_init__(self) -> None:
        """Refuse an empty name and a version that cannot be stored."""
        if not self.app_id or not 0 <= self.version <= _MAX_VERSION:
            raise InvalidInputError(
                f"A transaction needs the name of an application and a version from 0, not "
                f"{self.app_id!r} and {self.version}."
            )


@dataclass(frozen=True, slots=True)
class RecordedTransaction:
    """The newest transaction of an application that a branch is known to hold.

    Attributes:
        version: its version.
        committed_at: when, by the clock of its writer, in whole seconds of UTC; None if a version
            of this library wrote it that did not record times.
    """

    version: int
    committed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """The transactions that a snapshot's ancestry holds.

    Attributes:
        at: the snapshot in question.
        found_at: the nearest snapshot with a record, ``at`` included; None if no snapshot has one.
        newest: the newest transaction of every application.
    """

    at: SnapshotId
    found_at: SnapshotId | None
    newest: Mapping[str, RecordedTransaction]

    def holds(self, transaction: Transaction) -> bool:
        """Return whether it holds a transaction, or a later one of the same application."""
        found = self.newest.get(transaction.app_id)
        return found is not None and found.version >= transaction.version

    def properties_with(self, transaction: Transaction) -> dict[str, JSON]:
        """Return the properties of a snapshot that commits a transaction on top of this one."""
        now = clock.now_us() // 1_000_000
        times = {it: _seconds(found, now) for it, found in self.newest.items()}
        kept = [it for it, at in times.items() if now - at <= _MAX_AGE_SECONDS]
        kept = [it for it in kept if it != transaction.app_id]
        # Of equal age, the order of the names decides: all writers drop the same ones.
        kept = sorted(kept, key=lambda it: (-times[it], it))[: _MAX_NAMES - 1]
        newest = {
            it: RecordedTransaction(self.newest[it].version, _moment(times[it])) for it in kept
        }
        newest[transaction.app_id] = RecordedTransaction(transaction.version, _moment(now))
        own: dict[str, JSON] = {"app-id": transaction.app_id, "version": transaction.version}
        return {**_properties(newest), _OWN: own}

    def properties_without(self, app_ids: Collection[str]) -> dict[str, JSON]:
        """Return the properties of a snapshot on top of this one that forgets some applications."""
        return _properties({it: found for it, found in self.newest.items() if it not in app_ids})


def _seconds(found: RecordedTransaction, now: int) -> int:
    """Return when a transaction was committed; now if nobody knows, so that its age counts on."""
    return now if found.committed_at is None else int(found.committed_at.timestamp())


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _properties(newest: Mapping[str, RecordedTransaction]) -> dict[str, JSON]:
    names = sorted(newest)
    versions: dict[str, JSON] = {it: newest[it].version for it in names}
    moments = [newest[it].committed_at for it in names]
    # Not by name once more: every snapshot of the history holds them.
    times: list[JSON] = [None if it is None else int(it.timestamp()) for it in moments]
    return {_NEWEST: versions, _TIMES: times}


def newest_transactions(
    properties: Mapping[str, JSON],
) -> dict[str, RecordedTransaction] | None:
    """Return the newest transaction of every application that a snapshot records.

    None if the snapshot has no record: its ancestors may have one.
    """
    found, given = properties.get(_NEWEST), properties.get(_TIMES)
    if not isinstance(found, dict):
        return None
    times = given if isinstance(given, list) and len(given) == len(found) else [None] * len(found)
    return {
        app_id: RecordedTransaction(version, _read_time(time))
        for (app_id, version), time in zip(sorted(found.items()), times, strict=True)
        if isinstance(version, int)
    }


def _read_time(value: JSON) -> datetime | None:
    """Return a recorded time; None for anything else, since anybody may write properties."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    try:
        return _moment(value)
    except (ValueError, OverflowError, OSError):
        return None


def repeated(base: Snapshot) -> dict[str, JSON]:
    """Return the properties that a snapshot on top of ``base``, or in its place, repeats."""
    return {it: base.metadata[it] for it in (_NEWEST, _TIMES) if it in base.metadata}


async def record_of(history: History, tip: SnapshotId, known: Record | None = None) -> Record:
    """Return the transactions that the ancestry of a snapshot holds.

    Args:
        history: of the repository.
        tip: the snapshot in question.
        known: an earlier result. Ancestors from its snapshot on are not looked at again.

    Cost: with format version 2 one request; with version 1 one for each commit back to the
    nearest one with a record, or to the first of all.
    """
    async for info in history.ancestry(tip):
        if known is not None and info.id == known.at:
            return replace(known, at=tip)
        newest = newest_transactions(info.metadata)
        # The nearest record counts alone: it repeats all before it, also what has expired since.
        if newest is not None:
            return Record(tip, info.id, newest)
    return Record(tip, None, {})
