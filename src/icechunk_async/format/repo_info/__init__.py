"""The repo info file: refs, history, status and configuration in one object (spec 2).

`snapshots` and `log` are its long lists, and a `snapshot_info` is an entry of the first.
`snapshot_writing` copies those that did not change.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import (
    REF,
    Shape,
    blob,
    long_table,
    string,
    strings,
    structs,
    table,
    vector,
)
from icechunk_async.format.flatbuffers.checks import columns_pay
from icechunk_async.format.flatbuffers.single import Reader, TableList
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import decode_items, items_block, read_each
from icechunk_async.format.operations_log import decode_status, encode_status
from icechunk_async.format.repo_info.log import LogTable, OperationsLog
from icechunk_async.format.repo_info.snapshot_info import SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.flatbuffers.single import Row
    from icechunk_async.format.json.metadata import JSON, RawMetadata
    from icechunk_async.format.operations_log import RepoStatus, Update
    from icechunk_async.format.repo_info.snapshot_columns import Page
    from icechunk_async.format.repo_info.snapshots import Snapshots, SnapshotTable

__all__ = [
    "OperationsLog",
    "RepoInfo",
    "SnapshotInfo",
    "decode_repo_info",
    "encode_repo_info",
]

_SPEC: Final = 2
_ROOT: Final = Shape("B", *[REF] * 11)
_NAMED: Final = Shape(REF, "I")


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """Everything about a repository that can change."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    deleted_tags: frozenset[str]
    snapshots: Mapping[SnapshotId, SnapshotInfo]
    status: RepoStatus
    updates: Sequence[Update]
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
        return self.listed.ancestry(snapshot_id)

    def ancestry_pages(self, snapshot_id: SnapshotId, *, whole: bool = False) -> Iterator[Page]:
        """Iterate as `ancestry`, several at a time; ``whole`` if all are wanted."""
        return self.listed.ancestry_pages(snapshot_id, whole=whole)

    @property
    def listed(self) -> Snapshots:
        """The snapshots, of whatever mapping, to be searched and edited."""
        from icechunk_async.format.repo_info.snapshots import Snapshots  # noqa: PLC0415 -- on use

        return Snapshots.of(self.snapshots)

    def check(self) -> None:
        """Decode all that is decoded only when it is asked for.

        Raises:
            FormatError: something is damaged.
        """
        for it in self.snapshots.values():
            _ = it.message
        for _ in self.updates:
            pass

    @property
    def is_light(self) -> bool:
        """Whether so little lies on top of the file that it would not pay to read a newer one."""
        return self.listed.is_light and OperationsLog.of(self.updates).is_light


def decode_repo_info(envelope: Envelope) -> RepoInfo:
    """Read a repo info file.

    Snapshots and operations are decoded when they are asked for, and raise then if they are
    damaged.

    Raises:
        FormatError: the payload is damaged, or of another version.

    Cost: does not depend on the number of snapshots and operations.
    """
    from icechunk_async.format.repo_info.snapshots import Snapshots, SnapshotTable  # noqa: PLC0415 -- on use

    root = Reader(envelope.payload).root()
    # The file says its version twice, here and in its header; both must be 2.
    version = root.number(0, 1)
    if version != _SPEC or envelope.spec_version != _SPEC:
        raise FormatError(f"A repo info file says it is of format version {version}, not {_SPEC}.")
    stored = SnapshotTable(*root.table_list(4, required="snapshots"))
    updates = LogTable(*root.table_list(7, required="latest_updates"))
    return RepoInfo(
        branches=_decode_refs(root, 2, "branches", stored),
        tags=_decode_refs(root, 1, "tags", stored),
        deleted_tags=frozenset(root.texts(3, required="deleted_tags")),
        snapshots=Snapshots.from_table(stored),
        status=decode_status(root.table(5, required="status")),
        updates=OperationsLog.from_table(updates),
        before_updates=root.text(8) if root.has(8) else None,
        raw_metadata=read_each(root.tables(6)),
        raw_config=root.raw(9) if root.has(9) else None,
        enabled_flags=_decode_flags(root, 10),
        disabled_flags=_decode_flags(root, 11),
    )


def _decode_refs(root: Row, slot: int, name: str, stored: SnapshotTable) -> dict[str, SnapshotId]:
    refs = TableList(*root.table_list(slot, required=name))
    if columns_pay(len(refs)):
        indices: list[int] = refs.tables.scalar(1, 4).tolist()
        names = refs.tables.strings(0, required="name")
    else:
        rows = refs.rows()
        indices = [it.number(1, 4) for it in rows]
        names = [it.text(0, required="name") for it in rows]
    # A ref is the place of its snapshot in the list: one outside of it would be another history.
    if any(index >= len(stored) for index in indices):
        raise FormatError(f"A repo info file has {name} that point outside of it.")
    return {ref: SnapshotId(stored.id(index)) for ref, index in zip(names, indices, strict=True)}


def _decode_flags(root: Row, slot: int) -> tuple[int, ...] | None:
    return root.words(slot, 2) if root.has(slot) else None


def encode_repo_info(info: RepoInfo) -> bytes | memoryview:
    """Return the FlatBuffer of a repo info file.

    Raises:
        FormatError: what it takes over from the file below is damaged.

    Cost: some microseconds for each entry that lies on top of the file below; for the others, time
    to copy their bytes. The first time for a file, that of looking at all of it, by columns.
    """
    from icechunk_async.format.flatbuffers.writing import finish_long  # noqa: PLC0415 -- needs NumPy
    from icechunk_async.format.repo_info.log_writing import encode_log  # noqa: PLC0415 -- needs NumPy
    from icechunk_async.format.repo_info.snapshot_writing import encode_snapshots  # noqa: PLC0415 -- loaded when it is used

    # First, since branches and tags name snapshots by their place in the new list.
    snapshots, place_of = encode_snapshots(info.listed)
    return finish_long(
        long_table(
            _ROOT,
            _SPEC,
            # Sorted by the bytes of their names, as readers expect them; `sorted` compares code
            # points, which have the same order.
            _encode_refs(info.tags, place_of),
            _encode_refs(info.branches, place_of),
            strings(sorted(info.deleted_tags)),
            snapshots,
            encode_status(info.status),
            items_block(info.raw_metadata),
            encode_log(OperationsLog.of(info.updates)),
            None if info.before_updates is None else string(info.before_updates),
            None if info.raw_config is None else blob(info.raw_config),
            _encode_flags(info.enabled_flags),
            _encode_flags(info.disabled_flags),
        )
    )


def _encode_refs(refs: Mapping[str, SnapshotId], place_of: Callable[[SnapshotId], int]) -> Block:
    return vector([table(_NAMED, string(name), place_of(refs[name])) for name in sorted(refs)])


def _encode_flags(flags: tuple[int, ...] | None) -> Block | None:
    if flags is None:
        return None
    # Also ids of flags that this library does not know: they are another writer's, and stay.
    return structs(b"".join(struct.pack("<H", flag) for flag in sorted(flags)), 2)
