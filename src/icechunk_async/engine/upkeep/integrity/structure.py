"""Read references, snapshots, transaction logs and manifests, and see whether they agree.

What is compared holds in every repository that either engine writes; where old versions of the
official engine left something out, nothing is concluded from its absence.
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress
from icechunk_async.engine.files.assets import Assets
from icechunk_async.engine.files.manifests import MIN_SEEKABLE_FILE_BYTES, check_id
from icechunk_async.engine.upkeep.integrity.pieces import (
    NO_CODECS,
    NeededObjects,
    Pieces,
    VirtualPieces,
)
from icechunk_async.engine.upkeep.integrity.report import Finding, Level
from icechunk_async.errors import (
    FormatError,
    InvalidMetadataError,
    ObjectNotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.envelope import FileType, may_cut_seconds, unpack
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import manifest_key, snapshot_key, sums_key, transaction_key
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.seekable.reading import (
    longer_tail,
    open_seekable,
    tail_extent,
)
from icechunk_async.format.zarr_document import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import ManifestFileInfo, Node, Snapshot
    from icechunk_async.format.transaction_log import TransactionLog
    from icechunk_async.storage import Storage

    type Infos = Mapping[SnapshotId, SnapshotInfo] | None
    """The place in history of each snapshot; None if only the snapshots' own files tell."""

__all__ = [
    "ManifestUse",
    "Structure",
    "examine_manifest",
    "log_problem",
    "needed_by",
    "stored",
    "uncached",
    "walk",
]

_AT_ONCE: Final = 32
_ENCODING: Final = ("data_type", "chunk_grid", "codecs", "fill_value")
"""The members of an array's metadata document that say what its encoded chunks look like."""
_PARTS: Final = {
    True: ("new_arrays", "updated_arrays", "deleted_arrays"),
    False: ("new_groups", "updated_groups", "deleted_groups"),
}


def stored(engine: Engine) -> Storage:
    """Return the storage of a repository without the cache."""
    return engine.storage if engine.cache is None else engine.cache.storage


def uncached(engine: Engine) -> Assets:
    """Return the files of a repository as stored, whatever a cache holds."""
    return Assets(
        stored(engine),
        engine.assets.layout,
        compression_level=engine.assets.compression_level,
        # No cache in memory, either: each file is read once, and the check must see what is stored
        # now.
        snapshot_nodes=0,
        chunk_refs=0,
    )


@dataclass(frozen=True, slots=True)
class ManifestUse:
    """A manifest, and how snapshots use it. Plain data, so that it can be sent to other tasks."""

    id: ManifestId
    size_bytes: int
    """As its snapshots say; 0 if they do not."""
    num_chunk_refs: int
    boxes: dict[tuple[NodeId, Extents], str]
    """The arrays that it serves, with the boxes that their references lie in, and their paths."""
    codecs: dict[NodeId, int] = field(default_factory=dict["NodeId", int])
    """How the chunks of each array are encoded: an index into `Structure.codecs`."""


@dataclass(slots=True)
class Structure:
    """The manifests of some snapshots, and findings on the way."""

    snapshots: int = 0
    logs: int = 0
    uses: dict[ManifestId, ManifestUse] = field(default_factory=dict["ManifestId", ManifestUse])
    codecs: list[tuple[bytes, ...]] = field(default_factory=list[tuple[bytes, ...]])
    """Metadata documents of arrays that have chunks. Those that share chunks and differ in how they
    encode them are together; of documents that encode alike there is one."""
    findings: list[Finding] = field(default_factory=list[Finding])


def _finding(kind: str, location: str, problem: str, detail: str) -> Finding:
    return Finding(kind, location, problem, Level.STRUCTURE.name.lower(), detail)


