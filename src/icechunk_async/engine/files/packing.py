"""The setting that chunks share objects; `packs` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from icechunk_async.format.json.metadata import JSON

__all__ = ["Packing"]

_MIB: Final = 1 << 20
# A session may hold several such objects in memory at a time.
_MAX_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Packing:
    """Which chunks of a session share objects, and how large those become."""

    # From 4 to 16 MiB it makes no difference but memory (docs/decisions/0013).
    target_bytes: int = 8 * _MIB
    """An object is stored before it would become longer. A session holds a few in memory."""
    # At ten writers, which Zarr has by default, packing pays up to about this size.
    max_chunk_bytes: int = _MIB // 4
    """Longer chunks, once encoded, get an object each; 0: all do."""

    def __post_init__(self) -> None:
        """Raise InvalidInputError for meaningless numbers."""
        for name in ("target_bytes", "max_chunk_bytes"):
            if type(getattr(self, name)) is not int:
                raise InvalidInputError(f"Packing.{name} is a number of bytes, an integer.")
        if not (1 <= self.target_bytes <= _MAX_BYTES):
            raise InvalidInputError(
                f"Packing.target_bytes is {self.target_bytes}; allowed: from 1 to {_MAX_BYTES}."
            )
        if not (0 <= self.max_chunk_bytes <= self.target_bytes):
            raise InvalidInputError(
                f"Packing.max_chunk_bytes is {self.max_chunk_bytes}; allowed: from 0, which packs "
                f"nothing, to target_bytes, which is {self.target_bytes}."
            )

    @classmethod
    def off(cls) -> Self:
        """Return the setting that stores every chunk in a separate object."""
        return cls(max_chunk_bytes=0)

    @property
    def is_on(self) -> bool:
        """Whether any chunks share objects."""
        return self.max_chunk_bytes > 0

    def to_json(self) -> JSON:
        """Return plain data."""
        return {"target_bytes": self.target_bytes, "max_chunk_bytes": self.max_chunk_bytes}
