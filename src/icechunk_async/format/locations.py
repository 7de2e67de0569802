"""The strings that virtual references share: locations and ETags, decoded only when asked for.

In files of spec 2 a location may be a zstd frame made with a dictionary that the manifest
carries (spec, "Chunk manifest files").
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from icechunk_async.format.flat import Vectors

__all__ = ["EMPTY_POOL", "StoredStrings", "StringPool", "Strings", "merge_pools"]

_MAX_LOCATION_BYTES: Final = 1 << 16
"""What one compressed location may decompress to. The official reader allows 1024 bytes."""


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings in memory; references hold their index."""

    strings: tuple[str, ...] = ()

    @classmethod
    def factorize(cls, values: Iterable[str]) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Answer the index of every value, and the distinct values in order of appearance."""
        codes: dict[str, int] = {}
        indices = [codes.setdefault(value, len(codes)) for value in values]
        return np.array(indices, np.uint32), cls(tuple(codes))

    def __len__(self) -> int:
        """Count the strings."""
        return len(self.strings)

    def get(self, index: int) -> str:
        """Answer one string."""
        return self.strings[index]

    def distinct(self) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Answer, for every index, its index in a pool without repetitions; and that pool."""
        if len(set(self.strings)) == len(self.strings):
            return np.arange(len(self.strings), dtype=np.uint32), self
        return Strings.factorize(self.strings)


EMPTY_POOL: Final = Strings()


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
        return self._decode(self.raw.raw(index), bool(self.compressed[index]))

    def distinct(self) -> tuple[npt.NDArray[np.uint32], Strings]:
        """Decode every different string once; answer each one's index, and the strings."""
        places, first, inverse = np.unique(
            self.raw.starts * 2 + self.compressed, return_index=True, return_inverse=True
        )
        self.raw.buffer.check_unfolded(int(self.raw.counts[first].sum()))
        frames: dict[tuple[bool, bytes], int] = {}  # separately stored frames are often equal
        codes = np.empty(len(places), np.uint32)
        strings: list[str] = []
        for place, row in enumerate(first.tolist()):
            compressed = bool(self.compressed[row])
            raw = bytes(self.raw.raw(row))
            code = frames.setdefault((compressed, raw), len(strings))
            if code == len(strings):
                strings.append(self._decode(memoryview(raw), compressed))
            codes[place] = code
        again, pool = Strings(tuple(strings)).distinct()
        return again[codes][inverse], pool

    @cached_property
    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if self.dictionary is None:
            raise FormatError("A manifest has compressed locations and no dictionary.")
        return zstandard.ZstdDecompressor(dict_data=zstandard.ZstdCompressionDict(self.dictionary))

    def _decode(self, raw: memoryview, compressed: bool) -> str:  # noqa: FBT001
        try:
            if compressed:
                declared = zstandard.get_frame_parameters(raw).content_size
                if declared > _MAX_LOCATION_BYTES:
                    raise FormatError(f"A location claims to be {declared} bytes long.")
                with self._lock:  # a zstd context serves one thread at a time
                    raw = memoryview(self._decompressor.decompress(raw, allow_extra_data=False))
            return str(raw, "utf-8")
        except (zstandard.ZstdError, UnicodeDecodeError) as error:
            raise FormatError(f"A location in a manifest cannot be decoded: {error}.") from error


type StringPool = Strings | StoredStrings


def merge_pools(pools: list[StringPool]) -> tuple[list[npt.NDArray[np.uint32]], Strings]:
    """Join pools; answer for each how its indices map to the joint pool."""
    codes: dict[str, int] = {}
    maps: list[npt.NDArray[np.uint32]] = []
    for pool in pools:
        indices, distinct = pool.distinct()
        joint = [codes.setdefault(string, len(codes)) for string in distinct.strings]
        maps.append(np.array(joint, np.uint32)[indices])
    return maps, Strings(tuple(codes))
