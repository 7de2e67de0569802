"""Between ETags in headers and versions: a version holds the ETag without its quotes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import StorageError
from icechunk_async.storage import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async_s3.options import Place

__all__ = ["condition", "is_etag", "parse_etag", "version_of"]

_ETAG: Final = re.compile(r"[!#-)+-~]|[!#-~]{2,}")
"""What stands between the quotes; a lone ``*`` would mean any version."""


def parse_etag(value: str) -> str:
    """Return an ETag without quotes and without the mark of weakness that some proxies add."""
    return value.removeprefix("W/").strip('"')


def version_of(headers: Mapping[str, str], asked: str, place: Place) -> Version:
    """Return the version that an answer tells.

    Raises:
        StorageError: it tells none, so that nothing could be written safely.
    """
    etag = parse_etag(headers.get("etag", ""))
    if not etag:
        raise StorageError(
            f"{asked} {place.url!r}: the server's answer has no ETag, without which no version is "
            "known. Use a server that answers ETags.",
            url=place.url,
        )
    return Version(etag)


def is_etag(version: Version) -> bool:
    """Return whether a server may have answered this version."""
    return _ETAG.fullmatch(version.token) is not None


def condition(version: Version, *, quoted: bool) -> str:
    """Return a version as it stands in ``If-Match`` and ``If-None-Match``."""
    return f'"{version.token}"' if quoted else version.token
