"""Decide which containers a reader's grants open. Pure.

A grant is a URL prefix with the access to use there. It opens the container with that prefix, and
those below it. Both sides end in ``/`` before they are compared, so that ``s3://bucket`` opens
``s3://bucket/`` and ``s3://bucket/data/``, but never ``s3://bucket-of-somebody-else/``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, VirtualContainerError
from icechunk_async.format.config.secrets import veiled_url

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["Grant", "as_code", "settle_grants"]

_CREDENTIALS: Final = {
    "s3": "S3FromEnvironment()",
    "tigris": "S3FromEnvironment()",
    "gs": "GcsFromEnvironment()",
    "gcs": "GcsFromEnvironment()",
    "az": "AzureFromEnvironment()",
    "azure": "AzureFromEnvironment()",
    "abfs": "AzureFromEnvironment()",
    "http": "HttpAccess()",
    "https": "HttpAccess()",
    "file": "LocalFileSystemAccess()",
}


@dataclass(frozen=True, slots=True)
class Grant[A]:
    """The access to one container."""

    given: str
    """The prefix as the reader wrote it."""
    access: A
    below: str
    """The decoded path from the grant to the container; empty, or ending in ``/``."""


def settle_grants[A](prefixes: Collection[str], granted: Mapping[str, A]) -> dict[str, Grant[A]]:
    """Return the grant of each container by the container's prefix. The longest grant decides.

    Args:
        prefixes: the URL prefixes of the containers, each ending in ``/``.
        granted: access by URL prefix.

    Raises:
        VirtualContainerError: grants open no container; ``context["url_prefixes"]`` has all.
        InvalidInputError: two grants differ only in the slash at the end.
    """
    by_start: dict[str, str] = {}
    for given in granted:
        start = given if given.endswith("/") else f"{given}/"
        if start in by_start:
            raise InvalidInputError(
                f"Access was given twice for {veiled_url(start)!r}: with the slash at its end and "
                "without. Give it once.",
                url_prefix=veiled_url(given),
            )
        by_start[start] = given
    found: dict[str, Grant[A]] = {}
    for prefix in prefixes:
        nearest = max((it for it in by_start if _opens(it, prefix)), key=len, default=None)
        if nearest is not None:
            given = by_start[nearest]
            found[prefix] = Grant(given, granted[given], unquote(prefix[len(nearest) :]))
    idle = [given for start, given in by_start.items() if not _opens_any(start, prefixes)]
    if idle:
        known = ", ".join(map(veiled_url, sorted(prefixes))) or "none"
        raise VirtualContainerError(
            f"Access was given for {', '.join(repr(veiled_url(it)) for it in idle)}, but the "
            f"repository has no virtual chunk container there. Containers: {known}.",
            url_prefix=veiled_url(idle[0]),
            url_prefixes=tuple(map(veiled_url, idle)),
        )
    return found


def as_code(prefixes: Iterable[str]) -> str:
    """Return the argument that authorises containers, as Python code to copy."""
    entries = [
        f"{veiled_url(prefix)!r}: {_CREDENTIALS.get(urlsplit(prefix).scheme, None)}"
        for prefix in sorted(prefixes)
    ]
    return f"authorize_virtual_chunk_access={{{', '.join(entries)}}}"


def _opens_any(start: str, prefixes: Iterable[str]) -> bool:
    return any(_opens(start, prefix) for prefix in prefixes)


def _opens(start: str, prefix: str) -> bool:
    if start == prefix:
        return True
    if not prefix.startswith(start) or not _is_place(start):
        return False
    # The containers are the repository's words. A path that climbs (`file:///d/../etc/`) begins
    # like the grant and leads out of it, so it needs a separate grant.
    below = unquote(prefix[len(start) :]).replace("\\", "/")
    return not {".", ".."} & {unquote(it) for it in below.split("/")}


def _is_place(start: str) -> bool:
    """Return whether a prefix names a host, a bucket or a directory: ``s3://`` is everybody's."""
    try:
        url = urlsplit(start)
    except ValueError:
        return False
    return bool(url.path.strip("/") if url.scheme == "file" else url.netloc)
