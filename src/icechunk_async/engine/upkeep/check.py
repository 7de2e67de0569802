"""Check that every object exists that branches and tags lead to, virtual sources included.

Chunk objects are looked up in listings, one request for each 1000; virtual objects one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.upkeep.survey import Limits, Survey
from icechunk_async.engine.upkeep.sweep import object_name, pages
from icechunk_async.engine.virtual.chunks import check_unchanged
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, ChunkId
from icechunk_async.format.layout import chunk_key, manifest_key, snapshot_key, transaction_key
from icechunk_async.format.manifest.refs import Kind, VirtualChunk
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.format.id_set import Ids
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.storage import Storage

    type Problem = Literal["missing", "too short", "changed", "unreadable"]
    type ObjectKind = Literal["snapshot", "transaction log", "manifest", "chunk", "virtual"]
    type VirtualObject = tuple[str, str | None, int, bool]
    """Location, ETag, and time of the guard, which is 0 for none and may be rounded down."""

__all__ = [
    "BrokenReference",
    "NeededChunks",
    "NeededObjects",
    "ReferenceReport",
    "SurveyedHistory",
    "broken_chunks",
    "broken_virtual",
    "check_references",
    "guarded",
    "needed_by",
    "needed_of",
    "report_of",
    "survey_history",
]


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """An object with references to it that cannot be read through them."""

    kind: ObjectKind
    location: str
    """Its key in the repository, or its URL if it is virtual."""
    problem: Problem
    detail: str
    references: int
    """The number of references to it, in all manifests; 0 for an object without chunks."""


@dataclass(frozen=True, slots=True)
class NeededChunks:
    """Chunk objects of the repository, ascending by id."""

    ids: Ids
    """``(n, 12)``."""
    sizes: npt.NDArray[np.uint64]
    """The least number of bytes that each must have."""
    counts: npt.NDArray[np.int64]
    """The number of references to each."""

    @classmethod
    def joined(cls, parts: Sequence[NeededChunks]) -> Self:
        """Return the objects of all parts, each once."""
        ids = np.concatenate([np.empty((0, 12), np.uint8), *(it.ids for it in parts)])
        sizes = np.concatenate([np.empty(0, np.uint64), *(it.sizes for it in parts)])
        counts = np.concatenate([np.empty(0, np.int64), *(it.counts for it in parts)])
        found = IdSet()
        found.add(ids)
        rows = found.find(ids)
        most = np.zeros(len(found), np.uint64)
        total = np.zeros(len(found), np.int64)
        np.maximum.at(most, rows, sizes)
        np.add.at(total, rows, counts)
        return cls(found.ids(), most, total)

    def take(self, rows: npt.NDArray[Any]) -> NeededChunks:
        """Return some of the objects."""
        return NeededChunks(self.ids[rows], self.sizes[rows], self.counts[rows])


@dataclass(frozen=True, slots=True)
class NeededObjects:
    """The objects that hold chunks."""

    chunks: NeededChunks
    virtual: dict[VirtualObject, tuple[int, int]]
    """For each, the least number of bytes that it must have, and the number of references to it."""

    @classmethod
    def joined(cls, parts: Iterable[NeededObjects]) -> Self:
        """Return the objects of all parts, each once."""
        given = list(parts)
        virtual: dict[VirtualObject, tuple[int, int]] = {}
        for part in given:
            for it, (size, count) in part.virtual.items():
                known = virtual.get(it, (0, 0))
                virtual[it] = (max(size, known[0]), count + known[1])
        return cls(NeededChunks.joined([it.chunks for it in given]), virtual)


def needed_by(manifest: Manifest) -> NeededObjects:
    """Return the objects that one manifest refers to, in arrays of any rank."""
    refs = [*manifest.arrays.values(), *manifest.strays.values()]
    native = NeededChunks.joined([_native(it) for it in refs])
    return NeededObjects.joined(
        [NeededObjects(native, {}), *(NeededObjects(_NONE, _virtual(it)) for it in refs)]
    )


_NONE = NeededChunks(np.empty((0, 12), np.uint8), np.empty(0, np.uint64), np.empty(0, np.int64))


def _native(refs: ChunkRefs) -> NeededChunks:
    rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
    ends = refs.offsets[rows] + refs.lengths[rows]
    return NeededChunks(
        refs.chunk_ids[refs.objects[rows]], ends.astype(np.uint64), np.ones(len(rows), np.int64)
    )


def _virtual(refs: ChunkRefs) -> dict[VirtualObject, tuple[int, int]]:
    rows = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
    if not len(rows):
        return {}
    places, pool = refs.locations.distinct()
    states = np.stack(
        [places[refs.objects[rows]].astype(np.int64), refs.etags[rows], refs.modified[rows]], axis=1
    )
    distinct, codes = np.unique(states, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    ends = np.zeros(len(distinct), np.uint64)
    np.maximum.at(ends, codes, refs.offsets[rows] + refs.lengths[rows])
    counts = np.bincount(codes)
    found: dict[VirtualObject, tuple[int, int]] = {}
    rows_of_states: list[list[int]] = distinct.tolist()
    for (place, etag, modified), end, count in zip(
        rows_of_states, ends.tolist(), counts.tolist(), strict=True
    ):
        guard = refs.etag_pool.get(etag) if etag >= 0 else None
        key: VirtualObject = (pool.strings[place], guard, modified, refs.seconds_cut)
        known = found.get(key, (0, 0))
        found[key] = (max(end, known[0]), count + known[1])
    return found


def guarded(it: VirtualObject) -> VirtualChunk:
    """Return a reference to a whole object with its guard."""
    location, etag, modified, seconds_cut = it
    return VirtualChunk(location, 0, 0, etag, modified or None, seconds_cut)


_AT_ONCE: Final = 64
_MANIFESTS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class ReferenceReport:
    """The number of objects that were looked up, and those that are not usable."""

    snapshots: int
    transaction_logs: int
    manifests: int
    chunk_objects: int
    """Of the repository."""
    virtual_objects: int
    """Outside of the repository. An object with references to several states counts for each."""
    virtual_not_authorized: int
    """Virtual objects in containers that were not authorised."""
    broken: tuple[BrokenReference, ...] = ()
    """Snapshots first, then what they refer to, and so on."""

    @property
    def is_whole(self) -> bool:
        """Return whether every object that could be looked up is usable."""
        return not self.broken


@dataclass(frozen=True, slots=True)
class SurveyedHistory:
    """The snapshots of a history, checked, and the manifests that they refer to."""

    snapshots: int
    logs: int
    manifests: list[tuple[ManifestId, int]]
    broken: list[BrokenReference]


async def check_references(
    engine: Engine, progress: ProgressCallback | None = None
) -> ReferenceReport:
    """Check all objects; see `Repository.check_references`."""
    with telemetry.span("check_references"):
        return await _check(engine, progress or no_progress)


async def _check(engine: Engine, progress: ProgressCallback) -> ReferenceReport:
    history = await survey_history(engine, progress)
    done = 0

    async def read(entry: tuple[ManifestId, int]) -> tuple[NeededObjects, list[BrokenReference]]:
        nonlocal done
        found = await needed_of(engine, *entry)
        done += 1
        progress(Progress("reading manifests", done, len(history.manifests)))
        return found

    parts = await bounded_map(read, history.manifests, limit=_MANIFESTS_AT_ONCE)
    broken = [*history.broken, *(it for _, some in parts for it in some)]
    needed = NeededObjects.joined(it for it, _ in parts)
    progress(Progress("looking for chunks", 0))
    broken += await broken_chunks(engine.storage, needed.chunks)
    progress(Progress("looking at virtual objects", 0, len(needed.virtual)))
    more, unauthorized = await broken_virtual(engine.virtual, needed.virtual)
    return report_of(history, needed, [*broken, *more], unauthorized)


def report_of(
    history: SurveyedHistory,
    needed: NeededObjects,
    broken: Sequence[BrokenReference],
    unauthorized: int,
) -> ReferenceReport:
    """Return a report."""
    return ReferenceReport(
        history.snapshots,
        history.logs,
        len(history.manifests),
        len(needed.chunks.ids),
        len(needed.virtual),
        unauthorized,
        tuple(broken),
    )


async def survey_history(
    engine: Engine, progress: ProgressCallback = no_progress
) -> SurveyedHistory:
    """Read all snapshots, and look for their transaction logs.

    If only a snapshot's file says what its parent is, as in format 1, a missing or damaged snapshot
    hides its ancestors.
    """
    broken: dict[SnapshotId, BrokenReference] = {}
    survey: Survey[None] = Survey(
        engine.assets, lambda _: None, lambda _: None, limits=Limits(), progress=progress
    )

    async def parent_of(snapshot_id: SnapshotId) -> SnapshotId | None:
        try:
            return await survey.parent_of(snapshot_id)
        except (SnapshotNotFoundError, FormatError) as error:
            problem: Problem = (
                "missing" if isinstance(error, SnapshotNotFoundError) else "unreadable"
            )
            key = snapshot_key(snapshot_id)
            broken[snapshot_id] = BrokenReference("snapshot", key, problem, str(error), 0)
            return None

    snapshots = await engine.history.reachable(parent_of)
    await bounded_map(parent_of, [it for it in snapshots if it not in broken], limit=_AT_ONCE)
    manifests = await survey.discover(())
    logs = set(snapshots) - {INITIAL_SNAPSHOT_ID}
    if engine.history.state is not None:
        known = (await engine.history.state.info()).snapshots
        logs |= {log for it in snapshots for log in known[it].pruned_ancestor_logs if it in known}
    missing = await _missing_logs(engine.storage, logs)
    found = [*(broken[it] for it in sorted(broken)), *missing]
    return SurveyedHistory(len(snapshots), len(logs), manifests, found)


async def _missing_logs(storage: Storage, logs: set[SnapshotId]) -> list[BrokenReference]:
    wanted = {transaction_key(it) for it in logs}
    there: set[str] = set()
    if storage.capabilities.listing:
        async for page in pages(storage, "transactions/"):
            there.update(it.key for it in page)
    else:
        sizes = await _sizes(storage, sorted(wanted))
        there = {key for key, size in sizes.items() if size is not None}
    return [
        BrokenReference("transaction log", key, "missing", f"{key!r} is missing.", 0)
        for key in sorted(wanted - there)
    ]


async def needed_of(
    engine: Engine, manifest_id: ManifestId, size_bytes: int
) -> tuple[NeededObjects, list[BrokenReference]]:
    """Return the objects that a manifest needs; if it cannot be read, it is broken itself."""
    try:
        manifest = await engine.assets.manifests.read(manifest_id, size_bytes)
    except FormatError as error:
        gone = isinstance(error.__cause__, ObjectNotFoundError)
        key = manifest_key(manifest_id)
        problem: Problem = "missing" if gone else "unreadable"
        return NeededObjects.joined([]), [BrokenReference("manifest", key, problem, str(error), 0)]
    needed = await engine.assets.compute(
        lambda: needed_by(manifest), size_bytes=100 * len(manifest)
    )
    return needed, []


async def broken_chunks(
    storage: Storage, needed: NeededChunks, prefix: str = "chunks/"
) -> list[BrokenReference]:
    """Look for chunk objects, all of whose keys begin with a prefix.

    Cost: one request for each 1000 objects listed; if the storage cannot list, one for each object
    that is needed.
    """
    wanted = IdSet()
    wanted.add(needed.ids)
    sizes = np.full(len(needed.ids), -1, np.int64)
    if storage.capabilities.listing:
        listed = pages(storage, prefix)
        async with closing(listed):
            async for page in listed:
                ids, valid = parse_ids([object_name(it.key) for it in page])
                rows = np.where(valid, wanted.find(ids), -1)
                lengths = np.array([it.size_bytes for it in page], np.int64)
                sizes[rows[rows >= 0]] = lengths[rows >= 0]
    else:
        keys = [chunk_key(ChunkId(it.tobytes())) for it in needed.ids]
        found = await _sizes(storage, keys)
        sizes[:] = [-1 if (size := found[key]) is None else size for key in keys]
    return _short(needed, sizes)


def _short(needed: NeededChunks, sizes: npt.NDArray[np.int64]) -> list[BrokenReference]:
    broken: list[BrokenReference] = []
    for row in np.flatnonzero(sizes < needed.sizes.astype(np.int64)).tolist():
        key = chunk_key(ChunkId(needed.ids[row].tobytes()))
        size, count = int(sizes[row]), int(needed.counts[row])
        if size < 0:
            it = BrokenReference("chunk", key, "missing", f"{key!r} is missing.", count)
        else:
            detail = f"{key!r} has {size} bytes, and {int(needed.sizes[row])} are needed."
            it = BrokenReference("chunk", key, "too short", detail, count)
        broken.append(it)
    return broken


async def _sizes(storage: Storage, keys: Sequence[str]) -> dict[str, int | None]:
    """Return the size of each object; None if it does not exist."""

    async def size(key: str) -> int | None:
        try:
            return (await storage.get(key, ByteRange(0, 0))).size_bytes
        except ObjectNotFoundError:
            return None

    return dict(zip(keys, await bounded_map(size, keys, limit=_AT_ONCE), strict=True))


async def broken_virtual(
    virtual: VirtualChunks, needed: Mapping[VirtualObject, tuple[int, int]]
) -> tuple[list[BrokenReference], int]:
    """Look at virtual objects, and count those of containers that were not authorised.

    Cost: one request for each, several at a time.
    """

    async def look(item: tuple[VirtualObject, tuple[int, int]]) -> BrokenReference | None:
        it, (size, count) = item
        location = it[0]
        try:
            retrieved = await virtual.fetch(location, ByteRange(0, 0))
            check_unchanged(guarded(it), retrieved)
        except VirtualAccessError:
            raise
        except IcechunkError as error:
            gone = isinstance(error.__cause__, ObjectNotFoundError)
            changed = isinstance(error, VirtualSourceChangedError)
            problem: Problem = "missing" if gone else "changed" if changed else "unreadable"
            return BrokenReference("virtual", location, problem, str(error), count)
        if retrieved.size_bytes >= size:
            return None
        detail = f"{location!r} has {retrieved.size_bytes} bytes, and {size} are needed."
        return BrokenReference("virtual", location, "too short", detail, count)

    unauthorized = 0

    async def try_to(item: tuple[VirtualObject, tuple[int, int]]) -> BrokenReference | None:
        nonlocal unauthorized
        try:
            return await look(item)
        except VirtualAccessError:
            unauthorized += 1
            return None

    order = sorted(needed.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
    found = await bounded_map(try_to, order, limit=_AT_ONCE)
    return [it for it in found if it is not None], unauthorized
