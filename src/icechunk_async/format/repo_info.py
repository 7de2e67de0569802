"""The repo info file: refs, history, status and configuration in one object (spec 2)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.clock import from_us
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.flatbuffers.writing import (
    REF,
    Shape,
    blob,
    finish,
    string,
    strings,
    structs,
    table,
    vector,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import decode_items, encode_items
from icechunk_async.format.operations_log import (
    RepoStatus,
    Update,
    decode_status,
    decode_updates,
    encode_status,
    encode_updates,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.flatbuffers.writing import Block
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import LogCache

    type RawMetadata = tuple[tuple[str, bytes], ...]

__all__ = ["RepoInfo", "SnapshotInfo", "decode_repo_info", "encode_repo_info"]

_SPEC: Final = 2
_NO_PARENT: Final = -1
_ROOT: Final = Shape("B", *[REF] * 11)
_SNAPSHOT: Final = Shape("12s", "i", "Q", REF, REF, REF)
_ITEM: Final = Shape(REF, REF)
_NAMED: Final = Shape(REF, "I")


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot's place in history."""

    id: SnapshotId
    parent_id: SnapshotId | None
    """None for a root."""
    flushed_at: int
    """Microseconds since the epoch."""
    message: str
    raw_metadata: RawMetadata = field(default=(), repr=False)
    """The commit's properties as stored, so that rewriting the file carries them verbatim."""
    pruned_ancestor_logs: tuple[SnapshotId, ...] = ()
    """Snapshots that expired between this one and its parent; their logs are kept."""

    @property
    def written_at(self) -> datetime:
        """When the snapshot was made, by its writer's clock; aware, UTC."""
        return from_us(self.flushed_at)

    @cached_property
    def metadata(self) -> dict[str, JSON]:
        """The commit's properties."""
        return decode_items(list(self.raw_metadata), _SPEC)

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block | None]:
        """Message, properties and logs as written; kept, since every commit writes them again."""
        pruned = None
        if self.pruned_ancestor_logs:  # an empty list is never written
            pruned = structs(b"".join(self.pruned_ancestor_logs), SnapshotId.size_bytes)
        return string(self.message), _encode_items(self.raw_metadata), pruned

    @classmethod
    def of(
        cls,
        snapshot_id: SnapshotId,
        parent_id: SnapshotId | None,
        flushed_at: int,
        message: str,
        metadata: Mapping[str, JSON],
    ) -> SnapshotInfo:
        """Encode ``metadata`` and make an entry."""
        raw = tuple(encode_items(metadata, _SPEC))
        return cls(snapshot_id, parent_id, flushed_at, message, raw)


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """Everything about a repository that can change."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    deleted_tags: frozenset[str]
    snapshots: Mapping[SnapshotId, SnapshotInfo]
    status: RepoStatus
    updates: tuple[Update, ...]
    """The newest part of the operations log, newest first.

    No known writer leaves it empty, but the format allows it, and the official engine reads it.
    """
    before_updates: str | None = None
    """Name of the backup in which the log continues."""
    raw_metadata: RawMetadata = ()
    raw_config: bytes | None = None
    enabled_flags: tuple[int, ...] | None = None
    disabled_flags: tuple[int, ...] | None = None

    @property
    def updated_at(self) -> int:
        """Time of the newest entry of the operations log, microseconds; 0 if the log is empty."""
        return self.updates[0].updated_at if self.updates else 0

    @property
    def metadata(self) -> dict[str, JSON]:
        """The repository's own metadata."""
        return decode_items(list(self.raw_metadata), _SPEC)

    def ancestry(self, snapshot_id: SnapshotId) -> Iterator[SnapshotInfo]:
        """Iterate from a listed snapshot to its root.

        Raises:
            FormatError: the parents form a circle.
        """
        info: SnapshotInfo | None = self.snapshots[snapshot_id]
        for _ in range(len(self.snapshots)):
            if info is None:
                return
            yield info
            info = self.snapshots[info.parent_id] if info.parent_id is not None else None
        if info is not None:
            raise FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")


def decode_repo_info(envelope: Envelope) -> RepoInfo:
    """Read a repo info file.

    Raises:
        FormatError: the payload is damaged, or of another version.
    """
    root = Tables.root(Buffer(envelope.payload))
    version = int(root.scalar(0, 1)[0])
    if version != _SPEC or envelope.spec_version != _SPEC:
        raise FormatError(f"A repo info file says it is of format version {version}, not {_SPEC}.")
    infos = _decode_snapshots(root.vector(4, 4, 4, required="snapshots").tables())
    return RepoInfo(
        branches=_decode_refs(root, 2, "branches", infos),
        tags=_decode_refs(root, 1, "tags", infos),
        deleted_tags=frozenset(root.vector(3, 4, 4, required="deleted_tags").texts()),
        snapshots={info.id: info for info in infos},
        status=decode_status(root.tables(5, required="status")),
        updates=decode_updates(root.vector(7, 4, 4, required="latest_updates").tables()),
        before_updates=root.strings(8)[0] if root.has(8)[0] else None,
        raw_metadata=_decode_items(root.vector(6, 4, 4).tables()),
        raw_config=bytes(root.vector(9, 1, 1).raw(0)) if root.has(9)[0] else None,
        enabled_flags=_decode_flags(root, 10),
        disabled_flags=_decode_flags(root, 11),
    )


