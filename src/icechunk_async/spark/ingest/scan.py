"""Scanned sources: their groups, arrays and chunk locations, and helpers of the scanners."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import field, replace
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.zarr.virtual.zarr2 import array_document, fill_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.format.manifest.chunk import Coordinates

    type Document = dict[str, Any]
    type Guard = Literal["auto", "last-modified", "none"]

__all__ = [
    "LARGE_BYTES",
    "SMALL_BYTES",
    "Places",
    "Scanned",
    "ScannedArray",
    "SourceState",
    "along_first",
    "attributes_of",
    "chunk_shape",
    "divided",
    "document_of",
    "encode_document",
    "fill_value",
    "grid",
    "pieces",
    "plain",
]


_MICROSECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SourceState:
    """The state of an object when it was read or listed."""

    size_bytes: int
    version: str
    """Version token, which changes with every write; empty if the object was only listed."""
    etag: str | None
    """The ETag, if every reader of the repository sees the same."""
    modified_us: int | None
    """Time of the last change in microseconds since the epoch, by the store's clock."""

    @property
    def stamp(self) -> str:
        """A text that differs once the object has changed."""
        return f"{self.version}/{self.modified_us or 0}/{self.size_bytes}"

    def holds_for(self, read: SourceState) -> bool:
        """Return whether a read found the object in this state."""
        # A listing has no version. What it has, size and time, is compared then.
        if self.version:
            return self.stamp == read.stamp
        times = {self.modified_us}
        if self.modified_us is not None:  # some stores list finer times than they send with reads
            times.add(self.modified_us // _MICROSECONDS * _MICROSECONDS)
        return self.size_bytes == read.size_bytes and read.modified_us in times

    def guard(self, kind: Guard) -> tuple[str | None, int]:
        """Return the ETag and the time in whole seconds that references record as guards."""
        if kind == "auto" and self.etag is not None:
            return self.etag, 0
        if kind == "none" or self.modified_us is None:
            return None, 0
        # Rounded up: readers refuse an object that is newer than the second that is recorded.
        return None, -(-self.modified_us // _MICROSECONDS)


@dataclass(frozen=True, slots=True)
class Places:
    """Locations of the chunks of one array, one row each."""

    coords: npt.NDArray[np.uint32]
    """`(n, rank)`."""
    codes: npt.NDArray[np.uint32]
    """Index into `Scanned.urls`."""
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]

    @classmethod
    def none(cls, rank: int) -> Self:
        """Return an empty table."""
        return cls.of_one(np.empty((0, rank), np.uint32), [], [])

    @classmethod
    def of_one(
        cls,
        coords: npt.NDArray[Any],
        offsets: npt.NDArray[Any] | Sequence[int],
        lengths: npt.NDArray[Any] | Sequence[int],
    ) -> Self:
        """Return locations in the first URL."""
        return cls(
            coords.astype(np.uint32),
            np.zeros(len(coords), np.uint32),
            np.asarray(offsets, np.uint64),
            np.asarray(lengths, np.uint64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Places], rank: int) -> Self:
        """Return tables whose codes are of the same URLs as one."""
        places: list[Places] = [cls.none(rank), *parts]
        return cls(
            np.concatenate([it.coords for it in places]),
            np.concatenate([it.codes for it in places]),
            np.concatenate([it.offsets for it in places]),
            np.concatenate([it.lengths for it in places]),
        )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.coords)


