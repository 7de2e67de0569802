"""The contents of a copy: the folders that it carries, and the objects that snapshots need.

This is the one list of the folders, of those that stay behind as well.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.upkeep.survey import Limits, portions
from icechunk_async.engine.upkeep.sweep import chunk_ids, id_set
from icechunk_async.format.id_set import IdSet
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import PROPOSALS, STATISTICS, SUMS, snapshot_key, transaction_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.format.ids import ManifestId, SnapshotId

__all__ = [
    "CHUNKS",
    "FOLDERS",
    "LEFT_BEHIND",
    "LOG",
    "MANIFESTS",
    "MARK",
    "SAME_IN_ALL",
    "SNAPSHOTS",
    "STATISTICS",
    "SUMS",
    "TRANSACTIONS",
    "Needs",
    "find_needs",
]

CHUNKS: Final = "chunks/"
MANIFESTS: Final = "manifests/"
TRANSACTIONS: Final = "transactions/"
SNAPSHOTS: Final = "snapshots/"
LOG: Final = "overwritten/"
"""The operations log of format 2 continues here."""
FOLDERS: Final = (CHUNKS, MANIFESTS, SUMS, TRANSACTIONS, SNAPSHOTS, LOG)
"""The folders that are copied, in the order of copying: what refers to others comes after them. The
references come last of all."""
LEFT_BEHIND: Final = ("leases/", "collections/", "copies/", PROPOSALS)
"""Folders that say something about one place and nothing about its copy: sessions that are open
there, collections of garbage that ran there, what copies put there, and proposals, whose states no
branch holds. `STATISTICS` are in neither list: they are found by their array and not by snapshot,
so that only copies of all branches and arrays may have them, and nothing needs them."""
MARK: Final = "copies/state.json"
"""In the destination: what copies have put there. It tells a copy, which may be replaced by a newer
one, from a repository that is committed to."""
SAME_IN_ALL: Final = frozenset(
    {snapshot_key(INITIAL_SNAPSHOT_ID), transaction_key(INITIAL_SNAPSHOT_ID)}
)
"""The first snapshot has the same id in every repository, with other content."""
_LIMITS: Final = Limits()
_BYTES_A_REF: Final = 100


@dataclass(frozen=True, slots=True)
class Needs:
    """The objects to copy, by folder."""

    objects: Mapping[str, IdSet]
    """Ids that must be there."""
    optional: Mapping[str, IdSet] = field(default_factory=dict[str, IdSet])
    """Ids that may be missing: nothing that can be read depends on them."""


async def find_needs(
    assets: Assets,
    snapshots: AbstractSet[SnapshotId],
    *,
    parents: AbstractSet[SnapshotId],
    logs: Iterable[SnapshotId],
    progress: ProgressCallback,
) -> Needs:
    """Find what snapshots need that their parents did not.

    Args:
        assets: the files of the source.
        snapshots: the new ones.
        parents: snapshots whose objects were copied earlier. What they share with the new ones is
            left out.
        logs: the transaction logs to copy.
        progress: called with the number of snapshots and manifests read.

    Raises:
        SnapshotNotFoundError, ObjectNotFoundError, FormatError: a file is missing, or damaged.

    Cost: one read of each new snapshot, of each of these parents, and of each manifest that
    only one side uses. Memory: 12 bytes a chunk, and some manifests.
    """
    old = _Union()
    new = _Union()
    read = 0

    async def note(snapshot_id: SnapshotId, union: _Union) -> None:
        nonlocal read
        snapshot = await assets.read_snapshot(snapshot_id)
        union.add({it.id: it.size_bytes for it in snapshot.manifests.values()})
        read += 1
        progress(Progress("reading snapshots", read))

    await bounded_map(lambda it: note(it, new), snapshots, limit=_LIMITS.snapshots)
    await bounded_map(lambda it: note(it, old), parents, limit=_LIMITS.snapshots)
    # Chunks in a new manifest that were copied before were in one that it replaces, and those are
    # read to find them. A chunk that is missed is copied again, which does no harm.
    added = {it: size for it, size in new.sizes.items() if it not in old.sizes}
    replaced = {it: size for it, size in old.sizes.items() if it not in new.in_all}
    # Without new manifests no chunk is new, and the old ones need not be read.
    known = await _chunks_of(assets, replaced if added else {}, progress)
    wanted = await _chunks_of(assets, added, progress)
    ids = wanted.ids()
    chunks = IdSet()
    chunks.add(ids[~known.contains(ids)])
    manifests = id_set(added)
    return Needs(
        {CHUNKS: chunks, MANIFESTS: manifests, SNAPSHOTS: id_set(snapshots)},
        # A sidecar for each manifest, and digests for each snapshot.
        {SUMS: id_set([*added, *snapshots]), TRANSACTIONS: id_set(logs)},
    )


class _Union:
    """The manifests of several snapshots."""

    def __init__(self) -> None:
        self.sizes: dict[ManifestId, int] = {}
        self._in_all: set[ManifestId] | None = None

    def add(self, sizes: Mapping[ManifestId, int]) -> None:
        self.sizes.update(sizes)
        self._in_all = set(sizes) if self._in_all is None else self._in_all & sizes.keys()

    @property
    def in_all(self) -> set[ManifestId]:
        """Those that every snapshot has."""
        return self._in_all or set()


async def _chunks_of(
    assets: Assets, manifests: Mapping[ManifestId, int], progress: ProgressCallback
) -> IdSet:
    """Return the chunk objects that manifests, given with their sizes, refer to."""
    found = IdSet()
    done = 0

    async def read(entry: tuple[ManifestId, int]) -> None:
        manifest = await assets.manifests.read(*entry)
        # Between two awaits, so that readers of one portion do not meet in the set.
        found.add(
            await assets.compute(
                lambda: chunk_ids(manifest), size_bytes=_BYTES_A_REF * len(manifest)
            )
        )

    for portion in portions(manifests.items(), _LIMITS):
        await bounded_map(read, portion, limit=_LIMITS.manifests)
        done += len(portion)
        progress(Progress("reading manifests", done, len(manifests)))
    return found
