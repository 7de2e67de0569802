"""The snapshots that a repo info lists, by id: those of a file, with some added or left out."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, ValuesView
from dataclasses import field
from functools import cached_property
from itertools import chain, repeat
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, Self, overload

from icechunk_async._runtime.clock import from_us
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.blocks import string, structs
from icechunk_async.format.flatbuffers.checks import FEW, columns_pay
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.metadata import decode_items, encode_items, items_block

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from datetime import datetime

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.json.metadata import JSON, RawMetadata
    from icechunk_async.format.repo_info.snapshot_columns import Page, SnapshotPage
    from icechunk_async.format.repo_info.snapshot_table import SnapshotTable

__all__ = ["BLOCK", "NO_PARENT", "SnapshotInfo", "Snapshots", "no_such_parent"]

_SPEC: Final = 2
NO_PARENT: Final = -1
"""The row of the parent of a root."""
BLOCK: Final = 1024
"""Entries decoded at a time where all are asked for."""
_FIRST_PAGES: Final = (4, 12, 1024)
"""Entries of a history handed on at a time: most callers stop after a few, which are decoded one by
one. Others want all, as fast as they come, and each page by columns has fixed costs."""
_LONGEST_PAGE: Final = 4096
_NAMES: Final = ("id", "parent_id", "flushed_at", "message")
_MORE_NAMES: Final = ("raw_metadata", "pruned_ancestor_logs")
_ALL_NAMES: Final = frozenset({*_NAMES, *_MORE_NAMES})


@dataclass(frozen=True, eq=False, repr=False)
class SnapshotInfo:
    """A snapshot's place in history."""

    id: SnapshotId
    parent_id: SnapshotId | None
    """None for a root."""
    flushed_at: int
    """Microseconds since the epoch."""
    message: str
    raw_metadata: RawMetadata = field(default_factory=tuple[tuple[str, bytes], ...], repr=False)
    """The commit's properties as stored, so that rewriting the file carries them verbatim."""
    pruned_ancestor_logs: tuple[SnapshotId, ...] = field(default_factory=tuple[SnapshotId, ...])
    """Snapshots that expired between this one and its parent; their logs are kept."""

    @classmethod
    def on_page(cls, page: SnapshotPage, index: int) -> Self:
        """Return an entry that is decoded, with all of its page, when it is looked at."""
        # Past `__init__`, so that fields are missing and `__getattr__` is asked for them.
        info = object.__new__(cls)
        info.__dict__["_place"] = page, index
        return info

    if not TYPE_CHECKING:  # checkers are to see the fields alone

        def __getattr__(self, name: str) -> Any:
            """Return a field that is not decoded yet."""
            values = self.__dict__
            place = values.get("_place")
            if place is None or name not in _ALL_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            page, index = place
            # In two groups: listings of history want the first, and properties are what costs.
            for it in _NAMES if name in _NAMES else _MORE_NAMES:
                values[it] = getattr(page, it)[index]
            return values[name]

    def __eq__(self, other: object) -> bool:
        """Compare all fields."""
        return isinstance(other, SnapshotInfo) and self._values() == other._values()

    def __hash__(self) -> int:
        """Hash all fields."""
        return hash(self._values())

    def __repr__(self) -> str:
        """Show the fields, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        parent = None if self.parent_id is None else str(self.parent_id)
        return (
            f"SnapshotInfo(id={str(self.id)!r}, parent_id={parent!r}, "
            f"written_at={date(self.flushed_at)!r}, message={self.message!r})"
        )

    def _repr_html_(self) -> str:
        """Show the snapshot in a notebook."""
        from icechunk_async._display.cards import Card, date  # noqa: PLC0415 -- rarely needed

        rows: list[tuple[str, object]] = [("Written", date(self.flushed_at))]
        if self.parent_id is not None:
            rows.append(("Parent", self.parent_id))
        rows.append(("Message", self.message))
        if self.metadata:
            rows.append(("Properties", Card("", list(self.metadata.items()))))
        return Card(f"Snapshot {self.id}", rows).html()

    def __reduce__(self) -> tuple[type[SnapshotInfo], tuple[object, ...]]:
        """Pickle the fields alone."""
        return SnapshotInfo, self._values()

    def _values(self) -> tuple[object, ...]:
        return (
            self.id, self.parent_id, self.flushed_at, self.message, self.raw_metadata,
            self.pruned_ancestor_logs,
        )  # fmt: skip

    @cached_property
    def id_text(self) -> str:
        """The id as text."""
        return str(self.id)

    @cached_property
    def written_at(self) -> datetime:
        """When the snapshot was made, by its writer's clock; aware, UTC."""
        return from_us(self.flushed_at)

    @cached_property
    def metadata(self) -> dict[str, JSON]:
        """The commit's properties."""
        return decode_items(list(self.raw_metadata), _SPEC)

    @cached_property
    def blocks(self) -> tuple[Block, Block, Block | None]:
        """Message, properties and logs as written; kept, since commits may write them again."""
        pruned = None
        if self.pruned_ancestor_logs:  # an empty list is never written
            pruned = structs(b"".join(self.pruned_ancestor_logs), SnapshotId.size_bytes)
        return string(self.message), items_block(self.raw_metadata), pruned

    def written(self, write: Callable[[Self], Block]) -> Block:
        """Return the whole entry as written; kept like `blocks`."""
        found: Block | None = self.__dict__.get("_written")
        if found is None:
            found = self.__dict__["_written"] = write(self)
        return found

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


