"""The cells of an array that fulfil conditions, found chunk by chunk when they are asked for."""

from __future__ import annotations

from itertools import batched
from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.paths import check_path
from icechunk_async.zarr.queries.analyze import chunks_at_once
from icechunk_async.zarr.queries.parsing import parse_where
from icechunk_async.zarr.queries.planning import planned
from icechunk_async.zarr.queries.predicates import columns_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import numpy.typing as npt

    from icechunk_async.zarr.queries.planning import Plan
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["SelectedCells", "Selection", "select"]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedCells:
    """The cells of one chunk that fulfil conditions; there is at least one."""

    box: tuple[slice, ...]
    """The cells of the chunk that are in the array and in the region."""
    mask: npt.NDArray[np.bool_]
    """Which of them fulfil the conditions, of the shape of the box."""

    def __len__(self) -> int:
        """Count the cells."""
        return int(np.count_nonzero(self.mask))

    def indices(self) -> npt.NDArray[np.int64]:
        """Return the indices of the cells in the array, ``(n, rank)``, in ascending order."""
        corner = np.array([part.start for part in self.box], np.int64)
        return np.argwhere(self.mask).astype(np.int64) + corner


class Selection:
    """The cells of an array that fulfil conditions.

    What is known without reading chunks is known at once. ``async for`` reads chunks that are
    open, in ascending order, and yields `SelectedCells` for each chunk that has such cells; each
    iteration reads them again.

    Attributes:
        path: the array: of those that the conditions name, the one with the most axes.
        shape: its cells along each axis.
        chunks: its chunks in the region.
        candidates: the coordinates of the chunks that may have such cells, ``(n, rank)``.
        certain: which of these need not be read, as all of their cells fulfil the conditions or
            only coordinates decide, ``(n,)``.
        bytes_candidates: stored size of the candidates.
        bytes_excluded: stored size of all other chunks in the region.
    """

    def __init__(self, plan: Plan) -> None:
        """Select by a plan."""
        self._plan = plan
        self._rows = np.flatnonzero(~plan.excluded)
        lengths = plan.lengths()
        self.path = plan.target.path
        self.shape = plan.target.shape
        self.chunks = len(plan)
        self.candidates: npt.NDArray[np.int64] = plan.coords[self._rows]
        self.certain: npt.NDArray[np.bool_] = plan.included[self._rows] | plan.by_lines
        self.bytes_candidates = int(lengths[self._rows].sum())
        self.bytes_excluded = int(lengths.sum()) - self.bytes_candidates

    def boxes(self) -> list[tuple[slice, ...]]:
        """Return the cells of each candidate that are in the array and in the region."""
        return [self._plan.box(row) for row in self._rows.tolist()]

    async def __aiter__(self) -> AsyncGenerator[SelectedCells]:
        """Iterate over the cells, chunk by chunk.

        Raises:
            FormatError: a chunk that is needed is missing or damaged.

        Cancellation: the step is lost. The iteration may be left at any point.

        Cost: for each candidate that is not certain, a request for each array that the conditions
        name, coordinates excepted. Memory: 256 MiB of decoded chunks, or one larger chunk.
        """
        limit = chunks_at_once(*self._plan.arrays_read)
        # One batch at a time: a loop that is slow, or stops, has read no more than that.
        for some in batched(self._rows.tolist(), limit):
            for cells in await bounded_map(self._cells, some, limit=limit):
                if len(cells):
                    yield cells

    async def _cells(self, row: int) -> SelectedCells:
        box = self._plan.box(row)
        mask = await self._plan.mask(row)
        if mask is None:
            mask = np.ones(tuple(part.stop - part.start for part in box), bool)
        return SelectedCells(box, mask)


async def select(
    store: IcechunkStore, where: str, group: str, region: Sequence[slice] | None
) -> Selection:
    """Return the cells that fulfil conditions; see `Session.where`."""
    group = check_path(group).rstrip("/")
    names = columns_of(*parse_where(where, "The condition"))
    if not names:
        raise InvalidInputError(
            'There is no condition. Give at least one, such as "t2m > 320 and lat > 60".'
        )
    paths = [f"{group}/{name}" for name in names]
    nodes = [store.workspace.array(path) for path in paths]
    # Its cells are the answer, and the other arrays are broadcast along its axes.
    ranks = [0 if it.array is None else len(it.array.dimensions) for it in nodes]
    return Selection(await planned(store, paths[int(np.argmax(ranks))], where, region))
