"""Comparing chunks that are read with the checksums of when they were written."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import ChunkDamagedError
from icechunk_async.format.crc import crc_of, sum_of
from icechunk_async.format.layout import chunk_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.manifest.chunk import NativeChunk

__all__ = ["ReadChecks", "VerifiedReads", "damaged_chunk"]


@dataclass(frozen=True, slots=True)
class VerifiedReads:
    """Counts of chunks that were read with ``verify_reads``."""

    verified: int = 0
    """Chunks whose bytes had the sum that was recorded."""
    without_sum: int = 0
    """Whole chunks that no sum was recorded for; they were returned unverified."""
    partial: int = 0
    """Reads of a part of a chunk, as of one inner chunk of a shard. They are not verified."""


class ReadChecks:
    """Decides whether what was read is what was written, and counts. Usable from any thread."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._lock = threading.Lock()  # held over no await
        self._counts = VerifiedReads()

    @property
    def counts(self) -> VerifiedReads:
        """The counts so far."""
        return self._counts

    def passes(self, ref: NativeChunk, data: bytes | memoryview) -> bool:
        """Return whether the bytes of a chunk, or of a part of it, may be handed out."""
        verified = without_sum = partial = 0
        # A sum covers the whole chunk, and to fetch the rest only for it would undo reads of inner
        # chunks.
        if len(data) != ref.length:
            partial = 1
        elif not ref.sum:
            without_sum = 1
        # Outside of the lock: a large chunk takes milliseconds, and other threads read meanwhile.
        elif sum_of(data) == ref.sum:
            verified = 1
        else:
            return False
        with self._lock:
            old = self._counts
            self._counts = VerifiedReads(
                old.verified + verified, old.without_sum + without_sum, old.partial + partial
            )
        return True


def damaged_chunk(
    path: str, coords: Sequence[int], ref: NativeChunk, data: bytes | memoryview
) -> ChunkDamagedError:
    """Return the error for a chunk whose bytes are not those that were written."""
    key, stop = chunk_key(ref.chunk_id), ref.offset + ref.length
    expected, found = crc_of(ref.sum), crc_of(sum_of(data))
    return ChunkDamagedError(
        f"Chunk {tuple(coords)} of {path!r} is damaged: bytes {ref.offset} to {stop} of {key!r} "
        f"have the CRC-32C {found:08x}, and it was {expected:08x} when they were written. Restore "
        "the object from a copy of the repository, write the chunk anew, or read another snapshot.",
        path=path,
        coords=tuple(coords),
        object=key,
        offset=ref.offset,
        length=ref.length,
        expected=f"{expected:08x}",
        found=f"{found:08x}",
    )
