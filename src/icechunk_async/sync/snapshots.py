"""Snapshots and the changes between them, in the classes of the official package."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from functools import cached_property
from itertools import repeat
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, overload, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.text import printable
from icechunk_async.errors import FormatError
from icechunk_async.sync.official.display import Displayed, Record, public

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async._display.cards import Card
    from icechunk_async.engine.history.diff import Diff as NativeDiff
    from icechunk_async.engine.history.graph import AncestryGraph
    from icechunk_async.format.repo_info import SnapshotInfo as NativeInfo
    from icechunk_async.format.repo_info.snapshot_columns import Page, SnapshotPage

__all__ = ["AncestryGraph", "Diff", "ManifestFileInfo", "SnapshotInfo"]

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import the class of graphs, which bring the entities of HTML, at its first use."""
        if name != "AncestryGraph":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from icechunk_async.engine.history.graph import AncestryGraph  # noqa: PLC0415 -- see above

        return AncestryGraph


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

    if not TYPE_CHECKING:  # checkers are to see the fields alone
        # A history has many of these, and few of their fields are looked at.
        __slots__ = ("_at", "_columns")

        def __init__(
            self,
            id: str,  # noqa: A002 -- as the official class calls it
            parent_id: str | None,
            written_at: datetime,
            message: str,
            metadata: dict[str, Any] | None = None,
        ) -> None:
            given = {} if metadata is None else metadata
            _set_columns(self, _Given([id], [parent_id], [written_at], [message], [given]))
            _set_at(self, 0)

    @classmethod
    @override
    def from_native(cls, value: NativeInfo) -> Self:
        """Return the counterpart of the engine's; its fields are made when they are asked for."""
        info = object.__new__(cls)
        _set_columns(info, _OfNative(value))
        _set_at(info, 0)
        return info

    @classmethod
    def of_page(cls, page: Page) -> list[Self]:
        """Return the counterparts of several. Fields are made for all of them when asked for one.

        Cost: a tenth of a microsecond for each.
        """
        columns = _OfFew(page) if isinstance(page, list) else _OfPage(page)
        # Without a step of the interpreter for each.
        made = list(map(object.__new__, repeat(cls, len(page))))
        _exhaust(map(_set_columns, made, repeat(columns)))
        _exhaust(map(_set_at, made, range(len(made))))
        return made

    @override
    def __reduce__(self) -> tuple[type[SnapshotInfo], tuple[object, ...]]:
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)


class _Given(NamedTuple):
    """The fields of a single snapshot."""

    id: Sequence[str]
    parent_id: Sequence[str | None]
    written_at: Sequence[datetime]
    message: Sequence[str]
    metadata: Sequence[dict[str, Any]]


class _OfNative:
    """The fields of a single snapshot, each made from those of the engine's when asked for."""

    def __init__(self, native: NativeInfo) -> None:
        self._native = native

    @cached_property
    def id(self) -> Sequence[str]:
        return [str(self._native.id)]

    @cached_property
    def parent_id(self) -> Sequence[str | None]:
        parent = self._native.parent_id
        return [None if parent is None else str(parent)]

    @cached_property
    def written_at(self) -> Sequence[datetime]:
        return [self._native.written_at]

    @cached_property
    def message(self) -> Sequence[str]:
        return [self._native.message]

    @cached_property
    def metadata(self) -> Sequence[dict[str, Any]]:
        return [dict(self._native.metadata)]


class _OfFew:
    """The fields of a few snapshots of which each is the parent of the one before."""

    def __init__(self, infos: list[NativeInfo]) -> None:
        self._infos = infos

    @cached_property
    def id(self) -> Sequence[str]:
        return [it.id_text for it in self._infos]

    @cached_property
    def parent_id(self) -> Sequence[str | None]:
        last = self._infos[-1].parent_id
        return [*self.id[1:], None if last is None else str(last)]

    @cached_property
    def written_at(self) -> Sequence[datetime]:
        return [it.written_at for it in self._infos]

    @cached_property
    def message(self) -> Sequence[str]:
        return [it.message for it in self._infos]

    @cached_property
    def metadata(self) -> Sequence[dict[str, Any]]:
        try:
            return [dict(it.metadata) for it in self._infos]
        except FormatError:
            return _Metadata(self._infos)


class _OfPage:
    """The fields of the snapshots of a page, each made for all of them when asked for one."""

    def __init__(self, page: SnapshotPage) -> None:
        self._page = page

    @cached_property
    def id(self) -> Sequence[str]:
        return self._page.id_texts

    @cached_property
    def parent_id(self) -> Sequence[str | None]:
        return self._page.parent_id_texts

    @cached_property
    def written_at(self) -> Sequence[datetime]:
        return self._page.written_at()

    @cached_property
    def message(self) -> Sequence[str]:
        return self._page.message

    @cached_property
    def metadata(self) -> Sequence[dict[str, Any]]:
        try:
            return self._page.decode_metadata()
        except FormatError:
            return _Metadata(self._page)


class _Metadata(Sequence[dict[str, Any]]):
    """The properties of the snapshots of a page one of which is damaged: each by itself."""

    def __init__(self, page: Sequence[NativeInfo]) -> None:
        self._infos = list(page)

    @override
    def __len__(self) -> int:
        return len(self._infos)

    @overload
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice, /) -> list[dict[str, Any]]: ...

    @override
    def __getitem__(self, index: int | slice, /) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [it.metadata for it in self._infos[index]]
        return self._infos[index].metadata


def _exhaust(steps: Iterable[None]) -> None:
    deque(steps, maxlen=0)


_set_columns: Final[Callable[[SnapshotInfo, object], None]] = vars(SnapshotInfo)["_columns"].__set__
_set_at: Final[Callable[[SnapshotInfo, int], None]] = vars(SnapshotInfo)["_at"].__set__
# Each written out: an attribute by its name would take twice as long.
_READING: Final[dict[str, Callable[[Any], Any]]] = {
    "id": lambda info: info._columns.id[info._at],  # noqa: SLF001
    "parent_id": lambda info: info._columns.parent_id[info._at],  # noqa: SLF001
    "written_at": lambda info: info._columns.written_at[info._at],  # noqa: SLF001
    "message": lambda info: info._columns.message[info._at],  # noqa: SLF001
    "metadata": lambda info: info._columns.metadata[info._at],  # noqa: SLF001
}
for _name, _read in _READING.items():
    setattr(SnapshotInfo, _name, property(_read))


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
            # Lists of lists, as officially.
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
