"""Checksums: digests of the streams that a filter passed on unchanged."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor

if TYPE_CHECKING:
    from icechunk_async.tiledb.format.filters.pipeline import FilterCode

__all__ = ["verify_digests"]


def verify_digests(code: FilterCode, meta: memoryview, data: memoryview) -> memoryview:
    """Check the digests of what follows in the metadata, and of the data; return what follows.

    Raises:
        FormatError: a digest is another one, or the bytes are damaged.
    """
    name = code.name.lower()
    cursor = Cursor(meta, f"{name} metadata")
    parts, values = cursor.u32(), cursor.u32()
    size = hashlib.new(name, usedforsecurity=False).digest_size
    total = cursor.count(parts + values, 8 + size, "digests")
    records = [(cursor.u64(), bytes(cursor.take(size))) for _ in range(total)]
    rest = cursor.rest()
    for stream, entries in ((rest, records[:parts]), (data, records[parts:])):
        at = 0
        for length, digest in entries:
            part = stream[at : at + length]
            found = hashlib.new(name, part, usedforsecurity=False).digest()
            if len(part) != length or found != digest:
                raise FormatError(
                    f"A tile of a TileDB array is damaged: its {name} digest is another one."
                )
            at += length
        if at != len(stream):
            raise cursor.damaged(f"its digests cover {at} of {len(stream)} bytes")
    return rest
