"""Compaction: rewrite the chunks of packs that hold mostly garbage, so that those can go."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.commit.conflicts import Resolution
from icechunk_async.engine.commit.publisher import Publisher
from icechunk_async.engine.files.checks import damaged_chunk
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.files.packs import Packs
from icechunk_async.engine.history import check_online, check_unprotected
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.engine.upkeep.sweep import object_name, pages
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.crc import sum_of
from icechunk_async.format.id_set import parse_ids
from icechunk_async.format.manifest.chunk import Kind, NativeChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.transaction_log import TransactionLog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.commit.conflicts import Answer, Clash
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage

    type Names = npt.NDArray[np.uint64]
    """The first eight bytes of ids. A collision makes a share wrong and does no other harm."""

__all__ = ["CompactReport", "LiveShares", "compact"]


_log = logging.getLogger(__name__)


class LiveShares:
    """Objects with their lengths, and the bytes of each that are referred to."""

    def __init__(self, ids: Ids, sizes: npt.NDArray[np.int64]) -> None:
        """Begin with objects, ``(n, 12)`` and ``(n,)``, to which nothing refers."""
        names = _names(ids)
        order = np.argsort(names)
        self._names, self._sizes = names[order], sizes[order]
        self._live = np.zeros(len(names), np.int64)

    def count(self, refs: ChunkRefs) -> None:
        """Count the references of one array; bytes that several of them share count once."""
        rows, places = self._places(refs)
        ranges = np.stack(
            [places, refs.offsets[rows].astype(np.int64), refs.lengths[rows].astype(np.int64)]
        )
        # Ranges that overlap in part count twice. The object then looks fuller than it is, and
        # stays.
        distinct = np.unique(ranges, axis=1)
        np.add.at(self._live, distinct[0], distinct[2])

    def _places(self, refs: ChunkRefs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return which references are to these objects, and to which."""
        rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
        if not len(rows) or not len(self._names):
            return rows[:0], rows[:0]
        names = _names(refs.chunk_ids)[refs.objects[rows]]
        places = np.minimum(np.searchsorted(self._names, names), len(self._names) - 1)
        known = self._names[places] == names
        return rows[known], places[known]

    def sparse(self, min_share: float) -> npt.NDArray[np.bool_]:
        """Return which objects are referred to, but to less than this share of their bytes."""
        return (self._live > 0) & (self._live < min_share * self._sizes)

    def sizes(self, objects: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Return the total size of some objects, and the part of it that is referred to."""
        return int(self._sizes[objects].sum()), int(self._live[objects].sum())

    def within(self, refs: ChunkRefs, objects: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return which references are to some objects, in the order of their bytes there."""
        rows, places = self._places(refs)
        chosen = objects[places] & (refs.lengths[rows] > 0)  # an empty chunk has nothing to rewrite
        rows, places = rows[chosen], places[chosen]
        return rows[np.lexsort((refs.offsets[rows], places))]


def _names(ids: npt.NDArray[Any]) -> Names:
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64)[:, 0]


_CONCURRENT_CHUNKS: Final = 64
_BATCH: Final = 4096
"""References that are Python objects at a time."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The chunks that compaction rewrote, or after a dry run would have rewritten."""

    objects: int = 0
    """Chunk objects of which the branch used too little; its tip no longer uses them."""
    chunks: int = 0
    """Chunks that were rewritten."""
    bytes_written: int = 0
    """Size of those chunks; bytes that several share count for each."""
    bytes_released: int = 0
    """Size of the objects. Garbage collection frees it once no snapshot needs them."""
    snapshot_id: SnapshotId | None = None
    """The commit; None if there was nothing to do, or after a dry run."""


class _Yielding:
    """Leaves chunks that other writers changed meanwhile to them."""

    def solve(self, clash: Clash) -> Sequence[Answer]:
        return [Resolution.THEIRS] * len(clash.conflicts)


async def compact(
    engine: Engine,
    branch: str,
    *,
    min_live_share: float,
    message: str,
    metadata: Mapping[str, JSON],
    dry_run: bool,
    progress: ProgressCallback | None,
) -> CompactReport:
    """Rewrite the chunks in sparse objects of a branch's tip; see `Repository.compact`."""
    if not 0 < min_live_share <= 1:
        raise InvalidInputError(
            f"min_live_share must be a share of an object's bytes, above 0 and at most 1; it is "
            f"{min_live_share!r}."
        )
    engine.history.capabilities.require("upkeep")
    if not dry_run:
        engine.check_safe()
        check_online(engine.history)
    with telemetry.span("compact", branch=branch, dry_run=dry_run):
        # List before the tip is read: an object that is written later is never taken for sparse.
        shares = await _stored(engine.storage)
        base = await engine.assets.snapshot(await engine.history.branch_tip(branch))
        if not dry_run:
            check_unprotected(engine.history, branch)
        session = _session(engine, base, branch, metadata)
        report = await _rewrite(
            session.workspace, shares, min_live_share, progress or no_progress, dry_run=dry_run
        )
        if report.chunks and not dry_run:
            snapshot_id = await session.commit(message, rebase_with=_Yielding())
            report = replace(report, snapshot_id=snapshot_id)
    _log.info("branch %r compacted%s: %s", branch, " (dry run)" * dry_run, report)
    return report


