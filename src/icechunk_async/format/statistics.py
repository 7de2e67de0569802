"""Statistics of chunks: how many values each has, between which bounds, and the sum of numbers.

The format of Icechunk has no place for them, so they are kept in separate objects, some for each
array (docs/reference/chunk-statistics.md). A row is about bytes, not about a place in an array: its
key is made of where the bytes of a chunk are, and how much of the chunk lies within the array. So
rows stay right when chunks, arrays and manifests move, and bytes that another writer puts in a
place of a chunk have no row. A row that is missing is unknown, which is never an error.

Bounds of text have a fixed width, too: they hold the first 32 bytes of UTF-8, and how many. As
keys of 33 bytes they are in the order of code points, also those that were cut.
"""

from __future__ import annotations

import hashlib
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.ids import StatisticsId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, VirtualChunk
from icechunk_async.format.manifest.refs import NO_ETAG

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.refs import ChunkRefs

    type Keys = npt.NDArray[np.bytes_]
    """A key for each of some chunks, ``(n,)``."""
    type Rows = npt.NDArray[np.void]
    """Rows of the type that `row_type` returns, ``(n,)``."""

__all__ = [
    "HIGH_CUT",
    "LOW_CUT",
    "ChunkStatistics",
    "ValueKind",
    "carried",
    "cells_within",
    "chunk_keys",
    "greatest_keys",
    "joined",
    "row_type",
    "text_bound",
    "text_key",
    "text_of",
]

type ValueKind = Literal["i", "u", "f", "t"]
"""How bounds are kept: integers of 64 bits, signed or not, doubles, or the beginning of text."""

_MAGIC: Final = b"ICASTAT1"
_HEAD: Final = Struct("<8s12s1s3s32sQ")
"""Magic number, id, kind, zeros, digest of how bytes become values, rows."""
_DIGEST_BYTES: Final = 32
_IDENTITY_BYTES: Final = 32
_KEY_BYTES: Final = _IDENTITY_BYTES + 8
_KINDS: Final[dict[bytes, ValueKind]] = {b"i": "i", b"u": "u", b"f": "f", b"t": "t"}
_TEXT_BYTES: Final = 32
_BOUND_BYTES: Final = _TEXT_BYTES + 1
_LONGER: Final = _TEXT_BYTES + 1
"""The length in a key of text that has more bytes than a bound can hold."""
_LEAST_CUT: Final = _TEXT_BYTES - 3
"""A text is cut where the next character does not fit, and that has 4 bytes at most."""
LOW_CUT: Final = 1
HIGH_CUT: Final = 2
_BLOCK: Final = 1 << 16


def row_type(kind: ValueKind) -> np.dtype[np.void]:
    """Return the type of rows: one for each chunk.

    * ``key``: see `chunk_keys`.
    * ``count``, ``nulls``: cells within the array that have a value, and those that have none.
    * ``low``, ``high``: the least and the greatest value; 0 without any. Zero has no sign. Of
      text, see `text_bound`.
    * ``cut``, of text only: `LOW_CUT` and `HIGH_CUT` say which bounds are the beginning of a value.
    * ``sum``, ``rest``: of integers, the sum is ``sum * 2**32 + rest``; of floats it is ``sum``.
    * ``deviations``: the sum of the squared deviations of values from their mean.
    """
    about = [("key", f"S{_KEY_BYTES}"), ("count", "<u8"), ("nulls", "<u8")]
    if kind == "t":
        bound = f"S{_BOUND_BYTES}"
        return np.dtype([*about, ("low", bound), ("high", bound), ("cut", "u1")])
    number = f"<{kind}8"
    return np.dtype(
        [
            *about,
            ("low", number),
            ("high", number),
            ("sum", "<f8" if kind == "f" else "<i8"),
            ("rest", "<u4"),
            ("deviations", "<f8"),
        ]
    )


