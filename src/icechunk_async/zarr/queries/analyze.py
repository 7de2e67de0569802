"""Make the statistics that chunks lack, by reading these chunks."""

from __future__ import annotations

import logging
import math
from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.errors import FormatError, InvalidInputError, VirtualChunkError
from icechunk_async.format.paths import check_selection, is_within
from icechunk_async.format.statistics import ChunkStatistics, cells_within, joined
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.measuring import measure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.format.ids import SnapshotId, StatisticsId
    from icechunk_async.format.statistics import Keys, Rows
    from icechunk_async.zarr.store import IcechunkStore

__all__ = [
    "Analysis",
    "Tally",
    "Unknown",
    "analyze",
    "chunks_at_once",
    "join_objects",
    "lacking",
    "measure_chunks",
]

_log = logging.getLogger(__name__)
_MOST_BYTES: Final = 256 << 20
"""The most memory for decoded chunks, unless a single one is larger."""
_AT_ONCE: Final = 16
# What an interrupted analysis loses at most.
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
class Tally:
    """The result so far: what was found, and what was done."""

    arrays: int = 0
    chunks: int = 0
    known: int = 0
    bytes_read: int = 0
    left_out: list[str] = field(default_factory=list[str])
    unreadable: list[str] = field(default_factory=list[str])

    def analysis(self, snapshot_id: SnapshotId) -> Analysis:
        """Return it as a result, and write it to the log."""
        analysis = Analysis(
            snapshot_id,
            self.arrays,
            self.chunks,
            self.known,
            self.bytes_read,
            tuple(self.left_out),
            tuple(self.unreadable),
        )
        _log.info("analyzed: %s", analysis)
        return analysis


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """Chunks of an array that have no statistics; plain data."""

    path: str
    coords: npt.NDArray[np.uint32]
    """``(n, axes)``, ascending."""
    keys: Keys
    lengths: npt.NDArray[np.uint64]
    """Stored bytes, ``(n,)``."""

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.coords)

    def part(self, start: int, stop: int) -> Unknown:
        """Return some of the chunks."""
        rows = slice(start, stop)
        return Unknown(self.path, self.coords[rows], self.keys[rows], self.lengths[rows])


