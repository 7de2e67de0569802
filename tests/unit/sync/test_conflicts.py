"""Conflicts of the facade stand for those of the library, one for one."""

from __future__ import annotations

from icechunk_async.engine.changes.detect import ConflictKind
from icechunk_async.sync import ConflictType


def test_every_kind_of_conflict_has_its_name_and_number_in_the_facade() -> None:
    """A kind that only one of the two knows would be an error when it is first met."""
    kinds = {it.name.title().replace("_", ""): it.value for it in ConflictKind}
    assert {it.name: it.value for it in ConflictType} == kinds
