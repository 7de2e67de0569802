"""A repo info reads the same table by table, as without NumPy, and by columns."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async.format.envelope import Envelope
from icechunk_async.format.flatbuffers.checks import columns_pay
from icechunk_async.format.operations_log import (
    Availability,
    NewCommit,
    RepoInitialized,
    RepoStatus,
    Update,
)
from icechunk_async.format.repo_info import (
    RepoInfo,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
)
from tests.unit.format.samples import reading_repo_infos, snapshot_id

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId

COUNT = 60
"""More than are read one by one where NumPy is imported."""


def large() -> RepoInfo:
    """Return a repo info all of whose lists are long."""
    infos: list[SnapshotInfo] = []
    parent: SnapshotId | None = None
    for number in range(COUNT):
        made = SnapshotInfo.of(
            snapshot_id(number), parent, number, "m" * (number % 5), {"n": number}
        )
        infos.append(replace(made, pruned_ancestor_logs=(snapshot_id(900),) * (number % 2)))
        parent = infos[-1].id
    updates = [
        Update(NewCommit("main", snapshot_id(it)), it, f"b{it}") for it in range(COUNT - 1, 0, -1)
    ]
    return RepoInfo(
        branches={f"b{it}": snapshot_id(it) for it in range(COUNT)},
        tags={f"t{it}é": snapshot_id(it) for it in range(COUNT)},
        deleted_tags=frozenset(f"gone{it}" for it in range(COUNT)),
        snapshots={it.id: it for it in infos},
        status=RepoStatus(Availability.READ_ONLY, 7, "for a while"),
        updates=[*updates, Update(RepoInitialized(), 0, "b0")],
        before_updates="before",
        raw_metadata=(("a", b"\0\4\1"),),
        raw_config=b"\0\0\1",
        enabled_flags=(3, 700),
        disabled_flags=(),
    )


@pytest.mark.parametrize("by_columns", [True, False])
def test_long_lists_read_the_same_by_tables_and_by_columns(*, by_columns: bool) -> None:
    """Refs, deleted tags, ancestry and the log of operations."""
    with reading_repo_infos(by_columns=by_columns):
        _compare(large())


def _compare(info: RepoInfo) -> None:
    found = decode_repo_info(Envelope(2, encode_repo_info(info)))
    assert (found.branches, found.tags) == (info.branches, info.tags)
    assert (found.deleted_tags, found.status) == (info.deleted_tags, info.status)
    assert (found.raw_metadata, found.raw_config) == (info.raw_metadata, info.raw_config)
    assert (found.enabled_flags, found.disabled_flags) == (info.enabled_flags, ())
    assert found.before_updates == "before"
    line = list(found.ancestry(snapshot_id(COUNT - 1)))
    assert line == [info.snapshots[snapshot_id(it)] for it in range(COUNT - 1, -1, -1)]
    assert list(found.updates) == list(info.updates)


def test_columns_pay_later_where_numpy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import it takes longer than to read some hundred tables one by one."""
    assert [columns_pay(it) for it in (31, 32)] == [False, True]
    monkeypatch.delitem(sys.modules, "numpy")
    assert [columns_pay(it) for it in (1023, 1024)] == [False, True]
