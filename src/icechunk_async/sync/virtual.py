"""Virtual chunks: their containers, and references to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async.sync.official.containers import VirtualChunkContainer
from icechunk_async.sync.official.display import public

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["VirtualChunkContainer", "VirtualChunkSpec"]


@public("virtual")
@dataclass(frozen=True)
class VirtualChunkSpec:
    """One virtual chunk: its place in the array, and the place of its bytes.

    Attributes:
        index: the chunk's coordinates in the grid of chunks.
        location: URL of the object, or `vcc://container/path`; `?`, `#` and `%` in the object's
            key are percent-encoded.
        offset: the first byte of the chunk in the object.
        length: bytes of the chunk.
        etag_checksum: reading fails if the object has another ETag.
        last_updated_at_checksum: reading fails if the object was modified after this aware time.

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
        limit = self.last_updated_at_checksum
        if limit is not None and limit.tzinfo is None:
            raise TypeError(
                "VirtualChunkSpec(last_updated_at_checksum=...) has no time zone. Use an aware "
                "time, such as datetime.now(UTC)."
            )
