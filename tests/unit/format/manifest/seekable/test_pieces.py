"""One standard frame whose pieces decode on their own; what cannot be shown is not claimed."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.manifest.seekable.pieces import (
    MAX_PIECE_BYTES,
    Pieces,
    compress_pieces,
    decompress_piece,
)

CUTS = [0, 100, 50_000, 50_001, 300_000, 300_000 + MAX_PIECE_BYTES, 1_400_000]


def _payload(size: int = CUTS[-1]) -> memoryview:
    """Return bytes that repeat from one piece to the next, so that it is tempting to refer back."""
    words = np.random.default_rng(1).integers(0, 256, 3000, np.uint8)
    payload = np.resize(words, size)
    return memoryview(payload)


@pytest.mark.parametrize("level", [-3, 1, 3, 10, 19])
def test_together_the_pieces_are_one_standard_frame(level: int) -> None:
    """It declares its size and holds nothing that a reader would have to know of."""
    payload = _payload()
    pieces = compress_pieces(payload, CUTS, level)
    assert pieces is not None
    assert len(pieces.blocks) == len(CUTS) - 1
    frame = b"".join(pieces.frame())
    assert zstandard.get_frame_parameters(frame).content_size == len(payload)
    whole = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    assert whole == payload.tobytes()
    assert pieces.checksums(payload) == [
        zlib.crc32(payload[start:stop]) for start, stop in pairwise(CUTS)
    ]


def test_each_piece_decodes_by_itself_and_is_checked() -> None:
    """Against its size and its checksum; any other bytes are refused."""
    payload = _payload()
    pieces = compress_pieces(payload, CUTS, 3)
    assert pieces is not None
    sums = pieces.checksums(payload)
    assert sums is not None
    decompressor = zstandard.ZstdDecompressor()
    for number, (start, stop) in enumerate(pairwise(CUTS)):
        last = number == len(sums) - 1

        def decode(size: int, checksum: int, blocks: bytes, *, last: bool = last) -> bytes:
            return decompress_piece(blocks, size, checksum, last=last, decompressor=decompressor)

        blocks = pieces.blocks[number]
        assert decode(stop - start, sums[number], blocks) == payload[start:stop].tobytes()
        refused: list[tuple[int, int, bytes]] = [
            (stop - start + 1, sums[number], blocks),
            (stop - start, sums[number] ^ 1, blocks),
            (stop - start, sums[number], blocks[:-1]),
            (stop - start, sums[number], blocks + b"\0"),
        ]
        for size, checksum, other in refused:
            with pytest.raises(FormatError):
                decode(size, checksum, other)
        with pytest.raises(FormatError):
            decode(stop - start, sums[number], blocks, last=not last)


def test_pieces_that_refer_back_are_found_out() -> None:
    """As a compressor without jobs makes them."""
    payload = _payload()
    stream = zstandard.ZstdCompressor().compressobj(size=len(payload))
    blocks: list[bytes] = []
    for start, stop in pairwise(CUTS):
        end = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        if stop == CUTS[-1]:
            end = zstandard.COMPRESSOBJ_FLUSH_FINISH
        blocks.append(stream.compress(payload[start:stop]) + stream.flush(end))
    size = zstandard.frame_header_size(blocks[0])
    pieces = Pieces(blocks[0][:size], [blocks[0][size:], *blocks[1:]], CUTS)
    assert b"".join(pieces.frame()) == b"".join(blocks)
    assert pieces.checksums(payload) is None


@pytest.mark.parametrize("wrong", [0, -1], ids=["first", "last"])
def test_a_piece_that_differs_from_the_payload_is_found_out(wrong: int) -> None:
    """Wherever it is, no checksums are returned, so no index is written."""
    payload = _payload()
    pieces = compress_pieces(payload, CUTS, 3)
    assert pieces is not None
    changed = bytearray(payload)
    changed[wrong] ^= 1
    assert pieces.checksums(memoryview(changed)) is None


def test_a_library_without_threads_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may be built without threads."""

    def refuse(*_: Any, **__: Any) -> None:
        raise zstandard.ZstdError("unsupported parameter")

    monkeypatch.setattr(zstandard, "ZstdCompressor", refuse)
    assert compress_pieces(_payload(), CUTS, 3) is None
