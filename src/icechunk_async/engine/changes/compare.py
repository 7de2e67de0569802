"""Compare the references of one array in two states, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.flatbuffers.writing import copy_pieces
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import merge_pools
from icechunk_async.format.manifest.refs import NO_ETAG, ChunkRefs
from icechunk_async.format.manifest.row_index import rows_in
from icechunk_async.format.transaction_log import unique_coordinates

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.manifest.locations import StringPool

    type _Indices = npt.NDArray[np.intp]
    type _Mask = npt.NDArray[np.bool_]

__all__ = ["RefChanges", "common_rows", "compare_refs", "same_refs"]


@dataclass(frozen=True, slots=True)
class RefChanges:
    """Differences between two states of an array's references, each in ascending order."""

    before: ChunkRefs
    """References that are gone, or were replaced."""
    after: ChunkRefs
    """References that are new, or replace others."""

    @classmethod
    def none(cls, rank: int) -> RefChanges:
        """Return no differences."""
        return cls(ChunkRefs.empty(rank), ChunkRefs.empty(rank))

    def is_empty(self) -> bool:
        """Return whether nothing differs."""
        return not len(self.before) and not len(self.after)

    @property
    def coords(self) -> npt.NDArray[np.uint32]:
        """The places that differ, ``(n, rank)``, in ascending order, each once."""
        if not len(self.before):
            return self.after.coords
        if not len(self.after):
            return self.before.coords
        return unique_coordinates(np.concatenate([self.before.coords, self.after.coords]))

    def updates(self) -> ChunkRefs:
        """Return the references to set and delete that turn the first state into the second."""
        if not len(self.before):
            return self.after
        gone = ChunkRefs.build(self.before.coords, Kind.DELETED)
        return ChunkRefs.concat([gone, self.after]).sort() if len(self.after) else gone

    def without(self, places: npt.NDArray[np.uint32]) -> RefChanges:
        """Leave out the differences at some places, ``(n, rank)``."""
        return RefChanges(
            self.before.take(~rows_in(self.before.coords, places)),
            self.after.take(~rows_in(self.after.coords, places)),
        )


def compare_refs(before: ChunkRefs, after: ChunkRefs, *, equal_sums: bool = False) -> RefChanges:
    """Compare the references of one array in two states.

    Args:
        before: the first state, in ascending order of coordinates, as is ``after``.
        after: the second state, with the same number of axes.
        equal_sums: count native chunks of equal length and checksum as the same, wherever their
            bytes are.

    Cost: no Python object per reference.
    """
    if not len(before) or not len(after):
        return RefChanges(before, after)
    mine, theirs = common_rows(before.coords, after.coords)
    same = same_refs(before, mine, after, theirs, equal_sums=equal_sums)
    if same.all() and len(mine) == len(before) == len(after):
        return RefChanges.none(before.rank)
    gone, new = np.ones(len(before), bool), np.ones(len(after), bool)
    gone[mine[same]] = False
    new[theirs[same]] = False
    return RefChanges(before.take(gone), after.take(new))


def common_rows(
    one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]
) -> tuple[_Indices, _Indices]:
    """Return the rows of two ascending matrices that are equal, as pairs of indices."""
    if one.shape == other.shape and np.array_equal(one, other):
        every = np.arange(len(one))
        return every, every
    if one.shape[1] == 0:
        return np.zeros(1, np.intp), np.zeros(1, np.intp)
    keys, others = _keys(one, other)
    # A row behind the last one has a place that does not exist; clipped, it is compared with
    # another row, and differs.
    places = np.minimum(np.searchsorted(keys, others), len(keys) - 1)
    found = keys[places] == others
    return places[found], np.flatnonzero(found)


