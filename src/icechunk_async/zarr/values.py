"""Differences of values: the cells of arrays that differ between two snapshots, and by how much."""

from __future__ import annotations

import json
import math
from dataclasses import field, replace
from html import escape
from itertools import batched, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zarr.api.asynchronous as za

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.tree.listing import chunk_coordinates
from icechunk_async.engine.versions.feed import ChunkChange, ChunkChanges, NodeChange
from icechunk_async.engine.versions.pictures import ChangeMap, draw_changes, html_image
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.format.paths import check_selection, is_within
from icechunk_async.format.zarr_document import same_chunk_format
from icechunk_async.zarr.documents import array_members

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Iterator,
        Mapping,
        Sequence,
    )

    import numpy.typing as npt
    import xarray
    from zarr import AsyncArray

    from icechunk_async.engine.versions.feed import Change
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.zarr.store import IcechunkStore

__all__ = [
    "CellChanges",
    "ValueDiff",
    "cell_changes",
    "cells_of_chunks",
    "cells_of_feed",
    "value_diffs",
]

_CONCURRENT_CHUNKS: Final = 16
_MEMORY_BYTES: Final = 256 << 20
"""For chunks that are compared at the same time, and where they differ."""
_FIRST: Final = 10
_MAPS: Final = 64
"""The most arrays of which a map is kept, a megabyte each."""
_NUMBERS: Final = "biuf"
_OTHER_PATHS: Final = "Name the other arrays with paths=."
_OTHER_LEVEL: Final = "Ask for its chunks, with level='chunk'."


@dataclass(frozen=True, slots=True)
class CellChanges:
    """Cells of one array whose values differ, as columns; row ``i`` of each is about one cell."""

    snapshot_id: SnapshotId
    """The snapshot that has the change."""
    path: str
    """Of the array, after the change."""
    node_id: NodeId
    indices: npt.NDArray[np.int64]
    """Where they are in the array, ``(n, rank)``, those of one chunk together."""
    before: npt.NDArray[Any]
    """Their values before, ``(n,)``; the fill value where there was no chunk, or no cell."""
    after: npt.NDArray[Any]
    """Their values after, ``(n,)``."""

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.indices)

    def to_xarray(self) -> xarray.Dataset:
        """Return a dataset with a row for each cell, along the dimension ``cell``.

        It has ``before`` and ``after``, ``change`` for numbers (after minus before, float64), and
        the coordinates ``axis_0``, ``axis_1`` and so on: where the cell is in the array.

        Raises:
            MissingDriverError: xarray is not installed.
        """
        try:
            import xarray  # noqa: PLC0415 -- optional
        except ModuleNotFoundError as error:
            raise MissingDriverError(
                "A dataset needs xarray, which is not installed. Install it with: pip install "
                "'icechunk-async[xarray]'",
                module=error.name,
            ) from error
        columns: dict[str, Any] = {"before": ("cell", self.before), "after": ("cell", self.after)}
        steps = _steps(self)
        if steps is not None:
            columns["change"] = ("cell", steps)
        places = {f"axis_{axis}": ("cell", it) for axis, it in enumerate(self.indices.T)}
        return xarray.Dataset(columns, places, {"path": self.path})


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """How the values of one array differ between two snapshots."""

    path: str
    """Of the array, after the change."""
    cells: int
    """Cells that the array has on both sides."""
    changed: int
    """Cells with another value. NaN is equal to NaN, and NaT to NaT."""
    chunks: int
    """Chunks that were read and compared; all others are the same objects."""
    min_change: float | None
    """The least difference, after minus before, in float64; None if no finite numbers differ."""
    max_change: float | None
    mean_change: float | None
    first: CellChanges
    """The first ten of the changed cells."""
    map: ChangeMap | None = field(default=None, compare=False, repr=False)
    """The changes as a map; None except for the first 64 arrays."""

    def picture(self, *, dark: bool = False) -> bytes:
        """Draw the changes over the last two axes, as PNG; over other axes the largest change.

        It blocks while it draws. Red is more than before, blue less. Cells that changed without
        a size are grey.

        Args:
            dark: light on dark.

        Raises:
            MissingDriverError: matplotlib is not installed.
        """
        shown = [] if self.map is None else [(self.title, self.map)]
        return draw_changes(shown, dark=dark)

    @property
    def title(self) -> str:
        """The path, and the number of changed cells."""
        return f"{self.path}: {self.changed:,} of {self.cells:,} cells changed ({self.share:.3%})"

    def _repr_html_(self) -> str:
        """Show in a notebook: the numbers, and the picture if matplotlib is installed."""
        sizes = (("least", self.min_change), ("mean", self.mean_change), ("most", self.max_change))
        numbers = "".join(
            f"<tr><td>{name} change</td><td>{size:+.6g}</td></tr>"
            for name, size in sizes
            if size is not None
        )
        drawn = "" if self.map is None else html_image(lambda it: self.picture(dark=it), self.title)
        return f"<b>{escape(self.title)}</b><table>{numbers}</table>{drawn}"

    @property
    def share(self) -> float:
        """The share of the cells that changed, 0 to 1."""
        return self.changed / self.cells if self.cells else 0.0


