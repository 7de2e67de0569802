"""One interface to a manifest, however much of it is in memory.

A manifest is kept as its file, decompressed, in pieces, or decoded to columns. Callers look chunks
up in all of them in the same way. If the part in memory does not decide, they learn which bytes to
read, or that the manifest has to be expanded first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.reading import Manifest

__all__ = ["BYTES_PER_REF", "EXPAND", "Extent", "HeldManifest", "Undecided"]

BYTES_PER_REF: Final = 40
"""Roughly what a reference takes in a manifest that is not decoded."""

type Extent = tuple[int, int]
"""Bytes ``[start, stop)`` of a manifest's object."""


def _fill_nothing(extent: Extent, data: bytes | memoryview) -> None:
    raise AssertionError("no extent was asked for")


@dataclass(frozen=True, slots=True)
class Undecided:
    """The part of a manifest in memory does not decide whether a chunk exists."""

    extents: tuple[Extent, ...] = ()
    """Parts of the file that may decide it; none if the manifest has to be expanded instead."""
    fill: Callable[[Extent, bytes | memoryview], None] = _fill_nothing
    """Take the bytes of one of these extents. Raises FormatError if they are damaged; takes time
    for decompression, and may run on any thread."""


# Forms, from the least to the fullest: pieces (`SeekableManifest`) or the file (`ManifestFile`),
# decompressed (`PackedManifest`), columns (`Manifest`). That a chunk does not exist is concluded in
# the last form alone, or for an array that was decoded: only there the order was checked.
EXPAND: Final = Undecided()


class HeldManifest(Protocol):
    """A manifest of which some form is in memory. Usable from any thread."""

    @property
    def id(self) -> ManifestId:
        """The id that the manifest has, or that it was stored under if nothing is decoded."""
        ...

    @property
    def weight(self) -> int:
        """The decoded references that take as much memory; what a cache counts it as."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether nothing more of the file has to be read."""
        ...

    @property
    def columns(self) -> Manifest | None:
        """All references, if they are decoded already."""
        ...

    def lookup(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | Undecided | None:
        """Return the reference of a chunk, None if it does not exist, or what decides that.

        Raises:
            FormatError: what is in memory is damaged.

        Cost: microseconds; nothing is read.
        """
        ...

    def expand(self, node_id: NodeId | None = None) -> HeldManifest:
        """Return the manifest in the next fuller form, maybe this same object; it must be whole.

        Args:
            node_id: the array that `lookup` could not decide. The form decides all its chunks, or
                the one after it does. If not given, the last form has the `columns`.

        Raises:
            FormatError: the manifest is damaged.

        Cost: time in proportion to the manifest; belongs on a thread if it is large.
        """
        ...
