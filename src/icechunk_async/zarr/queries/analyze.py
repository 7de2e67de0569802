"""Make the statistics that chunks lack, by reading these chunks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.errors import FormatError, InvalidInputError, VirtualChunkError
from icechunk_async.format.paths import check_selection, is_within
from icechunk_async.format.statistics import ChunkStatistics, cells_within, joined
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.measuring import measure

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.format.ids import SnapshotId, StatisticsId
    from icechunk_async.format.statistics import Rows
    from icechunk_async.session import Session
    from icechunk_async.zarr.queries.arrays import KnownChunks

__all__ = ["Analysis", "analyze", "chunks_at_once"]

_log = logging.getLogger(__name__)
_MOST_BYTES: Final = 256 << 20
"""The most memory for decoded chunks, unless a single one is larger."""
_AT_ONCE: Final = 16
_ROWS: Final = 16_384
"""The most chunks that are analyzed before their statistics are stored."""
_MOST_OBJECTS: Final = 16
"""The most objects of one array: more are joined, since a query reads each."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The statistics that were added for a snapshot."""

    snapshot_id: SnapshotId
    arrays: int
    """Arrays whose values can have statistics."""
    chunks: int
    """Chunks that were read, and have statistics now."""
    known: int
    """Chunks whose statistics were known before."""
    bytes_read: int
    """Stored size of the chunks that were read."""
    left_out: tuple[str, ...] = ()
    """For each array without statistics, why: its values have no order, for example."""
    unreadable: tuple[str, ...] = ()
    """Messages about chunks that could not be read. Their statistics stay unknown."""


@dataclass(slots=True)
class _Tally:
    arrays: int = 0
    chunks: int = 0
    known: int = 0
    bytes_read: int = 0
    left_out: list[str] = field(default_factory=list[str])
    unreadable: list[str] = field(default_factory=list[str])
    superseded: list[StatisticsId] = field(default_factory=list["StatisticsId"])


def chunks_at_once(*arrays: QueriedArray) -> int:
    """Return the number of chunks of arrays that may be decoded at a time."""
    # Decoded, with the doubles and masks that are made of it.
    each = sum(it.bytes_a_chunk + 17 * math.prod(it.chunks) for it in arrays)
    return max(1, min(_AT_ONCE, _MOST_BYTES // max(each, 1)))


async def analyze(
    session: Session,
    paths: Collection[str] | None,
    progress: ProgressCallback | None = None,
) -> tuple[Analysis, list[StatisticsId]]:
    """Make the statistics that chunks of a snapshot lack; see `Repository.analyze`.

    Returns:
        What was added, and the objects whose statistics are now in others, too.
    """
    tops = None if paths is None else check_selection(paths)
    tally, progress = _Tally(), progress or no_progress
    nodes = session.workspace.base.nodes
    with telemetry.span("analyze"):
        for path in list(nodes.below("/")):
            if tops is not None and not any(is_within(path, top) for top in tops):
                continue
            if nodes[path].array is None:
                continue
            try:
                owner = await QueriedArray.open(session, path)
            except (InvalidInputError, ValueError) as error:  # ValueError: Zarr does not know it
                tally.left_out.append(str(error))
                continue
            tally.arrays += 1
            await _Work(session, owner, tally, progress).run()
    analysis = Analysis(
        session.snapshot_id,
        tally.arrays,
        tally.chunks,
        tally.known,
        tally.bytes_read,
        tuple(tally.left_out),
        tuple(tally.unreadable),
    )
    _log.info("analyzed: %s", analysis)
    return analysis, tally.superseded


class _Work:
    """The chunks of one array."""

    def __init__(
        self, session: Session, owner: QueriedArray, tally: _Tally, progress: ProgressCallback
    ) -> None:
        self._session = session
        self._owner = owner
        self._tally = tally
        self._progress = progress
        self._files = session.workspace.assets.statistics

    async def run(self) -> None:
        before = await self._files.find(self._owner.node.id)
        chunks = await self._owner.known_chunks(self._session)
        self._tally.known += int(np.count_nonzero(chunks.places >= 0))
        wanted = np.flatnonzero(chunks.has_key & (chunks.places < 0))
        made: list[Rows] = []
        for start in range(0, len(wanted), _ROWS):
            rows = await self._measure(chunks, wanted[start : start + _ROWS])
            if len(rows):
                await self._put(rows)
                made.append(rows)
        if len(before) > _MOST_OBJECTS:
            await self._join(chunks, before, made)

    async def _measure(self, chunks: KnownChunks, wanted: npt.NDArray[np.int64]) -> Rows:
        """Return the statistics of some chunks; without those that cannot be read."""
        limit = chunks_at_once(self._owner)
        found = await bounded_map(
            lambda row: self._measure_one(chunks, row), wanted.tolist(), limit=limit
        )
        return joined([it for it in found if it is not None], self._owner.meaning.kind)

    async def _measure_one(self, chunks: KnownChunks, row: int) -> Rows | None:
        owner, refs = self._owner, chunks.refs
        within = cells_within(refs.coords[row : row + 1], owner.shape, owner.chunks)[0].tolist()
        corner = zip(refs.coords[row].tolist(), owner.chunks, within, strict=True)
        box = tuple(slice(at * size, at * size + cells) for at, size, cells in corner)
        try:
            numbers = await owner.read(box)
        except (FormatError, VirtualChunkError) as error:
            self._tally.unreadable.append(f"A chunk of {owner.path!r}: {error}")
            return None
        found = await self._session.workspace.assets.compute(
            lambda: measure(owner.meaning, numbers), size_bytes=numbers.nbytes
        )
        found["key"] = chunks.keys[row]
        self._tally.chunks += 1
        self._tally.bytes_read += int(refs.lengths[row])
        self._progress(Progress("analyzing chunks", self._tally.chunks))
        return found

    async def _put(self, rows: Rows) -> StatisticsId:
        meaning = self._owner.meaning
        statistics = ChunkStatistics(meaning.digest, meaning.kind, rows)
        return await self._files.put(self._owner.node.id, statistics)

    async def _join(
        self, chunks: KnownChunks, before: list[StatisticsId], made: list[Rows]
    ) -> None:
        """Store the statistics of many objects as one."""
        meaning = self._owner.meaning
        table = await self._files.load(before, meaning.digest, meaning.kind)
        used = np.unique(chunks.places[chunks.places >= 0])
        if len(table) > 2 * (len(used) + sum(map(len, made))):  # most are of chunks that are gone
            table = chunks.table[used]
        if len(table):
            await self._put(table)
        self._tally.superseded += before
