"""The strings that virtual references share: locations and ETags, decoded only when asked for.

In files of spec 2 a location may be a zstd frame made with a dictionary that the manifest
carries (spec, "Chunk manifest files").
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.reading import Vectors


__all__ = ["EMPTY_POOL", "StoredStrings", "StringPool", "Strings", "join_stored", "merge_pools"]

_MAX_LOCATION_BYTES: Final = 1 << 16
"""The limit of one decompressed location. The official reader allows 1024 bytes."""
_MAX_RATIO: Final = 64
"""The limit of all decompressed locations, as a multiple of their file. Genuine files reach 16, if
each location has 1024 bytes and compresses to almost nothing."""
_UNKNOWN_SIZE: Final = (1 << 64) - 1
_RUN: Final = 64
"""Values that are compared together, because neighbours mostly share their location."""


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings in memory; references hold their index."""

    strings: tuple[str, ...] = ()

    @classmethod
    def factorize(cls, values: Iterable[str]) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Return the index of every value, and the distinct values in order of appearance."""
        values = values if isinstance(values, Sequence) else tuple(values)
        # Chunks that follow each other mostly lie in one object; a run costs one comparison in C.
        left, times = _without_runs(values)
        distinct = tuple(dict.fromkeys(left))
        codes = dict(zip(distinct, range(len(distinct)), strict=True))
        # No step of the interpreter for each value: there may be millions.
        indices = np.fromiter(map(codes.__getitem__, left), np.uint32, len(left))
        return indices if len(left) == len(values) else np.repeat(indices, times), cls(distinct)

    def __len__(self) -> int:
        """Count the strings."""
        return len(self.strings)

    def get(self, index: int) -> str:
        """Return one string."""
        return self.strings[index]

    def take(self, indices: npt.NDArray[np.int64]) -> Strings:
        """Return a pool of some of the strings."""
        rows: list[int] = indices.tolist()
        return Strings(tuple(self.strings[row] for row in rows))

    def distinct(self) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Return, for every index, its index in a pool without repetitions, and the pool."""
        if len(set(self.strings)) == len(self.strings):
            return np.arange(len(self.strings), dtype=np.uint32), self
        return Strings.factorize(self.strings)


EMPTY_POOL: Final = Strings()