class _Encodings:
    """Numbers the ways of encoding chunks that metadata documents describe."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []
        self._of_document: dict[bytes, int] = {}
        self._of_key: dict[str, int] = {}

    def number(self, document: bytes) -> int:
        known = self._of_document.get(document)
        if known is not None:
            return known
        try:
            values: Any = json.loads(document)
            # Documents differ in attributes and in shape from commit to commit; chunks are decoded
            # alike.
            key = json.dumps({name: values.get(name) for name in _ENCODING}, sort_keys=True)
        except (ValueError, AttributeError, RecursionError):
            key = repr(document)  # damaged, which is reported by itself
        number = self._of_key.setdefault(key, len(self._of_key))
        if number == len(self.documents):
            self.documents.append(document)
        self._of_document[document] = number
        return number


class _Walk:
    """Reads snapshots with their logs, following parents if only the files tell them."""

    def __init__(self, assets: Assets, infos: Infos, progress: ProgressCallback) -> None:
        self._assets = assets
        self._infos = infos
        self._progress = progress
        self._encodings = _Encodings()
        self._users: dict[tuple[ManifestId, NodeId], frozenset[int]] = {}
        self._sound: set[tuple[NodeId, int]] = set()
        self._seen: set[SnapshotId] = set()
        self._found = Structure()

    async def follow(self, tips: Iterable[SnapshotId], *, ancestry: bool) -> None:
        """Read what tips lead to."""
        infos = self._infos
        if infos is not None:
            ids = {it for tip in tips for it in _line(tip, infos, ancestry=ancestry)}
            pruned = {
                log for it in ids if it in infos for log in infos[it].pruned_ancestor_logs
            } - ids
            await bounded_map(self._read, sorted(ids), limit=_AT_ONCE)
            await bounded_map(self._read_log, sorted(pruned), limit=_AT_ONCE)
            return

        async def climb(tip: SnapshotId) -> None:
            current: SnapshotId | None = tip
            while current is not None and current not in self._seen:
                current = await self._read(current)
                if not ancestry:
                    return

        await bounded_map(climb, sorted(set(tips)), limit=_AT_ONCE)

    def finish(self) -> Structure:
        """Return the result."""
        found = self._found
        numbers: dict[frozenset[int], int] = {}
        for (manifest_id, node_id), users in self._users.items():
            number = numbers.setdefault(users, len(numbers))
            found.uses[manifest_id].codecs[node_id] = number
        documents = self._encodings.documents
        found.codecs = [tuple(documents[it] for it in sorted(users)) for users in numbers]
        order = {"snapshot": 0, "transaction log": 1}
        # Reads finish in any order; a report is to be the same each time.
        found.findings.sort(key=lambda it: (order[it.kind], it.location, it.detail))
        return found

    async def _read(self, snapshot_id: SnapshotId) -> SnapshotId | None:
        """Read a snapshot and its log; return the parent, as the way of publishing keeps it."""
        # Before the first await, so that of two tips that meet here one follows the ancestry below
        # it.
        self._seen.add(snapshot_id)
        self._found.snapshots += 1
        key = snapshot_key(snapshot_id)
        snapshot: Snapshot | None = None
        try:
            found = await self._assets.read_snapshot(snapshot_id)
            # Also what readers leave to the first use, because it costs time in proportion to the
            # nodes.
            found.check()
            snapshot = found
            self._take(key, found)
        except SnapshotNotFoundError:
            self._add("snapshot", key, "missing", f"{key!r} is missing.")
        except FormatError as error:
            self._add("snapshot", key, "unreadable", f"{key!r}: {error}")
        info = None if self._infos is None else self._infos.get(snapshot_id)
        if snapshot is not None and info is not None:
            self._compare(key, snapshot, info)
        source = info or (snapshot if self._infos is None else None)
        parent = None if source is None else source.parent_id
        # The first snapshot has a log in format 2 only, and nothing needs it.
        is_root = snapshot_id == INITIAL_SNAPSHOT_ID or (source is not None and parent is None)
        await self._read_log(snapshot_id, snapshot, optional=is_root)
        self._progress(Progress("reading snapshots", len(self._seen)))
        return parent

    def _compare(self, key: str, snapshot: Snapshot, info: SnapshotInfo) -> None:
        """Compare a snapshot's file with the entry in the repository's state."""
        if (snapshot.flushed_at, snapshot.message) != (info.flushed_at, info.message):
            detail = f"{key!r} has another time or message than the 'repo' object says."
            self._add("snapshot", key, "disagrees", detail)

    def _add(self, kind: str, location: str, problem: str, detail: str) -> None:
        self._found.findings.append(_finding(kind, location, problem, detail))

    async def _read_log(
        self, snapshot_id: SnapshotId, snapshot: Snapshot | None = None, *, optional: bool = False
    ) -> None:
        key = transaction_key(snapshot_id)
        log: TransactionLog | None = None
        try:
            log = await self._assets.transaction_log(snapshot_id)
        except ObjectNotFoundError:
            if optional:
                return
            self._add("transaction log", key, "missing", f"{key!r} is missing.")
        except FormatError as error:
            self._add("transaction log", key, "unreadable", f"{key!r}: {error}")
        self._found.logs += not optional
        if log is not None and snapshot is not None:
            problem = log_problem(log, snapshot)
            if problem is not None:
                self._add("transaction log", key, "disagrees", f"{key!r} {problem}.")

    def _take(self, key: str, snapshot: Snapshot) -> None:
        """Note the manifests of a snapshot, and what is wrong with its nodes."""
        for node in snapshot.nodes.values():
            problem = self._document_problem(node)
            if problem is not None:
                detail = f"{key!r}: node {node.path!r} {problem}."
                self._add("snapshot", key, "disagrees", detail)
            for ref in node.array.manifests if node.array is not None else ():
                info = snapshot.manifests.get(ref.manifest_id)
                if info is None:
                    detail = (
                        f"{key!r} does not list manifest {ref.manifest_id}, which its array "
                        f"{node.path!r} uses."
                    )
                    self._add("snapshot", key, "disagrees", detail)
                else:
                    self._use(info, node, ref.extents)

    def _use(self, info: ManifestFileInfo, node: Node, extents: Extents) -> None:
        use = self._found.uses.get(info.id)
        if use is None:
            use = ManifestUse(info.id, info.size_bytes, info.num_chunk_refs, {})
            self._found.uses[info.id] = use
        # One path is enough to name the array; it may have had others.
        use.boxes.setdefault((node.id, extents), node.path)
        encoding = self._encodings.number(node.user_data)
        known = self._users.get((info.id, node.id), frozenset())
        if encoding not in known:
            self._users[info.id, node.id] = known | {encoding}

    def _document_problem(self, node: Node) -> str | None:
        """Return the problem of a node's metadata document, looking once at each."""
        dimensions = None if node.array is None else node.array.dimensions
        # A hash and not the document: nodes stay the same from snapshot to snapshot, and a long
        # history would keep all documents in memory. A collision leaves one document unchecked.
        state = (node.id, hash((node.user_data, dimensions)))
        if state in self._sound:
            return None
        problem = _document_problem(node)
        if problem is None:
            self._sound.add(state)
        return problem