@dataclass(frozen=True, slots=True, eq=False)
class ChunkStatistics:
    """Statistics of some chunks of one array, in the order of their keys."""

    meaning: bytes
    """SHA-256 of how bytes become values, 32 bytes: rows hold for no other codecs or fill values"""
    kind: ValueKind
    rows: Rows

    def encode(self, statistics_id: StatisticsId) -> bytes:
        """Return the object of an id. Equal statistics give equal bytes."""
        head = (bytes(statistics_id), self.kind.encode(), b"", self.meaning, len(self.rows))
        parts = [_HEAD.pack(_MAGIC, *head)]
        # Column by column: numbers of one kind lie together and compress, and a reader of one needs
        # no others.
        parts += [self.rows[name].tobytes() for name in _names(self.rows)]
        data = b"".join(parts)
        return data + hashlib.sha256(data).digest()

    @classmethod
    def decode(cls, data: bytes | memoryview, statistics_id: StatisticsId) -> Self:
        """Read an object.

        Args:
            data: its bytes.
            statistics_id: its id.

        Raises:
            FormatError: it is damaged, hostile, another object, or of a newer version.
        """
        view = memoryview(data)
        if len(view) < _HEAD.size + _DIGEST_BYTES:
            raise _damaged(statistics_id, "they are cut off")
        magic, about, code, zeros, meaning, count = _HEAD.unpack_from(view)
        # The last letter is the version: objects of a newer one are no damage.
        if magic[:-1] != _MAGIC[:-1]:
            raise _damaged(statistics_id, "the object is something else")
        kind = _KINDS.get(code)
        if magic != _MAGIC or kind is None:
            raise FormatError(
                f"The statistics {statistics_id} were written by a newer version of "
                "icechunk-async, and cannot be read by this one. Upgrade it."
            )
        if zeros != b"\0\0\0" or about != bytes(statistics_id):
            raise _damaged(statistics_id, f"they are those of {StatisticsId(about)}")
        end = len(view) - _DIGEST_BYTES
        form = row_type(kind)
        # With Python's numbers, before `np.empty`: a count of 64 bits must not allocate more than
        # was sent.
        if end - _HEAD.size != count * form.itemsize:
            raise _damaged(statistics_id, f"they have another size than {count} rows")
        # Wrong bounds would leave data out of results in silence, so nothing damaged may pass.
        if hashlib.sha256(view[:end]).digest() != bytes(view[end:]):
            raise _damaged(statistics_id, "their own digest is another one")
        rows = np.empty(count, form)
        at = _HEAD.size
        for name in _names(rows):
            column = form[name]
            stop = at + count * column.itemsize
            rows[name] = np.frombuffer(view[at:stop], column)
            at = stop
        if not _is_possible(rows, kind):
            raise _damaged(statistics_id, "they cannot be those of any values")
        return cls(meaning, kind, rows)


def _names(rows: Rows) -> tuple[str, ...]:
    names = rows.dtype.names
    assert names is not None  # rows have columns
    return names


def _is_possible(rows: Rows, kind: ValueKind) -> bool:
    """Return whether rows are in order, and their bounds are bounds."""
    keys = rows["key"]
    most = np.uint64(1 << 62)  # sums of two must not wrap
    few = bool((rows["count"] < most).all() and (rows["nulls"] < most).all())
    if kind == "t":
        blocks = (rows[at : at + _BLOCK] for at in range(0, len(rows), _BLOCK))
        bounds = all(map(_are_texts, blocks))
    else:
        bounds = bool((rows["low"] <= rows["high"]).all())  # false for NaN
    return few and bounds and bool((keys[:-1] < keys[1:]).all())


def _are_texts(rows: Rows) -> bool:
    """Return whether bounds are whole characters in UTF-8, and in order."""
    if (rows["cut"] > (LOW_CUT | HIGH_CUT)).any():
        return False
    for name, flag in (("low", LOW_CUT), ("high", HIGH_CUT)):
        raw = _bytes_of(rows[name])
        lengths = raw[:, -1]
        least = np.where(rows["cut"] & flag, _LEAST_CUT, 0)
        if (lengths > _TEXT_BYTES).any() or (lengths < least).any():
            return False
        # Zeros behind the text: other bytes would order equal texts differently.
        if (raw[:, :-1] * _is_behind(raw)).any():
            return False
        try:
            # All at once: a length is ASCII, so no character has bytes of two texts.
            raw.tobytes().decode("utf-8")
        except UnicodeDecodeError:
            return False
    # A cut upper bound is below the value that it stands for, so it is compared as raised.
    return bool((rows["low"] <= greatest_keys(rows)).all())


def _bytes_of(bounds: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint8]:
    """Return a copy of the bytes of bounds, ``(n, 33)``."""
    return np.array(bounds, copy=True, order="C").view(np.uint8).reshape(-1, _BOUND_BYTES)


