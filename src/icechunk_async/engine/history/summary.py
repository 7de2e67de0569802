"""Summaries for people: a repository's place, refs, commits, arrays and sizes; its log."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, overload, override

from icechunk_async._display.cards import Card, Table, byte_size, count, date, first_line
from icechunk_async._display.versions import (
    commits_table,
    operations_card,
    operations_table,
    refs_table,
)
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.json.values import is_object
from icechunk_async.format.zarr_array import element_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.protocol import History
    from icechunk_async.format.operations_log import RepoStatus, Update
    from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo
    from icechunk_async.format.snapshot import Node

__all__ = [
    "ArraySummary",
    "OperationsLog",
    "RepositorySummary",
    "card_from_memory",
    "read_operations",
    "summarize",
]

_COMMITS: Final = 10
_SHOWN_ARRAYS: Final = 20
_ADVICE: Final = "as last read; summary() reads it anew, with arrays and sizes"


@dataclass(frozen=True, slots=True)
class ArraySummary:
    """An array of a snapshot, as its metadata declare it."""

    path: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    """Chunks along each axis."""
    data_type: str
    """The name of Zarr's data type; empty if the metadata do not tell."""
    dimension_names: tuple[str | None, ...] | None
    size_bytes: int | None
    """Of all cells, uncompressed; None for data types whose cells have no fixed size."""

    @property
    def axes(self) -> str:
        """The shape, with the names of its axes."""
        names = self.dimension_names or (None,) * len(self.shape)
        pairs = zip(names, self.shape, strict=True)
        return ", ".join(f"{n:,}" if it is None else f"{it}: {n:,}" for it, n in pairs) or "scalar"


