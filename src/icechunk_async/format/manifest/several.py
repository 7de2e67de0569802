"""References of several small arrays as common columns, so that work is done for all at once.

A call of NumPy takes as long as the work on a dozen references. For a commit that touches a
thousand small arrays each call is made once, and not once for each array.
"""

from __future__ import annotations

from itertools import chain, compress
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.format.flatbuffers.writing import copy_pieces
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk
from icechunk_async.format.manifest.few import (
    MOST,
    MOST_INLINE,
    first_place,
    head,
    record_of,
)
from icechunk_async.format.manifest.locations import EMPTY_POOL
from icechunk_async.format.manifest.refs import NO_ETAG, ChunkRefs, constant
from icechunk_async.format.manifest.row_index import ascends

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Sized

    import numpy.typing as npt

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.few import Record

    type Refs = Mapping[Coordinates, ChunkRef | None]

__all__ = ["Several", "encode_several", "merge_several"]

_VALUES: Final = methodcaller("values")
_KINDS: Final[dict[type, Kind]] = {
    InlineChunk: Kind.INLINE,
    NativeChunk: Kind.NATIVE,
    type(None): Kind.DELETED,
}


@dataclass(frozen=True, slots=True)
class Several:
    """Inline and native references, and deletions, of arrays that all have the same rank.

    Array after array, those of each in ascending order of coordinates.
    """

    counts: npt.NDArray[np.int64]
    """The references of each array."""
    coords: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint64]
    """Of native ones, the first byte in the object."""
    lengths: npt.NDArray[np.uint64]
    chunk_ids: npt.NDArray[np.uint8]
    """A row for each native reference, in their order."""
    inline: memoryview
    """The bytes of the inline ones, in their order."""
    sums: npt.NDArray[np.uint64] | None = None
    """As those of ``ChunkRefs``."""

    @classmethod
    def from_mappings(cls, rank: int, arrays: Sequence[Refs]) -> Self | None:
        """Make columns of single references; None is a deleted chunk.

        None if some are virtual, or have ids of different lengths.

        Cost: a third of a microsecond for each reference.
        """
        refs = list(chain.from_iterable(map(_VALUES, arrays)))
        # Virtual references have pools of strings, which would have to be merged array by array.
        if not set(map(type, refs)) <= _KINDS.keys():
            return None
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        # Two levels: mappings give their keys, keys their numbers. Of rank 0 there are no numbers,
        # and `reshape` makes rows of no columns.
        numbers = chain.from_iterable(chain.from_iterable(arrays))
        coords = np.fromiter(numbers, np.uint32).reshape(len(refs), rank)
        # Sessions keep changes in the order in which they were made.
        order = _order(counts, coords)
        if order is not None:
            coords, places = coords[order], order.tolist()
            refs = [refs[place] for place in places]
        kinds = np.fromiter(map(_KINDS.__getitem__, map(type, refs)), np.uint8, len(refs))
        inline, native = kinds == Kind.INLINE, kinds == Kind.NATIVE
        data = list(map(attrgetter("data"), compress(refs, inline.tolist())))
        stored: list[Any] = list(compress(refs, native.tolist()))
        # Layouts before version 1 have ids of 16 bytes; one commit has ids of one length.
        width = len(stored[0].chunk_id) if stored else ChunkId.size_bytes
        ids = np.frombuffer(b"".join(map(attrgetter("chunk_id"), stored)), np.uint8)
        if len(ids) != width * len(stored):
            return None  # the other way says what is wrong
        offsets, lengths = np.zeros((2, len(refs)), np.uint64)
        lengths[inline] = np.fromiter(map(len, data), np.uint64, len(data))
        for column, name in ((offsets, "offset"), (lengths, "length")):
            column[native] = np.fromiter(map(attrgetter(name), stored), np.uint64, len(stored))
        codes = np.fromiter(map(attrgetter("sum"), stored), np.uint64, len(stored))
        sums = None
        if codes.any():
            sums = np.zeros(len(refs), np.uint64)
            sums[native] = codes
        chunk_ids = ids.reshape(len(stored), width)
        joined = memoryview(b"".join(data))
        return cls(counts, coords, kinds, offsets, lengths, chunk_ids, joined, sums)

    @classmethod
    def of(cls, arrays: Sequence[ChunkRefs]) -> Self | None:
        """Join the references of arrays; None if some are virtual, or ranks or ids differ."""
        counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
        coords = [it.coords for it in arrays]
        kinds = np.concatenate([it.kinds for it in arrays])
        if len({it.shape[1] for it in coords}) != 1 or (kinds == Kind.VIRTUAL).any():
            return None
        # Pools are shared by arrays that were decoded together: joined as often as they occur, they
        # would grow with the square of the arrays.
        ids, id_bases = _pooled([it.chunk_ids for it in arrays])
        width = {it.shape[1] for it in ids}
        if len(width) > 1:
            return None
        native = kinds == Kind.NATIVE
        objects = np.concatenate([it.objects for it in arrays])
        if native.any():
            # A row of `chunk_ids` for each native reference, in their order: nothing has to say
            # which it is.
            objects = (objects + np.repeat(id_bases, counts))[native]
            chunk_ids = np.concatenate(ids)[objects]
        else:
            chunk_ids = np.empty((0, width.pop() if width else ChunkId.size_bytes), np.uint8)
        offsets = np.concatenate([it.offsets for it in arrays])
        lengths = np.concatenate([it.lengths for it in arrays])
        inline = kinds == Kind.INLINE
        data = memoryview(b"")
        if inline.any():
            pools, bases = _pooled([it.inline for it in arrays])
            # Of inline references `offsets` are places in a pool of bytes. From here on their bytes
            # lie in order, and offsets are those of native ones alone.
            starts = (offsets.astype(np.int64) + np.repeat(bases, counts))[inline]
            data = _picked(b"".join(pools), starts, lengths[inline].astype(np.int64))
            offsets[inline] = 0
        sums = None
        if any(it.sums is not None for it in arrays):
            sums = np.concatenate(
                [np.zeros(len(it), np.uint64) if it.sums is None else it.sums for it in arrays]
            )
        return cls(counts, np.concatenate(coords), kinds, offsets, lengths, chunk_ids, data, sums)

    def taken(self, rows: npt.NDArray[np.intp], counts: npt.NDArray[np.int64]) -> Several:
        """Return some rows, in another order, of which each array has ``counts``."""
        kinds, lengths = self.kinds[rows], self.lengths[rows]
        native, inline = kinds == Kind.NATIVE, kinds == Kind.INLINE
        # The row of `chunk_ids` that each native reference has; of others the number means nothing.
        objects = np.cumsum(self.kinds == Kind.NATIVE) - 1
        sizes = np.where(self.kinds == Kind.INLINE, self.lengths, np.uint64(0)).astype(np.int64)
        starts = (np.cumsum(sizes) - sizes)[rows[inline]]
        return Several(
            counts,
            self.coords[rows],
            kinds,
            self.offsets[rows],
            lengths,
            self.chunk_ids[objects[rows[native]]],
            _picked(self.inline, starts, sizes[rows[inline]]),
            None if self.sums is None else self.sums[rows],
        )

    def inline_bytes(self) -> list[int]:
        """Return the inline bytes of each array."""
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        inline = self.kinds == Kind.INLINE
        sums = np.bincount(owners[inline], self.lengths[inline], len(self.counts))
        found: list[int] = sums.astype(np.int64).tolist()
        return found

    def divided(self) -> list[ChunkRefs]:
        """Return the references of each array, which share no pool with those of the others.

        Cost: four microseconds for each array, which are views of these columns.
        """
        total = len(self.kinds)
        ends = np.cumsum(self.counts)
        firsts = ends - self.counts
        inline, native = self.kinds == Kind.INLINE, self.kinds == Kind.NATIVE
        # `ChunkRefs` counts ids and inline bytes from zero within each array. Two native references
        # of the first array and one of the second: `ids` is 0, 2, 3 and `numbers` 0, 1, 0.
        ids, numbers = _running(native, firsts, self.counts)
        sizes = np.where(inline, self.lengths, np.uint64(0))
        places, starts = _running(sizes, firsts, self.counts)
        objects = np.where(native, numbers, 0).astype(np.uint32)
        offsets = np.where(inline, starts.astype(np.uint64), self.offsets)
        etags, modified = constant(NO_ETAG, total, "i4"), constant(0, total, "u4")
        bounds = zip(firsts.tolist(), ends.tolist(), strict=True)
        id_places, byte_places = ids.tolist(), places.tolist()
        found: list[ChunkRefs] = []
        for array, (start, end) in enumerate(bounds):
            sums = None if self.sums is None else self.sums[start:end]
            found.append(
                ChunkRefs(
                    self.coords[start:end],
                    self.kinds[start:end],
                    objects[start:end],
                    offsets[start:end],
                    self.lengths[start:end],
                    etags[start:end],
                    modified[start:end],
                    self.chunk_ids[id_places[array] : id_places[array + 1]],
                    EMPTY_POOL,
                    EMPTY_POOL,
                    self.inline[byte_places[array] : byte_places[array + 1]],
                    sums if sums is not None and sums.any() else None,
                )
            )
        return found