def _is_behind(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which bytes of bounds are behind the text, ``(n, 32)``."""
    found: npt.NDArray[np.bool_] = np.arange(_TEXT_BYTES) >= raw[:, -1:]
    return found


def text_bound(text: str) -> tuple[bytes, bool]:
    """Return text as a bound, and whether that is only the beginning of it.

    A bound has the first characters of the text that fit 32 bytes in UTF-8, zeros up to 32 bytes,
    and the number of bytes that are not padding. The beginning of a value is a lower bound as it
    stands. For an upper one, see `greatest_keys`.
    """
    data = text[:_LONGER].encode()
    length = min(len(data), _TEXT_BYTES)
    # Back to where a character begins: a bound is whole characters.
    while length < len(data) and data[length] & 0xC0 == 0x80:
        length -= 1
    return data[:length].ljust(_TEXT_BYTES, b"\0") + bytes([length]), length < len(data)


def text_key(text: str) -> bytes:
    """Return a key of 33 bytes, which is among bounds as keys where the text is among values.

    Texts that are longer than bounds can be may have the same key.
    """
    data = text[:_LONGER].encode()
    return data[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + bytes([min(len(data), _LONGER)])


def text_of(bound: bytes) -> str:
    """Return the text in a bound, whose last zeros NumPy may have left out."""
    # NumPy drops zeros at the end, and the length, which is last, is 0 for an empty text alone.
    return bound[: bound[_TEXT_BYTES]].decode() if bound else ""


def greatest_keys(rows: Rows) -> npt.NDArray[np.bytes_]:
    """Return keys above which there is no value, ``(n,)``: upper bounds as they stand, or raised.

    Each text with a certain beginning is less than that beginning followed by bytes 255. UTF-8 has
    no such bytes, so there is a bound even where no character can follow.
    """
    raw = _bytes_of(rows["high"])
    behind = np.concatenate([_is_behind(raw), np.ones((len(raw), 1), bool)], axis=1)
    raw[behind & (rows["cut"] & HIGH_CUT > 0)[:, np.newaxis]] = 255
    return raw.reshape(-1).view(f"S{_BOUND_BYTES}")


def _damaged(statistics_id: StatisticsId, why: str) -> FormatError:
    return FormatError(
        f"The statistics {statistics_id} are damaged: {why}. No data is lost: delete "
        f"'statistics/{statistics_id}', and make them anew with Repository.analyze."
    )


def joined(parts: Iterable[Rows], kind: ValueKind) -> Rows:
    """Return the rows of several objects in the order of their keys, each key once."""
    whole = np.concatenate([np.empty(0, row_type(kind)), *parts])
    # Equal keys are about equal bytes, so it does not matter which row stays.
    _, first = np.unique(whole["key"], return_index=True)
    return whole[first]


def cells_within(
    coords: npt.NDArray[np.integer[Any]], shape: Sequence[int], chunks: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Return how far chunks reach into an array along each axis, in cells: ``(n, rank)``.

    Args:
        coords: where the chunks are in the grid, ``(n, rank)``.
        shape: cells of the array along each axis.
        chunks: cells of a chunk along each axis.
    """
    sizes = np.array(chunks, np.int64)
    # A chunk behind the end of its array, as one that shrank may still have, reaches 0 cells into
    # it.
    left = np.array(shape, np.int64) - coords.astype(np.int64) * sizes
    found: npt.NDArray[np.int64] = np.clip(left, 0, sizes)
    return found


def chunk_keys(
    refs: ChunkRefs, within: npt.NDArray[np.int64], chunks: Sequence[int]
) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return the keys of chunks, ``(n,)``, and which of them have one.

    A key is 32 bytes about the bytes of a chunk, and 8 about the cells of it that are in the array.

    * Native: the id of the object, zeros up to 16 bytes, the offset and the length.
    * Inline: the SHA-256 of the bytes.
    * Virtual: the SHA-256 of location, offset, length, and ETag or time. Without one of these
      nobody notices when the source changes, so such chunks have no key.
    * The cells: zeros if all are, otherwise the beginning of the SHA-256 of their number along
      each axis.

    Args:
        refs: references to the chunks.
        within: see `cells_within`.
        chunks: cells of a chunk along each axis.

    Cost: for inline and virtual chunks some microseconds each.
    """
    count = len(refs)
    raw = np.zeros((count, _KEY_BYTES), np.uint8)
    known = np.zeros(count, bool)
    native = np.flatnonzero(refs.kinds == Kind.NATIVE)
    if len(native):
        # Ids are random and objects never change, so the id stands for the bytes.
        ids = refs.chunk_ids[refs.objects[native]]
        raw[native, : ids.shape[1]] = ids
        raw[native, 16:24] = _words(refs.offsets[native])
        raw[native, 24:32] = _words(refs.lengths[native])
        known[native] = True
    for row in np.flatnonzero(refs.kinds != Kind.NATIVE).tolist():
        text = _described(refs, row)
        if text is not None:
            digest = hashlib.sha256(text).digest()
            raw[row, :_IDENTITY_BYTES] = np.frombuffer(digest, np.uint8)
            known[row] = True
    raw[:, _IDENTITY_BYTES:] = _extents(within, chunks)
    keys: Keys = raw.reshape(-1).view(f"S{_KEY_BYTES}")
    return keys, known


def carried(rows: Rows, before: ChunkRefs, after: ChunkRefs) -> Rows:
    """Return the rows of chunks whose bytes were copied, with the keys that the copies have.

    Args:
        rows: statistics of an array, in the order of their keys.
        before: references to the chunks that were copied.
        after: references to the copies, in the same order.

    Returns:
        Rows in the order of their keys, each key once. Chunks without statistics have none, and a
        chunk that has them for several extents has them for each.
    """
    (old, known), (new, _) = (_whole_keys(it) for it in (before, after))
    old, new = old[known], new[known]
    about = np.zeros((len(rows), _KEY_BYTES), np.uint8)
    about[:] = np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(-1, _KEY_BYTES)
    extents = about[:, _IDENTITY_BYTES:].copy()
    # Looked up by the first 32 bytes: the copy has other bytes there, and the cells that count
    # stay.
    about[:, _IDENTITY_BYTES:] = 0
    identities = about.reshape(-1).view(f"S{_KEY_BYTES}")
    first = np.searchsorted(identities, old, side="left")
    counts = np.searchsorted(identities, old, side="right") - first
    which = np.repeat(np.arange(len(old)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places = first[which] + within
    # A chunk may have rows for several extents, from before and after its array grew; each is
    # carried.
    keys = np.ascontiguousarray(new[which]).view(np.uint8).reshape(-1, _KEY_BYTES).copy()
    keys[:, _IDENTITY_BYTES:] = extents[places]
    found: Rows = rows[places]
    found["key"] = keys.reshape(-1).view(f"S{_KEY_BYTES}")
    _, distinct = np.unique(found["key"], return_index=True)
    copies: Rows = found[distinct]
    return copies


def _whole_keys(refs: ChunkRefs) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Return the keys that chunks have if all of their cells are in the array."""
    return chunk_keys(refs, np.ones((len(refs), refs.rank), np.int64), (1,) * refs.rank)


def _words(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(numbers.astype("<u8")).view(np.uint8).reshape(-1, 8)


def _described(refs: ChunkRefs, row: int) -> bytes | memoryview | None:
    """Return a description of the bytes of a chunk; None if they could change unnoticed."""
    match refs.ref(row):
        case InlineChunk(data):
            return data
        case VirtualChunk() as ref if refs.etags.item(row) != NO_ETAG or ref.last_modified:
            guard = ref.last_modified if ref.etag is None else ref.etag
            # With the type of the guard, so that the ETag "5" is not the time 5.
            parts = (ref.location, ref.offset, ref.length, type(guard).__name__, guard)
            return "\0".join(map(str, parts)).encode("utf-8", "surrogateescape")
        case _:
            return None


def _extents(within: npt.NDArray[np.int64], chunks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return eight bytes about the cells of each chunk that are in the array."""
    found = np.zeros((len(within), 8), np.uint8)
    partial = np.flatnonzero((within != np.array(chunks, np.int64)).any(axis=1))
    if len(partial):
        # Edge chunks of one side have equal extents: a digest for each different one.
        different, rows = np.unique(within[partial], axis=0, return_inverse=True)
        digests = [hashlib.sha256(it.astype("<u8").tobytes()).digest()[:8] for it in different]
        table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 8)
        found[partial] = table[rows.reshape(-1)]
    return found