@dataclass(frozen=True, slots=True, repr=False)
class RepositorySummary:
    """The contents of a repository at the time when `Repository.summary` read them.

    It shows itself: as lines when printed, as a card in a notebook.
    """

    url: str
    """Where it is, without secrets."""
    layout: str
    """As `Repository.layout`."""
    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]
    snapshot: SnapshotInfo
    """The snapshot whose arrays and groups are told."""
    commits: tuple[SnapshotInfo, ...]
    """The newest snapshots of its ancestry, itself first."""
    arrays: tuple[ArraySummary, ...]
    """All of them, ascending by path."""
    groups: int
    """Number of groups, with the root."""
    chunks: int
    """References to chunks in its manifests."""
    manifest_bytes: int
    operations: tuple[Update, ...] = ()
    """The newest entries of the operations log; empty where format version 1 keeps none."""
    status: RepoStatus | None = None
    """None where the layout knows no status."""
    stored_bytes: int | None = None
    """Of chunks that branches and tags lead to, stored here, in every snapshot; None if these were
    not measured."""
    virtual_bytes: int | None = None
    """Of virtual chunks; None as above."""
    known: Mapping[SnapshotId, SnapshotInfo] = field(default_factory=dict[Any, Any])
    """Snapshots by id that were at hand: in format 2 all, else those of `commits`."""

    @property
    def array_bytes(self) -> int:
        """Size of all arrays together, uncompressed, without those whose size is not known."""
        return sum(it.size_bytes or 0 for it in self.arrays)

    def __repr__(self) -> str:
        """Show lines."""
        return self._card().text()

    def _repr_html_(self) -> str:
        """Show a card in a notebook."""
        return self._card().html()

    def _card(self) -> Card:
        known = self.known or {it.id: it for it in (*self.commits, self.snapshot)}
        rows = [
            *_place(self.url, self.layout, self.status),
            ("Snapshot", f"{self.snapshot.id}, written {date(self.snapshot.flushed_at)}"),
            ("Holds", f"{count(len(self.arrays), 'array')}, {count(self.groups, 'group')}"),
            ("Size", self._sizes()),
        ]
        tables = [
            _arrays_table(self.arrays),
            refs_table(self.branches, "Branches", known.get),
            refs_table(self.tags, "Tags", known.get),
            commits_table(self.commits, "Last commits"),
            operations_table(self.operations, "Last operations"),
        ]
        return Card("Icechunk repository", rows, [it for it in tables if it.rows])

    def _sizes(self) -> str:
        unknown = any(it.size_bytes is None for it in self.arrays)
        parts = [
            f"{'more than ' if unknown else ''}{byte_size(self.array_bytes)} uncompressed",
            f"{count(self.chunks, 'chunk')} in manifests of {byte_size(self.manifest_bytes)}",
        ]
        if self.stored_bytes is not None:
            parts.append(f"{byte_size(self.stored_bytes)} stored by the whole history")
        if self.virtual_bytes:
            parts.append(f"{byte_size(self.virtual_bytes)} in virtual chunks")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class OperationsLog[T](Sequence[T]):
    """The newest entries of a repository's operations log; `Repository.operations` reads it.

    A sequence, newest first. It shows itself: as lines when printed, as a card in a notebook, with
    its first 50 entries. A slice of it is one again: ``log[50:]`` shows the next.
    """

    entries: tuple[T, ...]
    drawn: tuple[Update, ...] = field(compare=False)
    """The entries as `icechunk_async.results` has them: what is shown."""
    complete: bool
    """Whether the log has no older entries."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> OperationsLog[T]: ...

    @override
    def __getitem__(self, index: int | slice) -> T | OperationsLog[T]:
        """Return an entry, or the log of some."""
        if not isinstance(index, slice):
            return self.entries[index]
        # A slice is complete if it ends with the last entry of a complete log.
        last = range(len(self.entries))[index][-1:] == range(len(self.entries))[-1:]
        return OperationsLog(self.entries[index], self.drawn[index], self.complete and last)

    @override
    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.entries)

    def __repr__(self) -> str:
        """Show lines."""
        return operations_card(self.drawn, complete=self.complete).text()

    def _repr_html_(self) -> str:
        """Show a card in a notebook."""
        return operations_card(self.drawn, complete=self.complete).html()


async def read_operations(log: AsyncIterator[Update], limit: int | None) -> OperationsLog[Update]:
    """Read the newest entries of a log, and one more to see whether there is any."""
    found = await _first(log, None if limit is None else limit + 1)
    entries = tuple(found[:limit])
    return OperationsLog(entries, entries, len(found) == len(entries))


async def summarize(
    history: History,
    assets: Assets,
    ref: SnapshotId | str,
    find: Callable[[], Awaitable[SnapshotId]],
    url: str,
    *,
    commits: int,
) -> RepositorySummary:
    """Read what a summary tells but measured sizes; see `Repository.summary`.

    Args:
        history: of the repository.
        assets: reads the snapshot's file.
        ref: names the snapshot.
        find: finds the snapshot that ``ref`` names if it is no branch and no tag.
        url: of the repository.
        commits: the number of commits and operations.
    """
    state = history.state
    if state is not None:
        info = await state.info()  # all refs and the history, in one request
        branches, tags = info.branches, info.tags
    else:
        info, (branches, tags) = None, await gather(history.branches(), history.tags())
    named = None if isinstance(ref, SnapshotId) else branches.get(ref, tags.get(ref))
    snapshot_id = await find() if named is None else named
    snapshot, newest = await gather(
        assets.snapshot(snapshot_id), _first(history.ancestry(snapshot_id), max(commits, 1))
    )
    nodes = list(snapshot.nodes.values())
    manifests = list(snapshot.manifests.values())
    return RepositorySummary(
        url,
        history.layout,
        dict(branches),
        dict(tags),
        newest[0],
        tuple(newest[:commits]),
        tuple(_array(it) for it in nodes if it.array is not None),
        sum(it.array is None for it in nodes),
        sum(it.num_chunk_refs for it in manifests),
        sum(it.size_bytes for it in manifests),
        () if info is None else tuple(islice(info.updates, commits)),
        None if info is None else info.status,
        known={it.id: it for it in newest} if info is None else info.snapshots,
    )


async def _first[T](found: AsyncIterator[T], most: int | None) -> list[T]:
    """Return the first items of an iterator, and close it."""
    items: list[T] = []
    async for item in found:
        items.append(item)
        if len(items) == most:
            break
    # Here, and not when the generator is collected: the loop may have ended by then.
    close = getattr(found, "aclose", None)
    if close is not None:
        await close()
    return items


def card_from_memory(history: History, url: str) -> Card:
    """Return a card of an open repository, made without asking its storage."""
    state = history.state
    if state is None:
        note = "refs are in the storage; summary() reads them, with arrays and sizes"
        return Card("Icechunk repository", _place(url, history.layout, None), note=note)
    info = state.seen()
    rows = _place(url, history.layout, info.status)
    found = info.snapshots.get
    try:
        tables = [
            refs_table(info.branches, "Branches", found),
            refs_table(info.tags, "Tags", found),
            commits_table(_newest_of_main(info), "Last commits on main"),
        ]
    except FormatError as error:  # entries are decoded here, and showing a value does not fail
        return Card("Icechunk repository", [*rows, ("Damaged", error)])
    return Card("Icechunk repository", rows, [it for it in tables if it.rows], _ADVICE)


def _newest_of_main(info: RepoInfo) -> list[SnapshotInfo]:
    tip = info.branches.get("main")
    if tip is None or tip not in info.snapshots:
        return []
    return list(islice(info.ancestry(tip), _COMMITS))


def _place(url: str, layout: str, status: RepoStatus | None) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("Where", url), ("Format", layout.replace("-", " "))]
    if status is not None and status.availability:
        why = f": {first_line(status.reason)}" if status.reason else ""
        words = status.availability.name.replace("_", " ").lower()
        rows.append(("Status", f"{words} since {date(status.set_at)}{why}"))
    return rows


def _arrays_table(arrays: tuple[ArraySummary, ...]) -> Table:
    rows = [
        (
            it.path,
            it.axes,
            it.data_type,
            " x ".join(f"{n:,}" for n in it.grid) or "1",
            "" if it.size_bytes is None else byte_size(it.size_bytes),
        )
        for it in arrays[:_SHOWN_ARRAYS]
    ]
    heads = ("Path", "Shape", "Type", "Chunks", "Size")
    return Table("Arrays", heads, rows, len(arrays))


def _array(node: Node) -> ArraySummary:
    assert node.array is not None
    shape = tuple(it.array_length for it in node.array.dimensions)
    kind = _data_type(node.user_data)
    size = element_bytes(kind)
    names = node.array.dimension_names
    return ArraySummary(
        node.path,
        shape,
        node.array.grid,
        kind,
        names if names is not None and len(names) == len(shape) else None,
        None if size is None else math.prod(shape) * size,
    )


def _data_type(document: bytes) -> str:
    """Return the name of the data type in a metadata document; empty if it has none."""
    try:
        found: Any = json.loads(document)
    # Documents of other writers may hold anything, and a summary shows the other arrays.
    except (ValueError, RecursionError):
        return ""
    kind = found.get("data_type") if is_object(found) else None
    kind = kind.get("name") if is_object(kind) else kind
    return kind if isinstance(kind, str) else ""
