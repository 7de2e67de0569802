"""Migration from layouts before format version 1 to version 2, in place.

The order: write every file of version 2 under its new key, the chunk objects as copies; freeze the
old branches; do the same for what was committed meanwhile; create the repo info. Until then the old
repository is whole, and a migration that ends early is continued or undone by the next one.

Ids keep their first 12 bytes, nodes their numbers.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime import clock
from icechunk_async._runtime.backoff import Backoff
from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.files.assets import Assets
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.history import opening
from icechunk_async.engine.history.outcomes import create_object
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.engine.history.ref_files.migration import OldRefs, finished, migrated
from icechunk_async.engine.history.way import HistorySettings
from icechunk_async.errors import ConflictError, FormatError, UnsupportedBySpecError
from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.config.codec import encode_config
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId
from icechunk_async.format.layout import CHUNKS, REPO_INFO, chunk_key
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.repo_info import SnapshotInfo, encode_repo_info
from icechunk_async.format.snapshot import ManifestFileInfo, ManifestRef, Nodes, Snapshot
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.engine.history.protocol import Migration
    from icechunk_async.engine.history.way import Found
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.format.snapshot import Node
    from icechunk_async.storage import Storage

__all__ = ["OlderMigration", "find_older", "leftovers", "remove"]

_LEVEL: Final = 3
_CACHED_NODES: Final = 500_000
_CACHED_REFS: Final = 5_000_000
_CONCURRENT_SNAPSHOTS: Final = 8
_CONCURRENT_MANIFESTS: Final = 4
_CONCURRENT_COPIES: Final = 32
_ROUNDS: Final = 10
"""Times that commits during the migration are followed before it is given up."""
_BATCH: Final = 1000
_LAYOUT: Final = BinaryLayout(2)
_SETTINGS: Final = HistorySettings(Backoff(max_tries=20, initial_ms=50, max_ms=5000), 1000, _LEVEL)


async def find_older(storage: Storage) -> Found | None:
    """Return the repository of an older layout that a storage holds, or None.

    Raises:
        FormatError: it holds repositories of two layouts, or what decides is damaged.
        UnsupportedBySpecError: the files of the repository are in another place, or its layout is
            one of version 2 already.
    """
    # Present versions first: what a finished migration left of the old layout is not migrated
    # again.
    for read in await gather(*(way.detect(storage) for way in opening.WAYS)):
        if read is not None:  # not decoded: a closed branch of version 1 cannot be
            return None
    found = await opening.find_other(storage)
    if found is not None and found.elsewhere is not None:
        raise UnsupportedBySpecError(
            f"The files of the repository at {storage.description.url!r} are at "
            f"{found.elsewhere.url!r}, and a migration needs them in one place. Nothing was "
            "changed. Copy them to where the state file is, remove 'store_root' from it, and call "
            "upgrade again."
        )
    if found is not None and found.spec_version:
        raise UnsupportedBySpecError(
            f"The repository at {storage.description.url!r} has the layout {found.layout!r}, which "
            "is not migrated in place. Nothing was changed. Copy it with Repository.copy_to or "
            "icechunk-async copy: the copy is of format version 2."
        )
    return found


async def leftovers(storage: Storage) -> tuple[str, ...]:
    """Return the folders of older layouts that a finished migration has left."""
    left: list[str] = []
    for way in opening.other_ways():
        folders = way.folders
        try:
            read = await way.detect(storage)
            if read is None:
                continue
            try:
                found = read()
            except FormatError:
                continue  # an object of somebody else that has the same name
            migration = found.open(storage, _assets(storage, found.layout), _SETTINGS).migration
            # Frozen branches are the sign that a migration began here; an old repository that is in
            # use is not touched.
            if migration is None or not await migration.is_frozen():
                continue
            folders = migration.folders
        except FormatError:
            pass  # some of its references were deleted already
        left += folders
    return tuple(left)


def _assets(storage: Storage, layout: Layout) -> Assets:
    return Assets(
        storage,
        layout,
        compression_level=_LEVEL,
        snapshot_nodes=_CACHED_NODES,
        chunk_refs=_CACHED_REFS,
    )


async def remove(storage: Storage, folders: Sequence[str]) -> None:
    """Delete all objects in some folders; a name without a slash at its end is that of an object.

    Raises:
        StorageError: one could not be deleted; others may be.
    """
    for folder in folders:
        batch: list[str] = []
        async for entry in storage.list_prefix(folder):
            # A prefix also lists objects whose names only begin alike.
            if isinstance(entry, ObjectInfo) and (folder[-1] == "/" or entry.key == folder):
                batch.append(entry.key)
            if len(batch) == _BATCH:
                await _delete(storage, batch)
                batch = []
        await _delete(storage, batch)


async def _delete(storage: Storage, keys: list[str]) -> None:
    for failure in await storage.delete(keys) if keys else []:
        raise failure.error


@dataclass(frozen=True, slots=True)
class _Converted:
    """A manifest of version 2."""

    info: ManifestFileInfo
    extents: Mapping[NodeId, Extents]
    """The box of each array that it has references of."""


@dataclass(slots=True)
class _Written:
    """The files of format version 2 that were written so far."""

    infos: dict[SnapshotId, SnapshotInfo] = field(default_factory=dict[SnapshotId, SnapshotInfo])
    """By the new ids."""
    manifests: dict[ManifestId, _Converted] = field(default_factory=dict[ManifestId, "_Converted"])
    """By the old ids."""
    copied: set[bytes] = field(default_factory=set[bytes])
    """The old ids of chunk objects."""


class OlderMigration:
    """One migration."""

    def __init__(self, storage: Storage, found: Found, progress: ProgressCallback) -> None:
        """Migrate what was found in ``storage``."""
        self._storage = storage
        self._found = found
        self._progress = progress
        self._old, self._new = _assets(storage, found.layout), _assets(storage, _LAYOUT)
        self.history = found.open(storage, self._old, _SETTINGS)
        assert self.history.migration is not None  # every older layout has one
        self._migration: Migration = self.history.migration
        self._written = _Written()

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that version 2 does not need."""
        return self._migration.folders

    async def is_resumed(self) -> bool:
        """Return whether an earlier migration was interrupted."""
        return await self._migration.is_frozen()

    async def plan(self) -> RepoInfo:
        """Return the repo info that a migration would make, and write nothing.

        Raises:
            FormatError: a branch, tag or snapshot is damaged.

        Cost: reads all references and snapshots.
        """
        refs = await self._refs()
        for tip in _tips(refs):
            async for info in self.history.ancestry(tip):
                new = _short(info.id, SnapshotId)
                if new in self._written.infos:
                    break
                self._written.infos[new] = _new_info(info)
        return await self._info(refs)

    async def run(self) -> RepoInfo:
        """Migrate, and return the new repo info.

        Raises:
            ConflictError: writers were active all the time, or another process migrates as well;
                the old repository can be used on.
            FormatError: something is damaged; the same.
        """
        # An earlier migration may have copied most of them, which takes the longest.
        existing = await self._existing_chunks()
        # While writers are still at work; after the freeze only what they committed meanwhile is
        # left.
        await self._convert(await self._refs(), existing)
        try:
            info = await self._info(await self._freeze_and_follow(existing))
        except (ConflictError, FormatError):
            # Nothing of version 2 is in force before its repo info, which comes last.
            await self._migration.thaw()
            raise
        data = pack(encode_repo_info(info), FileType.REPO_INFO, 2, level=_LEVEL)
        if await create_object(self._storage, REPO_INFO, data) is None:
            raise ConflictError(
                "Somebody else is migrating the repository, or has just done it. Call upgrade "
                "again to see, but not while they are at work."
            )
        return info

    async def _freeze_and_follow(self, existing: Mapping[str, int]) -> OldRefs:
        """Freeze the branches, convert what is new, and return the references."""
        for _ in range(_ROUNDS):
            await self._migration.freeze()
            refs = await self._refs()
            await self._convert(refs, existing)
            # Frozen branches cannot move, but branches and tags can still be created.
            if await self._refs() == refs:
                await self._check_copies()
                return refs
        raise ConflictError(
            "Branches or tags were created all the time that the repository was migrated; the "
            "migration was undone. Stop all writers and call upgrade again."
        )

    async def _refs(self) -> OldRefs:
        """Read all references anew."""
        audit = await self.history.audit()
        if audit.faults:
            raise FormatError(
                f"The repository cannot be migrated: {audit.faults[0].detail} Nothing was changed."
            )
        named: dict[str, dict[str, SnapshotId]] = {"branch": {}, "tag": {}}
        for full_name, target in audit.refs.items():
            kind, _, name = full_name.partition(".")
            named[kind][name] = target
        return OldRefs(named["branch"], named["tag"], {})

    async def _info(self, refs: OldRefs) -> RepoInfo:
        """Return the repo info of the migrated repository."""
        new = OldRefs(
            {name: _short(it, SnapshotId) for name, it in refs.branches.items()},
            {name: _short(it, SnapshotId) for name, it in refs.tags.items()},
            {},
        )
        if MAIN not in new.branches:
            raise FormatError(f"The repository has no branch {MAIN!r}, so it cannot be migrated.")
        config = (await self.history.load_config()).config
        raw = None if config is None or config == RepositoryConfig() else encode_config(config, 2)
        return finished(migrated(new, self._written.infos, raw, clock.now_us()))

    async def _convert(self, refs: OldRefs, existing: Mapping[str, int]) -> None:
        """Write every file of version 2 that these references need and that is not written yet."""
        wanted: dict[SnapshotId, None] = {}
        for tip in _tips(refs):
            async for info in self.history.ancestry(tip):
                if info.id in wanted or _short(info.id, SnapshotId) in self._written.infos:
                    break
                wanted[info.id] = None
        done = 0

        async def convert(snapshot_id: SnapshotId) -> SnapshotInfo:
            nonlocal done
            info = await self._convert_snapshot(snapshot_id, existing)
            done += 1
            self._progress(Progress("converting snapshots", done, len(wanted)))
            return info

        # Oldest first, so that each manifest is converted while its snapshot is read.
        infos = await bounded_map(convert, list(wanted)[::-1], limit=_CONCURRENT_SNAPSHOTS)
        for info in infos:
            # Ids of the old layouts are longer, and two of them may begin alike.
            if self._written.infos.setdefault(info.id, info) is not info:
                raise _ambiguous("snapshots", str(info.id))

    async def _convert_snapshot(
        self, snapshot_id: SnapshotId, existing: Mapping[str, int]
    ) -> SnapshotInfo:
        snapshot = await self._old.snapshot(snapshot_id)
        # Times of format version 2 are unsigned (spec, "Snapshot files").
        if snapshot.flushed_at < 0:
            raise FormatError(f"Snapshot {snapshot_id} was written before 1970.")
        # Two snapshots that are converted side by side may both convert one: the bytes are the
        # same.
        missing = [it for it in snapshot.manifests if it not in self._written.manifests]
        await bounded_map(
            lambda it: self._convert_manifest(it, existing), missing, limit=_CONCURRENT_MANIFESTS
        )
        converted = {it: self._written.manifests[it] for it in snapshot.manifests}
        if len({it.info.id for it in converted.values()}) != len(converted):
            raise _ambiguous("manifests", f"those of snapshot {snapshot_id}")
        nodes = [_new_node(node, converted) for node in snapshot.nodes.values()]
        # The list and the nodes must name the same manifests, or the official engine refuses to
        # commit.
        used = {ref.manifest_id for it in nodes if it.array for ref in it.array.manifests}
        files = {it.info.id: it.info for it in converted.values() if it.info.id in used}
        info = _new_info(await self.history.snapshot_info(snapshot_id))
        new = Snapshot(
            info.id,
            None,
            snapshot.flushed_at,
            snapshot.message,
            snapshot.metadata,
            Nodes(nodes),
            files,
        )
        # Where the old layout has no logs, it is found by comparing snapshots.
        log = await self._old.transaction_log(snapshot_id)
        await self._new.put_snapshot(new)
        await self._new.put_transaction_log(replace(log, id=info.id))
        return info

    async def _convert_manifest(self, manifest_id: ManifestId, existing: Mapping[str, int]) -> None:
        old = await self._old.manifests.get(manifest_id)
        arrays = {node_id: _new_refs(refs) for node_id, refs in old.arrays.items() if len(refs)}
        await self._copy_chunks([_used_ids(refs) for refs in old.arrays.values()], existing)
        new_id = _short(manifest_id, ManifestId)
        data = await self._new.compute(
            lambda: self._new.manifests.encode(new_id, arrays), size_bytes=64 * len(old)
        )
        count = sum(map(len, arrays.values()))
        if count:
            await self._new.manifests.put(new_id, data)
        self._written.manifests[manifest_id] = _Converted(
            ManifestFileInfo(new_id, len(data), count),
            {node_id: refs.extents() for node_id, refs in arrays.items()},
        )

    async def _existing_chunks(self) -> dict[str, int]:
        """Return the sizes of chunk objects that an earlier migration copied, by key."""
        entries = self._storage.list_prefix(f"{CHUNKS}/")
        return {it.key: it.size_bytes async for it in entries if isinstance(it, ObjectInfo)}

    async def _copy_chunks(
        self, ids: Sequence[npt.NDArray[np.uint8]], existing: Mapping[str, int]
    ) -> None:
        """Copy chunk objects to the keys that they have in version 2."""
        names = self._found.layout.names
        fresh: list[ChunkId] = []
        for raw in [row.tobytes() for rows in ids for row in rows]:
            if raw not in self._written.copied:
                # Before it is copied: manifests that are converted side by side share chunks.
                self._written.copied.add(raw)
                fresh.append(ChunkId(raw))

        async def copy(chunk_id: ChunkId) -> None:
            key = chunk_key(_short(chunk_id, ChunkId))
            if key not in existing:
                await self._storage.copy(names.chunk(chunk_id), key)

        await bounded_map(copy, fresh, limit=_CONCURRENT_COPIES)

    async def _check_copies(self) -> None:
        """Compare the sizes of all chunk objects with those of their copies.

        Raises:
            FormatError: one is missing or has another size, or two have one new id.
        """
        # Listed anew, and all of them: a copy that was cut off, now or in an earlier migration, is
        # short.
        copies = await self._existing_chunks()
        names = self._found.layout.names
        seen: set[str] = set()
        async for entry in self._storage.list_prefix(f"{names.chunks}/"):
            if not isinstance(entry, ObjectInfo):
                continue
            try:
                chunk_id = ChunkId.parse(entry.key.rpartition("/")[2])
            except ValueError:
                continue
            # Garbage of the old repository, which stays behind.
            if bytes(chunk_id) not in self._written.copied:
                continue
            key = chunk_key(_short(chunk_id, ChunkId))
            if key in seen:
                raise _ambiguous("chunk objects", key)
            seen.add(key)
            if copies.get(key) != entry.size_bytes:
                raise FormatError(
                    f"{key!r}, the copy of {entry.key!r}, is missing or has another size. Call "
                    "upgrade again after deleting it."
                )


