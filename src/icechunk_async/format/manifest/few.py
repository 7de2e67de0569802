"""Write a manifest of a few references one by one: calls of NumPy would take longer than the work.

Files are byte for byte those of `writing`, which describes how they are laid out.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from icechunk_async.format.flatbuffers.blocks import IDENTIFIER
from icechunk_async.format.flatbuffers.writing import vtable
from icechunk_async.format.ids import ChunkId
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs

__all__ = [
    "MOST",
    "MOST_INLINE",
    "Record",
    "encode_few",
    "first_place",
    "head",
    "record_of",
]

_FEW: Final = 100
"""One by one is quicker up to some 140 references of an array, and by far for a dozen."""
MOST: Final = 1 << 12
MOST_INLINE: Final = 1 << 20
"""References and inline bytes of all arrays, far below what a file may hold."""

_HEAD: Final = Struct("<I4s6H4HI12sII")
"""The root, up to the vector of arrays: vtables and the only table."""
_ROOT: Final = (12, 24, 4, 16, 0, 20)
_ARRAY: Final = (8, 16, 4, 12)
"""Their vtables."""
_ARRAY_VTABLE: Final = 20
"""Where that of arrays is."""
_TABLE: Final = Struct("<I8sI")
"""The table of an array: the distance back to its vtable, the node, that to its references."""
_COUNT: Final = Struct("<I")
_INLINE, _NATIVE = map(int, (Kind.INLINE, Kind.NATIVE))
_ID_BYTES: Final = ChunkId.size_bytes
_WRITTEN: Final = frozenset((_INLINE, _NATIVE))


class Record:
    """How references of one kind are stored: each is a table and its ``index`` vector."""

    def __init__(self, kind: int, form: str, slots: dict[int, int], end: int, rank: int) -> None:
        self.kind = kind
        whole = end + 4 + 4 * rank
        self.size = whole + -whole % 8
        self.vtable = vtable(slots, end)
        self.index = end - 4
        self.pack = Struct(f"<iI{form}I{rank}I{self.size - whole}x").pack

    def first(self, at: int) -> int:
        """Return where the first of them goes if their vtable is at this place."""
        end = at + len(self.vtable)
        return end + -end % 8


@lru_cache(maxsize=64)
def record_of(kind: int, rank: int, *, has_offset: bool) -> Record:
    """Return how inline or native references are stored; the latter with an offset or without."""
    if kind == _INLINE:
        return Record(kind, "I", {0: 4, 1: 8}, 12, rank)
    if has_offset:
        return Record(kind, "QQ12s", {0: 4, 2: 8, 3: 16, 4: 24}, 36, rank)
    return Record(kind, "Q12s", {0: 4, 3: 8, 4: 16}, 28, rank)


def encode_few(identifier: ManifestId, arrays: Mapping[NodeId, ChunkRefs]) -> memoryview | None:
    """Return the FlatBuffer of a manifest, as `writing.encode_manifest` does.

    None if there are too many references or inline bytes, or virtual references.

    Cost: one to two microseconds for each reference.
    """
    nodes = sorted(arrays)
    found = [arrays[node] for node in nodes]
    if sum(map(len, found)) > min(MOST, _FEW * len(nodes)):
        return None
    if sum(len(refs.inline) for refs in found) > MOST_INLINE:
        return None
    kinds: list[list[int]] = [refs.kinds.tolist() for refs in found]
    if not all(map(_WRITTEN.issuperset, kinds)):
        return None
    # `struct` would cut a longer id off without a word.
    if any(refs.chunk_ids.shape[1] != _ID_BYTES for refs in found):
        return None  # of another layout, which the other way refuses
    at = first_place(len(nodes))
    places: list[int] = []
    blocks: list[bytes | memoryview] = []
    for refs, theirs in zip(found, kinds, strict=True):
        places.append(at)
        at = _append(blocks, refs, theirs, at)
    return memoryview(b"".join((head(identifier, nodes, places), *blocks)))


def first_place(num_arrays: int) -> int:
    """Return where the references of the first array begin, right after the `head`."""
    return _HEAD.size + 4 + (4 + _TABLE.size) * num_arrays


def head(identifier: ManifestId, nodes: Sequence[NodeId], places: Sequence[int]) -> bytes:
    """Return the bytes before the references, which begin at a place for each array."""
    entry = _HEAD.size + 4
    first = entry + 4 * len(nodes)
    stop = first_place(len(nodes))
    # The bytes that `encode_manifest` makes: vtables of the root and of arrays, the root, the
    # vector.
    # Distances from where they stand: to the root; from it back to its vtable, to the arrays and to
    # no dictionary.
    root = _HEAD.pack(28, IDENTIFIER, *_ROOT, *_ARRAY, 20, identifier, 8, 0)
    step = _TABLE.size - 4  # tables are longer than the entries that refer to them
    entries = range(first - entry, first - entry + step * len(nodes), step)
    vector = Struct(f"<{len(nodes) + 1}I").pack(len(nodes), *entries)
    tables = [
        _TABLE.pack(table - _ARRAY_VTABLE, node, place - table - 12)
        for table, node, place in zip(range(first, stop, _TABLE.size), nodes, places, strict=True)
    ]
    return b"".join((root, vector, *tables))


def _append(parts: list[bytes | memoryview], refs: ChunkRefs, kinds: list[int], start: int) -> int:
    """Append the references of an array, which begin at a place; return where they end."""
    count, vector, rank = len(refs), len(parts), refs.rank
    coords, offsets, lengths = (it.tolist() for it in (refs.coords, refs.offsets, refs.lengths))
    inline = [row for row, kind in enumerate(kinds) if kind == _INLINE]
    native = [row for row, kind in enumerate(kinds) if kind == _NATIVE]
    has_offset = any(offsets[row] for row in native)
    # In place of the vector, whose entries are known at the end.
    parts.append(b"")
    at = start + 4 + 4 * count
    groups: list[tuple[int, list[int], Record, int]] = []
    # Places first, since records of inline references refer to bytes behind all records. The order
    # is that of the numbers of kinds, in which `encode_manifest` groups them.
    for kind, rows in ((_INLINE, inline), (_NATIVE, native)):
        if rows:
            record = record_of(kind, rank, has_offset=has_offset)
            groups.append((kind, rows, record, at))
            at = record.first(at) + record.size * len(rows)
    entries = [0] * count
    fields: Iterator[tuple[int | bytes, ...]]
    for kind, rows, record, vtable_at in groups:
        table = record.first(vtable_at)
        parts += (record.vtable, bytes(table - vtable_at - len(record.vtable)))
        if kind == _INLINE:
            fields = _inline_fields(at - table - 8, record.size, [lengths[row] for row in rows])
        else:
            fields = _native_fields(refs, rows, offsets if has_offset else None, lengths)
        for row, values in zip(rows, fields, strict=True):
            parts.append(record.pack(table - vtable_at, record.index, *values, rank, *coords[row]))
            entries[row] = table - start - 4 - 4 * row
            table += record.size
    for row in inline:
        first, size = offsets[row], lengths[row]
        parts += (_COUNT.pack(size), refs.inline[first : first + size], bytes(-size % 4))
        at += 4 + size + -size % 4
    parts[vector] = Struct(f"<{count + 1}I").pack(count, *entries)
    return at


def _inline_fields(distance: int, step: int, lengths: list[int]) -> Iterator[tuple[int, ...]]:
    """Iterate over the distances from fields, one a record, to the bytes that they refer to."""
    for size in lengths:
        yield (distance,)
        # The bytes move on by this much, the field that refers to them by a record.
        distance += 4 + size + -size % 4 - step


def _native_fields(
    refs: ChunkRefs, rows: list[int], offsets: list[int] | None, lengths: list[int]
) -> Iterator[tuple[int | bytes, ...]]:
    ids = refs.chunk_ids[refs.objects[rows]].tobytes()
    for place, row in enumerate(rows):
        chunk_id = ids[_ID_BYTES * place : _ID_BYTES * (place + 1)]
        yield (
            (lengths[row], chunk_id) if offsets is None else (offsets[row], lengths[row], chunk_id)
        )
