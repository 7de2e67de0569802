"""The options of `open_gcs` and its URL, checked before anything is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from icechunk_async.errors import InvalidInputError, InvalidObjectKeyError, InvalidURLError
from icechunk_async.storage import MAX_KEY_BYTES, StorageDescription, check_key, check_user_agent

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["AccessToken", "Location", "Options", "Token", "describe", "parse_location"]

_SCHEME: Final = "gs://"
# Names with dots may have 222 characters, others 63; the service knows better than a pattern.
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")

CONNECT_TIMEOUT_SECONDS: Final = 10.0
READ_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A bearer token. Its text is left out of the repr."""

    token: str = field(repr=False)
    expires_at: datetime | None = None
    """When it expires (aware); None if unknown."""

    def __post_init__(self) -> None:
        """Validate that the time has a zone; without one it is ambiguous."""
        if self.expires_at is not None and self.expires_at.utcoffset() is None:
            raise InvalidInputError(
                "AccessToken(expires_at=...) needs an aware time, such as "
                "datetime.now(UTC) + timedelta(hours=1)."
            )


type Token = (
    str
    | os.PathLike[str]
    | Mapping[str, Any]
    | AccessToken
    | Callable[[], Awaitable[AccessToken]]
    | None
)
"""Ways to authenticate, see `icechunk_async_gcs.open_gcs`."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one storage; ``token`` is left out of the repr."""

    token: Token = field(default=None, repr=False)
    project: str | None = None
    endpoint_url: str | None = None
    connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS
    read_timeout_seconds: float = READ_TIMEOUT_SECONDS
    read_only: bool = False
    user_agent: str | None = None
    allow_http: bool = False

    def __post_init__(self) -> None:
        """Validate the options; messages name the option and never show a token."""
        _check_token(self.token)
        if self.project is not None and not _is_text(self.project):
            raise InvalidInputError(
                f"project={self.project!r} is no project. Give the id of the project that pays."
            )
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
            self.check_encrypted(self.endpoint_url)
        for name in ("connect_timeout_seconds", "read_timeout_seconds"):
            value: object = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise InvalidInputError(
                    f"{name}={value!r} is no number of seconds. Use one that is greater than 0."
                )
        for name in ("read_only", "allow_http"):
            flag: object = getattr(self, name)
            if not isinstance(flag, bool):
                raise InvalidInputError(f"{name}={flag!r} is neither True nor False.")
        check_user_agent(self.user_agent)

    def check_encrypted(self, endpoint: str) -> None:
        """Refuse a server without encryption unless that was allowed, wherever it is named.

        Raises:
            InvalidInputError: it is one.
        """
        if endpoint.lower().startswith("http://") and self.allow_http is not True:
            raise InvalidInputError(
                f"The server {urlsplit(endpoint).netloc!r} of Google Cloud Storage, which "
                "endpoint_url or STORAGE_EMULATOR_HOST names, is not encrypted. Use https, or pass "
                "allow_http=True if the network between is trusted.",
                option="allow_http",
            )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_token(token: object) -> None:
    if token is None or isinstance(token, AccessToken | Mapping) or callable(token):
        return
    if isinstance(token, os.PathLike) or (isinstance(token, str) and token):
        return
    raise InvalidInputError(
        f"token is a {type(token).__name__}, which is no way to authenticate. Use None (Google's "
        "default credentials), 'anonymous', the path of a key file, its content as a dictionary, "
        "an AccessToken, or an asynchronous function that answers one."
    )


def _check_endpoint(url: object) -> None:
    problem = None
    try:
        parts = urlsplit(str(url))
        port = parts.port
    except ValueError:
        problem = "its port is no number"
    else:
        if not isinstance(url, str) or parts.scheme not in ("http", "https") or not parts.hostname:
            problem = "it is not http(s)://host or http(s)://host:port"
        elif parts.username is not None or parts.password is not None:
            problem = "it holds a user name or a password"
        elif parts.query or parts.fragment or parts.path not in ("", "/") or port == 0:
            problem = "something follows the host and the port"
    if problem is not None:  # the URL itself is not shown: it may hold a password
        raise InvalidInputError(
            f"endpoint_url cannot be used: {problem}. Use one such as 'http://127.0.0.1:4443'."
        )


@dataclass(frozen=True, slots=True)
class Location:
    """A bucket and a prefix of its names, empty or ending with a slash."""

    bucket: str
    prefix: str

    def name(self, key: str) -> str:
        """Return the object name of a key.

        Raises:
            InvalidObjectKeyError: Cloud Storage takes no such name.
        """
        name = self.prefix + check_key(key)
        if "\r" in name or "\n" in name:
            problem = "Cloud Storage allows no line ends in names"
        elif len(name.encode()) > MAX_KEY_BYTES:
            problem = (
                f"with the prefix {self.prefix!r} it is longer than the {MAX_KEY_BYTES} bytes "
                "that Cloud Storage allows"
            )
        else:
            return name
        raise InvalidObjectKeyError(
            f"{key[:200]!r} cannot name an object: {problem}. Use another key.", key=key
        )


def parse_location(url: str) -> Location:
    """Read ``gs://bucket/prefix``; the prefix is taken literally.

    Raises:
        InvalidURLError: it names no bucket, or the prefix cannot be one.
    """
    bucket, _, prefix = url.removeprefix(_SCHEME).partition("/")
    prefix = prefix.removesuffix("/")
    if not url.startswith(_SCHEME) or not _BUCKET.fullmatch(bucket):
        shown = "gs://..." if "@" in bucket else repr(url)  # the text before an @ is a secret
        raise InvalidURLError(
            f"{shown} names no bucket. Use 'gs://bucket' or 'gs://bucket/prefix'; names of "
            "buckets have lower-case letters, digits, '-', '_' and '.'."
        )
    if "?" in prefix or "#" in prefix:
        raise InvalidURLError(
            f"gs://{bucket}/... has a '?' or a '#'. Give options as keyword arguments, and use a "
            "prefix without these characters."
        )
    if not prefix:
        return Location(bucket, "")
    try:
        location = Location(bucket, check_key(prefix) + "/")
        location.name("x")
    except InvalidObjectKeyError as error:
        raise InvalidURLError(
            f"{url[:200]!r} has a prefix that cannot be one: {error.message}", url=url[:200]
        ) from error
    return location


def describe(url: str, options: Options) -> StorageDescription:
    """Return the URL and the options that differ from their defaults."""
    default = Options()
    names = (
        *("token", "project", "endpoint_url"),
        *("connect_timeout_seconds", "read_timeout_seconds", "read_only", "user_agent"),
        "allow_http",
    )
    given = {name: getattr(options, name) for name in names}
    return StorageDescription(
        url, {name: value for name, value in given.items() if value != getattr(default, name)}
    )