def _tips(refs: OldRefs) -> list[SnapshotId]:
    """Return where branches and tags are, ``main`` first."""
    names = sorted(refs.branches, key=lambda name: (name != MAIN, name))
    return [*(refs.branches[name] for name in names), *refs.tags.values()]


def _short[Id: (SnapshotId, ManifestId, ChunkId)](old: Id, kind: type[Id]) -> Id:
    """Return the id that an object has in format version 2."""
    return kind(old[: kind.size_bytes])


def _ambiguous(what: str, which: str) -> FormatError:
    return FormatError(
        f"The repository cannot be migrated: the ids of two {what} begin with the same 12 bytes "
        f"({which}). Nothing was changed."
    )


def _new_info(info: SnapshotInfo) -> SnapshotInfo:
    parent = None if info.parent_id is None else _short(info.parent_id, SnapshotId)
    return replace(info, id=_short(info.id, SnapshotId), parent_id=parent)


def _new_node(node: Node, converted: Mapping[ManifestId, _Converted]) -> Node:
    """Return a node with its new manifests, without those that hold nothing of it.

    Boxes are those of the references, since the official engine looks into the first that fits.
    """
    if node.array is None:
        return node
    found = [converted[it.manifest_id] for it in node.array.manifests]
    refs = tuple(
        ManifestRef(it.info.id, it.extents[node.id]) for it in found if node.id in it.extents
    )
    return replace(node, array=replace(node.array, manifests=refs))


def _new_refs(refs: ChunkRefs) -> ChunkRefs:
    """Return references with the new ids of chunk objects."""
    return replace(refs, chunk_ids=np.ascontiguousarray(refs.chunk_ids[:, : ChunkId.size_bytes]))


def _used_ids(refs: ChunkRefs) -> npt.NDArray[np.uint8]:
    """Return the old ids of the chunk objects that references need."""
    used: npt.NDArray[np.uint8] = refs.chunk_ids[np.unique(refs.objects[refs.kinds == Kind.NATIVE])]
    return used