@dataclass(frozen=True, slots=True)
class _Pair:
    """One array on both sides, and the chunks in which it may differ."""

    snapshot_id: SnapshotId
    path: str
    node_id: NodeId
    old: AsyncArray[Any] | None
    """None: there was no such array, and every cell was the fill value."""
    new: AsyncArray[Any]
    shape: tuple[int, ...]
    """The cells that are compared, from the first on."""
    coords: npt.NDArray[np.uint32] | None
    """None: all of the grid, since bytes mean other values than before."""

    @property
    def at_a_time(self) -> int:
        """The number of chunks that are compared at the same time."""
        cells = math.prod(_chunk_shape(self.new))
        old = self.new if self.old is None else self.old
        cell_bytes = self.new.dtype.itemsize + old.dtype.itemsize + 8 * self.new.ndim + 1
        # Values of both sides, a byte for each cell that says whether it differs, and 8 bytes an
        # axis for the place of each that does; in the worst case all of them do.
        return max(1, min(_CONCURRENT_CHUNKS, _MEMORY_BYTES // max(1, cells * cell_bytes)))


@dataclass(slots=True)
class _Tally:
    """The changed cells of one array that were found so far."""

    pair: _Pair
    map: ChangeMap | None = None
    chunks: int = 0
    changed: int = 0
    compared: int = 0
    """Changes that can be subtracted."""
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    first: list[CellChanges] = field(default_factory=list[CellChanges])

    def add(self, cells: CellChanges) -> None:
        """Count a chunk that was compared, with its changed cells."""
        self.chunks += 1
        missing = _FIRST - self.changed
        if missing > 0 and len(cells):
            # Joining copies: rows that are a view would keep all changed cells of the chunk, of
            # every array until the last one is compared.
            self.first.append(_joined([_rows(cells, slice(missing))]))
        self.changed += len(cells)
        steps = _steps(cells)
        if self.map is not None and len(cells):
            self.map.add(cells.indices, steps)
        if steps is None:
            return
        steps = steps[np.isfinite(steps)]
        if len(steps):
            self.compared += len(steps)
            self.total += float(steps.sum())
            self.least = min(self.least, float(steps.min()))
            self.most = max(self.most, float(steps.max()))

    def outcome(self) -> ValueDiff:
        """Return the whole."""
        some = self.compared > 0
        return ValueDiff(
            self.pair.path,
            math.prod(self.pair.shape),
            self.changed,
            self.chunks,
            self.least if some else None,
            self.most if some else None,
            self.total / self.compared if some else None,
            _first_of(self.pair, self.first),
            self.map,
        )


async def cell_changes(
    before: IcechunkStore,
    after: IcechunkStore,
    changes: AsyncIterator[Change],
    paths: Collection[str] | None,
) -> AsyncGenerator[CellChanges]:
    """Iterate over the cells that differ; see `Repository.changed_cells`."""
    async for pair in _pairs(before, after, changes, paths):
        async for cells in _cells(pair):
            if len(cells):
                yield cells


async def cells_of_chunks(
    before: IcechunkStore, after: IcechunkStore, node_id: NodeId, coords: npt.NDArray[np.uint32]
) -> AsyncGenerator[CellChanges]:
    """Iterate over the cells of some chunks that differ; see `PendingMerge.cells`."""
    paths = [it.workspace.base.nodes.path_of(node_id) for it in (before, after)]
    documents = [
        None if path is None else side.workspace.base.nodes[path].user_data
        for side, path in zip((before, after), paths, strict=True)
    ]
    (old_path, path), (was, now) = paths, documents
    if old_path is None or path is None or not _means_the_same(was, now):
        raise InvalidInputError(
            f"The cells of {path or old_path!r} cannot be compared: one side deleted the array, or "
            "its chunks mean something else there."
        )
    _check_grid(before, old_path, "Look at its chunks.")
    old, new = await gather(_open(before, old_path), _open(after, path))
    pair = _Pair(after.workspace.base.id, path, node_id, old, new, new.shape, coords)
    async for cells in _cells(pair):
        if len(cells):
            yield cells


def _means_the_same(one: bytes | None, other: bytes | None) -> bool:
    return one is not None and other is not None and same_chunk_format(one, other)


async def value_diffs(
    before: IcechunkStore,
    after: IcechunkStore,
    changes: AsyncIterator[Change],
    paths: Collection[str] | None,
    see: Callable[[tuple[int, ...], CellChanges], None] | None = None,
) -> list[ValueDiff]:
    """Compare the values of the arrays that both sides have; see `Repository.diff_values`.

    ``see`` is called with the shape of an array and the cells of each of its chunks that differ.
    """
    tallies: dict[str, _Tally] = {}
    async for pair in _pairs(before, after, changes, paths):
        tally = tallies.get(pair.path)
        if tally is None:
            kept = ChangeMap.empty(pair.shape) if len(tallies) < _MAPS else None
            tally = tallies[pair.path] = _Tally(pair, kept)
        async for cells in _cells(pair):
            tally.add(cells)
            if see is not None:
                see(pair.new.shape, cells)
    return [tally.outcome() for _, tally in sorted(tallies.items())]


def _steps(cells: CellChanges) -> npt.NDArray[np.float64] | None:
    """Return by how much cells changed; None if their values cannot be subtracted."""
    if cells.before.dtype.kind not in _NUMBERS or cells.after.dtype.kind not in _NUMBERS:
        return None
    with np.errstate(invalid="ignore"):  # of infinities
        return cells.after.astype(np.float64) - cells.before.astype(np.float64)


async def _pairs(
    before: IcechunkStore,
    after: IcechunkStore,
    changes: AsyncIterator[Change],
    paths: Collection[str] | None,
) -> AsyncGenerator[_Pair]:
    """Open the arrays that a feed is about, on both sides, once for each batch of chunks."""
    tops = None if paths is None else check_selection(paths)
    whole: set[str] = set()
    async for change in changes:
        wanted = tops is None or any(is_within(change.path, top) for top in tops)
        if not wanted or change.path in whole:
            continue  # not asked for, or compared already
        origin = before.workspace.base.nodes.path_of(change.node_id)
        if origin is None or after.workspace.base.nodes.path_of(change.node_id) is None:
            continue  # it is new or gone: there is nothing to compare it with
        if isinstance(change, NodeChange):
            assert change.before is not None  # since both sides have it
            assert change.after is not None
            if not change.is_array or same_chunk_format(change.before, change.after):
                continue  # if values differ, the chunks do
            # All of the grid is compared. The feed's chunks of this array, which follow, are among
            # it.
            whole.add(change.path)
        coords = change.coords if isinstance(change, ChunkChanges) else None
        _check_grid(before, origin, _OTHER_PATHS)
        _check_grid(after, change.path, _OTHER_PATHS)
        old, new = await gather(_open(before, origin), _open(after, change.path))
        if _comparable(old, new):
            sizes = zip(old.shape, new.shape, strict=True)
            shape = tuple(min(pair) for pair in sizes)
            at = after.workspace.base.id
            yield _Pair(at, change.path, change.node_id, old, new, shape, coords)


def _comparable(old: AsyncArray[Any], new: AsyncArray[Any]) -> bool:
    """Return whether values of two arrays can be compared cell by cell."""
    numbers = old.dtype.kind in _NUMBERS and new.dtype.kind in _NUMBERS
    return old.ndim == new.ndim and (old.dtype == new.dtype or numbers)


async def _open(store: IcechunkStore, path: str) -> AsyncArray[Any]:
    return await za.open_array(  # pyright: ignore[reportUnknownMemberType]
        store=store, path=path.strip("/"), mode="r"
    )


async def _cells(pair: _Pair) -> AsyncGenerator[CellChanges]:
    """Compare chunk by chunk, several at a time; yield what differs in each."""

    async def compare(box: tuple[slice, ...]) -> CellChanges:
        one, other, differs = await _compared(pair, box)
        corner = np.array([part.start for part in box], np.int64)
        places = np.argwhere(differs).astype(np.int64, copy=False) + corner
        return CellChanges(
            pair.snapshot_id, pair.path, pair.node_id, places, one[differs], other[differs]
        )

    # A batch is compared and handed out before the next one is read, so that a slow consumer holds
    # one batch.
    limit = pair.at_a_time
    for some in batched(_boxes(pair), limit):
        for cells in await bounded_map(compare, some, limit=limit):
            yield cells


async def _compared(
    pair: _Pair, box: tuple[slice, ...]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the values of a box before and after, and where they differ.

    What the array did not have before counts as its fill value.
    """
    # Three cases. Both sides have all of the box: they are compared. The old side has none of it:
    # its fill value is. It has a part, since the array grew: that part, and the fill value
    # elsewhere.
    old, new = pair.old, pair.new
    shape = (0,) * new.ndim if old is None else old.shape
    limits = zip(box, shape, strict=True)
    common = tuple(slice(part.start, min(part.stop, stop)) for part, stop in limits)
    if old is not None and common == box:
        one, other = await gather(_values(old, box), _values(new, box))
        return one, other, ~_equal(one, other)
    other = await _values(new, box)
    # The new side's: cells that an array got by growing, and that were not written, are no change.
    nothing = np.broadcast_to(_fill_value(new), other.shape)
    differs = ~_equal(nothing, other)
    if old is None or any(part.start >= part.stop for part in common):
        return nothing, other, differs
    one = np.full(other.shape, _fill_value(old), old.dtype)
    inner = tuple(slice(0, part.stop - part.start) for part in common)
    one[inner] = await _values(old, common)
    differs[inner] = ~_equal(one[inner], other[inner])
    return one, other, differs


async def _values(array: AsyncArray[Any], box: tuple[slice, ...]) -> npt.NDArray[Any]:
    return np.asarray(await array.getitem(box))


def _fill_value(array: AsyncArray[Any]) -> npt.NDArray[Any]:
    """Return the fill value of an array, without axes."""
    return np.asarray(array.metadata.fill_value, array.dtype)


def _chunk_shape(array: AsyncArray[Any]) -> tuple[int, ...]:
    """Return the cells that are stored together, along each axis."""
    return array.chunks if array.shards is None else array.shards


def _boxes(pair: _Pair) -> Iterator[tuple[slice, ...]]:
    """Return the cells of each chunk that may differ, of those that are compared."""
    shape, sizes = pair.shape, _chunk_shape(pair.new)
    places: Iterator[Sequence[int]]
    if pair.coords is None:
        axes = zip(shape, sizes, strict=True)
        places = product(*(range(-(-length // size)) for length, size in axes))
    else:
        places = iter(pair.coords.tolist())
    for place in places:
        box = tuple(
            slice(at * size, min((at + 1) * size, stop))
            for at, size, stop in zip(place, sizes, shape, strict=True)
        )
        # Chunks that an array lost by shrinking have no cells to compare.
        if all(part.start < part.stop for part in box):
            yield box


def _check_grid(store: IcechunkStore, path: str, advice: str) -> None:
    """Refuse an array that is damaged, or not regular, before Zarr does with another advice."""
    node = store.workspace.array(path)
    assert node.array is not None
    name = array_members(node.user_data, path, len(node.array.dimensions))["chunk_grid"]["name"]
    if name != "regular":
        raise InvalidInputError(
            f"Values of {path!r} cannot be compared: its chunk grid is {name!r}, and "
            f"only regular ones are supported. {advice}"
        )


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Compare values; NaN and NaT are equal to themselves."""
    same = np.asarray(one == other, np.bool_)
    if one.dtype.kind in "fc" and other.dtype.kind in "fc":
        return same | (np.isnan(one) & np.isnan(other))
    if one.dtype.kind in "mM":
        return same | (np.isnat(one) & np.isnat(other))
    return same


def _first_of(pair: _Pair, parts: list[CellChanges]) -> CellChanges:
    """Return the first few of the changed cells as one."""
    if parts:
        return _joined(parts)
    nothing = np.empty(0, pair.new.dtype)
    places = np.empty((0, pair.new.ndim), np.int64)
    return CellChanges(pair.snapshot_id, pair.path, pair.node_id, places, nothing, nothing)


def _joined(parts: list[CellChanges]) -> CellChanges:
    """Return changed cells of one array, of which there are some, as one."""
    return replace(
        parts[0],
        indices=np.concatenate([it.indices for it in parts]),
        before=np.concatenate([it.before for it in parts]),
        after=np.concatenate([it.after for it in parts]),
    )


def _rows(cells: CellChanges, rows: slice) -> CellChanges:
    """Return some of the changed cells."""
    return replace(
        cells, indices=cells.indices[rows], before=cells.before[rows], after=cells.after[rows]
    )


async def cells_of_feed(
    before: IcechunkStore, after: IcechunkStore, changes: AsyncIterator[Change], batch_size: int
) -> AsyncGenerator[NodeChange | CellChanges]:
    """Iterate over a feed, whose nodes come first, with cells in place of chunks.

    See `Repository.changes`.
    """
    feed = _CellFeed(before, after)
    documents: list[NodeChange] = []
    async for change in changes:
        if isinstance(change, NodeChange):
            yield change
            if change.kind == "updated" and change.is_array:
                documents.append(change)
            continue
        # A feed lists all nodes before the first chunk. What documents alone changed comes before
        # the chunks, so that `_told` and `_edges` are complete when `of_chunks` looks.
        while documents:
            async for cells in _batches(feed.of_document(documents.pop(0)), batch_size):
                yield cells
        async for cells in _batches(feed.of_chunks(change), batch_size):
            yield cells
    for document in documents:
        async for cells in _batches(feed.of_document(document), batch_size):
            yield cells


class _CellFeed:
    """Finds out which chunks must be compared to know every cell of a feed."""

    def __init__(self, before: IcechunkStore, after: IcechunkStore) -> None:
        """Compare what two stores read."""
        self._before, self._after = before, after
        self._told: set[NodeId] = set()
        """Arrays that were compared as a whole."""
        self._edges: dict[NodeId, dict[int, int]] = {}
        """Of arrays that grew: along which axes the last chunk was not full, and its place."""

    async def of_document(self, change: NodeChange) -> AsyncGenerator[_Pair]:
        """Return the chunks to compare because an array has another document.

        Chunks that mean something else are not part of a feed of chunks. Nor are chunks that
        were at the end and not full: what they hold behind it comes to light if the array grows.
        """
        assert change.before is not None
        assert change.after is not None
        same = same_chunk_format(change.before, change.after)
        # Only attributes or names of dimensions are other.
        if same and json.loads(change.before).get("shape") == json.loads(change.after).get("shape"):
            return
        old, new = await self._both(change.node_id, change.path)
        assert old is not None  # since it has another document now
        if not _comparable(old, new):
            self._told.add(change.node_id)
            async for coords in chunk_coordinates(self._after.workspace, change.path):
                yield self._pair(change, None, new, coords)
        elif not same:
            self._told.add(change.node_id)
            yield self._pair(change, old, new, None)
        else:
            # 6 cells in chunks of 4 that become 9: chunk 1 had cells 6 and 7 stored behind the end.
            # They show now, though the chunk is the same object. So chunks at place 1 are compared.
            axes = enumerate(zip(old.shape, new.shape, _chunk_shape(new), strict=True))
            edges = {at: was // size for at, (was, now, size) in axes if was < now and was % size}
            if edges:
                self._edges[change.node_id] = edges
                async for coords in chunk_coordinates(self._after.workspace, change.path):
                    yield self._pair(change, old, new, coords[_at_edges(coords, edges)])

    async def of_chunks(self, change: ChunkChanges) -> AsyncGenerator[_Pair]:
        """Return the chunks to compare because they changed."""
        if change.node_id in self._told:
            return
        coords = change.coords
        if (edges := self._edges.get(change.node_id)) is not None:
            # They were compared with the document. A removed chunk is no longer listed there.
            told = _at_edges(coords, edges) & (change.kinds != ChunkChange.REMOVED)
            coords = coords[~told]
        old, new = await self._both(change.node_id, change.path)
        yield self._pair(change, old, new, coords)

    async def _both(
        self, node_id: NodeId, path: str
    ) -> tuple[AsyncArray[Any] | None, AsyncArray[Any]]:
        _check_grid(self._after, path, _OTHER_LEVEL)
        origin = self._before.workspace.base.nodes.path_of(node_id)
        if origin is None:
            return None, await _open(self._after, path)
        _check_grid(self._before, origin, _OTHER_LEVEL)
        old, new = await gather(_open(self._before, origin), _open(self._after, path))
        return old, new

    def _pair(
        self,
        change: Change,
        old: AsyncArray[Any] | None,
        new: AsyncArray[Any],
        coords: npt.NDArray[np.uint32] | None,
    ) -> _Pair:
        snapshot_id = self._after.workspace.base.id
        return _Pair(snapshot_id, change.path, change.node_id, old, new, new.shape, coords)


def _at_edges(coords: npt.NDArray[np.uint32], edges: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Return which chunks are at a place along one of some axes."""
    found = np.zeros(len(coords), np.bool_)
    for axis, at in edges.items():
        found |= coords[:, axis] == at
    return found


async def _batches(pairs: AsyncIterator[_Pair], size: int) -> AsyncGenerator[CellChanges]:
    """Return the cells that differ, of one array, in batches of a size and a last one."""
    held: list[CellChanges] = []
    count = 0
    async for pair in pairs:
        async for cells in _cells(pair):
            if len(cells):
                held.append(cells)
                count += len(cells)
            if count >= size:
                # Batches of 10 from chunks with 8, 8 and 9 changed cells: after the second one, ten
                # rows go out and six stay; after the third, ten more, and five are the last.
                whole, full = _joined(held), count - count % size
                for start in range(0, full, size):
                    yield _rows(whole, slice(start, start + size))
                count -= full
                held = [_rows(whole, slice(full, None))] if count else []
    if held:
        yield _joined(held)
