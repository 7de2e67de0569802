"""Snapshots and the changes between them, in the classes of the official package."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final, Self, cast, override

from icechunk_async._runtime.text import printable
from icechunk_async.engine.history.graph import AncestryGraph
from icechunk_async.sync.official.display import Displayed, Record, public

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from icechunk_async._display.cards import Card
    from icechunk_async.engine.history.diff import Diff as NativeDiff
    from icechunk_async.format.repo_info import SnapshotInfo as NativeInfo

__all__ = ["AncestryGraph", "Diff", "ManifestFileInfo", "SnapshotInfo"]


@public("snapshots")
@dataclass(frozen=True, repr=False)
class SnapshotInfo(Record):
    """A snapshot's place in history.

    Attributes:
        id: its id.
        parent_id: the snapshot before it; None for the first.
        written_at: the time of the commit, by the clock of the writer; aware, UTC.
        message: the message of the commit.
        metadata: the commit's properties.
    """

    id: str
    parent_id: str | None
    written_at: datetime
    message: str
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    @override
    def from_native(cls, value: NativeInfo) -> Self:
        """Return the counterpart of the engine's; its fields are made when they are asked for."""
        info = object.__new__(cls)
        info.__dict__["_native"] = value
        return info

    if not TYPE_CHECKING:  # checkers are to see the fields alone

        def __getattr__(self, name: str) -> Any:
            """Make a field."""
            native = self.__dict__.get("_native")
            if native is None or name not in _MADE:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__.setdefault(name, _MADE[name](native))

    @override
    def __reduce__(self) -> tuple[type[SnapshotInfo], tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)


_MADE: Final[dict[str, Callable[[NativeInfo], Any]]] = {
    "id": lambda native: str(native.id),
    "parent_id": lambda native: None if native.parent_id is None else str(native.parent_id),
    "written_at": lambda native: native.written_at,
    "message": lambda native: native.message,
    "metadata": lambda native: cast("dict[str, Any]", dict(native.metadata)),
}


@public("snapshots")
@dataclass(frozen=True, repr=False)
class Diff(Displayed):
    """The nodes and chunks that commits changed.

    Between two snapshots it is the union of the changes of each commit, not the net change.

    Attributes:
        new_groups: groups that were created.
        new_arrays: arrays that were created.
        deleted_groups: groups that were deleted.
        deleted_arrays: arrays that were deleted.
        updated_groups: groups whose metadata changed.
        updated_arrays: arrays whose metadata changed.
        updated_chunks: coordinates of the chunks that were set or deleted, by path of the array.
        moved_nodes: old and new path of nodes that were moved.
    """

    new_groups: set[str] = field(default_factory=set[str])
    new_arrays: set[str] = field(default_factory=set[str])
    deleted_groups: set[str] = field(default_factory=set[str])
    deleted_arrays: set[str] = field(default_factory=set[str])
    updated_groups: set[str] = field(default_factory=set[str])
    updated_arrays: set[str] = field(default_factory=set[str])
    updated_chunks: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    moved_nodes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        return self == Diff()

    @override
    def _rows(self) -> list[tuple[str, object]]:
        chunks = [
            line
            for path, coords in sorted(self.updated_chunks.items())
            for line in (f"{printable(path)}:", *(f"    {line}" for line in _few(map(str, coords))))
        ]
        moves = [f"{source} -> {target}" for source, target in self.moved_nodes]
        sections = (
            ("Groups created", _few(sorted(self.new_groups))),
            ("Arrays created", _few(sorted(self.new_arrays))),
            ("Groups updated", _few(sorted(self.updated_groups))),
            ("Arrays updated", _few(sorted(self.updated_arrays))),
            ("Chunks updated", chunks),
            ("Groups deleted", _few(sorted(self.deleted_groups))),
            ("Arrays deleted", _few(sorted(self.deleted_arrays))),
            ("Nodes moved", _few(moves)),
        )
        return [(title, "\n".join(lines)) for title, lines in sections if lines]

    @override
    def as_card(self) -> Card:
        """Return a row for each array and group, with the number of its chunks."""
        from icechunk_async._display.versions import diff_card  # noqa: PLC0415 -- rarely needed

        return diff_card(self, self._title())

    @override
    def __repr__(self) -> str:
        parts = [f"{title}:\n{indent(str(lines), '    ')}\n" for title, lines in self._rows()]
        return "\n".join(parts)

    @override
    def __str__(self) -> str:
        return repr(self)

    @classmethod
    def from_native(cls, value: NativeDiff) -> Self:
        """Return the counterpart of the engine's. Cost: a list for each chunk."""
        return cls(
            set(value.new_groups),
            set(value.new_arrays),
            set(value.deleted_groups),
            set(value.deleted_arrays),
            set(value.updated_groups),
            set(value.updated_arrays),
            {path: coords.tolist() for path, coords in value.updated_chunks.items()},
            list(value.moved_nodes),
        )


_SHOWN: Final = 20


def _few(lines: Iterable[str]) -> list[str]:
    """Return the first lines, and the number of the others."""
    every = list(lines)
    more = [f"... and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return [*map(printable, every[:_SHOWN]), *more]


@public("snapshots")
@dataclass(frozen=True, repr=False)
class ManifestFileInfo(Record):
    """One manifest that a snapshot refers to.

    Attributes:
        id: its id.
        size_bytes: of the file.
        num_chunk_refs: chunk references in it.
    """

    id: str
    size_bytes: int
    num_chunk_refs: int

    @classmethod
    @override
    def from_native(cls, value: Any) -> Self:
        """Return the counterpart of the engine's."""
        return cls(str(value.id), value.size_bytes, value.num_chunk_refs)
