"""Looking one reference up in a seekable manifest: the index first, then a few pieces.

Where an index is damaged the caller reads the whole file. Where an index is whole and a piece has
another checksum, the file is damaged, and that is said: the whole file has no checksum of its own,
and would give a wrong reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import FormatError
from icechunk_async.format.manifest_seek import AbsentPiecesError, SeekableManifest
from icechunk_async.format.seek_index import SeekIndex, index_size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from icechunk_async.format.chunk_refs import ChunkRef, Coordinates
    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest_seek import Extent

    type Read = Callable[[Extent], Awaitable[bytes | memoryview]]
    type Fill = Callable[[Extent], Awaitable[None]]

__all__ = ["MIN_SEEKABLE_FILE_BYTES", "find_by_pieces", "open_seekable"]

MIN_SEEKABLE_FILE_BYTES: Final = 1 << 20
"""Manifests from this size on storage are asked for an index; smaller ones are read whole."""
_MIN_TAIL_BYTES: Final = 1 << 14
_MAX_TAIL_BYTES: Final = 1 << 18
_TAIL_SHARE: Final = 512
"""An index takes less than one part of so many of its file, in most files."""
_MAX_ROUNDS: Final = 8


async def open_seekable(
    manifest_id: ManifestId, size_bytes: int, read: Read
) -> SeekableManifest | None:
    """Read the index of a manifest; None if it has none, or none that is of use.

    Args:
        manifest_id: which one.
        size_bytes: the size of its file.
        read: answers an extent of the file.

    Cost: one request; two where the index is unusually large.
    """
    guess = min(max(size_bytes // _TAIL_SHARE, _MIN_TAIL_BYTES), _MAX_TAIL_BYTES, size_bytes)
    tail = await read((size_bytes - guess, size_bytes))
    size = index_size(tail)
    if size is None or size > size_bytes:
        return None
    if size > len(tail):
        tail = await read((size_bytes - size, size_bytes))
    try:
        return SeekableManifest(manifest_id, SeekIndex.decode(tail, size_bytes))
    except (FormatError, MemoryError):  # nobody has as much as it says
        return None


async def find_by_pieces(
    manifest: SeekableManifest, node_id: NodeId, coords: Coordinates, fill: Fill, *, limit: int
) -> ChunkRef | None:
    """Find the reference of a chunk; None if it was not found, whether or not it is there.

    Args:
        manifest: where to look.
        node_id: the array.
        coords: the chunk.
        fill: reads an extent of the file and puts it in its place.
        limit: how many extents are read at a time.

    Raises:
        FormatError: a piece is damaged.

    Cancellation: what was read stays.

    Cost: one round of requests, rarely two or three, for the pieces that are not here yet: of the
    vector of references, of references and of locations.
    """
    wanted: Sequence[int] = manifest.likely(node_id, coords)
    for _ in range(_MAX_ROUNDS):
        await bounded_map(fill, manifest.extents(wanted), limit=limit)
        try:
            return manifest.find(node_id, coords)
        except AbsentPiecesError as absent:
            wanted = absent.pieces
        except FormatError:
            return None  # the whole file tells what is wrong
    return None
