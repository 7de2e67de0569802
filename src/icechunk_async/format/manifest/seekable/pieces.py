"""One zstd frame in pieces that decode on their own.

The library's threaded compressor begins each job without a window, tables or remembered offsets,
and a flush ends a job. So the blocks between two flushes become a complete frame once a header is
put before them, while all of them together are the one standard frame that every reader expects.
(Several frames in a row are not: the official engine takes the size of the first for the whole.)
"""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import zstandard

from icechunk_async.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_PIECE_BYTES",
    "Pieces",
    "compress_each",
    "compress_pieces",
    "decompress_piece",
]

MAX_PIECE_BYTES: Final = 1 << 20
"""The limit of a decompressed piece: one job of the compressor, so that it is not cut again."""

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ONE_SEGMENT: Final = b"\xa0"
"""Frame header descriptor: the size follows in four bytes, and is that of the window, too."""
_LAST_BLOCK: Final = b"\x01\x00\x00"
"""An empty block that ends a frame (RFC 8878, 3.1.1.2)."""
_WORKERS: Final = 2
"""One works at a time, since each job is waited for. With a single one the library would spin
between two jobs, until that one is ready again."""
_QUICK: Final = {"strategy": zstandard.STRATEGY_FAST, "hash_log": 13}
"""Records repeat the few before them: the quickest strategy, with a table that fits the processor's
cache, makes smaller files of them than the one of these levels, in three quarters of the time."""
_QUICK_LEVELS: Final = (3, 4)


class Pieces:
    """A frame made of pieces."""

    def __init__(self, header: bytes, blocks: list[bytes], cuts: Sequence[int]) -> None:
        """Hold the blocks of each piece; ``cuts`` are where pieces begin and the last one ends."""
        self.header = header
        self.blocks = blocks
        self.cuts = cuts

    def frame(self) -> list[bytes]:
        """Return the frame, to be joined."""
        return [self.header, *self.blocks]

    def checksums(self, payload: memoryview) -> list[int] | None:
        """Decode every piece by itself; return the checksum of each, None if one differs.

        zstd promises no version of its compressor what makes pieces independent, so it is checked.
        """
        sums: list[int] = []
        decompressor = zstandard.ZstdDecompressor()
        for number, blocks in enumerate(self.blocks):
            raw = payload[self.cuts[number] : self.cuts[number + 1]]
            last = number == len(self.blocks) - 1
            try:
                decoded = _decompress(blocks, len(raw), last=last, decompressor=decompressor)
            except FormatError:
                return None
            if decoded != raw.tobytes():  # by far faster than comparing with the view
                return None
            sums.append(zlib.crc32(decoded))
        return sums


def compress_pieces(payload: memoryview, cuts: Sequence[int], level: int) -> Pieces | None:
    """Compress a payload into one frame, cut at the given positions.

    Args:
        payload: what to compress.
        cuts: ascending, from 0 to the payload's length, at most `MAX_PIECE_BYTES` apart.
        level: zstd compression level.

    Returns:
        The pieces; None where the library has no threads, which are what makes them.
    """
    raws = [payload[start:stop] for start, stop in pairwise(cuts)]
    blocks = compress_each(raws, level, total=len(payload))
    if blocks is None:
        return None
    size = zstandard.frame_header_size(blocks[0])
    # The frame's header says the size of the whole, and belongs to no piece.
    header, blocks[0] = blocks[0][:size], blocks[0][size:]
    return Pieces(header, blocks, cuts)


def compress_each(
    raws: Sequence[bytes | memoryview], level: int, *, total: int = -1
) -> list[bytes] | None:
    """Compress each part of a frame by itself.

    Args:
        raws: the parts, beginning with the first of the frame.
        level: zstd compression level.
        total: bytes of the whole frame, if all of it is known.

    Returns:
        Their blocks, the first with a frame's header; None as `compress_pieces`.
    """
    try:
        parameters = zstandard.ZstdCompressionParameters.from_level(  # pyright: ignore[reportUnknownMemberType]
            level,
            source_size=max(total, 0),
            threads=_WORKERS,
            job_size=MAX_PIECE_BYTES,
            # Jobs then begin without the end of the one before as their window: 1 stands for no
            # overlap, 0 for the default of the level.
            overlap_log=1,
            write_content_size=True,
            **(_QUICK if level in _QUICK_LEVELS else {}),
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
    except zstandard.ZstdError:
        return None
    # One stream, since only the first job of it may write a frame's header.
    stream = compressor.compressobj(size=total)
    blocks: list[bytes] = []
    for number, raw in enumerate(raws):
        last = number == len(raws) - 1
        # A flush ends the job and its last block, so that the next part begins with a new block.
        end = zstandard.COMPRESSOBJ_FLUSH_FINISH if last else zstandard.COMPRESSOBJ_FLUSH_BLOCK
        blocks.append(stream.compress(raw) + stream.flush(end))
    return blocks


def decompress_piece(
    blocks: bytes | memoryview,
    size_bytes: int,
    checksum: int,
    *,
    last: bool,
    decompressor: zstandard.ZstdDecompressor,
) -> bytes:
    """Decode a piece by itself.

    Args:
        blocks: its blocks.
        size_bytes: what it decompresses to.
        checksum: the CRC-32 of that.
        last: it ends its frame.
        decompressor: a context, for one thread at a time.

    Raises:
        FormatError: it is damaged, or refers to what is outside of it.
    """
    raw = _decompress(blocks, size_bytes, last=last, decompressor=decompressor)
    if len(raw) != size_bytes or zlib.crc32(raw) != checksum:
        raise FormatError("A piece of a manifest is not what its index says.")
    return raw


def _decompress(
    blocks: bytes | memoryview,
    size_bytes: int,
    *,
    last: bool,
    decompressor: zstandard.ZstdDecompressor,
) -> bytes:
    """Decode a piece by itself, without comparing its size and checksum."""
    size = size_bytes.to_bytes(4, "little")
    # The library allocates the size that this header declares, and refuses other contents. The size
    # was checked against `MAX_PIECE_BYTES` with the index.
    frame = b"".join([_MAGIC, _ONE_SEGMENT, size, blocks, b"" if last else _LAST_BLOCK])
    try:
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"A piece of a manifest cannot be decompressed: {error}.") from error
