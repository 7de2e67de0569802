"""What a file system tells of an object, as the contract's words. Pure."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import StorageError
from icechunk_async.storage import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["modified", "size_of", "version"]

_IDENTITIES: Final = ("generation", "ETag", "etag", "e_tag", "sha", "md5Hash", "content_md5")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_SAY_NOTHING: Final = frozenset({"name", "size", "type", "Key", "Size", "atime", "accessed"})


def version(info: Mapping[str, Any], key: str) -> Version:
    """Return the state of an object: what the service calls it, or all that is told of it.

    Raises:
        StorageError: nothing is told by which a change could be seen.
    """
    for name in _IDENTITIES:
        if info.get(name):
            return Version(f"{name} {info[name]}")
    told = sorted((name, repr(value)) for name, value in info.items() if name not in _SAY_NOTHING)
    if not any(value != "None" for _, value in told):
        raise StorageError(
            f"The file system tells only the size of {key!r}, so that a change of it could not be "
            "seen. Use one that tells when objects were modified.",
            key=key,
        )
    told.append(("size", str(size_of(info, key))))
    return Version(hashlib.sha256(repr(told).encode()).hexdigest())


def size_of(info: Mapping[str, Any], key: str) -> int:
    """Return the size of an object in bytes.

    Raises:
        StorageError: the file system does not tell.
    """
    size = info.get("size")
    if isinstance(size, int) and size >= 0:
        return size
    raise StorageError(
        f"The file system does not tell the size of {key!r}. Use one that does.", key=key
    )


def modified(info: Mapping[str, Any]) -> datetime | None:
    """Return when an object was written, where the file system tells."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, int | float) and value > 0:
            return datetime.fromtimestamp(value, UTC)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return None