def _document_problem(node: Node) -> str | None:
    try:
        document: Any = json.loads(node.user_data)
        found = document.get("node_type")
    except (ValueError, AttributeError, RecursionError):
        return "has a metadata document that is no JSON object"
    kind = "group" if node.array is None else "array"
    if found not in (kind, None):
        return f"is an {kind} and has the metadata document of something else"
    try:
        parsed = parse_document(node.user_data, node.path).array
    except InvalidMetadataError:
        return None  # the official engine stores documents that this library would not
    if node.array is not None and parsed is not None and parsed.dimensions != node.array.dimensions:
        return "has another shape in the snapshot than in its metadata document"
    return None


def log_problem(log: TransactionLog, snapshot: Snapshot) -> str | None:
    """Return the statement of a log that its snapshot contradicts.

    Amended commits may list a node as new, changed and deleted.
    """
    for is_array, (new, updated, deleted) in _PARTS.items():
        gone = getattr(log, deleted)
        for node_id in sorted((getattr(log, new) | getattr(log, updated)) - gone):
            path = snapshot.nodes.path_of(node_id)
            node = None if path is None else snapshot.nodes[path]
            if node is None or (node.array is not None) != is_array:
                what = "array" if is_array else "group"
                return f"says that {what} {node_id} is new or changed, and its snapshot has none"
    return None


def _line(
    tip: SnapshotId, infos: Mapping[SnapshotId, SnapshotInfo], *, ancestry: bool
) -> Iterator[SnapshotId]:
    seen: set[SnapshotId] = set()
    current: SnapshotId | None = tip
    while current is not None and current not in seen:  # a circle is reported with the refs
        seen.add(current)
        yield current
        info = infos.get(current)
        current = info.parent_id if info is not None and ancestry else None


async def walk(
    assets: Assets,
    tips: Iterable[SnapshotId],
    infos: Infos,
    *,
    ancestry: bool,
    progress: ProgressCallback,
) -> Structure:
    """Read the snapshots that tips lead to, with their transaction logs.

    Args:
        assets: where the files are.
        tips: the snapshots to begin at.
        infos: ancestry, if the repository keeps it beside the snapshots. Otherwise a missing or
            damaged snapshot hides those before it.
        ancestry: also read the snapshots before the tips.
        progress: called with the number of snapshots read.
    """
    reading = _Walk(assets, infos, progress)
    await reading.follow(tips, ancestry=ancestry)
    return reading.finish()


async def examine_manifest(
    assets: Assets, use: ManifestUse, number: int, level: Level
) -> tuple[NeededObjects, list[Finding], Manifest | None]:
    """Read a manifest; return the objects that it refers to, and findings about it.

    Args:
        assets: where the files are.
        use: the manifest.
        number: noted in the pieces, see `Pieces.manifests`.
        level: below *sums*, pieces are whole objects.

    Returns:
        Among others the manifest; None if it cannot be read.
    """
    key = manifest_key(use.id)
    try:
        data = (await assets.storage.get(key)).data
        manifest = await assets.compute(lambda: _decoded(use, data), size_bytes=len(data))
    except ObjectNotFoundError:
        missing = _finding("manifest", key, "missing", f"{key!r} is missing.")
        return NeededObjects.joined([]), [missing], None
    except FormatError as error:
        unreadable = _finding("manifest", key, "unreadable", f"{key!r}: {error}")
        return NeededObjects.joined([]), [unreadable], None
    problems = [
        _finding("manifest", key, "disagrees", f"{key!r} {it}.")
        for it in _manifest_problems(manifest, use, len(data))
    ]
    if level >= Level.SUMS:
        manifest, more = await _with_known_sums(assets, manifest, data)
        problems += more
    needed = await assets.compute(
        lambda: needed_by(manifest, use, number, whole_objects=level < Level.SUMS),
        size_bytes=100 * len(manifest),
    )
    return needed, problems, manifest


