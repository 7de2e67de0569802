"""How the snapshots of a copy differ from those of its origin: some nodes, no chunks. Pure.

Everything that such a copy names is derived from the name in the origin, so that a copy that was
interrupted finds what it had made, and a later one makes only what is new.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, NotFoundError
from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.config.codec import decode_config, encode_config
from icechunk_async.format.digests import CONTENT_ROOT
from icechunk_async.format.id_set import IdSet, format_ids
from icechunk_async.format.ids import ManifestId, SnapshotId
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.layout import CHUNKS
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.paths import ancestors, check_selection, name_of
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.format.transaction_log import TransactionLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from icechunk_async.format.config import VirtualChunkContainer
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.operations_log import UpdateDetail
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.format.snapshot import Node, Nodes, Snapshot

__all__ = [
    "AS_IT_IS",
    "COPIED_FROM",
    "Derivation",
    "NodeChange",
    "Use",
    "as_paths",
    "check_paths",
    "derived_info",
    "derived_log",
]

COPIED_FROM: Final = "icechunk-async-copied-from"
"""The property of a snapshot of chosen nodes that holds the id of the whole snapshot."""
_NEAR_MISSES: Final = 3
_NAMES_SHOWN: Final = 20

_NONE: Final[frozenset[NodeId]] = frozenset()

type Use = tuple[ManifestId, frozenset[NodeId]]
"""A manifest of the origin, and the arrays whose references in it are wanted; none: all of them."""


def as_paths(paths: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return paths in their normal form, without those below others; None: all, as for the root.

    Raises:
        InvalidInputError: as `check_selection`.
    """
    if paths is None:
        return None
    given = set(check_selection(paths))
    if "/" in given:
        return None
    return tuple(sorted(it for it in given if not given & set(ancestors(it))))


def check_paths(paths: Iterable[str], tips: Iterable[Snapshot], refs: str) -> None:
    """Refuse paths that no tip has.

    Args:
        paths: as of `as_paths`.
        tips: the snapshots of the chosen branches and tags.
        refs: their names, for the message.

    Raises:
        NotFoundError: it names the first one, and paths that are like it.
    """
    known: dict[str, None] = {}
    for tip in tips:
        known |= dict.fromkeys(tip.nodes)
    for path in paths:
        if path in known:
            continue
        near = _near(path, known)
        hint = f"Did you mean {', '.join(map(repr, near))}?"
        if not near:
            hint = f"There are: {', '.join(map(repr, list(known)[:_NAMES_SHOWN])) or 'none'}."
        raise NotFoundError(
            f"There is no array and no group {path!r} to copy at the tip of {refs}. {hint}",
            path=path,
            near=tuple(near),
        )


def _near(path: str, known: Iterable[str]) -> list[str]:
    """Return known paths that may be meant: of the same name, or written alike."""
    by_text = {it.lower(): it for it in known if it != "/"}
    name = (name_of(path) or "").lower()
    same = [it for text, it in by_text.items() if name_of(text) == name]
    alike = [by_text[it] for it in difflib.get_close_matches(path.lower(), by_text, _NEAR_MISSES)]
    return list(dict.fromkeys([*same, *alike]))[:_NEAR_MISSES]