async def _rewrite(
    workspace: Workspace,
    shares: LiveShares,
    min_live_share: float,
    progress: ProgressCallback,
    *,
    dry_run: bool,
) -> CompactReport:
    """Give the chunks in sparse objects new places, without publishing them."""
    paths = [node.path for node in workspace.base.nodes.values() if node.array is not None]
    # All arrays before the first is rewritten: one object can hold chunks of several.
    for path in paths:
        shares.count(await workspace.all_refs(path))
    sparse = shares.sparse(min_live_share)
    size_bytes, live_bytes = shares.sizes(sparse)
    objects = int(sparse.sum())
    # The bytes in use are those that will be written, which is what progress is told of.
    mover = _Mover(workspace, live_bytes, progress, dry_run=dry_run)
    for path in paths if objects else ():
        refs = await workspace.all_refs(path)
        await mover.move(path, refs, shares.within(refs, sparse))
    return CompactReport(objects, mover.chunks, mover.size_bytes, size_bytes)


async def _stored(storage: Storage) -> LiveShares:
    """List the chunk objects with their sizes."""
    ids = [np.empty((0, 12), np.uint8)]
    sizes = [np.empty(0, np.int64)]
    async for page in pages(storage, "chunks/"):
        found, valid = parse_ids([object_name(it.key) for it in page])
        ids.append(found[valid])
        sizes.append(np.array([it.size_bytes for it in page], np.int64)[valid])
    return LiveShares(np.concatenate(ids), np.concatenate(sizes))


def _session(
    engine: Engine, base: Snapshot, branch: str, metadata: Mapping[str, JSON]
) -> Publisher:
    # Its commits touch nothing, since chunks only lie elsewhere: they conflict with no one.
    workspace = Workspace(
        base,
        engine.assets,
        engine.virtual,
        inline_threshold_bytes=0,
        read_only=False,
        packs=Packs(engine.packing if engine.packing.is_on else Packing(), engine.assets.layout),
    )
    return Publisher(
        workspace,
        engine.history,
        engine.manifest_options,
        branch=branch,
        mode=SessionMode.WRITABLE,
        default_metadata=metadata,
        log=TransactionLog,
        writers=engine.neighbours.writers,
    )


class _Mover:
    """Gives chunks new places, in a session."""

    def __init__(
        self, workspace: Workspace, live_bytes: int, progress: ProgressCallback, *, dry_run: bool
    ) -> None:
        self.chunks = 0
        self.size_bytes = 0
        self._workspace = workspace
        self._live_bytes = live_bytes
        self._progress = progress
        self._dry_run = dry_run

    async def move(self, path: str, refs: ChunkRefs, rows: npt.NDArray[np.int64]) -> None:
        """Move some chunks of an array, and with them what is known of their values.

        Memory: what is read at a time, the packs, and the statistics of the array.
        """
        parts = [ChunkRefs.empty(refs.rank)]
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            if not self._dry_run:
                # In the order of their bytes in the old packs: what was read together lies together
                # afterwards.
                coords = [tuple(at) for at in refs.coords[part].tolist()]
                places = await bounded_map(
                    lambda row: self._move(path, refs, row), part.tolist(), limit=_CONCURRENT_CHUNKS
                )
                moved = ChunkRefs.from_mapping(refs.rank, dict(zip(coords, places, strict=True)))
                # By the batch: references that are Python objects take some hundred bytes each.
                self._workspace.set_refs(path, moved)
                parts.append(moved)
            self.chunks += len(part)
            self.size_bytes += int(refs.lengths[part].sum())
            self._progress(Progress("rewriting bytes of chunks", self.size_bytes, self._live_bytes))
        if len(parts) > 1:
            # Before the commit, so that no reader finds less known than before. Without one, these
            # rows are about bytes that nothing refers to.
            node_id, statistics = self._workspace.array(path).id, self._workspace.assets.statistics
            await statistics.carry(node_id, refs.take(rows), ChunkRefs.concat(parts))

    async def _move(self, path: str, refs: ChunkRefs, row: int) -> NativeChunk:
        ref = refs.ref(row)
        assert isinstance(ref, NativeChunk)  # only these were chosen
        workspace = self._workspace
        stop = ref.offset + ref.length
        data = await workspace.assets.chunks.read(ref.chunk_id, ref.offset, stop)
        if ref.sum and sum_of(data) != ref.sum:  # a new sum would make the damage look right
            raise damaged_chunk(path, refs.coords[row].tolist(), ref, data)
        return await workspace.store_object(data)
