"""The 39-byte header and the zstd frame around every metadata file (spec, "Binary files")."""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Final

import zstandard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._version import __version__
from icechunk_async.errors import FormatError, InvalidInputError, UnsupportedSpecVersionError

__all__ = [
    "HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "SPEC_VERSIONS",
    "Envelope",
    "FileType",
    "believable_bytes",
    "check_header",
    "decompress",
    "file_header",
    "measure_blocks",
    "pack",
    "unpack",
    "written_by",
]

HEADER_BYTES: Final = 39
MAX_PAYLOAD_BYTES: Final = (1 << 31) - 1
"""FlatBuffers address their contents with signed 32-bit offsets."""
SPEC_VERSIONS: Final = (1, 2)

_MAGIC: Final = b"ICE\xf0\x9f\xa7\x8aCHUNK"
# The writer's name and version. Any bytes are allowed; only `may_cut_seconds` decides by them.
_STAMP: Final = f"ica-{__version__}".encode()[:24].ljust(24)
_CUT: Final = b"~"
"""Ends our stamp on manifests that took over references from another writer's."""
_STAMP_AT: Final = slice(12, 36)
_ZSTD: Final = 1
# Genuine files come near: a block of 128 KiB that only repeats what came before takes some ten
# bytes, and nodes may have equal documents of any length.
_MAX_RATIO: Final = 1 << 14
"""Bytes of contents that are believed for each byte of a file."""
_FLOOR_BYTES: Final = 64 << 20
"""Believed of any file: contents of this size do no harm."""
_UNKNOWN_SIZE: Final = (1 << 64) - 1
_MAX_BLOCK_BYTES: Final = 1 << 17
"""The maximum size of one decompressed block of a zstd frame (RFC 8878, 3.1.1.2)."""
_CHECKSUM_BYTES: Final = 4
_RLE_BLOCK, _COMPRESSED_BLOCK, _RESERVED_BLOCK = 1, 2, 3
_SKIPPABLE: Final = range(0x184D2A50, 0x184D2A60)
"""Magic numbers of frames that decoders skip (RFC 8878, 3.1.2)."""
_SMALL_BYTES: Final = 1 << 17
"""Contents up to this size are compressed in a context that stays."""
_LARGE_BYTES: Final = 1 << 22
"""From this size on NumPy requests large pages."""


