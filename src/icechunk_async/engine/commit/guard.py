"""Refuse to publish references to chunks that garbage collection deleted, or is deleting.

Only what the session wrote is looked at, and only if a collection ran since it began whose cutoff
can reach it. What it inherited is part of the history, which no collection deletes.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self

from icechunk_async._runtime import clock
from icechunk_async.engine.files.ages import are_older, chunk_times
from icechunk_async.engine.history.collections import Collection, DraftOutdatedError, read_notes
from icechunk_async.errors import ChunksCollectedError, ConflictError
from icechunk_async.format.id_set import IdSet
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.engine.changes.change_set import ArrayChanges
    from icechunk_async.engine.commit.flush import Flusher
    from icechunk_async.engine.history import History
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.storage import Storage

__all__ = ["RewriteGuard", "SessionGuard"]

_log = logging.getLogger(__name__)

_UNNOTED: Final = timedelta(hours=1)
"""Without an operations log, collections by other engines leave no trace: sessions that are open
for this long look for their chunks, and again each time that as long has passed."""
_SKEW: Final = timedelta(days=1)
"""Without an operations log, notes with a cutoff this long before a session are left out."""
_SHOWN: Final = 5


class _Stopwatch:
    """The time since a session began, never less than what passed."""

    def __init__(self, began_us: int | None = None) -> None:
        self.began_us = clock.now_us() if began_us is None else began_us
        self._began = time.monotonic()

    def elapsed(self) -> timedelta:
        # One clock is set back, the other stands still while the machine sleeps.
        wall = timedelta(microseconds=clock.now_us() - self.began_us)
        return max(wall, timedelta(seconds=time.monotonic() - self._began))


class SessionGuard:
    """The `Guard` of a session."""

    def __init__(self, workspace: Workspace, history: History, flusher: Flusher) -> None:
        """Begin with a session that wrote nothing yet."""
        self._workspace = workspace
        self._flusher = flusher
        self._has_log = history.capabilities.operations_log
        self._since_us = history.log_position()
        self._watch = _Stopwatch()
        self._looked_at = timedelta()
        self._passed: set[str] = set()
        """Notes that were looked at."""
        self._lost = IdSet()
        """Chunk objects that were found to be gone, or to be too old for a collection."""

    @property
    def since_us(self) -> int:
        """The place in the operations log up to which everything was looked at."""
        return self._since_us

    def distrust(self) -> None:
        """Take what the session holds for older than any collection: another process wrote it."""
        self._since_us, self._watch, self._looked_at = 0, _Stopwatch(0), timedelta()
        self._passed.clear()

    async def admit(self, ran: Sequence[Collection], up_to_us: int, *, stored: bool) -> None:
        """Refuse if collections deleted what the session wrote; see `Guard`."""
        reaching = [it for it in ran if self._may_reach(it)]
        # What other engines collect in format 1 leaves no trace at all. Only time tells that there
        # may have been something.
        age = self._watch.elapsed()
        is_due = not self._has_log and age - self._looked_at >= _UNNOTED
        if is_due:
            reaching.append(Collection(0))
        if reaching:
            _log.info("%d collection(s) ran beside this session; looking for its chunks", len(ran))
            await self._refuse_lost([it.cutoff for it in reaching if it.cutoff is not None])
        # Only after everything was found in place: a refused commit looks at the same ones again.
        self._since_us = up_to_us
        self._passed.update(it.name for it in ran)
        if is_due:
            self._looked_at = age
        if reaching and (stored or self._flusher.has_stored):
            # Manifests and snapshots are as old as chunks can be, and are quickly made again.
            self._flusher.forget()
            raise DraftOutdatedError

    def _may_reach(self, it: Collection) -> bool:
        if it.name and it.name in self._passed:
            return False
        if not self._has_log and it.cutoff is not None:
            began = clock.from_us(self._watch.began_us)
            # The two times are of two machines; a day covers clocks that are set wrong.
            if it.cutoff + _SKEW <= began:
                return False
        return it.may_reach(self._watch.elapsed())

    async def _refuse_lost(self, cutoffs: Sequence[datetime]) -> None:
        """Look for the chunk objects that the session wrote.

        Raises:
            ChunksCollectedError: some are gone, or older than a cutoff and so about to go.
        """
        ids = await self._written()
        if len(ids) == 0:
            return
        assets = self._workspace.assets
        times = await chunk_times(assets.storage, assets.backend, ids)
        # A collection publishes that it runs, and deletes afterwards: what is older than its cutoff
        # may still be there, and will not be when the commit is read.
        # Negative: the object is not there.
        lost = times < 0
        if cutoffs:
            lost |= are_older(times, max(cutoffs))
        if not lost.any():
            return
        self._lost.add(ids[lost])
        if self._workspace.deduplication is not None:  # else it would find them in place
            self._workspace.deduplication.forget(ids[lost])
        raise _chunks_collected(self.lost_chunks())

    async def _written(self) -> Ids:
        """Return the chunk objects that the session wrote, each once.

        Chunks that were shifted keep their objects, which belong to the snapshot that they were
        copied from: these are left out.
        """
        workspace = self._workspace
        with workspace.lock:
            # Under the lock only what is quick: writers on other threads wait for it.
            changed = [(node_id, _native(it)) for node_id, it in workspace.changes.chunks.items()]
            sources = workspace.changes.sources
        written = IdSet()
        for node_id, ids in changed:
            mine = await self._without_inherited(node_id, ids) if sources else ids
            written.add(mine)
        return written.ids()

    async def _without_inherited(self, node_id: NodeId, ids: Ids) -> Ids:
        inherited = IdSet()
        workspace = self._workspace
        for source in workspace.changes.sources:
            snapshot = await workspace.assets.snapshot_if_there(source)
            path = None if snapshot is None else snapshot.nodes.path_of(node_id)
            # A merge puts chunks of an array into another one of the same path and document.
            path = path or workspace.base.nodes.path_of(node_id)
            node = None if snapshot is None or path is None else snapshot.nodes.get(path)
            if snapshot is None or node is None or node.array is None:
                continue
            for ref in node.array.manifests:
                info = snapshot.manifests.get(ref.manifest_id)
                if info is not None:
                    manifest = await workspace.assets.manifests.get(info.id, info.size_bytes)
                    inherited.add(manifest.refs(node.id, len(node.array.grid)).chunk_ids)
        return ids[~inherited.contains(ids)]

    def lost_chunks(self) -> dict[str, npt.NDArray[np.uint32]]:
        """Return the chunks that are lost and that were not written again, by array."""
        workspace = self._workspace
        found: dict[str, npt.NDArray[np.uint32]] = {}
        if len(self._lost) == 0:
            return found
        with workspace.lock:
            tree = workspace.tree
            for path in tree.paths():
                node = tree.get(path)
                changes = None if node is None else workspace.changes.chunks.get(node.id)
                if changes is not None:
                    rows = _rows_of(changes.columns(), self._lost)
                    if rows.any():
                        found[path] = changes.columns().coords[rows].copy()
        return found


class RewriteGuard:
    """The `Guard` of a rewriting of manifests, which writes no chunk."""

    def __init__(self, since_us: int, known: frozenset[str]) -> None:
        """Begin at a place in the log, or without one with the notes that are there."""
        self._since_us = since_us
        self._known = known
        self._watch = _Stopwatch()

    @classmethod
    async def begin(cls, history: History, storage: Storage) -> Self:
        """Return the guard of manifests that are stored from now on.

        Cost: none; one request where there is no operations log.
        """
        if history.capabilities.operations_log:
            return cls(history.log_position(), frozenset())
        return cls(0, frozenset(it.name for it in await read_notes(storage)))

    @property
    def since_us(self) -> int:
        """The place in the operations log where the rewriting began."""
        return self._since_us

    async def admit(self, ran: Sequence[Collection], up_to_us: int, *, stored: bool) -> None:
        """Refuse if collections may have deleted new manifests.

        Raises:
            ConflictError: one may have.
        """
        del up_to_us, stored
        new = [it for it in ran if it.name not in self._known]
        if any(it.may_reach(self._watch.elapsed()) for it in new):
            raise ConflictError(
                "Garbage was collected while manifests were being rewritten, and may have deleted "
                "new ones. Nothing was published; rewrite them again, and collect garbage "
                "afterwards, or only what is older than a day."
            )


def _native(changes: ArrayChanges) -> Ids:
    """Return the chunk objects that changes refer to; some may be repeated."""
    refs = changes.columns()
    found: Ids = refs.chunk_ids[refs.objects[refs.kinds == Kind.NATIVE]]
    return found


def _rows_of(refs: ChunkRefs, objects: IdSet) -> npt.NDArray[np.bool_]:
    """Return which references are to some chunk objects."""
    rows: npt.NDArray[np.bool_] = refs.kinds == Kind.NATIVE
    rows[rows] = objects.contains(refs.chunk_ids[refs.objects[rows]])
    return rows


def _chunks_collected(chunks: dict[str, npt.NDArray[np.uint32]]) -> ChunksCollectedError:
    count = sum(map(len, chunks.values()))
    named = "; ".join(_described(chunks))
    return ChunksCollectedError(
        f"Garbage was collected while this session was open, with a cutoff later than its "
        f"beginning: {count} chunk(s) that it wrote are deleted or being deleted: {named}. "
        "Nothing was published. Write them again ('session.collected_chunks' names them) and "
        "commit, or discard the session.",
        chunks=chunks,
    )


def _described(chunks: dict[str, npt.NDArray[np.uint32]]) -> Iterator[str]:
    left = _SHOWN
    for path, coords in chunks.items():
        if left <= 0:
            yield f"and more in other arrays ({len(chunks)} in all)"
            return
        shown = ", ".join(str(tuple(row)) for row in coords[:left].tolist())
        more = "" if len(coords) <= left else f" and {len(coords) - left} more"
        yield f"{path!r} {shown}{more}"
        left -= len(coords)
