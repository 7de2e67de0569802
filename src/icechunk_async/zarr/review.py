"""Review the changes of a proposal, for people: nodes, chunks, values, and where they are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async.engine.proposals.record import (
    ArrayReview,
    CellReview,
    ChangeMap,
    KeyReview,
    NodeReview,
    Review,
)
from icechunk_async.engine.versions.feed import ChunkChange, ChunkChanges, NodeChange
from icechunk_async.errors import FormatError, StorageError
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.json.values import is_object
from icechunk_async.zarr.values import value_diffs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import numpy.typing as npt

    from icechunk_async.engine.versions.feed import Change
    from icechunk_async.zarr.store import IcechunkStore
    from icechunk_async.zarr.values import CellChanges, ValueDiff

__all__ = ["review_changes"]

# Together these keep the review of any proposal below the size of a record.
_MOST_NODES: Final = 500
_MOST_KEYS: Final = 1_000
"""Of all nodes together."""
_MOST_ARRAYS: Final = 100
_MOST_MAPS: Final = 40
_SIDE: Final = 48
"""Fields of a map along its longer side, at most."""
_MOST_PATH: Final = 1_000
_MOST_VALUE: Final = 300
_NUMBERS: Final = "biuf"


async def review_changes(
    before: IcechunkStore, after: IcechunkStore, changes: AsyncIterator[Change], most_chunks: int
) -> Review:
    """Return the differences between two stores.

    Args:
        before: the tip of the branch.
        after: the merged state.
        changes: the net differences between them.
        most_chunks: compare the values of an array only if at most this many of its chunks
            changed; and of all arrays together, in the order of the feed.

    Where a chunk of either side is damaged, a note says so: that may be what the change mends.

    Raises:
        FormatError: a snapshot or a manifest is damaged.

    Cost: both versions of the chunks whose values are compared are read and decoded. Memory: 16
    chunks of each side, and the coordinates of all chunks that changed in one array at a time.
    """
    nodes: list[NodeReview] = []
    arrays: dict[str, _Array] = {}
    more_nodes = 0
    left_out: set[str] = set()
    async for change in changes:
        if isinstance(change, NodeChange):
            if len(nodes) < _MOST_NODES:
                nodes.append(_node(change, _MOST_KEYS - sum(len(it.keys) for it in nodes)))
            else:
                more_nodes += 1
        # Chunks of an array come in several batches, one after the other.
        elif change.path in arrays or len(arrays) < _MOST_ARRAYS:
            if change.path not in arrays:
                arrays[change.path] = _Array(change.path, after)
            arrays[change.path].add(change, most_chunks)
        else:
            left_out.add(change.path)
    left = most_chunks
    found: list[ArrayReview] = []
    for number, array in enumerate(arrays.values()):
        if array.count <= left:
            left -= array.count
            review = await _with_values(before, after, array)
            # Its values were compared all the same, for the numbers of changed cells.
            if number >= _MOST_MAPS:
                review = replace(review, chunks=None, values=None)
            found.append(review)
            continue
        note = (
            f"Values were not compared: {array.count:,} chunks changed, and of all arrays together "
            f"{most_chunks:,} are read."
        )
        review = array.review()
        found.append(
            replace(review, note=note, chunks=review.chunks if number < _MOST_MAPS else None)
        )
    return Review(tuple(nodes), more_nodes, tuple(found), len(left_out))


def _cut(text: str, most: int) -> str:
    """Return text that UTF-8 can hold, cut short."""
    # JSON may hold half a surrogate pair, which the record of the review could not be encoded with.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _node(change: NodeChange, most_keys: int) -> NodeReview:
    keys: tuple[KeyReview, ...] = ()
    if change.kind == "updated" and change.before is not None and change.after is not None:
        keys = _keys(change.before, change.after, most_keys)
    previous = change.previous_path
    return NodeReview(
        change.kind,
        _cut(change.path, _MOST_PATH),
        None if previous is None else _cut(previous, _MOST_PATH),
        change.is_array,
        keys,
    )


def _keys(before: bytes, after: bytes, most: int) -> tuple[KeyReview, ...]:
    """Return the keys of a ``zarr.json`` whose values differ; those of attributes one by one."""
    old, new = _flat(before), _flat(after)
    names = [it for it in dict.fromkeys([*old, *new]) if old.get(it) != new.get(it)]
    listed = [
        KeyReview(_cut(it, _MOST_VALUE), _shown(old.get(it)), _shown(new.get(it)))
        for it in names[: max(most - 1, 0)]
    ]
    if len(names) > len(listed):
        listed.append(KeyReview(f"and {len(names) - len(listed)} more keys", None, None))
    return tuple(listed)


def _flat(document: bytes) -> dict[str, str]:
    try:
        members = dict(parse_json(document, "metadata document").members)
    except FormatError:  # another writer's; the change may be what mends it
        return {"zarr.json": f"damaged: {document!r}"}
    attributes: Any = members.get("attributes")
    if is_object(attributes):  # which Zarr demands, and a store does not
        del members["attributes"]
        members |= {f"attributes[{name!r}]": value for name, value in attributes.items()}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in members.items()}


def _shown(value: str | None) -> str | None:
    return None if value is None else _cut(value, _MOST_VALUE)


class _Array:
    """The chunks of one array that changed."""

    def __init__(self, path: str, after: IcechunkStore) -> None:
        node = after.workspace.node(path)
        grid = () if node is None or node.array is None else node.array.grid
        self.batches: list[ChunkChanges] = []
        self.count = 0
        self._path = path
        self._kinds = np.zeros(3, np.int64)
        self._drawing = _Drawing(tuple(grid))

    def add(self, change: ChunkChanges, most: int) -> None:
        """Count some chunks; keep them unless there are more than ``most``."""
        self.count += len(change)
        # More chunks than will be compared are only counted: their coordinates may be millions.
        self.batches = [*self.batches, change] if self.count <= most else []
        self._kinds += np.bincount(change.kinds, minlength=3)
        self._drawing.count(change.coords.astype(np.int64))

    def review(self) -> ArrayReview:
        """Return the review without values."""
        kinds: list[int] = self._kinds.tolist()
        return ArrayReview(
            _cut(self._path, _MOST_PATH),
            kinds[ChunkChange.ADDED],
            kinds[ChunkChange.CHANGED],
            kinds[ChunkChange.REMOVED],
            self._drawing.counts(),
        )


class _Drawing:
    """Adds up something over the last two axes of an array, in at most 48 by 48 fields."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        # An array of one axis is drawn as one row, one without axes as one field.
        sides = [max(side, 1) for side in (1, 1, *shape)[-2:]]
        self._steps = [-(-side // _SIDE) for side in sides]
        self._sizes = [-(-side // step) for side, step in zip(sides, self._steps, strict=True)]
        self._sums = np.zeros(self._sizes, np.float64)
        self._numbers = np.zeros(self._sizes, np.int64)

    def count(self, indices: npt.NDArray[np.int64]) -> None:
        """Count what is at some places."""
        # Not `+=`, which counts a field once however often it is among the indices.
        np.add.at(self._numbers, self._fields(indices), 1)

    def add(self, indices: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Add values that are at some places."""
        fields = self._fields(indices)
        np.add.at(self._numbers, fields, 1)
        np.add.at(self._sums, fields, values)

    def _fields(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the fields of places, ``(n, rank)``, as rows and columns.

        Chunks that an array lost by shrinking lie behind its end, and count in the last field.
        """
        nothing = np.zeros(len(indices), np.int64)
        rank = indices.shape[1]
        row = indices[:, -2] // self._steps[0] if rank > 1 else nothing
        column = indices[:, -1] // self._steps[1] if rank > 0 else nothing
        return np.minimum(row, self._sizes[0] - 1), np.minimum(column, self._sizes[1] - 1)

    def counts(self) -> ChangeMap | None:
        """Return the numbers of places in each field; None without any."""
        return self._map(self._numbers.astype(np.float64)) if self._numbers.any() else None

    def means(self) -> ChangeMap | None:
        """Return the mean of the values in each field; None without any."""
        if not self._numbers.any():
            return None
        return self._map(self._sums / np.maximum(self._numbers, 1))

    def _map(self, values: npt.NDArray[np.float64]) -> ChangeMap:
        # Reviews are stored as JSON, which has no infinities.
        values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        rows, columns = self._sizes
        row_cells, column_cells = self._steps
        listed: list[float] = values.ravel().tolist()
        # Four digits are more than a picture shows, and the text of a double has up to 17.
        shown = tuple(float(f"{it:.4g}") for it in listed)
        return ChangeMap(rows, columns, row_cells, column_cells, shown)


async def _with_values(before: IcechunkStore, after: IcechunkStore, array: _Array) -> ArrayReview:
    """Return the review of one array with its values compared."""
    review = array.review()
    drawing: _Drawing | None = None

    def see(shape: tuple[int, ...], cells: CellChanges) -> None:
        nonlocal drawing
        if cells.before.dtype.kind not in _NUMBERS or cells.after.dtype.kind not in _NUMBERS:
            return
        drawing = drawing or _Drawing(shape)
        with np.errstate(invalid="ignore", over="ignore"):
            steps = cells.after.astype(np.float64) - cells.before.astype(np.float64)
        finite = np.isfinite(steps)
        drawing.add(cells.indices[finite], steps[finite])

    async def feed() -> AsyncGenerator[Change]:
        for batch in array.batches:
            yield batch

    try:
        diffs = await value_diffs(before, after, feed(), None, see)
    # A storage that fails says nothing about the change.
    except StorageError:
        raise
    except Exception as error:  # noqa: BLE001 -- of codecs, too: what cannot be read may be replaced
        return replace(review, note=_cut(f"Values were not compared: {error}", _MOST_PATH))
    if not diffs:
        return replace(
            review, note="Only one side has this array, or its values cannot be compared."
        )
    return _valued(review, diffs[0], None if drawing is None else drawing.means())


def _valued(review: ArrayReview, diff: ValueDiff, values: ChangeMap | None) -> ArrayReview:
    first = diff.first
    cells = [
        CellReview(tuple(index), _cut(str(old), _MOST_VALUE), _cut(str(new), _MOST_VALUE))
        for index, old, new in zip(first.indices.tolist(), first.before, first.after, strict=True)
    ]
    return replace(
        review,
        cells=diff.cells,
        changed_cells=diff.changed,
        min_change=diff.min_change,
        mean_change=diff.mean_change,
        max_change=diff.max_change,
        first=tuple(cells),
        values=values,
    )
