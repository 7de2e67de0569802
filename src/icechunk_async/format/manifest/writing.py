"""Encoding manifests: references of one shape become one block of equal records.

A record is a ChunkRef table followed by its ``index`` vector. Locations, ETags and inline bytes
lie behind the records; a string that many references share is stored once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.envelope import MAX_PAYLOAD_BYTES
from icechunk_async.format.flatbuffers.writing import BLOCK, Layout, vtable
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import merge_pools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.writing import Output
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.locations import StringPool
    from icechunk_async.format.manifest.refs import ChunkRefs

    type Positions = npt.NDArray[np.int64]

__all__ = ["LocationDictionary", "encode_manifest"]

_MAX_PACKED_BYTES: Final = 1024
"""The official reader refuses longer compressed locations, so they are stored plain."""
_MIN_SAMPLE_BYTES: Final = 8

# Fields of a record: name -> (slot, NumPy format, bytes). Order keeps 8-byte words aligned.
_FIELDS: Final[dict[str, tuple[int, Any, int]]] = {
    "offset": (2, "<u8", 8),
    "length": (3, "<u8", 8),
    "chunk_id": (4, ("u1", (12,)), 12),
    "location": (5, "<u4", 4),
    "packed": (8, "<u4", 4),
    "etag": (6, "<u4", 4),
    "modified": (7, "<u4", 4),
    "inline": (1, "<u4", 4),
}


@dataclass(frozen=True, slots=True)
class LocationDictionary:
    """How to compress locations, each by itself, with a dictionary trained on a sample."""

    min_refs: int = 1000
    max_samples: int = 100
    max_bytes: int = 2048
    level: int = 3


def encode_manifest(
    identifier: ManifestId,
    arrays: Mapping[NodeId, ChunkRefs],
    *,
    location_dictionary: LocationDictionary | None = None,
) -> memoryview:
    """Return the FlatBuffer of a manifest.

    Args:
        identifier: the manifest's id.
        arrays: references of each array, sorted by coordinates, without deletions.
        location_dictionary: compress locations where enough are virtual (spec 2 only). Without
            it locations are plain and shared, which makes files of about the same size that
            decode faster.

    Raises:
        InvalidInputError: more than a manifest can hold; split it.

    Cost: no Python object per reference.
    """
    # The order is a contract of the format (spec, `arrays` by node id): readers bisect it.
    nodes = sorted(arrays)
    refs = [arrays[node].narrow() for node in nodes]
    locations = _StringTable([it.locations for it in refs])
    etags = _StringTable([it.etag_pool for it in refs])
    dictionary = _compress(locations, refs, location_dictionary) if location_dictionary else None
    _check_apparent_size(refs, locations)

    layout = Layout()
    # Slot 3 is the algorithm, whose default is zstd. Without a dictionary it is written as 0, as
    # the official writer does; files of its version 1, which have neither, mean the same.
    root_slots = {0: 4, 1: 16, (3 if dictionary is None else 2): 20}
    root_vtable = layout.place(4 + 2 * (max(root_slots) + 1), 2)
    array_vtable = layout.place(8, 2)
    root = layout.place(24, 4)
    vector = layout.place_vector(len(nodes), 4, 4)
    tables = np.array([layout.place(16, 4) for _ in nodes], np.int64)
    blocks = [_ArrayBlock(layout, it, locations, etags, row) for row, it in enumerate(refs)]
    dictionary_at = 0 if dictionary is None else layout.place_vector(len(dictionary), 1, 1)
    locations.place(layout)
    etags.place(layout)

    out = layout.output()
    out.put(root_vtable, vtable(root_slots, 24))
    out.put(array_vtable, vtable({0: 4, 1: 12}, 16))
    out.table(root, root_vtable)
    out.put(root + 4, identifier)
    out.offset(root + 16, vector)
    if dictionary is not None:  # the algorithm, zstd, is the default and so absent
        out.offset(root + 20, dictionary_at)
        out.word(dictionary_at, len(dictionary))
        out.put(dictionary_at + 4, dictionary)
    out.offset_vector(vector, tables)
    for node, table, block in zip(nodes, tables.tolist(), blocks, strict=True):
        out.table(table, array_vtable)
        out.put(table + 4, node)
        out.offset(table + 12, block.vector)
        block.fill(out)
    locations.fill(out)
    etags.fill(out)
    return out.finish(root)


def _check_apparent_size(refs: Sequence[ChunkRefs], locations: _StringTable) -> None:
    """Raise if readers would count too much: each use of a shared string counts for them."""
    sizes = np.array([len(string) for string in locations.raw], np.int64)
    if sum(map(len, refs)) * (80 + int(sizes.max(initial=0))) <= MAX_PAYLOAD_BYTES:
        return  # however often each is referred to
    total = 0
    for row, it in enumerate(refs):
        codes = locations.codes[row]
        times = np.bincount(it.objects[it.kinds == Kind.VIRTUAL], minlength=len(codes))
        total += int((sizes[codes] * times).sum()) + 80 * len(it)
    if total > MAX_PAYLOAD_BYTES:
        raise InvalidInputError(
            f"A manifest of {sum(map(len, refs))} references would take readers {total} bytes "
            "to check, and the format allows 2 GiB. Configure manifest splitting."
        )


class _StringTable:
    """Distinct strings of several arrays, each stored once."""

    def __init__(self, pools: list[StringPool]) -> None:
        self.codes, strings = merge_pools(pools)
        """For each array: how indices of its pool map to this table."""
        self.raw = [string.encode() for string in strings.strings]
        self.packed = np.zeros(len(self.raw), bool)
        self.positions: Positions = np.empty(0, np.int64)

    def place(self, layout: Layout) -> None:
        """Reserve room; each string has a count and a terminating NUL."""
        # FlatBuffers end strings with a NUL. Vectors of bytes need none, but compressed locations
        # share the code.
        sizes = np.array([len(raw) + 1 for raw in self.raw], np.int64)
        self.positions = _place_bytes(layout, sizes)

    def fill(self, out: Output) -> None:
        """Write the strings."""
        sizes = np.array([len(raw) for raw in self.raw], np.int64)
        joined = np.frombuffer(b"".join(self.raw), np.uint8)
        out.byte_vectors(self.positions, joined, np.cumsum(sizes) - sizes, sizes)


def _place_bytes(layout: Layout, sizes: Positions) -> Positions:
    """Reserve a vector of bytes for each size; return the positions of their counts."""
    padded = 4 + sizes + (-sizes) % 4
    positions: Positions = layout.place(int(padded.sum()), 4) + np.cumsum(padded) - padded
    return positions


class _ArrayBlock:
    """The references of one array: a vector of offsets, and a block for each record shape."""

    def __init__(
        self,
        layout: Layout,
        refs: ChunkRefs,
        locations: _StringTable,
        etags: _StringTable,
        row: int,
    ) -> None:
        self.refs = refs
        self.strings = {"location": locations, "packed": locations, "etag": etags}
        self.location_codes = locations.codes[row]
        self.etag_codes = etags.codes[row]
        self.vector = layout.place_vector(len(refs), 4, 4)
        self.groups: list[tuple[_Shape, int, int, Positions | None]] = []
        """Of each shape: its vtable, its first record, and its rows; None for all of them."""
        for fields, rows in self._group_rows():
            shape = _Shape(refs.rank, fields)
            vtable_at = layout.place(len(shape.vtable), 2)
            count = len(refs) if rows is None else len(rows)
            start = layout.place(count * shape.dtype.itemsize, 8)
            self.groups.append((shape, vtable_at, start, rows))
        self.inline_rows = np.flatnonzero(refs.kinds == Kind.INLINE)
        self.inline = _place_bytes(layout, refs.lengths[self.inline_rows].astype(np.int64))

    def _group_rows(self) -> list[tuple[tuple[str, ...], Positions | None]]:
        """Return the record shapes in use, as names of fields, and the rows of each."""
        refs = self.refs
        # One number for each shape of record: the kind, then a bit each for a compressed location,
        # an ETag and a time.
        key = refs.kinds << 3
        virtual = refs.kinds == Kind.VIRTUAL
        if virtual.any():
            chosen = slice(None) if virtual.all() else virtual
            packed = self.strings["location"].packed
            traits = (refs.etags[chosen] >= 0).astype(np.uint8) << 1
            traits |= refs.modified[chosen] > 0
            if packed.any():
                traits |= packed[self.location_codes[refs.objects[chosen]]].astype(np.uint8) << 2
            key[chosen] |= traits
        alike = len(key) > 0 and bool((key == key[0]).all())
        groups: list[tuple[tuple[str, ...], Positions | None]] = []
        for value in key[:1].tolist() if alike else np.unique(key).tolist():
            rows = None if alike else np.flatnonzero(key == value)
            match Kind(value >> 3):
                case Kind.INLINE:
                    fields: tuple[str, ...] = ("inline",)
                case Kind.NATIVE:
                    offsets = refs.offsets if rows is None else refs.offsets[rows]
                    # Zeros are left out, as by all writers; only packed chunks have an offset.
                    fields = (*(("offset",) if offsets.any() else ()), "length", "chunk_id")
                case Kind.VIRTUAL:
                    fields = ("offset", "length", "packed" if value & 4 else "location")
                    fields += ("etag",) * (value >> 1 & 1) + ("modified",) * (value & 1)
                case Kind.DELETED:
                    raise AssertionError("a manifest holds no deletions")
            groups.append((fields, rows))
        return groups

    def fill(self, out: Output) -> None:
        """Write the offsets, vtables, records and inline bytes; records while in the cache."""
        entries = out.offsets(self.vector, len(self.refs))
        for shape, vtable_at, start, rows in self.groups:
            out.put(vtable_at, shape.vtable)
            count, size = len(self.refs) if rows is None else len(rows), shape.dtype.itemsize
            records = out.records(start, count, shape.dtype)
            for first in range(0, count, BLOCK):
                block = slice(first, min(first + BLOCK, count))
                tables = np.arange(start + size * block.start, start + size * block.stop, size)
                theirs = block if rows is None else rows[block]
                entries.put(theirs, tables)
                self._fill_block(records[block], shape, tables, vtable_at, theirs)
        self._fill_inline(out)

    def _fill_block(
        self,
        record: npt.NDArray[Any],
        shape: _Shape,
        tables: Positions,
        vtable_at: int,
        rows: Positions | slice,
    ) -> None:
        record["vtable"] = tables - vtable_at
        record["index"] = shape.size - 4
        record["rank"] = self.refs.rank
        record["coords"] = self.refs.coords[rows]
        for name, place in shape.places.items():
            record[name] = self._column(name, rows, tables + place)

    def _column(self, name: str, rows: Positions | slice, fields_at: Positions) -> npt.NDArray[Any]:
        """Return the values of a field; for offsets, the distances from where they stand."""
        refs = self.refs
        match name:
            case "offset":
                return refs.offsets[rows]
            case "length":
                return refs.lengths[rows]
            case "modified":
                return refs.modified[rows]
            case "chunk_id":
                return refs.chunk_ids[refs.objects[rows]]
            case "inline":
                ours = rows if isinstance(rows, slice) else np.searchsorted(self.inline_rows, rows)
                return self.inline[ours] - fields_at
            case "etag":
                codes = self.etag_codes[refs.etags[rows]]
            case _:
                codes = self.location_codes[refs.objects[rows]]
        return self.strings[name].positions[codes] - fields_at

    def _fill_inline(self, out: Output) -> None:
        starts = self.refs.offsets[self.inline_rows].astype(np.int64)
        sizes = self.refs.lengths[self.inline_rows].astype(np.int64)
        out.byte_vectors(self.inline, np.frombuffer(self.refs.inline, np.uint8), starts, sizes)


class _Shape:
    """The layout of one shape of record: a table, then its ``index`` vector."""

    def __init__(self, rank: int, fields: Sequence[str]) -> None:
        names, formats, offsets = ["vtable", "index"], ["<i4", "<u4"], [0, 4]
        slots = {0: 4}
        self.places: dict[str, int] = {}
        end = 8
        for name in fields:
            slot, form, size = _FIELDS[name]
            self.places[name] = slots[slot] = end
            names.append(name)
            formats.append(form)
            offsets.append(end)
            end += size
        self.size = end
        self.vtable = vtable(slots, end)
        whole = end + 4 + 4 * rank
        self.dtype = np.dtype(
            {
                "names": [*names, "rank", "coords"],
                "formats": [*formats, "<u4", ("<u4", (rank,))],
                "offsets": [*offsets, end, end + 4],
                # Records follow each other, and numbers of 8 bytes in the next one must be aligned,
                # too.
                "itemsize": whole + -whole % 8,
            }
        )


def _compress(
    locations: _StringTable, refs: Sequence[ChunkRefs], settings: LocationDictionary
) -> bytes | None:
    """Compress the locations in place; return the dictionary, or None if it would not pay."""
    virtual = sum(int(np.count_nonzero(it.kinds == Kind.VIRTUAL)) for it in refs)
    if virtual < settings.min_refs or not locations.raw:
        return None
    # Evenly spaced, where the official writer takes them at random: equal references, equal files.
    step = max(1, len(locations.raw) // settings.max_samples)
    samples = locations.raw[::step][: settings.max_samples]
    # The official writer's rule: such short samples teach a dictionary nothing.
    if 2 * sum(len(sample) < _MIN_SAMPLE_BYTES for sample in samples) >= len(samples):
        return None
    # Training needs more bytes than the dictionary gets, so a few samples are repeated.
    repeats = -(-settings.max_bytes // max(1, sum(map(len, samples))))
    try:
        dictionary = zstandard.train_dictionary(settings.max_bytes, [*samples] * max(repeats, 8))
    except zstandard.ZstdError:
        return None  # too little to learn from; plain locations are always right
    compressor = zstandard.ZstdCompressor(level=settings.level, dict_data=dictionary)
    for code, raw in enumerate(locations.raw):
        # Mixed manifests are legal: each reference says whether its own location is compressed.
        if len(raw) <= _MAX_PACKED_BYTES:
            locations.raw[code] = compressor.compress(raw)
            locations.packed[code] = True
    return dictionary.as_bytes()
