"""Zarr's byte requests as the engine's ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from icechunk_async.storage import ByteRange, SuffixRange

if TYPE_CHECKING:
    from icechunk_async.storage import RangeRequest

__all__ = ["range_of"]


def range_of(request: ByteRequest | None) -> RangeRequest:
    """Answer the range that a byte request means.

    Raises:
        ValueError: it is none of Zarr's.
    """
    match request:
        case None:
            return None
        case RangeByteRequest(start, end):
            return ByteRange(start, max(start, end))
        case OffsetByteRequest(offset):
            return ByteRange(offset)
        case SuffixByteRequest(suffix):
            return SuffixRange(suffix)
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}.")
