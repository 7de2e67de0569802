"""Byte shuffle and bit shuffle, undone by Blosc.

Blosc has fast routines for both, but offers them only as a part its own containers. A container
whose blocks are stored uncompressed is quickly put around a stream, and Blosc then unshuffles it.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from numcodecs import blosc

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.cursor import Cursor

__all__ = ["unshuffle_bits", "unshuffle_bytes"]

_HEAD: Final = struct.Struct("<BBBBIII")
_BLOSC_VERSION: Final = 2
_CODEC_VERSION: Final = 1
# Blosc would expect a block of shuffled bytes as one stream for each byte of a value.
_BYTES, _BITS, _DO_NOT_SPLIT = 0x01, 0x04, 0x10
_BIT_BLOCK_BYTES: Final = 8192
"""Bits are shuffled in blocks of this size, the default of the library bitshuffle."""


def unshuffle_bytes(
    meta: memoryview, data: memoryview, width: int
) -> tuple[memoryview, memoryview]:
    """Undo byte shuffle: the first bytes of all values, then the second ones, and so forth.

    Args:
        meta: metadata that begins with that of the filter.
        data: its output.
        width: bytes of a value.

    Returns:
        The rest of the metadata, and the data.

    Raises:
        FormatError: the bytes are damaged.
    """
    rest, parts = _parts(meta, data)
    found = [_undo_bytes(part, width) for part in parts]
    return rest, found[0] if len(found) == 1 else memoryview(b"".join(found))


def unshuffle_bits(meta: memoryview, data: memoryview, width: int) -> tuple[memoryview, memoryview]:
    """Undo bit shuffle: within blocks the lowest bits of all values, then the next, and so forth.

    Parts that are no whole number of values and of eight bytes are stored unchanged.

    Args, returns and raises: as `unshuffle_bytes`.
    """
    rest, parts = _parts(meta, data)
    found = [
        part if len(part) % width or len(part) % 8 else _undo_bits(part, width) for part in parts
    ]
    return rest, found[0] if len(found) == 1 else memoryview(b"".join(found))


def _parts(meta: memoryview, data: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the rest of the metadata, and the parts that the data consists of."""
    cursor = Cursor(meta, "shuffle metadata")
    number = cursor.u32()
    lengths = cursor.array("<u4", number).tolist()
    if sum(lengths) != len(data):
        raise FormatError(
            f"The shuffled parts of a tile of a TileDB array take {sum(lengths)} bytes, and "
            f"{len(data)} are there. The file is damaged."
        )
    found: list[memoryview] = []
    at = 0
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return cursor.rest(), found


def _undo_bytes(part: memoryview, width: int) -> memoryview:
    # The writer copied trailing bytes that are no value.
    whole = len(part) - len(part) % width
    if width == 1 or not whole:
        return part
    found = _unblosc(part[:whole], width, _BYTES, whole)
    return found if whole == len(part) else memoryview(b"".join((found, part[whole:])))


def _undo_bits(part: memoryview, width: int) -> memoryview:
    # The routine shuffles only multiples of eight values; the writer copied what is beyond.
    values = len(part) // width
    whole = (values - values % 8) * width
    if not whole:
        return part
    found = _unblosc(part[:whole], width, _BITS, _BIT_BLOCK_BYTES)
    return found if whole == len(part) else memoryview(b"".join((found, part[whole:])))


def _unblosc(part: memoryview, width: int, flag: int, block: int) -> memoryview:
    """Unshuffle a part as the single content of a container of Blosc, in blocks."""
    size = len(part)
    # Bytes are shuffled over a whole part, bits in blocks of 8192 bytes.
    block = min(block, size)
    whole, last = divmod(size, block)
    count = whole + bool(last)
    head = _HEAD.size + 4 * count
    container = np.empty(head + 4 * count + size, np.uint8)
    container[: _HEAD.size] = np.frombuffer(
        _HEAD.pack(
            _BLOSC_VERSION,
            _CODEC_VERSION,
            flag | _DO_NOT_SPLIT,
            width,
            size,
            block,
            len(container),
        ),
        np.uint8,
    )
    # A block whose stored size equals its own size is uncompressed: four bytes, then the bytes.
    starts = head + np.arange(count, dtype="<i4") * (block + 4)
    container[_HEAD.size : head] = starts.view(np.uint8)
    source = np.frombuffer(part, np.uint8)
    body = container[head : head + whole * (block + 4)].reshape(whole, block + 4)
    body[:, :4] = np.frombuffer(struct.pack("<i", block), np.uint8)
    body[:, 4:] = source[: whole * block].reshape(whole, block)
    if last:
        tail = container[head + whole * (block + 4) :]
        tail[:4] = np.frombuffer(struct.pack("<i", last), np.uint8)
        tail[4:] = source[whole * block :]
    found: Any = blosc.decompress(container)
    return memoryview(found).cast("B")
