"""Properties of a snapshot that every later one on its branch has as well.

Writers that must know what a branch holds already keep it in such a property. So it is known at
the tip, whoever commits or amends in between, and also once older snapshots have expired.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["WRITTEN_ONCE", "carried_from"]

WRITTEN_ONCE: Final = "spark-transactions"
"""The newest version of every application that wrote to the branch with one, by its name."""


def carried_from(base: Snapshot) -> dict[str, JSON]:
    """Answer the properties that a snapshot made from ``base``, or instead of it, carries on."""
    return {WRITTEN_ONCE: base.metadata[WRITTEN_ONCE]} if WRITTEN_ONCE in base.metadata else {}
