"""What commands answer: plain values, the same for JSON and for people.

The names of the fields are the keys of ``--json`` and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.format.metadata import JSON

__all__ = [
    "ChunkCounts",
    "Comparison",
    "Content",
    "Created",
    "Details",
    "Entry",
    "Hierarchy",
    "Listing",
    "Log",
    "Move",
    "Node",
    "PromiseLine",
    "Promises",
    "RefChange",
    "RefLine",
    "RefList",
    "SnapshotLine",
    "Touched",
    "TouchedChunks",
]


@dataclass(frozen=True, slots=True)
class Created:
    """Answer of ``init``."""

    url: str
    spec_version: int
    branch: str
    snapshot_id: str


@dataclass(frozen=True, slots=True)
class SnapshotLine:
    """A snapshot in history."""

    id: str
    parent_id: str | None
    written_at: datetime
    message: str
    metadata: dict[str, JSON]
    branches: list[str]
    """Those whose tip it is."""
    tags: list[str]


@dataclass(frozen=True, slots=True)
class Log:
    """Answer of ``log``: newest first."""

    ref: str
    snapshot_id: str
    snapshots: list[SnapshotLine]


@dataclass(frozen=True, slots=True)
class TouchedChunks:
    """Chunks of one array that were set or deleted."""

    path: str
    count: int
    bounds: list[tuple[int, int]]
    """The box of the chunk grid that they lie in: ``(start, stop)`` along each axis."""
    coords: list[list[int]]
    """The first of them."""


@dataclass(frozen=True, slots=True)
class Move:
    """A node that was moved."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Touched:
    """What commits touched, by path."""

    new_groups: list[str]
    new_arrays: list[str]
    deleted_groups: list[str]
    deleted_arrays: list[str]
    updated_groups: list[str]
    updated_arrays: list[str]
    updated_chunks: list[TouchedChunks]
    moved_nodes: list[Move]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was touched."""
        return self == Touched([], [], [], [], [], [], [], [])


@dataclass(frozen=True, slots=True)
class Details:
    """Answer of ``show``."""

    ref: str
    snapshot: SnapshotLine
    touched: Touched | None
    """None for the first snapshot."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answer of ``diff``."""

    from_ref: str
    from_snapshot_id: str
    to_ref: str
    to_snapshot_id: str
    touched: Touched


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """How many chunks an array has, by where their bytes are."""

    in_grid: int
    """Chunks that the array's shape has room for."""
    inline: int
    native: int
    virtual: int
    size_bytes: int
    """As stored, all together."""

    @property
    def stored(self) -> int:
        """Chunks that were written."""
        return self.inline + self.native + self.virtual


@dataclass(frozen=True, slots=True)
class Node:
    """A group or an array."""

    path: str
    type: str
    """``group`` or ``array``."""
    shape: list[int] | None = None
    data_type: str | None = None
    chunk_shape: list[int] | None = None
    """None for a group, and for chunks of several shapes."""
    dimension_names: list[str | None] | None = None
    chunks: ChunkCounts | None = None


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Answer of ``tree``: ascending by path."""

    ref: str
    snapshot_id: str
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name below a path."""

    name: str
    type: str
    """``group``, ``array``, ``document``, ``chunks`` (more names below) or ``chunk``."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Answer of ``ls``."""

    ref: str
    snapshot_id: str
    path: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Content:
    """Answer of ``cat``: a metadata document or the bytes of a chunk."""

    ref: str
    snapshot_id: str
    key: str
    size_bytes: int
    document: JSON
    """None for a chunk."""
    base64: str
    """The bytes as they are stored."""


@dataclass(frozen=True, slots=True)
class PromiseLine:
    """One promise of a storage."""

    promise: str
    needed: bool
    """Commits could be lost without it."""
    verdict: str
    """``kept``, ``broken``, ``not promised`` or ``unknown``."""
    detail: str


@dataclass(frozen=True, slots=True)
class Promises:
    """Answer of ``probe``."""

    url: str
    is_safe: bool
    """Whether every promise that is needed was kept."""
    seconds: float
    promises: list[PromiseLine]
    left_behind: list[str]
    """Keys of the trial that could not be removed."""


@dataclass(frozen=True, slots=True)
class RefLine:
    """A branch or a tag."""

    name: str
    snapshot_id: str
    written_at: datetime
    message: str


@dataclass(frozen=True, slots=True)
class RefList:
    """Answer of ``branch list`` and ``tag list``: ascending by name."""

    kind: str
    """``branch`` or ``tag``."""
    refs: list[RefLine] = field(default_factory=list[RefLine])


@dataclass(frozen=True, slots=True)
class RefChange:
    """Answer of the commands that change a branch or a tag."""

    action: str
    """``created``, ``reset`` or ``deleted``."""
    kind: str
    """``branch`` or ``tag``."""
    name: str
    snapshot_id: str | None
    """What it names now; None if it was deleted."""
    previous_snapshot_id: str | None
    """What it named before; None if it is new."""