def chunks_at_once(*arrays: QueriedArray) -> int:
    """Return the number of chunks of arrays that may be decoded at a time."""
    # Decoded, with the doubles and masks that are made of it.
    # 8 for a double, 8 for its square or a copy without missing values, 1 for the mask.
    each = sum(it.bytes_a_chunk + 17 * math.prod(it.chunks) for it in arrays)
    return max(1, min(_AT_ONCE, _MOST_BYTES // max(each, 1)))


async def analyze(
    store: IcechunkStore,
    paths: Collection[str] | None,
    progress: ProgressCallback | None = None,
) -> tuple[Analysis, list[StatisticsId]]:
    """Make the statistics that chunks of a snapshot lack; see `Repository.analyze`.

    Returns:
        What was added, and the objects whose statistics are now in others, too.
    """
    tally = Tally()
    superseded: list[StatisticsId] = []
    with telemetry.span("analyze"):
        async for unknown in lacking(store, paths, tally):
            await measure_chunks(store, unknown, tally, progress)
            superseded += await join_objects(store, unknown.path)
    return tally.analysis(store.workspace.base.id), superseded


async def lacking(
    store: IcechunkStore, paths: Collection[str] | None, tally: Tally
) -> AsyncGenerator[Unknown]:
    """Yield the chunks without statistics of each array that can have them, and count the others.

    Cost: as `QueriedArray.known_chunks`, one array at a time.
    """
    tops = None if paths is None else check_selection(paths)
    nodes = store.workspace.base.nodes
    for path in list(nodes.below("/")):
        if tops is not None and not any(is_within(path, top) for top in tops):
            continue
        if nodes[path].array is None:
            continue
        try:
            owner = await QueriedArray.open(store, path)
        except (InvalidInputError, FormatError) as error:  # others can be analyzed all the same
            tally.left_out.append(str(error))
            continue
        tally.arrays += 1
        chunks = await owner.known_chunks(store)
        tally.known += int(np.count_nonzero(chunks.places >= 0))
        # Chunks without a key stay unknown: nothing tells whether their bytes are still the same,
        # as with a virtual chunk that has no guard.
        rows = np.flatnonzero(chunks.has_key & (chunks.places < 0))
        refs = chunks.refs
        yield Unknown(path, refs.coords[rows], chunks.keys[rows], refs.lengths[rows])


async def measure_chunks(
    store: IcechunkStore, unknown: Unknown, tally: Tally, progress: ProgressCallback | None = None
) -> None:
    """Read chunks, and store their statistics; those that cannot be read stay unknown.

    Cancellation: statistics that were stored until then stay.
    """
    if not len(unknown):
        return
    work = _Work(
        store, await QueriedArray.open(store, unknown.path), tally, progress or no_progress
    )
    for start in range(0, len(unknown), _ROWS):
        await work.run(unknown.part(start, start + _ROWS))


async def join_objects(store: IcechunkStore, path: str) -> list[StatisticsId]:
    """Store the statistics in many objects of an array as one, since a query reads each.

    Returns:
        The objects that are not needed any more.
    """
    files = store.workspace.assets.statistics
    before = await files.find(store.workspace.array(path).id)
    if len(before) <= _MOST_OBJECTS:
        return []
    owner = await QueriedArray.open(store, path)
    chunks = await owner.known_chunks(store)
    table = chunks.table
    used = np.unique(chunks.places[chunks.places >= 0])
    # Rows of old snapshots are worth keeping, since those may be queried as well.
    if len(table) > 2 * len(used):  # most are of chunks that are gone
        table = table[used]
    if len(table):
        await _put(store, owner, table)
    # These alone may be deleted: what is needed of their rows is in the object that was stored now.
    # Another process may have stored more since they were listed.
    return before


async def _put(store: IcechunkStore, owner: QueriedArray, rows: Rows) -> None:
    meaning = owner.meaning
    statistics = ChunkStatistics(meaning.digest, meaning.kind, rows)
    await store.workspace.assets.statistics.put(owner.node.id, statistics)


class _Work:
    """Measuring chunks of one array."""

    def __init__(
        self, store: IcechunkStore, owner: QueriedArray, tally: Tally, progress: ProgressCallback
    ) -> None:
        self._store = store
        self._owner = owner
        self._tally = tally
        self._progress = progress

    async def run(self, unknown: Unknown) -> None:
        """Measure some chunks, and store what came of it as one object."""
        found = await bounded_map(
            lambda row: self._measure(unknown, row),
            range(len(unknown)),
            limit=chunks_at_once(self._owner),
        )
        rows = joined([it for it in found if it is not None], self._owner.meaning.kind)
        if len(rows):
            await _put(self._store, self._owner, rows)

    async def _measure(self, unknown: Unknown, row: int) -> Rows | None:
        owner, coords = self._owner, unknown.coords[row : row + 1]
        within = cells_within(coords, owner.shape, owner.chunks)[0].tolist()
        corner = zip(coords[0].tolist(), owner.chunks, within, strict=True)
        box = tuple(slice(at * size, at * size + cells) for at, size, cells in corner)
        try:
            numbers = await owner.read(box)
        except (FormatError, VirtualChunkError) as error:
            self._tally.unreadable.append(f"A chunk of {owner.path!r}: {error}")
            return None
        found = await self._store.workspace.assets.compute(
            lambda: measure(owner.meaning, numbers), size_bytes=numbers.nbytes
        )
        # The key was made of the references when the chunks were listed, so the bytes that were
        # read are those that it names: objects never change, and guarded sources are checked.
        found["key"] = unknown.keys[row]
        self._tally.chunks += 1
        self._tally.bytes_read += int(unknown.lengths[row])
        self._progress(Progress("analyzing chunks", self._tally.chunks))
        return found
