"""Filters of TileDB written from their description, to test the decoders against."""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.tiledb.format.filters.pipeline import Filter

    type Streams = tuple[bytes, bytes]
    """The metadata and the data of a chunk."""

__all__ = [
    "bit_shuffled",
    "byte_shuffled",
    "checked",
    "container",
    "delta",
    "dictionary",
    "double_delta",
    "generic",
    "gzipped",
    "positive_delta",
    "reduced",
    "run_lengths",
    "runs_of_text",
    "scaled",
    "xored",
]

u32 = struct.Struct("<I").pack
u64 = struct.Struct("<Q").pack


def container(chunks: Sequence[tuple[int, Streams]]) -> bytes:
    """Return a tile of chunks, each with its plain size."""
    parts = [u64(len(chunks))]
    for plain, (meta, data) in chunks:
        parts += [u32(plain), u32(len(data)), u32(len(meta)), meta, data]
    return b"".join(parts)


def generic(body: bytes, *, version: int = 22) -> bytes:
    """Return a generic tile, compressed as TileDB does it."""
    stored = container([(len(body), gzipped(b"", body))] if body else [])
    pipeline = struct.pack("<IIBIBi", 65536, 1, 1, 5, 1, 1)
    head = struct.pack("<IQQBQBI", version, len(stored), len(body), 4, 1, 0, len(pipeline))
    return head + pipeline + stored


def _compressed(meta: bytes, data: bytes, compress: Any) -> Streams:
    parts = [it for it in (meta,) if it]
    stored = [compress(it) for it in (*parts, data)]
    sizes = b"".join(u32(len(a)) + u32(len(b)) for a, b in zip((*parts, data), stored, strict=True))
    return u32(len(parts)) + u32(1) + sizes, b"".join(stored)


def gzipped(meta: bytes, data: bytes) -> Streams:
    """Apply gzip."""
    return _compressed(meta, data, lambda it: zlib.compress(it, 1))


def run_lengths(meta: bytes, data: bytes, width: int) -> Streams:
    """Apply run length encoding to cells of a width."""

    def compress(plain: bytes) -> bytes:
        cells = [plain[at : at + width] for at in range(0, len(plain), width)]
        found: list[list[Any]] = []
        for cell in cells:
            if found and found[-1][0] == cell and found[-1][1] < 65535:
                found[-1][1] += 1
            else:
                found.append([cell, 1])
        return b"".join(cell + struct.pack(">H", count) for cell, count in found)

    return _compressed(meta, data, compress)


def delta(meta: bytes, data: bytes, dtype: Any) -> Streams:
    """Apply delta."""

    def compress(plain: bytes) -> bytes:
        values = np.frombuffer(plain, np.dtype(dtype)).view(f"<u{np.dtype(dtype).itemsize}")
        steps = np.concatenate([values[:1], np.diff(values)]).astype(values.dtype)
        return u64(len(values)) + steps.tobytes()

    return _compressed(meta, data, compress)