class _Contexts(threading.local):
    """Contexts of this thread: creating one takes longer than decompressing a small file."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """Return the context of a compression level."""
        found = self._compressors.get(level)
        if found is None:
            found = self._compressors[level] = zstandard.ZstdCompressor(level=level)
        return found


_contexts: Final = _Contexts()


class FileType(IntEnum):
    """The type of a file (header byte 37)."""

    SNAPSHOT = 1
    MANIFEST = 2
    TRANSACTION_LOG = 4
    REPO_INFO = 6


@dataclass(frozen=True, slots=True)
class Envelope:
    """The contents of a metadata file."""

    spec_version: int
    """The version that *this file* is written to; migrated repositories mix them."""
    payload: bytes | memoryview
    """One FlatBuffer."""


def pack(
    payload: bytes | memoryview, file_type: FileType, spec_version: int, *, level: int = 3
) -> bytes:
    """Wrap a FlatBuffer: header, then one zstd frame that declares its size.

    Args:
        payload: the FlatBuffer; at most 2 GiB.
        file_type: what it holds.
        spec_version: 1 or 2.
        level: zstd compression level.

    Raises:
        InvalidInputError: the payload is too large for the format, or so large and so uniform that
            no reader believes it.
    """
    header = file_header(len(payload), file_type, spec_version)
    if len(payload) <= _SMALL_BYTES:
        return header + _contexts.compressor(level).compress(payload)
    # A context grows with its largest input: drop it.
    frame = zstandard.ZstdCompressor(level=level).compress(payload)
    # Before anybody refers to it: what no reader believes must not become part of a commit.
    if len(payload) > believable_bytes(len(frame)):
        raise InvalidInputError(
            f"A {_name(file_type)} of {len(payload)} bytes compresses to {len(frame)}, which no "
            "reader believes. Shorten the metadata, which consist of almost one character alone."
        )
    return header + frame


def file_header(size_bytes: int, file_type: FileType, spec_version: int) -> bytes:
    """Return the header before the zstd frame.

    Args:
        size_bytes: the length of the FlatBuffer in the frame.
        file_type: what it holds.
        spec_version: 1 or 2.

    Raises:
        InvalidInputError: the FlatBuffer is too large for the format.
    """
    if size_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidInputError(
            f"A {_name(file_type)} of {size_bytes} bytes exceeds the format's limit of 2 GiB. "
            "Configure manifest splitting, so that each manifest holds fewer references."
        )
    return b"".join([_MAGIC, _STAMP, bytes([spec_version, file_type, _ZSTD])])


def unpack(data: bytes | memoryview, file_type: FileType) -> Envelope:
    """Check the header and decompress the contents, within bounds.

    Skippable frames after that of the contents are passed over.

    Raises:
        UnsupportedSpecVersionError: written to a newer version of the format.
        FormatError: not an Icechunk file, of another type, truncated, or it would decompress
            to more than a genuine file of its size does.
    """
    view = memoryview(data)
    spec_version = check_header(view, file_type)
    name = _name(file_type)
    return Envelope(spec_version, decompress(_contents(view[HEADER_BYTES:], name), name))


def check_header(view: memoryview, file_type: FileType) -> int:
    """Check the header before the zstd frame, and return the version of the file.

    Raises:
        UnsupportedSpecVersionError: written to a newer version of the format.
        FormatError: not an Icechunk file, of another type, or truncated.
    """
    name = _name(file_type)
    if len(view) < HEADER_BYTES:
        raise FormatError(
            f"A {name} file is truncated: {len(view)} bytes, and its header alone has "
            f"{HEADER_BYTES}."
        )
    if bytes(view[:12]) != _MAGIC:
        raise FormatError(f"Not an Icechunk {name} file: it begins with {bytes(view[:12])!r}.")
    spec_version, found_type, compression = view[36], view[37], view[38]
    if spec_version > SPEC_VERSIONS[-1]:
        raise UnsupportedSpecVersionError(
            f"A {name} file has format version {spec_version}; this library reads versions up to "
            f"{SPEC_VERSIONS[-1]}. Upgrade icechunk-async to open it.",
            found=spec_version,
            supported=SPEC_VERSIONS[-1],
        )
    if spec_version not in SPEC_VERSIONS:
        raise FormatError(f"A {name} file has format version {spec_version}, which never existed.")
    if found_type != file_type:
        raise FormatError(f"Expected a {name} file, found one of type {_name(found_type)}.")
    # The specification defines 0 for none, but the official reader takes nothing but zstd, so no
    # file has it.
    if compression != _ZSTD:
        raise FormatError(f"A {name} file has unknown compression {compression}; expected zstd.")
    return spec_version


def believable_bytes(packed_bytes: int) -> int:
    """Return the maximum plausible size of the contents of a file of this size."""
    return min(MAX_PAYLOAD_BYTES, max(_FLOOR_BYTES, _MAX_RATIO * packed_bytes))


def written_by(data: bytes | memoryview) -> str:
    """Return name and version of the program that wrote a metadata file, from its header."""
    return bytes(memoryview(data)[12:36]).decode(errors="replace").rstrip(" ")


def may_cut_seconds(data: bytes | memoryview) -> bool:
    """Return whether times in a manifest's file may have been rounded down to seconds.

    The official engine does that. We round up, and mark the files into which we copy its times.
    """
    stamp = bytes(memoryview(data)[_STAMP_AT])
    return not stamp.startswith(b"ica-") or stamp.endswith(_CUT)


def with_cut_seconds(data: bytes) -> bytes:
    """Return a manifest's file with the mark that `may_cut_seconds` looks for."""
    return data[: _STAMP_AT.stop - 1] + _CUT + data[_STAMP_AT.stop :]


