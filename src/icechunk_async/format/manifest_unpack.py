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
    unpack,
)
from icechunk_async.format.halves import both
from icechunk_async.format.pieces import decompress_run
from icechunk_async.format.seek_index import SeekIndex, index_size

__all__ = ["unpack_manifest"]

_SHARED_BYTES: Final = 1 << 23
"""Payloads from this size are shared by two threads; of smaller ones there may be many at once."""


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
        frame = zstandard.get_frame_parameters(view[HEADER_BYTES:])
    except (FormatError, zstandard.ZstdError):
        return None
    size = int(index.cuts[-1])
    if size < _SHARED_BYTES or frame.content_size != size or frame.has_checksum:
        return None
    payload = memoryview(np.empty(size, np.uint8))
    middle = int(np.searchsorted(index.cuts, size // 2))
    cut, place = int(index.cuts[middle]), int(index.places[middle])
    start, stop = int(index.places[0]), int(index.places[-1])
    try:
        both(
            lambda: decompress_run(view[start:place], payload[:cut], last=False),
            lambda: decompress_run(view[place:stop], payload[cut:], last=True),
        )
    except FormatError:
        return None
    # The piece at the cut is what its writer made it, so the rest is what follows it in the frame.
    first = payload[cut : int(index.cuts[middle + 1])]
    if zlib.crc32(first) != int(index.checksums[middle]):
        return None
    return payload.toreadonly()
