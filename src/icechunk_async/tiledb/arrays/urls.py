"""URLs that say that a TileDB array or group is there: `tiledb+s3://bucket/array`."""

from __future__ import annotations

import re
from typing import Final

from icechunk_async.errors import InvalidURLError

__all__ = ["is_tiledb_url", "storage_location"]

_URL: Final = re.compile(r"tiledb(\+[^:/]*)?:(.*)", re.IGNORECASE | re.DOTALL)
_INNER: Final = re.compile(r"\+([a-z][a-z0-9.-]*(\+[a-z0-9.-]+)*)", re.IGNORECASE)
_FORMS: Final = (
    "Give the URL of its storage, such as 'tiledb+s3://bucket/array' or "
    "'tiledb+file:///data/array', or a path as 'tiledb:///data/array'."
)


def is_tiledb_url(location: str) -> bool:
    """Return whether a location is a URL whose scheme is TileDB, alone or before another."""
    return _URL.fullmatch(location) is not None


def storage_location(location: str) -> str:
    """Return the location that the storage knows: without `tiledb+`, or of a file.

    Anything but a URL of TileDB is returned unchanged. Errors do not repeat what may be secret.

    Raises:
        InvalidURLError: it begins as a URL of TileDB, and is not one that names a storage.
    """
    found = _URL.fullmatch(location)
    if found is None:
        return location
    inner, rest = found[1], found[2]
    if not rest.startswith("//"):
        raise InvalidURLError(f"A URL of a TileDB array has no '//' after its scheme. {_FORMS}")
    if inner is None:
        if not rest.startswith("///") or rest == "///":
            raise InvalidURLError(
                "A URL 'tiledb://...' with a name behind it is one of TileDB's cloud service, "
                f"which is not served here. {_FORMS}"
            )
        return f"file:{rest}"
    scheme = _INNER.fullmatch(inner)
    if scheme is None or scheme[1].lower().partition("+")[0] == "tiledb":
        raise InvalidURLError(
            f"The scheme 'tiledb{inner[:40]}' of a TileDB array names no storage. {_FORMS}"
        )
    return f"{scheme[1]}:{rest}"
