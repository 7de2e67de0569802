"""How many bytes the chunks of a repository take."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.chunk_refs import Kind
from icechunk_async.repository.byte_ranges import ByteRanges, Ranges
from icechunk_async.repository.survey import Survey

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.chunk_refs import ChunkRefs
    from icechunk_async.format.manifest import Manifest
    from icechunk_async.repository.opened import Opened
    from icechunk_async.repository.progress import ProgressCallback
    from icechunk_async.repository.survey import Limits

__all__ = ["ChunkPart", "ChunkStorageStats", "ChunkTally", "contribution", "measure_chunks"]

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ChunkStorageStats:
    """Bytes of all chunks that branches and tags lead to, in any of their snapshots."""

    native_bytes: int
    """In the repository's chunk objects. A byte that several chunks share counts once."""
    virtual_bytes: int
    """In the objects of others. A byte that several chunks share counts once."""
    inlined_bytes: int
    """Inside manifests, decompressed; a chunk that is in several manifests counts in each."""

    def non_virtual_bytes(self) -> int:
        """Count what the repository itself stores."""
        return self.native_bytes + self.inlined_bytes

    def total_bytes(self) -> int:
        """Count all."""
        return self.native_bytes + self.virtual_bytes + self.inlined_bytes


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What one manifest contributes."""

    native: Ranges
    virtual: Ranges
    inlined_bytes: int


class ChunkTally:
    """What all manifests so far contribute."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.native = ByteRanges()
        self.virtual = ByteRanges()
        self.inlined_bytes = 0

    def absorb(self, parts: list[ChunkPart]) -> None:
        """Add what manifests contribute."""
        for part in parts:
            self.native.add(part.native)
            self.virtual.add(part.virtual)
            self.inlined_bytes += part.inlined_bytes

    def stats(self) -> ChunkStorageStats:
        """Answer the sums."""
        return ChunkStorageStats(
            self.native.size_bytes(), self.virtual.size_bytes(), self.inlined_bytes
        )


async def measure_chunks(
    opened: Opened, limits: Limits, progress: ProgressCallback | None = None
) -> ChunkStorageStats:
    """Read every manifest that branches and tags lead to, and add up."""
    tally = ChunkTally()
    survey = Survey(opened.assets, contribution, tally.absorb, limits=limits, progress=progress)
    await survey.cover(await opened.history.reachable(survey.parent_of))
    return tally.stats()


def contribution(manifest: Manifest) -> ChunkPart:
    """Answer what one manifest contributes."""
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
    digests = b"".join(
        blake2b(it.encode(), digest_size=_DIGEST_BYTES).digest() for it in pool.strings
    )
    names: npt.NDArray[np.uint8] = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST_BYTES)
    return Ranges.of(names[indices[refs.objects[rows]]], refs.offsets[rows], refs.lengths[rows])