@dataclass(frozen=True, slots=True)
class ScannedArray:
    """An array of a source."""

    document: Document
    """Its metadata in Zarr format 3."""
    places: Places
    inline: Mapping[Coordinates, bytes] = field(default_factory=dict[Any, bytes])
    """Encoded chunks that cannot be referred to."""
    values: npt.NDArray[Any] | None = None
    """The whole array, if it is to be copied instead of referred to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.document["shape"])

    @property
    def dimensions(self) -> tuple[str | None, ...]:
        """The names of the dimensions."""
        return tuple(self.document.get("dimension_names") or [None] * len(self.shape))


@dataclass(frozen=True, slots=True)
class Scanned:
    """The contents of a source; paths are relative to its root, the empty path."""

    groups: Mapping[str, Mapping[str, Any]]
    """Attributes of each group, the root included."""
    arrays: Mapping[str, ScannedArray]
    urls: tuple[str, ...]
    states: tuple[SourceState, ...]
    """The state of each URL's object."""

    def to_bytes(self) -> bytes:
        """Return plain data, for the way from a task to the driver."""
        # Columns of places repeat and count up: level 1 makes a fraction of them in little time.
        return zstandard.compress(pickle.dumps(self, protocol=5), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the result of `to_bytes`."""
        found: Self = pickle.loads(zstandard.decompress(data))  # noqa: S301 -- our own tasks'
        return found

    def stamp_with(self, index: str) -> str:
        """Return one stamp for an index, whose own is given, and all objects that it refers to."""
        digest = blake2b(index.encode(), digest_size=16)
        # Sorted, because references name objects in any order.
        for url, state in sorted(zip(self.urls, self.states, strict=True), key=itemgetter(0)):
            digest.update(f"\0{url}\0{state.stamp}".encode())
        return digest.hexdigest()

    @property
    def num_references(self) -> int:
        """The number of chunks that are referred to."""
        return sum(len(it.places) for it in self.arrays.values() if it.values is None)

    def without(self, skip: Sequence[str]) -> Scanned:
        """Return the contents without some arrays or groups."""
        left_out = {it.strip("/") for it in skip}

        def kept(path: str) -> bool:
            parts = path.split("/")
            return not any("/".join(parts[: n + 1]) in left_out for n in range(len(parts)))

        return replace(
            self,
            groups={path: it for path, it in self.groups.items() if not path or kept(path)},
            arrays={path: it for path, it in self.arrays.items() if kept(path)},
        )

    def check(self) -> None:
        """Validate chunk locations before anything is stored.

        Raises:
            InvalidInputError: a chunk is outside of its array, or has no bytes.
        """
        for path, array in self.arrays.items():
            if array.values is not None:
                continue
            limits = np.array(grid(array.document), np.uint64)
            outside = bool(np.any(array.places.coords >= limits)) if len(limits) else False
            # Scanned files are untrusted: the manifest must not hold what no reader accepts.
            if outside or not array.places.lengths.all():
                what = "lie outside of it" if outside else "have no bytes"
                raise InvalidInputError(f"Chunks of the array {path!r} {what}.")

    def refs(
        self,
        places: Places,
        normalize: Callable[[str], str],
        guard: Guard,
        first: Sequence[int] | None = None,
    ) -> ChunkRefs:
        """Return the references of an array.

        Args:
            places: locations of its chunks.
            normalize: checks a URL, and returns it in the form that is stored.
            guard: what references record, so that readers notice a changed source.
            first: coordinates to which the chunk `(0, ...)` is moved.
        """
        # A URL that only other arrays use is not stored with this one.
        distinct, objects = np.unique(places.codes, return_inverse=True)
        used: list[int] = distinct.tolist()
        etags: dict[str, int] = {}
        codes: list[int] = []
        seconds: list[int] = []
        for code in used:
            etag, modified = self.states[code].guard(guard)
            codes.append(-1 if etag is None else etags.setdefault(etag, len(etags)))
            seconds.append(modified)
        coords = places.coords
        if first is not None and coords.shape[1]:
            coords = coords + np.array(first, np.uint32)
        return ChunkRefs.build(
            coords,
            Kind.VIRTUAL,
            objects=objects.astype(np.uint32),
            offsets=places.offsets,
            lengths=places.lengths,
            etags=np.array(codes, np.int32)[objects],
            modified=np.array(seconds, np.uint32)[objects],
            locations=Strings(tuple(normalize(self.urls[code]) for code in used)),
            etag_pool=Strings(tuple(etags)),
        )


def document_of(
    path: str,
    array: Mapping[str, Any],
    attributes: Mapping[str, Any],
    names: Sequence[str],
    mask: Any = None,
) -> Document:
    """Return metadata of format 3 for an array described in format 2.

    Args:
        path: path of the array, for messages.
        array: its description.
        attributes: its attributes.
        names: names of its dimensions.
        mask: the value of missing data, if any; the fill value alone does not mean that.

    Raises:
        InvalidMetadataError: format 3 cannot express its data type or a codec.
    """
    given = {**attributes, "_ARRAY_DIMENSIONS": list(names)}
    document: Document = json.loads(array_document(path, array, given))
    # In format 2 the fill value doubles as the mark of missing data. Here the source says whether
    # there is one.
    document["attributes"].pop("_FillValue", None)
    shown = None if mask is None else fill_attribute(mask, np.dtype(array["dtype"]))
    if shown is not None:
        document["attributes"]["_FillValue"] = shown
    return document


def attributes_of(document: Document) -> dict[str, Any]:
    """Return the attributes of an array."""
    found: dict[str, Any] | None = document.get("attributes")
    return found or {}


def encode_document(document: Document) -> bytes:
    """Return metadata as bytes of JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


def chunk_shape(document: Document) -> tuple[int, ...]:
    """Return the chunk shape; the grid must be regular."""
    return tuple(document["chunk_grid"]["configuration"]["chunk_shape"])


def grid(document: Document) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(
        -(-size // chunk)
        for size, chunk in zip(document["shape"], chunk_shape(document), strict=True)
    )


LARGE_BYTES: Final = 32 << 20
"""Larger contiguous arrays are divided into chunks along their first axis."""
SMALL_BYTES: Final = 1 << 20
"""Contiguous arrays are not divided into smaller chunks than this."""


def divided(
    shape: Sequence[int], names: Sequence[str], itemsize: int, concat_dim: str | None
) -> tuple[int, ...]:
    """Return a chunk shape for an array that is stored contiguously.

    Args:
        shape: shape of the array.
        names: names of its dimensions.
        itemsize: bytes of an element.
        concat_dim: the dimension of concatenation. If it is the first one, chunks have length 1
            along it, so that files of any length go together.
    """
    if not shape:
        return ()
    sizes = [max(size, 1) for size in shape]
    if names[0] == concat_dim and len(sizes) > 1:
        return (1, *sizes[1:])
    row_bytes = math.prod(sizes[1:]) * itemsize
    most = max(1, min(sizes[0], LARGE_BYTES // row_bytes))
    # Divisors only: a chunk beyond the end of the array would need bytes that are not there.
    rows = _largest_divisor(sizes[0], most)
    # If the divisors are too small, one large chunk is better than very many small ones.
    return (rows if rows * row_bytes >= SMALL_BYTES else sizes[0], *sizes[1:])


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor that is at most `most`."""
    # Divisors come in pairs, `low` and `number // low`, and the smaller one is at most the root. A
    # length comes from a file, and may be a prime of many digits.
    best = 1
    for low in range(1, min(most, math.isqrt(number)) + 1):
        if number % low == 0:
            high = number // low
            if high <= most:
                return high  # the first that fits is the largest
            best = low
    return best


def pieces(offset: int, shape: Sequence[int], chunks: Sequence[int], itemsize: int) -> Places:
    """Return the locations of the chunks of `divided`, for an array that is not empty."""
    if not chunks:
        return Places.of_one(np.empty((1, 0)), [offset], [itemsize])
    size_bytes = math.prod(chunks) * itemsize
    # Without a remainder: `divided` takes divisors only.
    numbers = np.arange(shape[0] // chunks[0])
    coords = along_first(numbers, len(chunks))
    return Places.of_one(coords, offset + numbers * size_bytes, [size_bytes] * len(numbers))


def along_first(numbers: npt.NDArray[np.integer], rank: int) -> npt.NDArray[np.uint32]:
    """Return coordinates that differ along the first axis; `(n, rank)`."""
    coords = np.zeros((len(numbers), rank), np.uint32)
    coords[:, 0] = numbers
    return coords


def fill_value(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value as metadata of format 2 writes it."""
    value = np.asarray(fill, dtype)[()]
    match dtype.kind:
        case "f" if not np.isfinite(value):
            return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        # Neither is a number of JSON. Null leaves what the type has by default.
        case "c" | "S":
            return None
        case _:
            return value.item()


def plain(value: Any) -> Any:
    """Return an attribute as a JSON value, or None; an array of length 1 becomes a scalar.

    JSON has no NaN and no infinite numbers.
    """
    array = np.atleast_1d(value)
    if array.dtype.fields is not None or array.dtype.kind not in "biufSUO":
        return None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return None
    items: list[Any] = array.tolist()
    found = [it.decode(errors="replace") if isinstance(it, bytes) else it for it in items]
    if not all(isinstance(it, (str, int, float, bool, list)) for it in found):
        return None
    return found[0] if len(found) == 1 else found
