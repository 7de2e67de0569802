"""Replies: status, headers and body. Pure.

A reply to a stranger tells what the stranger can do, and nothing of where the repository is: the
log has the rest.
"""

from __future__ import annotations

from dataclasses import field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    StorageUnavailableError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.gateway.requests import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FOREVER", "Cors", "Reply", "joined", "sentence_reply", "status_of"]

FOREVER: Final = "max-age=31536000, immutable"
"""Directives for what never changes."""
_ALLOWED_HEADERS: Final = "Authorization, Range, If-Range, If-None-Match, Cache-Control, Pragma"
_EXPOSED: Final = "ETag, Content-Range, Content-Length, Accept-Ranges, Icechunk-Snapshot"


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply without its body, unless that is at hand."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    size_bytes: int = 0
    """Of the body."""
    body: bytes = b""


def sentence_reply(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a reply that is one sentence of plain text, which no cache keeps."""
    body = f"{sentence}\n".encode()
    common = {
        "Content-Type": "text/plain; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return Reply(status, common | dict(headers or {}), len(body), body)


def joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of both; what replies vary by adds up."""
    vary = ", ".join(it["Vary"] for it in (first, second) if "Vary" in it)
    return {**first, **second, **({"Vary": vary} if vary else {})}


def status_of(error: IcechunkError) -> tuple[int, str]:
    """Return the status and the sentence that a client gets for an error of the engine."""
    match error:
        case VirtualSourceChangedError():
            return 502, "The source of this virtual chunk changed since it was referenced."
        case VirtualAccessError() | VirtualContainerError():
            return 502, "The gateway is not authorised to read the source of this virtual chunk."
        case StorageUnavailableError():
            return 503, "The storage of the repository does not reply at present; try again later."
        case FormatError():
            return 502, "The repository is damaged here; its operator finds the reason in the log."
        case _:
            return (
                502,
                "The storage of the repository refused; its operator finds the reason in the log.",
            )


class Cors:
    """Lets pages of other origins read, as browsers ask."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Allow ``origins``; ``*`` allows all."""
        self._all = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of a reply to a page of ``origin``."""
        if self._all:
            allowed = {"Access-Control-Allow-Origin": "*"}
        elif origin in self._origins:
            allowed = {"Access-Control-Allow-Origin": str(origin), "Vary": "Origin"}
        else:
            return {"Vary": "Origin"} if self._origins else {}
        return {**allowed, "Access-Control-Expose-Headers": _EXPOSED}

    def preflight(self, origin: str | None) -> Reply:
        """Return the reply to ``OPTIONS``."""
        headers = {"Allow": ", ".join(METHODS), **self.headers(origin)}
        if "Access-Control-Allow-Origin" in headers:
            headers |= {
                "Access-Control-Allow-Methods": ", ".join(METHODS),
                "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
                "Access-Control-Max-Age": "86400",
            }
        return Reply(HTTPStatus.NO_CONTENT, headers)
