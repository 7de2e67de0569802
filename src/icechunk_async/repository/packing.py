"""When chunks share objects: the setting, and where a repository keeps it.

The configuration of the format has no place for it, and the official engine drops what it does
not know when it writes that; it keeps the repository's metadata, so the setting is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, cast

from icechunk_async.errors import IcechunkError, InvalidInputError
from icechunk_async.format.metadata import decode_value, encode_items

if TYPE_CHECKING:
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.repo_info import RawMetadata, RepoInfo

__all__ = [
    "METADATA_NAME",
    "Packing",
    "raw_packing",
    "stored_item",
    "stored_packing",
    "with_packing",
]

_log = logging.getLogger(__name__)

METADATA_NAME: Final = "icechunk-async"
"""The item of a repository's metadata that holds what only this library knows."""
_ITEM: Final = "packing"
_MIB: Final = 1 << 20
_MAX_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Packing:
    """Which chunks of a session share objects, and how large those become."""

    target_bytes: int = 8 * _MIB
    """An object is stored when it would become longer. A session has some of them in memory."""
    max_chunk_bytes: int = _MIB // 4
    """Chunks that are longer, once encoded, get an object each; 0: all do."""

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning."""
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
        """Answer the setting under which every chunk gets an object of its own."""
        return cls(max_chunk_bytes=0)

    @property
    def is_on(self) -> bool:
        """Whether any chunks share objects."""
        return self.max_chunk_bytes > 0

    def to_json(self) -> JSON:
        """Answer plain data."""
        return {"target_bytes": self.target_bytes, "max_chunk_bytes": self.max_chunk_bytes}


def raw_packing(packing: Packing) -> RawMetadata:
    """Answer the metadata of a new repository with a setting."""
    return tuple(encode_items({METADATA_NAME: with_packing(None, packing)}, 2))


def with_packing(item: JSON, packing: Packing) -> JSON:
    """Answer the item of a repository's metadata with another setting in it."""
    kept = item if isinstance(item, dict) else {}
    return {**kept, _ITEM: packing.to_json()}


def stored_item(info: RepoInfo) -> JSON:
    """Answer the item of a repository's metadata that is this library's; None without one.

    Raises:
        FormatError: it is damaged.
    """
    raw = dict(info.raw_metadata).get(METADATA_NAME)
    return None if raw is None else decode_value(raw, 2)


def stored_packing(info: RepoInfo) -> Packing | None:
    """Answer the setting that a repository keeps; None without one that can be used."""
    try:
        item = stored_item(info)
        found = item.get(_ITEM) if isinstance(item, dict) else None
        # A later version may say more; what is known here is what counts here.
        return None if found is None else _from_json(found)
    except (IcechunkError, KeyError, TypeError) as error:
        _log.warning("the stored setting of packing cannot be used, so none is: %s", error)
        return None


def _from_json(value: JSON) -> Packing:
    fields = cast("dict[str, int]", value)
    return Packing(fields["target_bytes"], fields["max_chunk_bytes"])
