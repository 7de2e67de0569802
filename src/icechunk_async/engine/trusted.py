"""The services whose promises were tried a short time ago, so that they are not tried again.

A trial of a storage takes some 200 requests, and what it shows is a property of the service and of
the bucket, not of one folder in it. So a success counts for other repositories of this process
there, for an hour: in the same bucket, with the same options and the same environment variables,
which may name another server. A failure is never kept, and neither is anything on disk.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from icechunk_async._runtime import clock

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["TRUSTED_SECONDS", "is_trusted", "service_of", "trust"]

TRUSTED_SECONDS: Final = 3600
_BUCKETS: Final = frozenset({"s3", "gs", "az"})
"""Schemes of which the part of a URL before the path names a bucket or container, and no more."""
_MOST: Final = 1000

# No lock: each access is one step of the interpreter, and threads that try at once find the same.
_tried: dict[tuple[bytes, bool], int] = {}
"""When the last trial ended that succeeded, by service and by whether only the promises were
needed that numbered references depend on."""


def service_of(storage: Storage) -> bytes | None:
    """Return a name of the service and the bucket; None if they cannot be told from others.

    Options may be secret, so only a digest is kept.
    """
    description = storage.description
    parts = urlsplit(description.url)
    options = sorted(description.options.items())
    # Folders of one disk can be on different file systems, and paths of one web server on different
    # services.
    if parts.scheme not in _BUCKETS:
        return None
    if any(not isinstance(value, str | int | float | None) for _, value in options):
        return None  # an object: what it will do is unknown
    told = repr((parts.scheme, parts.netloc, options, sorted(os.environ.items())))
    return hashlib.sha256(told.encode(errors="surrogateescape")).digest()


def is_trusted(service: bytes | None, *, numbered: bool) -> bool:
    """Return whether a trial of a service succeeded within the last hour."""
    if service is None:
        return False
    at = _tried.get((service, numbered))
    return at is not None and clock.elapsed_us() - at < TRUSTED_SECONDS * 1_000_000


def trust(service: bytes | None, *, numbered: bool) -> None:
    """Remember that a trial succeeded now."""
    if service is None:
        return
    # All at once: a trial too many costs 200 requests, and to find the oldest would cost code.
    if len(_tried) >= _MOST:
        _tried.clear()
    _tried[service, numbered] = clock.elapsed_us()