def decompress(frame: memoryview, name: str) -> bytes | memoryview:
    """Decompress one zstd frame within bounds; messages call its file a ``name`` file.

    Raises:
        FormatError: it is damaged, or would decompress to more than is believed.
    """
    limit = believable_bytes(len(frame))
    try:
        # Looked at first, as the library allocates what a frame declares. Writers before 2.3.0 left
        # the size out.
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared == _UNKNOWN_SIZE:
            return _decompress_unsized(frame, name, limit)
        if declared == 0:
            raise FormatError(f"A {name} file holds nothing.")
        if declared > limit:
            raise FormatError(
                f"A {name} file of {len(frame)} bytes claims to hold {declared}; "
                f"at most {limit} are believed."
            )
        payload: bytes | memoryview
        if declared >= _LARGE_BYTES:
            payload = _decompress_large(frame, name, declared)
        else:
            payload = _contexts.decompressor.decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise FormatError(f"A {name} file cannot be decompressed: {error}.") from error
    if len(payload) != declared:
        raise FormatError(f"A {name} file declares {declared} bytes and holds {len(payload)}.")
    return payload


def _contents(frames: memoryview, name: str) -> memoryview:
    """Return the first frame, where nothing but skippable frames follows it; else all of them."""
    # Our seekable manifests have their index in such a frame. A second frame with contents is
    # refused when all of them are decompressed, as the official engine refuses it.
    try:
        end, _ = measure_blocks(frames, name)
    except (FormatError, zstandard.ZstdError):
        return frames  # decompressing them raises the error
    position = end
    while position < len(frames):
        magic = int.from_bytes(frames[position : position + 4], "little")
        size = int.from_bytes(frames[position + 4 : position + 8], "little")
        position += 8 + size
        if magic not in _SKIPPABLE or position > len(frames):
            return frames
    return frames[:end]


def _decompress_large(frame: memoryview, name: str, size_bytes: int) -> memoryview:
    """Decompress a frame that declares its size, to memory of NumPy.

    NumPy allocates it in pages of megabytes if the system has them; touching small pages for the
    first time would take more than a quarter of the time.
    """
    import numpy as np  # noqa: PLC0415 -- slow to import

    end, _ = measure_blocks(frame, name)
    if end != len(frame):
        raise FormatError(f"A {name} file has {len(frame) - end} bytes after its zstd frame.")
    payload = memoryview(np.empty(size_bytes, np.uint8))
    with zstandard.ZstdDecompressor().stream_reader(frame) as stream:
        found = stream.readinto(payload)  # pyright: ignore[reportUnknownMemberType]
    return payload[:found].toreadonly()


def _decompress_unsized(frame: memoryview, name: str, limit: int) -> bytes:
    """Decompress a frame that does not declare its size, as writers before 2.3.0 made them.

    The library reports neither the end of such a frame nor its size, so both are computed from its
    blocks.
    """
    end, room = measure_blocks(frame, name)
    if end != len(frame):
        raise FormatError(f"A {name} file has {len(frame) - end} bytes after its zstd frame.")
    decompressor = zstandard.ZstdDecompressor()
    return decompressor.decompress(frame, max_output_size=max(1, min(room, limit)))


def measure_blocks(frame: memoryview, name: str) -> tuple[int, int]:
    """Return where a frame ends, and how many bytes it decompresses to at most.

    Raises:
        FormatError: it is truncated.
        zstandard.ZstdError: it does not begin as a frame.
    """
    position, room = zstandard.frame_header_size(frame), 0
    last = False
    while not last:
        header = int.from_bytes(frame[position : position + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        position += 3 + (1 if kind == _RLE_BLOCK else size)
        if position > len(frame) or kind == _RESERVED_BLOCK:
            raise FormatError(f"A {name} file has a damaged or truncated zstd frame.")
        room += _MAX_BLOCK_BYTES if kind == _COMPRESSED_BLOCK else size
    checksum = zstandard.get_frame_parameters(frame).has_checksum
    return position + _CHECKSUM_BYTES * checksum, room


def _name(file_type: int) -> str:
    try:
        return FileType(file_type).name.lower().replace("_", " ")
    except ValueError:
        return str(file_type)