def _without_runs(values: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return values, many that are alike in a row only once; and how often each is there."""
    left: list[str] = []
    places: list[int] = []
    sizes: list[int] = []
    for start in range(0, len(values), _RUN):
        some = values[start : start + _RUN]
        first = some[0]
        if some[-1] == first and some.count(first) == len(some):
            places.append(len(left))
            sizes.append(len(some))
            left.append(first)
        else:
            left += some
    times = np.ones(len(left), np.int64)
    times[places] = sizes
    return left, times


@dataclass(frozen=True)
class StoredStrings:
    """Strings as a manifest stores them: one a reference, possibly shared or compressed."""

    raw: Vectors
    compressed: npt.NDArray[np.bool_]
    """Which of them are zstd frames."""
    dictionary: bytes | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __len__(self) -> int:
        """Count the strings, repetitions included."""
        return len(self.raw)

    def get(self, index: int) -> str:
        """Decode one string.

        Raises:
            FormatError: it is damaged, or no dictionary fits.
        """
        return self._decode(bytes(self.raw.raw(index)), bool(self.compressed[index]))

    def take(self, indices: npt.NDArray[np.int64]) -> StoredStrings:
        """Return a pool of some of the strings; nothing is decoded."""
        # It has a lock and a decompressor for itself. The dictionary's bytes are shared.
        return StoredStrings(self.raw.select(indices), self.compressed[indices], self.dictionary)

    def distinct(self) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Decode every different string once; return each index's string, and the strings."""
        # Writers share strings in the file, so the place is a key that needs no bytes. The same
        # bytes may be both text and a frame.
        places = self.raw.starts * 2 + self.compressed
        _, first, inverse = np.unique(places, return_index=True, return_inverse=True)
        # Files that store a string anew for every chunk have most of them in runs.
        kept = self.raw.select(first).changes() | _changes(self.compressed[first])
        groups = np.cumsum(kept) - 1
        first = first[kept]
        chosen = self.raw.select(first)
        if not self.compressed.any():
            again, pool = Strings(tuple(chosen.decode())).distinct()
        else:
            again, pool = self._decode_all(chosen.bytes(), self.compressed[first]).distinct()
        return again[groups[inverse]], pool

    def _decode_all(self, raws: list[bytes], compressed: npt.NDArray[np.bool_]) -> Strings:
        """Decode strings within a budget; equal ones, though stored apart, only once."""
        # With a dictionary a few bytes become a long location, and each reference may have another.
        budget = _MAX_RATIO * self.raw.buffer.size
        known: dict[tuple[bytes, bool], str] = {}
        for key in zip(raws, compressed.tolist(), strict=True):
            if key not in known:
                known[key] = self._decode(*key)
                budget -= len(known[key])
                if budget < 0:
                    raise FormatError("The locations in a manifest dwarf their file.")
        return Strings(tuple(known[key] for key in zip(raws, compressed.tolist(), strict=True)))

    @cached_property
    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if self.dictionary is None:
            raise FormatError("A manifest has compressed locations and no dictionary.")
        return zstandard.ZstdDecompressor(dict_data=zstandard.ZstdCompressionDict(self.dictionary))

    def _decode(self, raw: bytes, compressed: bool) -> str:  # noqa: FBT001
        try:
            return (self._decompress(raw) if compressed else raw).decode()
        except (zstandard.ZstdError, UnicodeDecodeError) as error:
            raise FormatError(f"A location in a manifest cannot be decoded: {error}.") from error

    def _decompress(self, frame: bytes) -> bytes:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared == _UNKNOWN_SIZE:
            declared = _MAX_LOCATION_BYTES
        # Longer than any URL. The official reader stops at 1024 bytes already.
        if declared > _MAX_LOCATION_BYTES:
            raise FormatError(f"A location claims to be {declared} bytes long.")
        with self._lock:  # a zstd context serves one thread at a time
            return self._decompressor.decompress(
                # One frame and nothing behind it, as the spec has it for a location.
                frame,
                max_output_size=declared,
                allow_extra_data=False,
            )


def _changes(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which values differ from the one before."""
    different = np.zeros(len(values), bool)
    different[1:] = values[1:] != values[:-1]
    return different


type StringPool = Strings | StoredStrings


def join_stored(pools: Sequence[StringPool]) -> StringPool:
    """Join pools of one manifest; nothing is decoded."""
    from icechunk_async.format.flatbuffers.reading import Vectors  # noqa: PLC0415 -- on use

    stored = [pool for pool in pools if isinstance(pool, StoredStrings)]
    if not stored:
        return EMPTY_POOL  # nothing else is made from a file
    return StoredStrings(
        Vectors.join([pool.raw for pool in stored]),
        np.concatenate([pool.compressed for pool in stored]),
        stored[0].dictionary,
    )


def merge_pools(pools: list[StringPool]) -> tuple[list[npt.NDArray[np.uint32]], Strings]:
    """Join pools; return how the indices of each map to the joint pool, and the pool."""
    if len(pools) == 1:
        indices, distinct = pools[0].distinct()
        return [indices], distinct
    # Strings, not places: the same location is at another place in each manifest.
    codes: dict[str, int] = {}
    maps: list[npt.NDArray[np.uint32]] = []
    for pool in pools:
        indices, distinct = pool.distinct()
        joint = [codes.setdefault(string, len(codes)) for string in distinct.strings]
        maps.append(np.array(joint, np.uint32)[indices])
    return maps, Strings(tuple(codes))