class Snapshots(Mapping[SnapshotId, SnapshotInfo]):
    """The snapshots that a repo info lists. Entries are decoded when they are asked for."""

    def __init__(self, infos: Iterable[SnapshotInfo] = ()) -> None:
        """Hold these entries; each id once."""
        self._table: SnapshotTable | None = None
        self._put = {info.id: info for info in infos}
        """Entries that are not, or no longer, those of the file."""
        self._covered: dict[SnapshotId, int] = {}
        """Entries of the file that do not count, with their rows."""

    @classmethod
    def from_table(cls, stored: SnapshotTable) -> Self:
        """Hold the entries of a file."""
        return cls._on_top(stored, {}, {})

    @classmethod
    def _on_top(
        cls,
        stored: SnapshotTable | None,
        put: dict[SnapshotId, SnapshotInfo],
        covered: dict[SnapshotId, int],
    ) -> Self:
        snapshots = cls()
        snapshots._table, snapshots._put, snapshots._covered = stored, put, covered
        return snapshots

    @classmethod
    def of(cls, infos: Mapping[SnapshotId, SnapshotInfo]) -> Snapshots:
        """Return the entries of any mapping."""
        return infos if isinstance(infos, Snapshots) else cls(infos.values())

    def edited(self, put: Iterable[SnapshotInfo], gone: Collection[SnapshotId] = ()) -> Self:
        """Return these entries with some added or replaced, and others left out.

        Cost: time in proportion to the changes since the file was written.
        """
        stored, new, left_out = self._table, {info.id: info for info in put}, set(gone)
        covered = dict(self._covered)
        if stored is not None:
            wanted = [it for it in left_out | new.keys() if it not in covered]
            rows = zip(wanted, stored.find_each(wanted), strict=True)
            covered |= {it: row for it, row in rows if row is not None}
        kept = {it: info for it, info in self._put.items() if it not in left_out}
        return self._on_top(stored, kept | new, covered)

    @property
    def table(self) -> SnapshotTable | None:
        """The file below; None if all entries were given as such."""
        return self._table

    @property
    def put(self) -> Mapping[SnapshotId, SnapshotInfo]:
        """The entries that lie on top of the file."""
        return self._put

    @property
    def covered(self) -> Mapping[SnapshotId, int]:
        """Those entries of the file that do not count any more, with their rows."""
        return self._covered

    @property
    def is_light(self) -> bool:
        """Whether so little lies on top of the file that it would not pay to read a newer one."""
        # Every change copies what lies on top, and reading anew costs in proportion to the file.
        stored = 0 if self._table is None else len(self._table)
        return len(self._put) + len(self._covered) <= max(FEW, isqrt(stored // FEW))

    def __getitem__(self, snapshot_id: SnapshotId) -> SnapshotInfo:
        """Return an entry; raise KeyError if it is missing."""
        info = self.get(snapshot_id)
        if info is None:
            raise KeyError(snapshot_id)
        return info

    @overload
    def get(self, snapshot_id: SnapshotId, /) -> SnapshotInfo | None: ...

    @overload
    def get[T](self, snapshot_id: SnapshotId, /, default: SnapshotInfo | T) -> SnapshotInfo | T: ...

    def get(self, snapshot_id: SnapshotId, /, default: Any = None) -> Any:
        """Return an entry, or the default; faster than through an exception."""
        info = self._put.get(snapshot_id)
        if info is not None:
            return info
        row = self._find(snapshot_id)
        return default if row is None or self._table is None else self._table.info(row)

    def _find(self, snapshot_id: SnapshotId) -> int | None:
        if self._table is None or snapshot_id in self._covered:
            return None
        return self._table.find(snapshot_id)

    def among(self, snapshot_ids: Collection[SnapshotId]) -> set[SnapshotId]:
        """Return the ids that are listed; quicker than one by one."""
        found = {it for it in snapshot_ids if it in self._put}
        if self._table is not None:
            left = [it for it in snapshot_ids if it not in found and it not in self._covered]
            rows = zip(left, self._table.find_each(left), strict=True)
            found |= {it for it, row in rows if row is not None}
        return found

    def older_than(self, moment_us: int) -> set[SnapshotId]:
        """Return the ids of the entries that have a parent and were written before a moment."""
        infos: Iterable[SnapshotInfo] = self._put.values()
        found: set[SnapshotId] = set()
        if self._table is not None and columns_pay(len(self._table)):
            found.update(self._table.columns.older_than(moment_us))
            found.difference_update(self._covered)
        else:
            infos = self.infos()
        found.update(
            it.id for it in infos if it.parent_id is not None and it.flushed_at < moment_us
        )
        return found

    def children_of(self, parents: Collection[SnapshotId]) -> list[SnapshotInfo]:
        """Return the entries whose parent is among some, and which are not among them."""
        infos: Iterable[SnapshotInfo] = self._put.values()
        found: list[SnapshotInfo] = []
        if self._table is not None and columns_pay(len(self._table)):
            rows = [it for it in self._table.find_each([*parents]) if it is not None]
            covered = set(self._covered.values())
            found = [
                self._table.info(row)
                for row in self._table.columns.children_of(rows)
                if row not in covered
            ]
        else:
            infos = self.infos()
        found += [it for it in infos if it.parent_id in parents and it.id not in parents]
        return found

    def __contains__(self, snapshot_id: object) -> bool:
        """Return whether a snapshot is listed."""
        if snapshot_id in self._put:
            return True
        return isinstance(snapshot_id, SnapshotId) and self._find(snapshot_id) is not None

    def _rows(self) -> list[int]:
        """Return the rows of the file that count, in ascending order of their ids."""
        if self._table is None:
            return []
        covered, order = set(self._covered.values()), self._table.columns.order
        rows = range(len(self._table)) if order is None else order.tolist()
        return [row for row in rows if row not in covered]

    def __iter__(self) -> Iterator[SnapshotId]:
        """Iterate over ids: those of the file, then those on top of it."""
        if self._table is not None:
            yield from SnapshotId.many(self._table.columns.ids[self._rows()].tobytes())
        yield from self._put

    def __len__(self) -> int:
        """Count the entries."""
        stored = 0 if self._table is None else len(self._table)
        return stored - len(self._covered) + len(self._put)

    def values(self) -> ValuesView[SnapshotInfo]:
        """Return the entries, in the order of `__iter__`; they are decoded together."""
        return _Infos(self)

    def items(self) -> ItemsView[SnapshotId, SnapshotInfo]:
        """Return ids and entries; as `values`."""
        return _Items(self)

    def infos(self) -> Iterator[SnapshotInfo]:
        """Iterate over the entries; as `values`."""
        if self._table is not None:
            yield from self._table.infos(self._rows())
        yield from self._put.values()

    def ancestry(self, snapshot_id: SnapshotId) -> Iterator[SnapshotInfo]:
        """Iterate from a listed snapshot to its root; as `ancestry_pages`."""
        return chain.from_iterable(self.ancestry_pages(snapshot_id))

    def ancestry_pages(self, snapshot_id: SnapshotId, *, whole: bool = False) -> Iterator[Page]:
        """Iterate from a listed snapshot to its root, several at a time.

        The first pages are short, unless the whole line is wanted. Entries are decoded when they
        are looked at.

        Raises:
            KeyError: it is not listed, or one of its ancestors is not.
            FormatError: the parents form a circle.
        """
        # Parents are places in a list, which a damaged file can make a circle of. A history is no
        # longer than the list, so count instead of remembering every snapshot.
        left = len(self)
        wanted: SnapshotId | None = snapshot_id
        while wanted is not None:
            info = self._put.get(wanted)
            if info is not None:
                if left == 0:
                    raise _circle(snapshot_id)
                left -= 1
                yield [info]
                wanted = info.parent_id
                continue
            row = self._find(wanted)
            if row is None or self._table is None:
                raise KeyError(wanted)
            wanted = None
            for size in chain(() if whole else _FIRST_PAGES, repeat(_LONGEST_PAGE)):
                rows, row, wanted = self._line(self._table, row, size)
                # Before the page is handed on, so that a circle ends after one round at the most.
                if len(rows) > left:
                    raise _circle(snapshot_id)
                left -= len(rows)
                if rows:
                    yield self._table.lazily(rows, row)
                if row == NO_PARENT or wanted is not None:
                    break

    def _line(
        self, stored: SnapshotTable, row: int, most: int
    ) -> tuple[list[int], int, SnapshotId | None]:
        """Return the next rows of a line of ancestors, the row after them, or the id on top."""
        covered = set(self._covered.values())
        rows: list[int] = []
        # The plain case first, with nothing in the loop but a list: long histories pass here.
        by_columns = columns_pay(most)
        if by_columns and not covered:
            parents = stored.columns.parents
            for _ in repeat(None, most):
                rows.append(row)
                row = parents[row]
                if row < 0:
                    break
            return rows, row, None
        parent = stored.columns.parents.__getitem__ if by_columns else stored.parent
        while row != NO_PARENT and len(rows) < most:
            # What lies on top may have another parent than the entry of the file, so the line
            # continues there.
            if row in covered:
                return rows, row, SnapshotId(stored.id(row))
            rows.append(row)
            row = parent(row)
        return rows, row, None


def no_such_parent() -> FormatError:
    """Return the error for a parent that is no entry of the file."""
    return FormatError("A snapshot has a parent outside of the repo info file.")


def _circle(snapshot_id: SnapshotId) -> FormatError:
    return FormatError(f"The ancestry of snapshot {snapshot_id} forms a circle.")


class _Infos(ValuesView[SnapshotInfo]):
    _mapping: Snapshots

    def __iter__(self) -> Iterator[SnapshotInfo]:
        return self._mapping.infos()


class _Items(ItemsView[SnapshotId, SnapshotInfo]):
    _mapping: Snapshots

    def __iter__(self) -> Iterator[tuple[SnapshotId, SnapshotInfo]]:
        return ((info.id, info) for info in self._mapping.infos())
