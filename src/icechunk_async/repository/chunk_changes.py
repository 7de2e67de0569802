"""The chunks of one array that a session set or deleted.

Single changes wait by coordinates until there are some thousand, which then become columns; changes
made in bulk stay the columns they came as. The latest change of a chunk counts.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from icechunk_async.format.chunk_refs import ChunkRefs, Kind
from icechunk_async.format.row_index import rows_in

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from icechunk_async.format.chunk_refs import ChunkRef, Coordinates

__all__ = ["ArrayChanges"]

_REVISIONS: Final = count(1)
_MAX_SINGLES: Final = 4096
"""Single changes that wait at most: an object for each takes ten times the memory of a row, and
a commit has the less left to do the more rows there are."""


class ArrayChanges:
    """Changed chunks of an array of ``rank`` axes. Not safe for concurrent use by itself."""

    def __init__(self, rank: int) -> None:
        """Begin without changes."""
        self.rank = rank
        self.kept_grid: Coordinates | None = None
        """Chunks of the base snapshot outside of this grid are gone: the array was shrunk."""
        self.revision = 0
        """Names this state among all states of all changes, so that what was made from it can
        be told from what was made from any other; 0 while nothing changed."""
        self._singles: dict[Coordinates, ChunkRef | None] = {}
        self._blocks: list[ChunkRefs] = []  # oldest first, all older than the singles

    def copy(self) -> ArrayChanges:
        """Answer changes that can be edited without touching these; columns are shared."""
        twin = ArrayChanges(self.rank)
        twin.kept_grid, twin.revision = self.kept_grid, self.revision
        twin._singles, twin._blocks = dict(self._singles), list(self._blocks)
        return twin

    def is_empty(self) -> bool:
        """Tell whether no chunk was set or deleted."""
        return not self._singles and not self._blocks

    def set(self, coords: Coordinates, ref: ChunkRef | None) -> None:
        """Set one chunk; None deletes it.

        Cost: about half a microsecond, most of it in the calls that make columns of thousands.
        """
        if len(self._singles) >= _MAX_SINGLES:
            self._settle()
        self._singles[coords] = ref
        self.revision = next(_REVISIONS)

    def set_many(self, refs: ChunkRefs) -> None:
        """Set or delete many chunks; of rows with equal coordinates the last one counts.

        Cost: in all, the logarithm of the number of calls for each chunk: blocks are joined when
        the newer has grown as large as the older, so there are never many.
        """
        if len(refs) == 0:
            return
        self._settle()
        self._push(refs.sort())
        self.revision = next(_REVISIONS)

    def find(self, coords: Coordinates) -> tuple[bool, ChunkRef | None]:
        """Answer whether a chunk was changed, and its reference (None: deleted)."""
        if coords in self._singles:
            return True, self._singles[coords]
        for block in reversed(self._blocks):
            row = block.find(coords)
            if row is not None:
                return True, block.ref(row)
        return False, None

    def columns(self) -> ChunkRefs:
        """Answer all changes, deletions included, in ascending order of coordinates."""
        self._settle()
        if not self._blocks:
            return ChunkRefs.empty(self.rank)
        if len(self._blocks) > 1:
            self._blocks = [ChunkRefs.concat(self._blocks).sort()]
        return self._blocks[0]

    def keeps(self, coords: Coordinates) -> bool:
        """Tell whether the base snapshot's chunk at ``coords`` still counts."""
        return self.kept_grid is None or all(
            at < size for at, size in zip(coords, self.kept_grid, strict=True)
        )

    def shrink(self, grid: Coordinates) -> None:
        """Delete every chunk outside of ``grid``; growing again does not bring it back.

        Changes out there stay as deletions: a transaction log lists every chunk touched.
        """
        old = grid if self.kept_grid is None else self.kept_grid
        self.kept_grid = tuple(min(a, b) for a, b in zip(old, grid, strict=True))
        self.clip(grid)
        self.revision = next(_REVISIONS)

    def clip(self, grid: Coordinates) -> None:
        """Turn changes outside of ``grid`` into deletions; the base's chunks stay as they are."""
        refs = self.columns()
        inside = refs.inside(tuple((0, size) for size in grid))
        if not inside.all():
            gone = ChunkRefs.build(refs.coords[~inside], Kind.DELETED)
            self._blocks = [ChunkRefs.concat([refs.take(inside), gone]).sort()]
            self.revision = next(_REVISIONS)

    def drop(self, coords: npt.NDArray[np.uint32]) -> None:
        """Take back the changes of some chunks; ``coords`` is ``(n, rank)``."""
        refs = self.columns()
        keep = ~rows_in(refs.coords, coords)
        self._blocks = [refs.take(keep)] if keep.any() else []
        self.revision = next(_REVISIONS)

    def _settle(self) -> None:
        """Turn single changes into a block, so that a newer block can follow."""
        if self._singles:
            self._push(ChunkRefs.from_mapping(self.rank, self._singles).sort())
            self._singles = {}

    def _push(self, block: ChunkRefs) -> None:
        """Add the newest block."""
        while self._blocks and len(self._blocks[-1]) <= len(block):
            block = ChunkRefs.concat([self._blocks.pop(), block]).sort()
        self._blocks.append(block)