async def _with_known_sums(
    assets: Assets, manifest: Manifest, data: bytes | memoryview
) -> tuple[Manifest, list[Finding]]:
    """Return a manifest with those sums of its chunks that are stored."""
    key = sums_key(manifest.id)
    try:
        sums = await assets.sums.read(manifest.id)
        if sums is None:
            return manifest, []
        summed = sums.attached_to(manifest)
    except FormatError as error:
        detail = f"{key!r}: {error}"
        return manifest, [replace(_finding("sums", key, "unreadable", detail), level="sums")]
    digest = await assets.compute(lambda: sha256(data).digest(), size_bytes=len(data))
    # Sums tell of the manifest that they were made for. Beside a damaged one they would accuse
    # chunks that are whole.
    if digest == sums.head.manifest_digest:
        return summed, []
    key = manifest_key(manifest.id)
    detail = f"{key!r} has another SHA-256 than was stored when it was written."
    return manifest, [replace(_finding("manifest", key, "wrong sum", detail), level="sums")]


def _decoded(use: ManifestUse, data: bytes | memoryview) -> Manifest:
    payload = unpack(data, FileType.MANIFEST).payload
    manifest = decode_manifest(payload, seconds_cut=may_cut_seconds(data))
    check_id(manifest_key(use.id), manifest.id, use.id)
    if len(data) >= MIN_SEEKABLE_FILE_BYTES:
        _check_index(use.id, memoryview(data))
    return manifest


def _check_index(manifest_id: ManifestId, data: memoryview) -> None:
    """Compare the pieces of a seekable manifest with the checksums of its index.

    A damaged index is no fault: readers then take the whole file.

    Raises:
        FormatError: a piece has another checksum.
    """
    tail = data[slice(*tail_extent(len(data)))]
    longer = longer_tail(len(data), tail)
    opened = open_seekable(manifest_id, len(data), tail if longer is None else data[slice(*longer)])
    if opened is not None:
        for start, stop in opened.extents(range(len(opened.index))):
            opened.fill((start, stop), data[start:stop])


def _manifest_problems(manifest: Manifest, use: ManifestUse, size_bytes: int) -> Iterator[str]:
    if use.size_bytes and use.size_bytes != size_bytes:
        yield f"has {size_bytes} bytes, and snapshots say {use.size_bytes}"
    count = len(manifest) + sum(map(len, manifest.strays.values()))
    if count != use.num_chunk_refs:
        yield f"has {count} chunk references, and snapshots say {use.num_chunk_refs}"
    for (node_id, extents), path in use.boxes.items():
        refs = manifest.arrays.get(node_id)
        if refs is None:
            yield f"has no references of array {path!r}, which uses it"
            continue
        # References of another rank are left over from official engines, and so are odd boxes.
        has_strays = any(node == node_id for node, _ in manifest.strays)
        if has_strays or refs.rank != len(extents):
            continue
        outside = int((~refs.inside(extents)).sum())
        if outside:
            yield f"has {outside} references outside of the box that array {path!r} gives it"


def needed_by(
    manifest: Manifest, use: ManifestUse, number: int, *, whole_objects: bool
) -> NeededObjects:
    """Return the objects that a manifest refers to, in arrays of any rank that use it.

    Arrays that moved to another manifest leave references behind, which nobody reads.
    """
    users = {node_id for node_id, _ in use.boxes}
    native: list[Pieces] = []
    virtual: list[VirtualPieces] = []
    first_row = 0
    strays = [(node_id, refs) for (node_id, _), refs in manifest.strays.items()]
    places: Sequence[Any] = [*manifest.arrays.items(), *strays]
    for node_id, refs in places:
        if node_id not in users:
            first_row += len(refs)
            continue
        codec = NO_CODECS if whole_objects else use.codecs.get(node_id, NO_CODECS)
        some = Pieces.of(refs, codec=codec, manifest=number, first_row=first_row)
        native.append(Pieces.joined([some]).objects() if whole_objects else some)
        virtual.append(
            VirtualPieces.of(
                refs,
                codec=codec,
                manifest=number,
                first_row=first_row,
                whole_objects=whole_objects,
            )
        )
        first_row += len(refs)
    return NeededObjects(Pieces.joined(native), VirtualPieces.joined(virtual))