@dataclass(frozen=True, slots=True)
class Derivation:
    """The parts of a snapshot of the origin that the copy of that snapshot holds."""

    paths: tuple[str, ...] | None = None
    """Arrays and groups, with all below them and the groups above them; None: all."""
    container: VirtualChunkContainer | None = None
    """Where the origin is. Chunk objects stay there, and references lead to them; None: they are
    copied."""

    def describe(self) -> dict[str, JSON]:
        """Return plain data that is equal for equal derivations."""
        paths: Any = None if self.paths is None else list(self.paths)
        return {
            "paths": paths,
            "origin": None if self.container is None else self.container.url_prefix,
        }

    @property
    def changes_nothing(self) -> bool:
        """Whether snapshots are copied byte for byte."""
        return self == AS_IT_IS

    # Names

    def named(
        self, snapshot_id: SnapshotId, lines: Mapping[SnapshotId, SnapshotInfo]
    ) -> SnapshotId:
        """Return the id of the copy of a snapshot; the first one of a history keeps its own.

        The first one holds no nodes, so it is the same in all copies.
        """
        it = lines.get(snapshot_id)
        if it is not None and it.parent_id is None:
            return snapshot_id
        return self.snapshot_id(snapshot_id)

    def snapshot_id(self, snapshot_id: SnapshotId) -> SnapshotId:
        """Return the id of the copy of a snapshot that is not the first one.

        It stays if all nodes are copied: arrays and attributes are the same then.
        """
        if self.paths is None:
            return snapshot_id
        return SnapshotId(_hash(b"snapshot", snapshot_id, *map(str.encode, self.paths)))

    def manifest_id(self, use: Use) -> ManifestId:
        """Return the id of a manifest whose references are changed."""
        manifest_id, nodes = use
        place = b"" if self.container is None else (self.container.name or "").encode()
        return ManifestId(_hash(b"manifest", manifest_id, place, b"".join(sorted(nodes))))

    # Snapshots

    def choose(self, nodes: Nodes) -> dict[str, Node]:
        """Return the chosen nodes of a snapshot by their paths, in their order."""
        if self.paths is None:
            return dict(nodes.items())
        chosen: set[str] = set()
        for path in self.paths:
            if path in nodes:
                chosen.update((path, *(it for it in ancestors(path) if it in nodes)))
            chosen.update(nodes.below(path))
        # By the bytes of UTF-8, as nodes of a snapshot are (spec, "Snapshot files").
        return {path: nodes[path] for path in sorted(chosen, key=str.encode)}

    def uses(self, nodes: Mapping[str, Node]) -> set[Use]:
        """Return the manifests that nodes need, each with those that need it.

        If all nodes are copied, no node is named: then all of a manifest is wanted.
        """
        users: dict[ManifestId, set[NodeId]] = {}
        for node in nodes.values():
            for ref in node.array.manifests if node.array is not None else ():
                # Small arrays share manifests, so a manifest may hold references that are not
                # wanted.
                users.setdefault(ref.manifest_id, set()).add(node.id)
        if self.paths is None:
            return {(manifest_id, _NONE) for manifest_id in users}
        return {(manifest_id, frozenset(them)) for manifest_id, them in users.items()}

    def metadata(self, snapshot_id: SnapshotId, metadata: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the properties of the copy of a snapshot.

        The content root vouches for what is not copied byte for byte, so it is left out.
        """
        kept = {name: value for name, value in metadata.items() if name != CONTENT_ROOT}
        return kept if self.paths is None else {**kept, COPIED_FROM: str(snapshot_id)}

    # Manifests

    def chunks_at(self, spec_version: int) -> str:
        """Return the location of the chunk objects that stay, with a slash at its end.

        By the name of the container the place can change later, in the configuration alone.
        Libraries that know only format version 1 do not know names.
        """
        assert self.container is not None
        if spec_version == 1:
            return f"{self.container.url_prefix}{CHUNKS}/"
        return f"vcc://{self.container.name}/{CHUNKS}/"

    def rewritten(
        self, manifest: Manifest, nodes: frozenset[NodeId], guard: int, spec_version: int
    ) -> dict[NodeId, ChunkRefs] | None:
        """Return the wanted references of a manifest; None if it can be copied unchanged.

        Args:
            manifest: of the origin.
            nodes: the arrays that are wanted; none: all.
            guard: seconds since the epoch: chunks of the origin that are written later have
                changed. 0 for none.
            spec_version: of the copy.
        """
        there = {*manifest.arrays, *(node for node, _ in manifest.strays)}
        refs = {node: it for node, it in manifest.arrays.items() if not nodes or node in nodes}
        stays = self.container is None or not any(
            (it.kinds == Kind.NATIVE).any() for it in (*refs.values(), *manifest.strays.values())
        )
        if stays and (not nodes or there <= nodes):
            return None
        if self.container is None:
            return refs
        prefix = self.chunks_at(spec_version)
        return {node: _pointing_back(it, prefix, guard) for node, it in refs.items()}

    # Configuration

    def config(self, raw: bytes | None, spec_version: int) -> bytes | None:
        """Return the stored configuration of the copy, with the container of the origin.

        Raises:
            InvalidInputError: the origin has another container for its own place.
            FormatError: the configuration is damaged.
        """
        if self.container is None:
            return raw
        ours = self.container
        config = RepositoryConfig() if raw is None else decode_config(raw, spec_version)
        kept: list[VirtualChunkContainer] = []
        for it in config.effective_virtual_chunk_containers:
            if it.url_prefix != ours.url_prefix:
                kept.append(it)
            elif it.name not in (None, ours.name):
                raise InvalidInputError(
                    f"The repository has a virtual chunk container {it.name!r} for the place where "
                    f"it lies, {ours.url_prefix!r}. A shallow copy needs that prefix for its own "
                    f"container {ours.name!r}. Give the other one a longer prefix.",
                    url_prefix=ours.url_prefix,
                )
        config = replace(config, virtual_chunk_containers=(*kept, ours))
        return encode_config(config, spec_version)


AS_IT_IS: Final = Derivation()


def derived_info(info: RepoInfo, derivation: Derivation) -> RepoInfo:
    """Return the repo info of a copy whose snapshots are derived; format version 2.

    The operations log is cut where it continues in backups, which show snapshots of the origin.
    """
    lines = info.snapshots

    def named(snapshot_id: SnapshotId) -> SnapshotId:
        return derivation.named(snapshot_id, lines)

    snapshots: dict[SnapshotId, SnapshotInfo] = {}
    for it in lines.values():
        raw = it.raw_metadata
        metadata = derivation.metadata(it.id, it.metadata)
        if it.parent_id is not None and metadata != it.metadata:
            raw = tuple(encode_items(metadata, 2))
        made = SnapshotInfo(
            named(it.id),
            None if it.parent_id is None else named(it.parent_id),
            it.flushed_at,
            it.message,
            raw,
            tuple(map(named, it.pruned_ancestor_logs)),
        )
        snapshots[made.id] = made

    def renamed(detail: UpdateDetail) -> UpdateDetail:
        values = {it.name: getattr(detail, it.name) for it in fields(detail)}
        ids: Any = {key: named(it) for key, it in values.items() if isinstance(it, SnapshotId)}
        return replace(detail, **ids)

    return replace(
        info,
        branches={name: named(tip) for name, tip in info.branches.items()},
        tags={name: named(tip) for name, tip in info.tags.items()},
        snapshots=snapshots,
        updates=tuple(
            replace(it, detail=renamed(it.detail), backup_path=None) for it in info.updates
        ),
        before_updates=None,
        raw_config=derivation.config(info.raw_config, 2),
    )


def _hash(*parts: bytes) -> bytes:
    """Return the 12 bytes of an id that is made of others."""
    digest = hashlib.sha256(b"icechunk-async copy")
    for part in parts:
        # With its length, so that two lists of parts never give the same bytes.
        digest.update(b"\0%d\0" % len(part) + part)
    return digest.digest()[:12]


def _pointing_back(refs: ChunkRefs, prefix: str, guard: int) -> ChunkRefs:
    """Return references in which chunk objects have become virtual ones below a prefix."""
    native: npt.NDArray[np.bool_] = refs.kinds == Kind.NATIVE
    if not native.any():
        return refs
    rows = np.flatnonzero(native)
    ids = refs.chunk_ids[refs.objects[rows]]
    shared = IdSet()  # chunks that share an object share a location
    shared.add(ids)
    names = format_ids(shared.ids())
    indices, old = refs.locations.distinct()
    objects = np.zeros(len(refs), np.uint32)
    virtual = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
    objects[virtual] = indices[refs.objects[virtual]] if len(virtual) else 0
    # Locations that were there keep their numbers; those of chunk objects come behind them.
    objects[rows] = shared.find(ids) + len(old)
    return replace(
        refs,
        kinds=np.where(native, np.uint8(Kind.VIRTUAL), refs.kinds),
        objects=objects,
        # An object that is written again there later is refused, and not read as the old chunk.
        modified=np.where(native, np.uint32(guard), refs.modified),
        chunk_ids=np.empty((0, ids.shape[1]), np.uint8),
        locations=Strings((*old.strings, *(prefix + it for it in names))),
        # Sums are of native chunks; nothing looks for those of virtual ones.
        sums=None,
    )


@dataclass(frozen=True, slots=True)
class NodeChange:
    """The chosen nodes of a snapshot and of the one before it."""

    before: Mapping[NodeId, Node]
    after: Mapping[NodeId, Node]
    entered: Mapping[NodeId, npt.NDArray[np.uint32]]
    """Nodes that were moved to a chosen path: the origin's log calls them moved, and the copy's
    new. Of arrays, the coordinates of all chunks."""
    left: AbstractSet[NodeId]
    """Nodes that were moved away, which the copy's log calls deleted."""


def derived_log(log: TransactionLog, snapshot_id: SnapshotId, change: NodeChange) -> TransactionLog:
    """Return the part of a log that concerns chosen nodes, as the log of a snapshot of the copy."""
    before, after = change.before, change.after
    known = before.keys() | after.keys()
    arrays = {it for it in known if (after.get(it) or before[it]).array is not None}
    came, went = frozenset(change.entered), frozenset(change.left)

    def part(name: str, more: frozenset[NodeId] = _NONE) -> frozenset[NodeId]:
        found: frozenset[NodeId] = getattr(log, name)
        return (found & known) | more

    chunks = {it: coords for it, coords in log.updated_chunks.items() if it in known}
    chunks |= {it: coords for it, coords in change.entered.items() if len(coords)}
    stayed = before.keys() & after.keys()
    return TransactionLog(
        snapshot_id,
        new_groups=part("new_groups", came - arrays),
        new_arrays=part("new_arrays", came & arrays),
        deleted_groups=part("deleted_groups", went - arrays),
        deleted_arrays=part("deleted_arrays", went & arrays),
        updated_groups=part("updated_groups") - came,
        updated_arrays=part("updated_arrays") - came,
        updated_chunks=chunks,
        moves=tuple(it for it in log.moves if it.node_id in stayed),
    )
