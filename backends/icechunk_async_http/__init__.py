"""Read-only storage on web servers: ``https://host/path`` and ``http://host/path``."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from icechunk_async.errors import InvalidInputError, InvalidURLError
from icechunk_async.storage import StorageDescription, check_user_agent
from icechunk_async_http.storage import HTTPStorage
from icechunk_async_http.transport import Sessions, Transport, check_headers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

__all__ = ["HTTPStorage", "open_http"]

_TIMEOUT_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 10.0
_MAX_UNRANGED_BYTES: Final = 64 << 20


@asynccontextmanager
async def open_http(
    url: str,
    *,
    headers: Mapping[str, str] | Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    allow_http: bool = False,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    connect_timeout_seconds: float = _CONNECT_SECONDS,
    max_unranged_bytes: int = _MAX_UNRANGED_BYTES,
    unversioned: bool = False,
    user_agent: str | None = None,
) -> AsyncGenerator[HTTPStorage]:
    """Open a URL and everything below it for reading. Nothing is sent before the first operation.

    Args:
        url: where the objects are; without user, password, query and fragment.
        headers: sent with each request, such as credentials; or an asynchronous callable that
            returns them, called before each request. Redirects to another server are followed
            without them.
        allow_http: let ``headers`` be sent over plain ``http://``, where they can be read by
            anyone between.
        timeout_seconds: how long the server may be silent.
        connect_timeout_seconds: how long making a connection may take.
        max_unranged_bytes: how much may be fetched for a part of an object from a server that
            ignores ranges and sends all of it. Reading past this is refused.
        unversioned: also read from a server that sends neither ETag nor Last-Modified, although
            changes of an object cannot be detected then. Not for repositories.
        user_agent: the header ``User-Agent`` of each request, unless ``headers`` has one; also
            over plain HTTP.

    Raises:
        InvalidURLError: the URL has no host, or parts that it may not have.
        InvalidInputError: a header cannot be sent.
    """
    base = _read_url(url)
    if headers is not None and base.scheme == "http" and not allow_http:
        raise InvalidInputError(
            f"Headers for {base.host!r} would be sent over plain HTTP, where anyone between can "
            "read them. Use https://, or give 'allow_http=True'.",
            option="allow_http",
        )
    given: dict[str, object] = {}
    for name, seconds, usual in (
        ("timeout_seconds", timeout_seconds, _TIMEOUT_SECONDS),
        ("connect_timeout_seconds", connect_timeout_seconds, _CONNECT_SECONDS),
    ):
        if not seconds > 0:
            raise InvalidInputError(
                f"The option {name!r} is {seconds!r}. Give seconds, more than 0.", option=name
            )
        if seconds != usual:
            given[name] = seconds
    if isinstance(max_unranged_bytes, bool) or not max_unranged_bytes >= 0:
        raise InvalidInputError(
            f"The option 'max_unranged_bytes' is {max_unranged_bytes!r}. Give a number of bytes.",
            option="max_unranged_bytes",
        )
    if max_unranged_bytes != _MAX_UNRANGED_BYTES:
        given["max_unranged_bytes"] = max_unranged_bytes
    if unversioned:
        given["unversioned"] = True
    if headers is not None:
        headers = headers if callable(headers) else check_headers(headers)
        given["headers"] = headers
    if allow_http:
        given["allow_http"] = True
    given |= _named(user_agent)
    # No limit for a whole transfer, which may be long; silence within it has one.
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=connect_timeout_seconds, sock_read=timeout_seconds
    )
    sessions = Sessions(repr(url), timeout, user_agent)
    transport = Transport(sessions, headers or {})
    description = StorageDescription(url, given)
    try:
        yield HTTPStorage(
            str(base).rstrip("/"),
            sessions,
            transport,
            description,
            max_unranged_bytes=max_unranged_bytes,
            unversioned=unversioned,
        )
    finally:
        await sessions.close()


def _named(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    check_user_agent(name)
    return {"user_agent": name}


def _read_url(url: str) -> URL:
    problem = "is not an http:// or https:// URL of a host"
    try:
        base = URL(url)
    except ValueError:
        base = URL()
    if base.scheme in ("http", "https") and base.host:
        if (
            base.user is None
            and base.password is None
            and not base.query_string
            and (not base.fragment)
        ):
            return base
        # The URL is not repeated: what it may not have may be secret.
        problem = "has a user, password, query or fragment, which may be secret and has no place"
    raise InvalidURLError(
        f"The URL of a web server {problem}. Use one such as 'https://host/path', and 'headers' "
        "for credentials."
    )
