"""Make the objects of a copy whose snapshots differ from those of its origin; see `derivation`.

Snapshots come last: until then nothing refers to what was made. Each manifest is read once, however
many snapshots share it.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.files.manifests import check_id
from icechunk_async.engine.upkeep.copying import contents
from icechunk_async.engine.upkeep.copying.derivation import NodeChange, derived_log
from icechunk_async.engine.upkeep.survey import Limits, portions
from icechunk_async.engine.upkeep.sweep import chunk_ids, id_set, object_name, pages
from icechunk_async.errors import FormatError, InvalidInputError, ObjectNotFoundError
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import ManifestId
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.snapshot import ManifestFileInfo, Nodes
from icechunk_async.format.transaction_log import unique_coordinates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.upkeep.copying.derivation import Derivation, Use
    from icechunk_async.engine.upkeep.copying.transfer import Transfer
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.manifest.writing import LocationDictionary
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Node, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.storage import Retrieved

__all__ = ["GUARD_SECONDS", "Deriving"]

GUARD_SECONDS: Final = 600
"""By how much the clocks of a machine and a storage may disagree; commits allow as much."""
_LIMITS: Final = Limits()
_SNAPSHOTS_AT_ONCE: Final = 16
_BYTES_A_REF: Final = 100
_BYTES_A_NODE: Final = 1000
_EXPANSION: Final = 4
"""Roughly how much larger a manifest is than its file; decides what goes to a thread."""


@dataclass(slots=True)
class _Present:
    """Objects that an interrupted copy left at the destination."""

    manifests: dict[ManifestId, int] = field(default_factory=dict[ManifestId, int])
    """With their sizes."""
    chunks: IdSet = field(default_factory=IdSet)


class Deriving:
    """Makes the objects of new snapshots, in one call of `bring`."""

    def __init__(
        self,
        source: Assets,
        destination: Assets,
        transfer: Transfer,
        derivation: Derivation,
        *,
        dictionary: LocationDictionary | None,
        guard: int,
        progress: ProgressCallback,
    ) -> None:
        """Begin with nothing.

        Args:
            source: files of the origin; cached snapshots save reading them several times.
            destination: files of the copy.
            transfer: copies objects that do not change.
            derivation: how snapshots differ.
            dictionary: how locations of virtual chunks are compressed; None: they are not.
            guard: seconds since the epoch. What is written later is no chunk that a shallow copy
                refers to.
            progress: called with each step.
        """
        self._source = source
        self._destination = destination
        self._transfer = transfer
        self._derivation = derivation
        self._dictionary = dictionary
        self._guard = guard
        self._progress = progress
        self._lines: Mapping[SnapshotId, SnapshotInfo] = {}
        self._present = _Present()
        self._became: dict[Use, ManifestFileInfo] = {}
        """The manifests of the copy, by what they hold of the origin's."""
        self._in_all: set[Use] | None = None
        """The manifests that every new snapshot needs; None before any was read."""
        self._kept: set[ManifestId] = set()
        self._chunks = IdSet()

    async def bring(
        self,
        lines: Mapping[SnapshotId, SnapshotInfo],
        known: AbstractSet[SnapshotId],
        *,
        resumes: bool,
    ) -> bool:
        """Make what the snapshots of a history need that the destination does not have.

        Args:
            lines: snapshots of the origin, with the parents that they have in the copy.
            known: ids of snapshots of the copy that are there, with all that they need.
            resumes: look at what is at the destination, and do not make it again.

        Returns:
            Whether every object that was needed could be read.

        Raises:
            SnapshotNotFoundError, ObjectNotFoundError, FormatError: a file is missing, or damaged.
            InvalidInputError: a manifest has too many references for locations.

        Cost: two reads of each new snapshot, one of each manifest that only they use, one of each
        snapshot of the copy that they follow on, and the writing of what differs. Memory: 12 bytes
        a chunk that is copied, and some manifests.
        """
        self._lines = lines
        new = [it for it in _in_order(lines) if self._id(it) not in known]
        if resumes:
            self._present = await self._look()
        before = await self._known_files(new, known)
        # Manifests that are made come before chunks, although they refer to them: they tell which
        # chunks are needed, and nothing refers to them before the snapshots, which come last.
        await self._make_manifests(await self._uses(new), before)
        whole = await self._copy_chunks(await self._known_chunks(before))
        whole = await self._copy_kept() and whole
        await self._bring_logs(new)
        await self._bring_snapshots(new)
        return whole

    def _id(self, snapshot_id: SnapshotId) -> SnapshotId:
        """Return the id of the copy of a snapshot."""
        return self._derivation.named(snapshot_id, self._lines)

    # Looking

    async def _look(self) -> _Present:
        found = _Present()
        storage = self._destination.storage
        async for page in pages(storage, contents.CHUNKS):
            ids, valid = parse_ids([object_name(it.key) for it in page])
            found.chunks.add(ids[valid])
        async for page in pages(storage, contents.MANIFESTS):
            ids, valid = parse_ids([object_name(it.key) for it in page])
            for it, row, is_id in zip(page, ids, valid.tolist(), strict=True):
                if is_id:
                    found.manifests[ManifestId(row.tobytes())] = it.size_bytes
        return found

    async def _known_files(
        self, new: Sequence[SnapshotId], known: AbstractSet[SnapshotId]
    ) -> dict[ManifestId, ManifestFileInfo]:
        """Return the manifests of the snapshots of the copy that new ones follow on."""
        parents = {self._id(it) for new_id in new if (it := self._lines[new_id].parent_id)}
        found: dict[ManifestId, ManifestFileInfo] = {}

        async def read(snapshot_id: SnapshotId) -> None:
            snapshot = await self._destination.snapshot_if_there(snapshot_id)
            if snapshot is not None:
                found.update(snapshot.manifests)

        await bounded_map(read, parents & known, limit=_SNAPSHOTS_AT_ONCE)
        return found

    async def _uses(self, new: Sequence[SnapshotId]) -> dict[Use, int]:
        """Return the manifests, with their sizes, that new snapshots need, and what of each."""
        found: dict[Use, int] = {}
        done = 0

        async def read(snapshot_id: SnapshotId) -> None:
            nonlocal done
            snapshot = await self._source.snapshot(snapshot_id)
            uses = self._derivation.uses(self._derivation.choose(snapshot.nodes))
            self._in_all = uses if self._in_all is None else self._in_all & uses
            for use in uses:
                info = snapshot.manifests.get(use[0])
                found[use] = 0 if info is None else info.size_bytes
            done += 1
            self._progress(Progress("reading snapshots", done, len(new)))

        await bounded_map(read, new, limit=_SNAPSHOTS_AT_ONCE)
        return found

    # Manifests

    async def _make_manifests(
        self, uses: Mapping[Use, int], before: Mapping[ManifestId, ManifestFileInfo]
    ) -> None:
        left: dict[Use, int] = {}
        for use, size_bytes in uses.items():
            # The same manifest, copied byte for byte or made of it by an earlier copy.
            known = before.get(use[0]) or before.get(self._derivation.manifest_id(use))
            if known is None:
                left[use] = size_bytes
            else:
                self._became[use] = known
        done = 0
        for portion in portions(left.items(), _LIMITS):
            await bounded_map(lambda it: self._make(it[0]), portion, limit=_LIMITS.manifests)
            done += len(portion)
            self._progress(Progress("writing manifests", done, len(left)))

    async def _make(self, use: Use) -> None:
        """Make one manifest, or find that it can be copied."""
        assets, (manifest_id, nodes) = self._source, use
        file = await assets.manifests.read_file(manifest_id)
        manifest = await assets.compute(
            lambda: assets.layout.manifests.decode(manifest_id, file.data),
            size_bytes=_EXPANSION * len(file.data),
        )
        # It is stored under a new id: nobody would notice later that it was another's.
        check_id(assets.layout.names.manifest(manifest_id), manifest.id, manifest_id)
        refs = await assets.compute(
            lambda: self._derivation.rewritten(
                manifest, nodes, self._guard_of(file), self._destination.spec_version
            ),
            size_bytes=_BYTES_A_REF * len(manifest),
        )
        if refs is None:
            self._became[use] = ManifestFileInfo(manifest_id, file.size_bytes, len(manifest))
            self._kept.add(manifest_id)
        else:
            self._became[use] = await self._store(self._derivation.manifest_id(use), refs)
            manifest = Manifest(manifest_id, refs)
        if self._derivation.container is None:
            self._chunks.add(
                await assets.compute(
                    lambda: chunk_ids(manifest), size_bytes=_BYTES_A_REF * len(manifest)
                )
            )

    def _guard_of(self, file: Retrieved) -> int:
        """Return the guard of the chunks of a manifest: they were written before it.

        0 if the storage does not tell when objects were written: then no guard could be checked.
        """
        if file.last_modified is None:
            return 0
        # Chunks are stored before their manifest. If the storage's clock is ahead of ours, its time
        # counts.
        return max(self._guard, int(file.last_modified.timestamp()) + GUARD_SECONDS)

    async def _store(
        self, manifest_id: ManifestId, refs: Mapping[NodeId, ChunkRefs]
    ) -> ManifestFileInfo:
        """Store a manifest, unless it is there already."""
        count = sum(map(len, refs.values()))
        size_bytes = self._present.manifests.get(manifest_id)
        # Names are hashes of what is taken from which manifest, so one that an interrupted copy
        # left is the same.
        if size_bytes is not None:
            self._transfer.skipped += 1
            return ManifestFileInfo(manifest_id, size_bytes, count)
        made = self._destination
        codec, level = made.layout.manifests, made.compression_level
        try:
            data = await made.compute(
                lambda: codec.encode(manifest_id, refs, level, self._dictionary),
                size_bytes=_BYTES_A_REF * count,
            )
        except InvalidInputError as error:
            raise InvalidInputError(
                f"A manifest is too large to be copied with locations instead of chunks: {error} "
                "Then write the manifests of the origin anew, with rewrite_manifests."
            ) from error
        await made.manifests.put(manifest_id, data)
        self._transfer.count(len(data))
        return ManifestFileInfo(manifest_id, len(data), count)

    # Objects that are copied unchanged

    async def _known_chunks(self, before: Mapping[ManifestId, ManifestFileInfo]) -> IdSet:
        """Return the chunks of those manifests of the copy that new ones replace."""
        found = IdSet()
        if not len(self._chunks):
            return found
        # As in `find_needs`: chunks that the copy has already are in manifests that new ones
        # replace.
        stay = {self._became[it].id for it in self._in_all or ()}
        gone = {it: info.size_bytes for it, info in before.items() if it not in stay}
        assets = self._destination

        async def read(entry: tuple[ManifestId, int]) -> None:
            manifest = await assets.manifests.read(*entry)
            size_bytes = _BYTES_A_REF * len(manifest)
            found.add(await assets.compute(lambda: chunk_ids(manifest), size_bytes=size_bytes))

        for portion in portions(gone.items(), _LIMITS):
            await bounded_map(read, portion, limit=_LIMITS.manifests)
        return found

    async def _copy_chunks(self, known: IdSet) -> bool:
        """Copy the chunks that are neither known nor there."""
        ids = self._chunks.ids()
        there = self._present.chunks.contains(ids)
        self._transfer.skipped += int(there.sum())
        wanted = IdSet()
        wanted.add(ids[~there & ~known.contains(ids)])
        return await self._transfer.by_id(contents.CHUNKS, wanted)

    async def _copy_kept(self) -> bool:
        """Copy manifests that are the same in the copy, and their checksums."""
        wanted = id_set(it for it in self._kept if it not in self._present.manifests)
        self._transfer.skipped += len(self._kept) - len(wanted)
        await self._transfer.by_id(contents.SUMS, id_set(self._kept))  # nobody depends on them
        return await self._transfer.by_id(contents.MANIFESTS, wanted)

    # Transaction logs

    async def _bring_logs(self, new: Sequence[SnapshotId]) -> None:
        """Copy or make the logs of snapshots; one that is missing at the origin stays missing."""
        infos = [self._lines[it] for it in new]
        if self._derivation.paths is None:
            ids = {log for it in infos for log in (it.id, *it.pruned_ancestor_logs)}
            await self._transfer.by_id(contents.TRANSACTIONS, id_set(ids))
            return
        roots = [it.id for it in infos if it.parent_id is None]
        await self._transfer.by_id(contents.TRANSACTIONS, id_set(roots))
        later = [it for it in infos if it.parent_id is not None]
        await bounded_map(self._make_logs, later, limit=_SNAPSHOTS_AT_ONCE)

    async def _make_logs(self, it: SnapshotInfo) -> None:
        """Make the log of a snapshot, and those of expired snapshots before it."""
        before, after = await self._chosen(it.parent_id), await self._chosen(it.id)
        logs = [await self._log(name) for name in (*it.pruned_ancestor_logs, it.id)]
        there = [log for log in logs if log is not None]
        born = {node for log in there for node in (*log.new_groups, *log.new_arrays)}
        dead = {node for log in there for node in (*log.deleted_groups, *log.deleted_arrays)}
        for log in there:
            entered: dict[NodeId, npt.NDArray[np.uint32]] = {}
            left: set[NodeId] = set()
            if log.id == it.id:
                # Moved into the chosen part: to a reader of the copy it is new, with all its
                # chunks.
                came = after.keys() - before.keys() - born
                entered = {node: await self._coordinates(after[node]) for node in sorted(came)}
                left = before.keys() - after.keys() - dead
            change = NodeChange(before, after, entered, left)
            made = derived_log(log, self._id(log.id), change)
            data = await self._destination.pack_transaction_log(made)
            await self._destination.put_packed_log(made.id, data)
            self._transfer.count(len(data))

    async def _chosen(self, snapshot_id: SnapshotId | None) -> dict[NodeId, Node]:
        """Return the chosen nodes of a snapshot of the origin, by id."""
        if snapshot_id is None:
            return {}
        nodes = self._derivation.choose((await self._source.snapshot(snapshot_id)).nodes)
        return {node.id: node for node in nodes.values()}

    async def _log(self, snapshot_id: SnapshotId) -> TransactionLog | None:
        try:
            return await self._source.transaction_log(snapshot_id)
        except ObjectNotFoundError:
            return None

    async def _coordinates(self, node: Node) -> npt.NDArray[np.uint32]:
        """Return the coordinates of all chunks of an array."""
        if node.array is None:
            return np.empty((0, 0), np.uint32)
        rank = len(node.array.dimensions)
        found = [np.empty((0, rank), np.uint32)]
        for ref in node.array.manifests:
            manifest = await self._source.manifests.read(ref.manifest_id)
            found.append(manifest.refs(node.id, rank).coords)
        return unique_coordinates(np.concatenate(found))

    # Snapshots

    async def _bring_snapshots(self, new: Sequence[SnapshotId]) -> None:
        same: list[SnapshotId] = []
        done = 0

        async def bring(snapshot_id: SnapshotId) -> None:
            nonlocal done
            snapshot = await self._source.snapshot(snapshot_id)
            made = self._derived(snapshot)
            if made is None:
                same.append(snapshot_id)
            else:
                await self._put(made)
            done += 1
            self._progress(Progress("writing snapshots", done, len(new)))

        await bounded_map(bring, new, limit=_SNAPSHOTS_AT_ONCE)
        ids = id_set(same)
        await self._transfer.by_id(contents.SUMS, ids)  # lists of digests; nobody depends on them
        if not await self._transfer.by_id(contents.SNAPSHOTS, ids):
            raise ObjectNotFoundError("A snapshot was deleted while it was copied.")

    def _derived(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the copy of a snapshot; None if it is the same byte for byte."""
        lines, derivation = self._lines[snapshot.id], self._derivation
        chosen = derivation.choose(snapshot.nodes)
        became = {use[0]: self._became[use] for use in derivation.uses(chosen)}
        is_first = lines.parent_id is None
        metadata = snapshot.metadata
        if not is_first:
            metadata = derivation.metadata(snapshot.id, metadata)
        parent_id = None if lines.parent_id is None else self._id(lines.parent_id)
        made = replace(
            snapshot,
            id=self._id(snapshot.id),
            parent_id=parent_id,
            metadata=metadata,
            nodes=Nodes([_with_manifests(it, became) for it in chosen.values()]),
            manifests={it.id: it for it in became.values()},
        )
        same = (
            made.id == snapshot.id
            # Only files of format 1 name their parent.
            and (self._destination.spec_version > 1 or parent_id == snapshot.parent_id)
            and metadata == snapshot.metadata
            and len(chosen) == len(snapshot.nodes)
            and all(manifest_id == info.id for manifest_id, info in became.items())
        )
        return None if same else made

    async def _put(self, snapshot: Snapshot) -> None:
        assets = self._destination
        data = await assets.compute(
            lambda: assets.layout.snapshots.encode(snapshot, None, assets.compression_level).data,
            size_bytes=_BYTES_A_NODE * len(snapshot.nodes),
        )
        await assets.storage.put(assets.layout.names.snapshot(snapshot.id), data)
        self._transfer.count(len(data))


def _with_manifests(node: Node, became: Mapping[ManifestId, ManifestFileInfo]) -> Node:
    if node.array is None:
        return node
    refs = tuple(replace(it, manifest_id=became[it.manifest_id].id) for it in node.array.manifests)
    return replace(node, array=replace(node.array, manifests=refs))


def _in_order(lines: Mapping[SnapshotId, SnapshotInfo]) -> list[SnapshotId]:
    """Return snapshots so that each comes soon after its parent.

    Raises:
        FormatError: the parents form a circle.
    """
    children: dict[SnapshotId | None, list[SnapshotId]] = {}
    for it in lines.values():
        parent_id = it.parent_id if it.parent_id in lines else None
        children.setdefault(parent_id, []).append(it.id)
    found: list[SnapshotId] = []
    # Sorted, so that two copies do the same in the same order.
    waiting = sorted(children.get(None, ()), reverse=True)
    while waiting:
        found.append(waiting.pop())
        waiting += sorted(children.get(found[-1], ()), reverse=True)
    if len(found) < len(lines):
        raise FormatError("The ancestry of the snapshots to copy forms a circle.")
    return found
