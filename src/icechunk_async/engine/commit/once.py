"""Exactly-once commits: which transactions of which applications a branch holds already.

A commit can name the transaction that it is. Its snapshot records the newest version of every
application that ever committed to the branch with one, and every later snapshot of this library
repeats that record. So the tip alone shows whether a transaction was committed, also after older
snapshots have expired; if another library committed since, the nearest snapshot of this one
does. A branch moves only from the snapshot whose record was read, so two commits of one
transaction cannot both land.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.engine.history import History
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["Record", "Transaction", "newest_versions", "record_of", "repeated"]

# Part of what is stored. The names are those of the first writer that committed this way, and
# stay so that its streams still recognise their batches.
_NEWEST: Final = "spark-transactions"
_OWN: Final = "spark-transaction"
_MAX_VERSION: Final = (1 << 63) - 1
"""The largest integer that a snapshot's properties can hold."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Names a commit, so that committing it again changes nothing.

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
class Record:
    """The transactions that a snapshot's ancestry holds.

    Attributes:
        at: the snapshot in question.
        found_at: the nearest snapshot with a record, ``at`` included; None if no snapshot has one.
        versions: the newest version of every application.
    """

    at: SnapshotId
    found_at: SnapshotId | None
    versions: Mapping[str, int]

    def holds(self, transaction: Transaction) -> bool:
        """Return whether it holds a transaction, or a later one of the same application."""
        return self.versions.get(transaction.app_id, -1) >= transaction.version

    def properties_with(self, transaction: Transaction) -> dict[str, JSON]:
        """Return the properties of a snapshot that commits a transaction on top of this one."""
        newest: dict[str, JSON] = {**self.versions, transaction.app_id: transaction.version}
        own: dict[str, JSON] = {"app-id": transaction.app_id, "version": transaction.version}
        return {_NEWEST: newest, _OWN: own}


def newest_versions(properties: Mapping[str, JSON]) -> dict[str, int] | None:
    """Return the newest version of every application that a snapshot records.

    None if the snapshot has no record: its ancestors may have one.
    """
    found = properties.get(_NEWEST)
    if not isinstance(found, dict):
        return None
    return {app_id: it for app_id, it in found.items() if isinstance(it, int)}


def repeated(base: Snapshot) -> dict[str, JSON]:
    """Return the properties that a snapshot on top of ``base``, or in its place, repeats."""
    return {_NEWEST: base.metadata[_NEWEST]} if _NEWEST in base.metadata else {}


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
        versions = newest_versions(info.metadata)
        if versions is not None:
            return Record(tip, info.id, versions)
    return Record(tip, None, {})
