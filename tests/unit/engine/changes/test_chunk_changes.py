"""The chunks that a session set or deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from icechunk_async.engine.changes import change_set as chunk_changes
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, settle_together
from icechunk_async.format.manifest.chunk import InlineChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.helpers import counted_calls, examples
from tests.unit.format.samples import node_id, snapshot_id

if TYPE_CHECKING:
    from icechunk_async.format.manifest.chunk import ChunkRef

GRID = (4, 3)
COORDS = st.tuples(st.integers(0, GRID[0] - 1), st.integers(0, GRID[1] - 1))
REFS = st.one_of(st.none(), st.binary(min_size=1, max_size=3).map(InlineChunk))


class ChangesMachine(RuleBasedStateMachine):
    """Compares the changes with a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = ArrayChanges(2)
        self.model: dict[tuple[int, ...], ChunkRef | None] = {}
        self.revisions = {0}

    @rule()
    def settle_with_others(self) -> None:
        """Make columns of all that was set one by one, together with that of other arrays."""
        others = [ArrayChanges(rank) for rank in (2, 2, 2, 2, 1)]
        for number, it in enumerate(others[:-1]):
            it.set((number, 0), InlineChunk(b"%d" % number))
        settle_together([others[0], self.changes, *others[1:]])
        for number, it in enumerate(others[:-1]):
            assert not it.singles
            assert it.find((number, 0)) == (True, InlineChunk(b"%d" % number))
        assert others[-1].is_empty()
        assert not self.changes.singles or self.changes.count() == len(self.changes.singles)

    @rule(coords=COORDS, ref=REFS)
    def set_one(self, coords: tuple[int, int], ref: ChunkRef | None) -> None:
        """Set or delete a chunk."""
        self.changes.set(coords, ref)
        self.model[coords] = ref

    @rule(refs=st.lists(st.tuples(COORDS, REFS), min_size=1))
    def set_many(self, refs: list[tuple[tuple[int, int], ChunkRef | None]]) -> None:
        """Set or delete many at once; of equal coordinates the last counts."""
        parts = [ChunkRefs.from_mapping(2, dict([pair])) for pair in refs]
        self.changes.set_many(ChunkRefs.concat(parts))
        self.model.update(refs)

    @rule(grid=st.tuples(st.integers(0, GRID[0]), st.integers(0, GRID[1])))
    def shrink(self, grid: tuple[int, int]) -> None:
        """Changes outside of a smaller grid become deletions."""
        self.changes.shrink(grid)
        self.model = {
            at: ref if at[0] < grid[0] and at[1] < grid[1] else None
            for at, ref in self.model.items()
        }

    @rule(coords=st.lists(COORDS, min_size=1, unique=True))
    def drop(self, coords: list[tuple[int, int]]) -> None:
        """Take changes back."""
        self.changes.drop(np.array(coords, np.uint32))
        for at in coords:
            self.model.pop(at, None)

    @rule()
    def copy(self) -> None:
        """Go on with a copy; editing it leaves the original alone."""
        original, self.changes = self.changes, self.changes.copy()
        before = original.columns().coords.tolist()
        self.changes.set((0, 0), None)
        self.model[(0, 0)] = None
        assert original.columns().coords.tolist() == before

    @invariant()
    def agrees(self) -> None:
        """Single lookups and columns say what the dictionary says."""
        for at in np.ndindex(*GRID):
            expected = (at in self.model, self.model.get(at))
            assert self.changes.find(at) == expected
        columns = self.changes.columns()
        found = {tuple(at): columns.ref(row) for row, at in enumerate(columns.coords.tolist())}
        assert found == self.model
        assert list(found) == sorted(found)
        assert self.changes.is_empty() == (not self.model)


TestChanges = ChangesMachine.TestCase
TestChanges.settings = settings(examples(80), stateful_step_count=12)


class EarlyBlocksMachine(ChangesMachine):
    """The same, with columns made of two changes in place of thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(chunk_changes, "_MAX_SINGLES", 2)

    def teardown(self) -> None:
        """Let thousands wait again."""
        self.patch.undo()


TestEarlyBlocks = EarlyBlocksMachine.TestCase
TestEarlyBlocks.settings = settings(examples(80), stateful_step_count=12)


def test_revisions_never_repeat() -> None:
    """A manifest made for one state never passes for that of another state or array."""
    first, second = ArrayChanges(1), ArrayChanges(1)
    seen = []
    for changes in (first, second):
        changes.set((0,), None)
        seen.append(changes.revision)
        changes.set((0,), InlineChunk(b"x"))
        seen.append(changes.revision)
    assert len(set(seen)) == 4
    assert first.copy().revision == first.revision


def test_chunks_of_the_base_outside_a_smaller_grid_are_gone_for_good() -> None:
    """Growing again does not bring them back; a rank that changed keeps none."""
    changes = ArrayChanges(2)
    assert changes.keeps((9, 9))
    changes.shrink((2, 5))
    changes.shrink((4, 3))
    assert changes.keeps((1, 2))
    assert not changes.keeps((2, 2))
    assert not changes.keeps((1, 3))


def test_setting_no_chunks_changes_nothing() -> None:
    """A bulk write of nothing leaves nothing to commit."""
    changes = ArrayChanges(2)
    changes.set_many(ChunkRefs.empty(2))
    assert changes.is_empty()
    assert changes.revision == 0


def test_columns_of_many_arrays_are_made_at_once() -> None:
    """The log of a commit needs them; an array more costs no more than a few calls."""

    def calls(arrays: int) -> int:
        changes = ChangeSet()
        for number in range(arrays):
            it = changes.chunks[node_id(number)] = ArrayChanges(1)
            for chunk in range(20):
                it.set((chunk,), InlineChunk(b"x"))
        with counted_calls() as made:
            log = changes.log(snapshot_id(1))
        assert {len(it) for it in log.updated_chunks.values()} == {20}
        return len(made)

    assert calls(60) - calls(10) < 50 * 13
