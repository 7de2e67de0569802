"""Conflicts of the facade stand for those of the library, one for one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from icechunk_async.engine.changes.detect import ConflictKind
from icechunk_async.engine.commit.conflicts import Resolution
from icechunk_async.sync import (
    BasicConflictSolver,
    ConflictSolver,
    ConflictType,
    Repository,
    VersionSelection,
    in_memory_storage,
)

if TYPE_CHECKING:
    from icechunk_async.conflicts import Clash


def test_every_kind_of_conflict_has_its_name_and_number_in_the_facade() -> None:
    """A kind that only one of the two knows would be an error when it is first met."""
    kinds = {it.name.title().replace("_", ""): it.value for it in ConflictKind}
    assert {it.name: it.value for it in ConflictType} == kinds


class _Ours(ConflictSolver):
    thread = ""

    def solve(self, clash: Clash) -> list[Resolution]:
        self.thread = threading.current_thread().name
        return [Resolution.OURS] * len(clash.conflicts)


def _clashing() -> Repository:
    """Return a repository whose branches set one chunk: ``main`` to 1, ``side`` to 2."""
    repository = Repository.create(in_memory_storage())
    with repository.transaction("main", message="array") as store:
        zarr.create_array(store, name="a", shape=4, chunks=1, dtype="i4")
    repository.create_branch("side", repository.lookup_branch("main"))
    for value, branch in enumerate(("main", "side"), start=1):
        with repository.transaction(branch, message=branch) as store:
            zarr.open_array(store, path="a")[0] = value
    return repository


@pytest.mark.parametrize(
    ("solver", "value"),
    [
        (BasicConflictSolver(on_chunk_conflict=VersionSelection.UseOurs), 2),
        (BasicConflictSolver(on_chunk_conflict=VersionSelection.UseTheirs), 1),
        (_Ours(), 2),
    ],
)
def test_solvers_of_the_facade_decide_merges_and_cherry_picks(
    solver: ConflictSolver, value: int
) -> None:
    """As they do for commits: ours is what comes from the other branch."""
    for take in ("merge", "cherry_pick"):
        repository = _clashing()
        getattr(repository, take)("side", solver=solver)
        store = repository.readonly_session("main").store
        assert np.asarray(zarr.open_array(store, path="a", mode="r")[:]).tolist() == [
            value,
            0,
            0,
            0,
        ]
    if isinstance(solver, _Ours):
        assert solver.thread != "icechunk-async-portal"
