"""The one list of the folders of a repository: those that a copy carries, and those that stay."""

from __future__ import annotations

from typing import Final

from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import PROPOSALS, STATISTICS, SUMS, snapshot_key, transaction_key

__all__ = [
    "CHUNKS",
    "FOLDERS",
    "LEFT_BEHIND",
    "LOG",
    "MANIFESTS",
    "MARK",
    "SAME_IN_ALL",
    "SNAPSHOTS",
    "STATISTICS",
    "SUMS",
    "TRANSACTIONS",
]

CHUNKS: Final = "chunks/"
MANIFESTS: Final = "manifests/"
TRANSACTIONS: Final = "transactions/"
SNAPSHOTS: Final = "snapshots/"
LOG: Final = "overwritten/"
"""The operations log of format 2 continues here."""

FOLDERS: Final = (CHUNKS, MANIFESTS, SUMS, TRANSACTIONS, SNAPSHOTS, LOG)
"""The folders that are copied, in the order of copying: what refers to others comes after them. The
references come last of all."""

LEFT_BEHIND: Final = ("leases/", "collections/", "copies/", PROPOSALS)
"""Folders that say something about one place and nothing about its copy: sessions that are open
there, collections of garbage that ran there, what copies put there, and proposals, whose states no
branch holds. `STATISTICS` are in neither list: they are found by their array and not by snapshot,
so that only copies of all branches and arrays may have them, and nothing needs them."""

MARK: Final = "copies/state.json"
"""In the destination: what copies have put there. It tells a copy, which may be replaced by a newer
one, from a repository that is committed to."""

SAME_IN_ALL: Final = frozenset(
    {snapshot_key(INITIAL_SNAPSHOT_ID), transaction_key(INITIAL_SNAPSHOT_ID)}
)
"""The first snapshot has the same id in every repository, with other content."""
