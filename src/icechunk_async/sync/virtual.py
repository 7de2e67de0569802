"""Virtual chunks: containers that they may live in, and references to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async.sync._display import public
from icechunk_async.sync.config._stores import VirtualChunkContainer

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["VirtualChunkContainer", "VirtualChunkSpec"]


@public("virtual")
@dataclass(frozen=True)
class VirtualChunkSpec:
    """One virtual chunk: its place in the array, and where its bytes are.

    Attributes:
        index: the chunk's coordinates in the grid of chunks.
        location: URL of the object, or ``vcc://container/path``; ``?``, ``#`` and ``%`` in the
            object's key are percent-encoded.
        offset: where the chunk begins in the object, in bytes.
        length: bytes of the chunk.
        etag_checksum: reading fails when the object's ETag is another.
        last_updated_at_checksum: reading fails when the object was modified later than this; an
            aware time.

    Raises:
        TypeError: the time has no zone.
    """

    index: list[int]
    location: str
    offset: int
    length: int
    etag_checksum: str | None = None
    last_updated_at_checksum: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse a time that could mean any time."""
        limit = self.last_updated_at_checksum
        if limit is not None and limit.tzinfo is None:
            raise TypeError(
                "VirtualChunkSpec(last_updated_at_checksum=...) has no time zone. Use an aware "
                "time, such as datetime.now(UTC)."
            )
