"""How each service names one state of an object, and what may be sent back as a condition."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import OutcomeUnknownError, StorageError
from icechunk_async.storage import Version

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion

__all__ = ["Service", "condition", "is_possible", "version_of"]

_ETAG: Final = re.compile(r'(?:W/)?"[^"]*"|[A-Za-z0-9_.+/=-]+')
_GENERATION: Final = re.compile(r"[1-9][0-9]*")


class Service(StrEnum):
    """Whose protocol is spoken; the part of the URL scheme after ``obstore+``."""

    S3 = "s3"
    GS = "gs"
    AZ = "az"


def version_of(service: Service, answer: ObjectMeta | PutResult, key: str) -> Version:
    """Return the version in what the client answered: a generation on GCS, else an ETag.

    Raises:
        StorageError: it holds none, so that no write could be conditional on it.
    """
    token = answer["version"] if service is Service.GS else answer["e_tag"]
    if not token:
        missing = "generation" if service is Service.GS else "ETag"
        kind = StorageError if "path" in answer else OutcomeUnknownError
        raise kind(
            f"The service answered no {missing} for {key!r}, so that its state cannot be told from "
            "another. Let the server, and proxies before it, send that header.",
            key=key,
        )
    return Version(token)


def is_possible(service: Service, version: Version) -> bool:
    """Return whether the service could have answered this version.

    Others are never sent: ``*`` and generation 0 have meanings of their own there.
    """
    pattern = _GENERATION if service is Service.GS else _ETAG
    return pattern.fullmatch(version.token) is not None


def condition(service: Service, version: Version) -> UpdateVersion:
    """Return what the client sends as the condition of an update."""
    if service is Service.GS:
        return {"version": version.token}
    return {"e_tag": version.token}