def _order(
    counts: npt.NDArray[np.int64], coords: npt.NDArray[np.uint32]
) -> npt.NDArray[np.intp] | None:
    """Return the order in which the coordinates of each array ascend; None if they do."""
    before = ascends(coords)
    ends = np.cumsum(counts)
    # Ends of empty arrays repeat the one before, or are 0 or the last, where there is no next row.
    before[ends[(ends > 0) & (ends < len(coords))] - 1] = True  # the next row is of another array
    if before.all():
        return None
    arrays = np.repeat(np.arange(len(counts)), counts)
    return np.lexsort((*coords.T[::-1], arrays))


def _running(
    values: npt.NDArray[Any], firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Add values up.

    Returns:
        The sum before each array and after the last one, and before each row within its array.
    """
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    bases = np.append(sums[firsts], sums[-1])
    return bases, sums[:-1] - np.repeat(bases[:-1], counts)


def _pooled[T: Sized](pools: Sequence[T]) -> tuple[list[T], npt.NDArray[np.int64]]:
    """Return those pools that are not empty, each once, and where each begins in all of them."""
    found: list[T] = []
    places: dict[int, int] = {}
    end = 0
    for pool in pools:
        if id(pool) not in places:
            # By identity: equal contents need not be found, and all pools are alive while this
            # runs.
            places[id(pool)] = end
            if len(pool):
                found.append(pool)
                end += len(pool)
    return found, np.fromiter((places[id(pool)] for pool in pools), np.int64, len(pools))


def _picked(
    data: bytes | memoryview, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> memoryview:
    """Return pieces of some bytes, one after the other."""
    places = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    # Mostly, since commits lay bytes out in order. Nothing is copied then.
    if total == len(data) and (places == starts).all():  # all of them, in order
        return memoryview(data)
    picked = np.empty(total, np.uint8)
    copy_pieces(picked, places, np.frombuffer(data, np.uint8), starts, sizes)
    return picked.data


def merge_several(
    old: Sequence[ChunkRefs], changed: Sequence[ChunkRefs], grids: Sequence[Coordinates]
) -> list[tuple[ChunkRefs, int]] | None:
    """Return the references of arrays as changes leave them, each with its inline bytes.

    None if some are virtual; `merging.merge` takes any.

    Args:
        old: the references of each array; may be none.
        changed: new references, and deletions.
        grids: what lies outside of an array's grid is left out.

    Cost: some twenty microseconds for each array that has references already, and a third of that
    for the others.
    """
    # Old references of all arrays, then new ones. Sorting by array and coordinates, which is
    # stable, puts each new one right behind the one that it replaces.
    several = Several.of([*old, *changed])
    if several is None:
        return None
    count = len(changed)
    owners = np.repeat(np.tile(np.arange(count), 2), several.counts)
    keep = several.kinds != Kind.DELETED
    shape = np.array(grids, np.int64).reshape(count, several.coords.shape[1])
    for axis in range(shape.shape[1]):  # by far faster than all axes at once
        keep &= several.coords[:, axis] < shape[:, axis][owners]
    before = int(several.counts[:count].sum())
    # New arrays: nothing to merge with, and the columns of each exist already.
    if not before and keep.all():
        return list(zip(changed, several.inline_bytes()[count:], strict=True))
    rows = np.lexsort((*several.coords.T[::-1], owners))  # of equal ones the new one comes last
    coords, ordered = several.coords[rows], owners[rows]
    last = np.ones(len(rows), bool)
    last[:-1] = (ordered[1:] != ordered[:-1]) | (coords[1:] != coords[:-1]).any(axis=1)
    # In this order: a deletion has to win over the old reference first, and is then left out
    # itself.
    rows = rows[last & keep[rows]]
    found = several.taken(rows, np.bincount(owners[rows], minlength=count))
    return list(zip(found.divided(), found.inline_bytes(), strict=True))


def encode_several(identifier: ManifestId, arrays: Mapping[NodeId, ChunkRefs]) -> memoryview | None:
    """Return the FlatBuffer of a manifest, as `writing.encode_manifest` does, byte for byte.

    None if there are too many references or inline bytes, virtual references, or arrays without any
    or of different ranks.

    Cost: some ten microseconds for each array.
    """
    nodes = sorted(arrays)
    refs = [arrays[node] for node in nodes]
    if not all(map(len, refs)) or sum(map(len, refs)) > MOST:
        return None
    # Arrays that were decoded together share the payload as their inline bytes, which counts once.
    if sum(len(it) for it in {id(it.inline): it.inline for it in refs}.values()) > MOST_INLINE:
        return None
    several = Several.of(refs)
    if several is None or several.chunk_ids.shape[1] != ChunkId.size_bytes:
        return None
    if (several.kinds == Kind.DELETED).any():
        return None
    file = _File(several)
    file.fill_head(head(identifier, nodes, file.starts.tolist()))
    for group in file.groups:
        file.fill_group(group)
    file.fill_inline()
    return memoryview(file.data)


class _Group:
    """Those references of all arrays that are stored as one kind of record."""

    def __init__(self, record: Record, rows: npt.NDArray[np.intp], file: _File) -> None:
        self.record = record
        self.rows = rows
        self.owners = file.owners[rows]
        self.numbers = np.bincount(self.owners, minlength=len(file.several.counts))
        """How many of them each array has."""
        self.vtables, self.firsts = np.zeros((2, len(self.numbers)), np.int64)
        """Where the vtable and the first record of each array are."""

    def place(self, array: int, count: int, at: int) -> int:
        """Place the records of an array; return where they end."""
        if not count:
            return at
        first = self.record.first(at)
        self.vtables[array], self.firsts[array] = at, first
        return first + self.record.size * count

    @property
    def tables(self) -> npt.NDArray[np.int64]:
        """Where the records are."""
        before = np.cumsum(self.numbers) - self.numbers
        numbers = np.arange(len(self.rows)) - before[self.owners]
        tables: npt.NDArray[np.int64] = self.firsts[self.owners] + self.record.size * numbers
        return tables


class _File:
    """The buffer of a manifest, laid out and then filled in."""

    def __init__(self, several: Several) -> None:
        self.several = several
        counts = several.counts
        self.owners = np.repeat(np.arange(len(counts)), counts)
        """The array of each reference."""
        native = several.kinds == Kind.NATIVE
        # By array, as `encode_manifest` decides: one packed chunk gives all native references of
        # its array an offset, and files are equal byte for byte.
        has_offset = np.bincount(self.owners, several.offsets > 0, len(counts)) > 0
        has_offset = has_offset[self.owners]
        rank = several.coords.shape[1]
        kinds = (
            (Kind.INLINE, False, ~native),
            (Kind.NATIVE, False, native & ~has_offset),
            (Kind.NATIVE, True, native & has_offset),
        )
        self.groups = [
            _Group(record_of(kind, rank, has_offset=shifted), np.flatnonzero(rows), self)
            for kind, shifted, rows in kinds
            if rows.any()
        ]
        sizes = np.where(native, 0, several.lengths.astype(np.int64))
        padded = np.where(native, 0, 4 + sizes + -sizes % 4)
        firsts = np.cumsum(counts) - counts
        bases, places = _running(padded, firsts, counts)
        self.starts, ends = np.zeros((2, len(counts)), np.int64)
        at = first_place(len(counts))
        numbers = zip(*(it.numbers.tolist() for it in self.groups), strict=True)
        rows = zip(counts.tolist(), numbers, np.diff(bases).tolist(), strict=True)
        # Array after array: the vector, then for each kind its vtable and records, then inline
        # bytes. A loop, since each place depends on all before; a few steps of the interpreter for
        # each array.
        for array, (count, found, inline_bytes) in enumerate(rows):
            self.starts[array] = at
            at += 4 + 4 * count
            for group, number in zip(self.groups, found, strict=True):
                at = group.place(array, number, at)
            ends[array] = at
            at += inline_bytes
        self.inline = ends[self.owners] + places
        """Where the bytes of inline references are."""
        self.entries = self.starts[self.owners] + 4 * (
            np.arange(len(native)) - firsts[self.owners] + 1
        )
        """Where references are referred to."""
        self.data = np.zeros(at, np.uint8)
        self._words = self.data.view("<u4")

    def fill_head(self, raw: bytes) -> None:
        """Write the root and the tables of arrays, and how many references each has."""
        self.data[: len(raw)] = np.frombuffer(raw, np.uint8)
        self._words[self.starts >> 2] = self.several.counts

    def fill_group(self, group: _Group) -> None:
        """Write the records of a group, their vtables, and the entries that refer to them."""
        record, rows, several = group.record, group.rows, self.several
        tables = group.tables
        words = np.zeros((len(rows), record.size >> 2), "<u4")
        words[:, 0] = tables - group.vtables[group.owners]
        words[:, 1] = record.index
        # Records in words of 4 bytes, as `record_of` lays them out: vtable, index, [offset, 2
        # words], length, 2 words, id, 3 words, rank, coordinates. So the id ends where the rank
        # begins, and only records with an offset have more than 7 words before it.
        rank_at = record.index + 4 >> 2
        if record.kind == Kind.INLINE:
            words[:, 2] = self.inline[rows] - (tables + 8)
        else:
            numbers = [several.lengths, *([several.offsets] if rank_at > 7 else [])]
            for column, at in zip(numbers, (rank_at - 5, rank_at - 7), strict=False):
                words[:, at : at + 2] = column[rows].view("<u4").reshape(-1, 2)
            # An id is 12 bytes, three words: it moves like numbers.
            natives = np.cumsum(several.kinds == Kind.NATIVE)[rows] - 1
            words[:, rank_at - 3 : rank_at] = several.chunk_ids[natives].view("<u4")
        rank = several.coords.shape[1]
        words[:, rank_at] = rank
        words[:, rank_at + 1 : rank_at + 1 + rank] = several.coords[rows]
        self._put(tables, words)
        # Filled up to words with zeros, which are part of the padding before the first record.
        vtable = record.vtable + bytes(-len(record.vtable) % 4)
        there = np.frombuffer(vtable, "<u4")[None, :]
        self._put(group.vtables[group.numbers > 0], there)
        entries = self.entries[rows]
        self._words[entries >> 2] = tables - entries

    def fill_inline(self) -> None:
        """Write the bytes of inline references."""
        several = self.several
        inline = several.kinds == Kind.INLINE
        if inline.any():
            sizes = several.lengths[inline].astype(np.int64)
            places = self.inline[inline]
            self._words[places >> 2] = sizes
            source = np.frombuffer(several.inline, np.uint8)
            copy_pieces(self.data, places + 4, source, np.cumsum(sizes) - sizes, sizes)

    def _put(self, places: npt.NDArray[np.int64], words: npt.NDArray[np.uint32]) -> None:
        """Write a row of words to each place."""
        self._words[(places >> 2)[:, None] + np.arange(words.shape[1])] = words
