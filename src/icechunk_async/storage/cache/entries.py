"""Entries of the cache, in memory and on disk: how they are named, and whether they are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.storage.protocol import ByteRange, SuffixRange, slice_range

if TYPE_CHECKING:
    from icechunk_async.storage.protocol import RangeRequest, Retrieved

__all__ = ["fits", "part_name"]


def part_name(request: RangeRequest) -> str:
    """Return a short file name part for a range."""
    match request:
        case None | ByteRange(0, None):
            return "all"
        case ByteRange(start, stop):
            return f"{start}-{'' if stop is None else stop}"
        case SuffixRange(length):
            return f"-{length}"


def fits(request: RangeRequest, retrieved: Retrieved) -> bool:
    """Return whether the length of a reply fits the request and the size of the object."""
    start, stop = slice_range(request, retrieved.size_bytes)
    return len(retrieved.data) == stop - start
