"""Reading the whole file of a manifest: one that is seekable on two threads.

Each half of its pieces decodes without the other, so that two threads need half the time. That is
all that the index is used for: without one, or with one that does not fit, the frame is
decompressed as that of any other file.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import (
    HEADER_BYTES,
    Envelope,
    FileType,
    check_header,
    measure_blocks,
    unpack,
)
from icechunk_async.format.manifest.halves import both
from icechunk_async.format.manifest.seekable.index import SeekIndex, index_size
from icechunk_async.format.manifest.seekable.pieces import decompress_run

__all__ = ["unpack_manifest"]

_SHARED_BYTES: Final = 1 << 23
"""Payloads from this size are shared by two threads; of smaller ones there may be many at once.
It is several pieces, so that each thread has some."""


def unpack_manifest(data: bytes | memoryview) -> Envelope:
    """Check the header of a manifest and decompress it.

    Errors as :func:`~icechunk_async.format.envelope.unpack`.
    """
    view = memoryview(data)
    spec_version = check_header(view, FileType.MANIFEST)
    payload = _decompress_halves(view)
    if payload is None:
        return unpack(data, FileType.MANIFEST)
    return Envelope(spec_version, payload)


def _decompress_halves(view: memoryview) -> memoryview | None:
    """Decompress a large seekable manifest; None if it is another, or damaged."""
    if index_size(view) is None:
        return None
    try:
        index = SeekIndex.decode(view, len(view))
        if not _is_shared(index, view[HEADER_BYTES:]):
            return None
        payload = memoryview(np.empty(index.cuts[-1], np.uint8))
        middle = int(np.searchsorted(index.cuts, len(payload) // 2))
        both(
            lambda: _decompress(view, index, range(middle), payload),
            lambda: _decompress(view, index, range(middle, len(index)), payload),
        )
    except (FormatError, zstandard.ZstdError, MemoryError):
        return None
    return payload.toreadonly()


def _is_shared(index: SeekIndex, frame: memoryview) -> bool:
    """Return whether two threads take a half each, of a frame that is what the index says."""
    found = zstandard.get_frame_parameters(frame)
    begin, end = (index.places[[0, -1]] - HEADER_BYTES).tolist()
    return (
        found.content_size == int(index.cuts[-1]) >= _SHARED_BYTES
        and zstandard.frame_header_size(frame) == begin
        and measure_blocks(frame, "manifest")[0] == end
    )


def _decompress(view: memoryview, index: SeekIndex, pieces: range, payload: memoryview) -> None:
    """Decompress some pieces to where they belong, and compare each with its checksum.

    What one decodes to may depend on those before it, in files of others: then it shows here.
    """
    cuts: list[int] = index.cuts.tolist()
    start, stop = index.places[[pieces.start, pieces.stop]].tolist()
    part = payload[cuts[pieces.start] : cuts[pieces.stop]]
    decompress_run(view[start:stop], part, last=pieces.stop == len(index))
    for piece in pieces:
        if zlib.crc32(payload[cuts[piece] : cuts[piece + 1]]) != index.checksums[piece]:
            raise FormatError("A piece of a manifest is not what its index says.")