def _keys(
    one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return a number for each row of two matrices: equal rows equal numbers, in their order."""
    # Rows are numbered as cells of an array in C order: row (2, 1) of a grid of (4, 3) is number 7.
    # Sizes are Python's integers, because the product of many axes would wrap round in 64 bits;
    # where it does not fit, all rows have to be sorted.
    sizes = np.maximum(one.max(axis=0), other.max(axis=0)).astype(object) + 1
    if np.prod(sizes) < 1 << 63:
        strides = np.array([np.prod(sizes[axis + 1 :]) for axis in range(len(sizes))], np.int64)
        return one.astype(np.int64) @ strides, other.astype(np.int64) @ strides
    _, codes = np.unique(np.concatenate([one, other]), axis=0, return_inverse=True)
    numbers = codes.astype(np.int64)
    return numbers[: len(one)], numbers[len(one) :]


def same_refs(
    one: ChunkRefs,
    mine: _Indices,
    other: ChunkRefs,
    theirs: _Indices,
    *,
    equal_sums: bool = False,
) -> _Mask:
    """Return which pairs of references lead to the same bytes.

    Args:
        one: references.
        mine: a row of them for each pair.
        other: references.
        theirs: a row of them for each pair.
        equal_sums: see `compare_refs`.
    """
    kinds = one.kinds[mine]
    alike = (kinds == other.kinds[theirs]) & (one.lengths[mine] == other.lengths[theirs])
    same = np.zeros(len(mine), bool)
    for kind, compare in (
        (Kind.NATIVE, _same_native),
        (Kind.VIRTUAL, _same_virtual),
        (Kind.INLINE, _same_inline),
    ):
        rows = np.flatnonzero(alike & (kinds == kind))
        if len(rows):
            same[rows] = compare(one, mine[rows], other, theirs[rows])
    same[alike & (kinds == Kind.DELETED)] = True
    if equal_sums and one.sums is not None and other.sums is not None:
        # A code of 0 says that no sum is known: two unknown sums are not equal.
        sums = one.sums[mine]
        native = alike & (kinds == Kind.NATIVE)
        same |= native & (sums != 0) & (sums == other.sums[theirs])
    return same


def _same_native(one: ChunkRefs, mine: _Indices, other: ChunkRefs, theirs: _Indices) -> _Mask:
    same = one.offsets[mine] == other.offsets[theirs]
    ids = one.chunk_ids[one.objects[mine]] == other.chunk_ids[other.objects[theirs]]
    found: _Mask = same & ids.all(axis=1)
    return found


def _same_virtual(one: ChunkRefs, mine: _Indices, other: ChunkRefs, theirs: _Indices) -> _Mask:
    same = one.offsets[mine] == other.offsets[theirs]
    same &= one.modified[mine] == other.modified[theirs]
    if one.locations is other.locations:
        same &= one.objects[mine] == other.objects[theirs]
    else:
        maps = merge_pools([one.locations, other.locations])[0]
        same &= maps[0][one.objects[mine]] == maps[1][other.objects[theirs]]
    etags = _codes(one.etags[mine], other.etags[theirs], one.etag_pool, other.etag_pool)
    found: _Mask = same & (etags[0] == etags[1])
    return found


def _codes(
    mine: npt.NDArray[np.int32],
    theirs: npt.NDArray[np.int32],
    pool: StringPool,
    other_pool: StringPool,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return indices of optional strings in two pools as numbers that can be compared."""
    codes = mine.astype(np.int64), theirs.astype(np.int64)
    if len(pool) and len(other_pool):
        for code, names in zip(codes, merge_pools([pool, other_pool])[0], strict=True):
            given = code != NO_ETAG
            code[given] = names[code[given]]
    elif len(pool):  # the other side has none
        codes[1][:] = NO_ETAG
    return codes


def _same_inline(one: ChunkRefs, mine: _Indices, other: ChunkRefs, theirs: _Indices) -> _Mask:
    """Compare bytes; the lengths of each pair are equal."""
    sizes = one.lengths[mine].astype(np.int64)
    places = np.cumsum(sizes) - sizes
    differs = _gather(one, mine, places, sizes) != _gather(other, theirs, places, sizes)
    # The number of differing bytes before each place. A chunk is the same if the number does not
    # grow from its first byte to its end.
    wrong = np.concatenate([[0], np.cumsum(differs)])
    found: _Mask = wrong[places + sizes] == wrong[places]
    return found


def _gather(
    refs: ChunkRefs,
    rows: _Indices,
    places: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    target = np.empty(int(sizes.sum()), np.uint8)
    source = np.frombuffer(refs.inline, np.uint8)
    copy_pieces(target, places, source, refs.offsets[rows].astype(np.int64), sizes)
    return target
