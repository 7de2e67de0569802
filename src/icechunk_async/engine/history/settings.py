"""Settings of a repository that only this library has.

They are an item of the repository's metadata: the format's configuration has no field for them, and
the official engine drops unknown fields when it writes the configuration. Format version 1 has no
such metadata, so there they are given at each opening.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.engine.files.packs import Packing
from icechunk_async.errors import IcechunkError
from icechunk_async.format.json.metadata import decode_value, encode_items

if TYPE_CHECKING:
    from icechunk_async.format.json.metadata import JSON, RawMetadata
    from icechunk_async.format.repo_info import RepoInfo

__all__ = ["METADATA_NAME", "OwnSettings", "stored_item"]

_log = logging.getLogger(__name__)

METADATA_NAME: Final = "icechunk-async"
"""The item of a repository's metadata for settings that only this library has."""
_PACKING: Final = "packing"
_SUMS: Final = "sums"


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Settings that were given, or are stored; None where one was not."""

    packing: Packing | None = None
    sums: bool | None = None
    """Whether checksums of chunks are kept."""

    def raw(self) -> RawMetadata:
        """Return the metadata of a new repository."""
        if self == OwnSettings():
            return ()
        return tuple(encode_items({METADATA_NAME: self.laid_over(None)}, 2))

    def laid_over(self, item: JSON) -> JSON:
        """Return the item of a repository's metadata with what was given here in it."""
        merged: dict[str, JSON] = {**item} if isinstance(item, dict) else {}
        if self.packing is not None:
            merged[_PACKING] = self.packing.to_json()
        if self.sums is not None:
            merged[_SUMS] = self.sums
        return merged

    @staticmethod
    def stored_in(info: RepoInfo) -> OwnSettings:
        """Return the settings that a repository stores, without unusable ones."""
        try:
            item = stored_item(info)
        except IcechunkError as error:
            _log.warning("the stored settings cannot be used, so none is: %s", error)
            return OwnSettings()
        if not isinstance(item, dict):
            return OwnSettings()
        sums = item.get(_SUMS)
        return OwnSettings(_packing(item.get(_PACKING)), sums if isinstance(sums, bool) else None)


def stored_item(info: RepoInfo) -> JSON:
    """Return the item of a repository's metadata that is this library's; None without one.

    Raises:
        FormatError: it is damaged.
    """
    raw = dict(info.raw_metadata).get(METADATA_NAME)
    return None if raw is None else decode_value(raw, 2)


def _packing(stored: Any) -> Packing | None:
    try:
        # A later version may add fields; they are ignored.
        return (
            None if stored is None else Packing(stored["target_bytes"], stored["max_chunk_bytes"])
        )
    except (IcechunkError, KeyError, TypeError) as error:
        _log.warning("the stored setting of packing cannot be used, so none is: %s", error)
        return None
