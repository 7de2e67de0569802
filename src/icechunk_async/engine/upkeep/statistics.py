"""The number of bytes that the chunks of a repository take."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.room import count_unfinished
from icechunk_async.engine.upkeep.survey import Survey
from icechunk_async.format.manifest.chunk import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.survey import Limits
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.manifest.refs import ChunkRefs

    type Keys = npt.NDArray[np.uint64]
    type Column = npt.NDArray[np.int64]

__all__ = [
    "ByteRanges",
    "ChunkPart",
    "ChunkStorageStats",
    "ChunkTally",
    "Ranges",
    "contribution",
    "measure_chunks",
]


_KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges ``[starts, stops)`` of objects, a row each."""

    keys: Keys
    """Names of the objects, or what stands for them: 16 bytes as two numbers, ``(n, 2)``."""
    starts: Column
    stops: Column

    @classmethod
    def of(
        cls,
        keys: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
    ) -> Ranges:
        """Make rows of names of up to 16 bytes, ``(n, width)``; offsets are below 2^63."""
        # Twelve bytes of an id and zeros behind, or sixteen of a digest: sorted as two numbers.
        wide = np.zeros((len(keys), _KEY_BYTES), np.uint8)
        wide[:, : keys.shape[1]] = keys
        starts = offsets.astype(np.int64)
        return cls(wide.view(np.uint64), starts, starts + lengths.astype(np.int64))

    @classmethod
    def concat(cls, parts: Sequence[Ranges]) -> Ranges:
        """Join rows."""
        return cls(
            np.concatenate([np.empty((0, 2), np.uint64), *(it.keys for it in parts)]),
            np.concatenate([np.empty(0, np.int64), *(it.starts for it in parts)]),
            np.concatenate([np.empty(0, np.int64), *(it.stops for it in parts)]),
        )

    def union(self) -> Ranges:
        """Return the fewest ranges that cover the same bytes; empty ones vanish."""
        order = np.lexsort((self.starts, self.keys[:, 1], self.keys[:, 0]))
        order = order[self.stops[order] > self.starts[order]]
        keys, starts, stops = self.keys[order], self.starts[order], self.stops[order]
        if len(keys) == 0:
            return Ranges(keys, starts, stops)
        other = np.ones(len(keys), bool)
        other[1:] = np.any(keys[1:] != keys[:-1], axis=1)
        # Of one object, `[0, 9) [2, 4) [8, 12)` reach 9, 9, 12: each begins before the end so far,
        # so they are one range, `[0, 12)`.
        reach = _running_maximum(stops, np.cumsum(other))
        first = other.copy()
        first[1:] |= starts[1:] > reach[:-1]
        last = np.append(np.flatnonzero(first)[1:] - 1, len(keys) - 1)
        return Ranges(keys[first], starts[first], reach[last])


def _running_maximum(values: Column, groups: npt.NDArray[np.int64]) -> Column:
    """Return the largest value so far, in each group of consecutive rows on its own."""
    reach = values.copy()
    # Steps of 1, 2, 4: after each, a row has the maximum of twice the rows. numpy has no running
    # maximum by groups, and a loop over millions of rows takes seconds.
    step = 1
    while step < len(reach):
        same = groups[step:] == groups[:-step]
        if not same.any():  # no group is as long as this
            break
        reach[step:] = np.where(same, np.maximum(reach[step:], reach[:-step]), reach[step:])
        step *= 2
    return reach


class ByteRanges:
    """A growing union of ranges; what overlaps or touches is one."""

    def __init__(self) -> None:
        """Begin empty."""
        self._settled = Ranges.concat([])
        self._waiting: list[Ranges] = []
        self._num_waiting = 0

    def add(self, ranges: Ranges) -> None:
        """Put in ranges. Cost: that of sorting, in proportion to what is added in all."""
        self._waiting.append(ranges)
        self._num_waiting += len(ranges.starts)
        # Sorted again only when as much came as there is, so that each range is sorted a few times
        # in all.
        if self._num_waiting > max(1 << 16, len(self._settled.starts)):
            self._settle()

    def size_bytes(self) -> int:
        """Count the bytes that are in any of the ranges."""
        self._settle()
        return int((self._settled.stops - self._settled.starts).sum())

    def _settle(self) -> None:
        self._settled = Ranges.concat([self._settled, *self._waiting]).union()
        self._waiting.clear()
        self._num_waiting = 0


_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ChunkStorageStats:
    """Bytes of all chunks that branches and tags lead to, in any of their snapshots."""

    native_bytes: int
    """In the repository's chunk objects. A byte that several chunks share counts once."""
    virtual_bytes: int
    """In virtual objects. A byte that several chunks share counts once."""
    inlined_bytes: int
    """Inside manifests, decompressed; a chunk that is in several manifests counts in each."""
    unfinished_bytes: int = 0
    """In files of killed writers on a local disk, which garbage collection removes. No chunks."""

    def non_virtual_bytes(self) -> int:
        """Count what the repository itself stores."""
        return self.native_bytes + self.inlined_bytes

    def total_bytes(self) -> int:
        """Count all chunks."""
        return self.native_bytes + self.virtual_bytes + self.inlined_bytes


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The contribution of one manifest."""

    native: Ranges
    virtual: Ranges
    inlined_bytes: int


class ChunkTally:
    """The contributions of all manifests so far."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.native = ByteRanges()
        self.virtual = ByteRanges()
        self.inlined_bytes = 0

    def absorb(self, parts: list[ChunkPart]) -> None:
        """Add the contributions of manifests."""
        for part in parts:
            self.native.add(part.native)
            self.virtual.add(part.virtual)
            self.inlined_bytes += part.inlined_bytes

    def stats(self) -> ChunkStorageStats:
        """Return the sums."""
        return ChunkStorageStats(
            self.native.size_bytes(), self.virtual.size_bytes(), self.inlined_bytes
        )


async def measure_chunks(
    engine: Engine, limits: Limits, progress: ProgressCallback | None = None
) -> ChunkStorageStats:
    """Read every manifest that branches and tags lead to, and add up."""
    tally = ChunkTally()
    survey = Survey(engine.assets, contribution, tally.absorb, limits=limits, progress=progress)
    await survey.cover(await engine.history.reachable(survey.parent_of))
    unfinished = await count_unfinished(engine)
    return replace(tally.stats(), unfinished_bytes=unfinished.size_bytes)


def contribution(manifest: Manifest) -> ChunkPart:
    """Return the contribution of one manifest."""
    refs = [*manifest.arrays.values(), *manifest.strays.values()]
    return ChunkPart(
        Ranges.concat([_native(it) for it in refs]).union(),
        Ranges.concat([_virtual(it) for it in refs]).union(),
        sum(int(it.lengths[it.kinds == Kind.INLINE].sum()) for it in refs),
    )


def _native(refs: ChunkRefs) -> Ranges:
    rows = np.flatnonzero(refs.kinds == Kind.NATIVE)
    return Ranges.of(refs.chunk_ids[refs.objects[rows]], refs.offsets[rows], refs.lengths[rows])


def _virtual(refs: ChunkRefs) -> Ranges:
    rows = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
    indices, pool = refs.locations.distinct()
    # In place of names of any length: two locations with one digest of 128 bits do not happen.
    digests = b"".join(
        blake2b(it.encode(), digest_size=_DIGEST_BYTES).digest() for it in pool.strings
    )
    names: npt.NDArray[np.uint8] = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST_BYTES)
    return Ranges.of(names[indices[refs.objects[rows]]], refs.offsets[rows], refs.lengths[rows])
