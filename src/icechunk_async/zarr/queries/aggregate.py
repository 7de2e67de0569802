"""Aggregates of arrays: from the statistics of chunks where they suffice, from values elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.statistics import row_type
from icechunk_async.zarr.queries.analyze import chunks_at_once
from icechunk_async.zarr.queries.measuring import (
    ExtremeTexts,
    check_function,
    is_whole_text,
    measure,
    summary,
)
from icechunk_async.zarr.queries.planning import Plan, planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.measuring import AggregateFunction
    from icechunk_async.zarr.store import IcechunkStore

__all__ = ["Aggregate", "aggregate", "gathered"]

_BYTES_A_CHUNK: Final = 1 << 10
"""To compare bounds of text takes as long as to handle some bytes."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate of the values of an array, and what it cost."""

    value: Any
    """A number or text of Python, a truth value, or a time of NumPy; None if there are no values.
    The count and the sum of no values are 0."""
    count: int
    """Cells that have a value and fulfil the conditions."""
    chunks: int
    """Chunks of the array in the region."""
    chunks_read: int
    """Those that were read."""
    bytes_read: int
    """Stored size of all chunks that were read, also those of other arrays in conditions."""
    bytes_skipped: int
    """Stored size of the array's chunks in the region that were not read."""


async def aggregate(
    store: IcechunkStore,
    path: str,
    function: AggregateFunction,
    where: str | None,
    region: Sequence[slice] | None,
) -> Aggregate:
    """Return an aggregate of an array's values; see `Session.aggregate`."""
    with telemetry.span("aggregate"):
        plan = await planned(store, path, where, region)
        check_function(function, plan.target.meaning)
        # Bounds of text are cut after 32 bytes, so chunks with known statistics may have to be read
        # as well.
        texts: list[ExtremeTexts] = []
        if is_whole_text(function, plan.target.meaning):
            every = np.arange(len(plan))
            texts.append(ExtremeTexts([every], len(plan), least=function == "min"))
        rows, reads = await gathered(store, plan, texts)
        text = texts[0].found[0] if texts else None
        value, count = summary(function, plan.target.meaning, rows, text)
    lengths = plan.lengths()
    target_bytes = int(lengths[reads].sum())
    return Aggregate(
        value,
        count,
        len(plan),
        len(reads),
        target_bytes + plan.bytes_of_conditions(reads),
        int(lengths.sum()) - target_bytes,
    )


async def gathered(
    store: IcechunkStore, plan: Plan, texts: Sequence[ExtremeTexts] = ()
) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Return the statistics of the cells of each chunk that count, and which chunks were read.

    Args:
        store: where the array is.
        plan: its chunks.
        texts: texts to find, which chunks may have to be read for.
    """
    whole, statistics = plan.known_whole()
    # Three kinds of chunks: known ones count by their statistics, excluded ones not at all, and the
    # rest is read. Which chunk is of which kind changes the cost, never the result.
    known = whole.copy()
    for it in texts:
        known &= await store.workspace.assets.compute(
            partial(it.settled, statistics, whole), size_bytes=len(plan) * _BYTES_A_CHUNK
        )
    excluded = plan.excluded
    reads = np.flatnonzero(~known & ~excluded)
    found = await bounded_map(
        lambda at: _measured(store, plan, at, texts),
        reads.tolist(),
        limit=chunks_at_once(*plan.arrays_read),
    )
    # Chunks that are excluded stay zeros: no cells, no values, nothing to add.
    rows = np.zeros(len(plan), row_type(plan.target.meaning.kind))
    rows[known] = statistics[known]
    if found:
        rows[reads] = np.concatenate(found)
    return rows, reads


async def _measured(
    store: IcechunkStore, plan: Plan, at: int, texts: Sequence[ExtremeTexts]
) -> Rows:
    """Return the statistics of the cells of a chunk that count."""
    box = plan.box(at)
    numbers = await plan.target.read(box)
    chosen = await plan.mask(at, numbers)

    def take(low: str, high: str) -> None:
        for it in texts:
            it.add(at, low, high)

    return await store.workspace.assets.compute(
        lambda: measure(plan.target.meaning, numbers, chosen, take),
        size_bytes=numbers.nbytes,
    )