def double_delta(meta: bytes, data: bytes, dtype: Any) -> Streams:
    """Apply double delta; the differences must fit."""

    def compress(plain: bytes) -> bytes:
        values = [int(it) for it in np.frombuffer(plain, dtype)]
        bits_of_type = np.dtype(dtype).itemsize * 8
        steps = [values[n] - 2 * values[n - 1] + values[n - 2] for n in range(2, len(values))]
        bits = max((abs(it).bit_length() for it in steps), default=0)
        head = bytes([bits]) + u64(len(values))
        if bits >= bits_of_type - 1:
            return head + plain
        text = "".join(
            f"{int(it < 0)}{abs(it):0{bits}b}" if bits else str(int(it < 0)) for it in steps
        )
        text += "0" * (-len(text) % 64)
        words = b"".join(u64(int(text[at : at + 64], 2)) for at in range(0, len(text), 64))
        return head + plain[: 2 * bits_of_type // 8] + words

    return _compressed(meta, data, compress)


def reduced(meta: bytes, data: bytes, dtype: Any, window: int) -> Streams:
    """Apply bit width reduction in windows of some bytes."""
    kind = np.dtype(dtype)
    heads: list[bytes] = []
    parts: list[bytes] = []
    for at in range(0, len(data), window):
        part = data[at : at + window]
        size = len(part)
        if size % kind.itemsize:
            heads.append(bytes(kind.itemsize) + bytes([kind.itemsize * 8]) + u32(size))
            parts.append(part)
            continue
        values = [int(it) for it in np.frombuffer(part, kind)]
        low = min(values)
        bits = next(
            (it for it in (8, 16, 32) if max(values) - low < 1 << (it - (kind.kind == "i"))),
            64,
        )
        heads.append(kind.type(low).tobytes() + bytes([min(bits, 8 * kind.itemsize)]) + u32(size))
        if bits >= 8 * kind.itemsize:
            parts.append(part)
        else:
            small = np.array([it - low for it in values], f"<{kind.kind}{bits // 8}")
            parts.append(small.tobytes())
    return u32(len(data)) + u32(len(heads)) + b"".join(heads) + meta, b"".join(parts)


def positive_delta(meta: bytes, data: bytes, dtype: Any, window: int) -> Streams:
    """Apply positive delta in windows of some bytes."""
    kind = np.dtype(dtype)
    heads: list[bytes] = []
    parts: list[bytes] = []
    for at in range(0, len(data), window):
        values = np.frombuffer(data[at : at + window], kind)
        heads.append(values[:1].tobytes() + u32(values.nbytes))
        parts.append(np.concatenate([[0], np.diff(values)]).astype(kind).tobytes())
    return u32(len(heads)) + b"".join(heads) + meta, b"".join(parts)


def xored(meta: bytes, data: bytes, width: int) -> Streams:
    """Apply xor of neighbours."""
    values = np.frombuffer(data, f"<u{width}")
    found = values.copy()
    found[1:] ^= values[:-1]
    return u32(1) + u32(len(data)) + meta, found.tobytes()


def scaled(meta: bytes, data: bytes, dtype: Any, it: Filter) -> Streams:
    """Apply float scale."""
    values = np.frombuffer(data, dtype).astype("f8")
    stored = np.round((values - it.offset) / it.scale).astype(f"<i{it.byte_width}").tobytes()
    return u32(1) + u32(len(stored)) + meta, stored


def byte_shuffled(meta: bytes, data: bytes, width: int) -> Streams:
    """Apply byte shuffle; trailing bytes that are no value are copied."""
    whole = len(data) - len(data) % width
    planes = np.frombuffer(data[:whole], np.uint8).reshape(-1, width).T.tobytes()
    return u32(1) + u32(len(data)) + meta, planes + data[whole:]


def bit_shuffled(meta: bytes, data: bytes, width: int) -> Streams:
    """Apply bit shuffle in blocks of 8192 bytes, to a head of whole eights of values."""
    whole = len(data) - len(data) % (8 * width)
    parts = [it for it in (data[:whole], data[whole:]) if it] or [b""]
    found: list[bytes] = []
    for part in parts:
        if len(part) % width or len(part) % 8:
            found.append(part)
            continue
        for at in range(0, len(part), 8192):
            block = part[at : at + 8192]
            count = len(block) // width // 8 * 8
            head, rest = block[: count * width], block[count * width :]
            bits = np.unpackbits(
                np.frombuffer(head, np.uint8).reshape(count, width), axis=1, bitorder="little"
            )
            found.append(np.packbits(bits.T, axis=1, bitorder="little").tobytes() + rest)
    sizes = b"".join(u32(len(it)) for it in parts)
    return u32(len(parts)) + sizes + meta, b"".join(found)


def checked(meta: bytes, data: bytes, name: str) -> Streams:
    """Add digests."""
    streams = [it for it in (meta,) if it]
    head = u32(len(streams)) + u32(1)
    for it in (*streams, data):
        head += u64(len(it)) + hashlib.new(name, it, usedforsecurity=False).digest()
    return head + meta, data


def _text_head(values: Sequence[bytes], stored: int) -> bytes:
    total = sum(map(len, values))
    return u32(0) + u32(1) + u32(total) + u32(stored) + u32(8 * len(values))


def runs_of_text(values: Sequence[bytes]) -> Streams:
    """Apply run lengths to strings."""
    found: list[list[Any]] = []
    for it in values:
        if found and found[-1][0] == it and found[-1][1] < 65535:
            found[-1][1] += 1
        else:
            found.append([it, 1])
    data = b"".join(struct.pack(">HB", count, len(it)) + it for it, count in found)
    return _text_head(values, len(data)) + bytes([2, 1]), data


def dictionary(values: Sequence[bytes]) -> Streams:
    """Apply a dictionary to strings."""
    known = {it: number for number, it in enumerate(dict.fromkeys(values))}
    entries = b"".join(bytes([len(it)]) + it for it in known)
    data = b"".join(struct.pack(">H", known[it]) for it in values)
    return _text_head(values, len(data)) + bytes([2, 1]) + u32(len(entries)) + entries, data