def _decode_snapshots(tables: Tables) -> list[SnapshotInfo]:
    ids = [SnapshotId(raw.tobytes()) for raw in tables.struct(0, 12, field="id")]
    if len(set(ids)) != len(ids):
        raise FormatError("A repo info file lists a snapshot twice.")
    # An absent offset is 0, the first snapshot; no parent is -1.
    parents: list[int] = tables.scalar(1, 4).astype("<i4").tolist()
    times: list[int] = tables.scalar(2, 8).tolist()
    messages = tables.strings(3, required="message")
    items = tables.vector(4, 4, 4)
    all_items = _decode_items(items.tables())
    pruned = tables.vector(5, 12, 1)
    logs = iter([SnapshotId(raw.tobytes()) for raw in pruned.structs()])
    infos: list[SnapshotInfo] = []
    first_item = 0
    for row, parent in enumerate(parents):
        if not _NO_PARENT <= parent < len(ids):
            raise FormatError(f"Snapshot {ids[row]} has a parent outside of the repo info file.")
        next_item = first_item + int(items.counts[row])
        infos.append(
            SnapshotInfo(
                ids[row],
                None if parent == _NO_PARENT else ids[parent],
                times[row],
                messages[row],
                all_items[first_item:next_item],
                tuple(islice(logs, int(pruned.counts[row]))),
            )
        )
        first_item = next_item
    return infos


def _decode_items(tables: Tables) -> RawMetadata:
    names = tables.strings(0, required="name")
    values = tables.vector(1, 1, 1, required="value").bytes()
    return tuple(zip(names, values, strict=True))


def _decode_refs(
    root: Tables, slot: int, name: str, infos: list[SnapshotInfo]
) -> dict[str, SnapshotId]:
    tables = root.vector(slot, 4, 4, required=name).tables()
    indices: list[int] = tables.scalar(1, 4).tolist()
    if any(index >= len(infos) for index in indices):
        raise FormatError(f"A repo info file has {name} that point outside of it.")
    names = tables.strings(0, required="name")
    return {ref: infos[index].id for ref, index in zip(names, indices, strict=True)}


def _decode_flags(root: Tables, slot: int) -> tuple[int, ...] | None:
    if not root.has(slot)[0]:
        return None
    return tuple(root.vector(slot, 2, 2).words().tolist())


def encode_repo_info(info: RepoInfo, log_cache: LogCache | None = None) -> bytes:
    """Return the FlatBuffer of a repo info file. Cost: some microseconds for each table.

    ``log_cache`` saves a writer that encodes successive states most of the operations log.
    """
    ids = sorted(info.snapshots)
    places = {snapshot_id: index for index, snapshot_id in enumerate(ids)}
    return finish(
        table(
            _ROOT,
            _SPEC,
            _encode_refs(info.tags, places),
            _encode_refs(info.branches, places),
            strings(sorted(info.deleted_tags)),
            vector([_encode_snapshot(info.snapshots[it], places) for it in ids]),
            encode_status(info.status),
            _encode_items(info.raw_metadata),
            vector(encode_updates(info.updates, log_cache)),
            None if info.before_updates is None else string(info.before_updates),
            None if info.raw_config is None else blob(info.raw_config),
            _encode_flags(info.enabled_flags),
            _encode_flags(info.disabled_flags),
        )
    )


def _encode_snapshot(info: SnapshotInfo, places: Mapping[SnapshotId, int]) -> Block:
    parent = _NO_PARENT if info.parent_id is None else places[info.parent_id]
    return table(_SNAPSHOT, bytes(info.id), parent, info.flushed_at, *info.blocks)


def _encode_items(items: RawMetadata) -> Block:
    return vector([table(_ITEM, string(name), blob(value)) for name, value in items])


def _encode_refs(refs: Mapping[str, SnapshotId], places: Mapping[SnapshotId, int]) -> Block:
    return vector([table(_NAMED, string(name), places[refs[name]]) for name in sorted(refs)])


def _encode_flags(flags: tuple[int, ...] | None) -> Block | None:
    if flags is None:
        return None
    return structs(b"".join(struct.pack("<H", flag) for flag in sorted(flags)), 2)
