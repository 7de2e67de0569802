"""The options of `open_s3` and its URL, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import urlsplit

from icechunk_async.errors import InvalidInputError, InvalidObjectKeyError, InvalidURLError
from icechunk_async.storage import MAX_KEY_BYTES, check_key, check_user_agent
from icechunk_async_s3.signing import CHECKSUMS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async_s3.credentials import S3Credentials

__all__ = ["PRESETS", "Options", "Place", "make_options", "place_of"]

type Preset = Literal["r2", "tigris", "minio", "ceph"]

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "r2": {"region": "auto", "force_path_style": True},
    "tigris": {
        "endpoint_url": "https://t3.storage.dev",
        "region": "auto",
        # Without it a read may come from a replica that has not seen the last write.
        "extra_headers": {"x-tigris-consistent": "true"},
    },
    "minio": {"region": "us-east-1", "force_path_style": True},
    # Its gateway never matches a version that is sent in quotes.
    "ceph": {"region": "us-east-1", "force_path_style": True, "quote_etags": False},
}
"""The options of each kind of server; options given by the caller take precedence."""

_NEEDS_ENDPOINT: Final = {
    "r2": "https://<account>.r2.cloudflarestorage.com",
    "minio": "https://minio.example.com:9000",
    "ceph": "https://rgw.example.com",
}
# Wider than today's rules of AWS: old buckets have up to 255 characters and capitals, and other
# servers allow underscores.
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TAKEN: Final = frozenset(
    {
        *("host", "authorization", "range", "if-match", "if-none-match", "content-length"),
        "user-agent",  # a separate option, because it is not signed
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `open_s3`; its documentation explains them."""

    endpoint_url: str | None = None
    region: str | None = None
    force_path_style: bool = False
    allow_http: bool = False
    anonymous: bool = False
    requester_pays: bool = False
    checksum_algorithm: str | None = None
    storage_class: str | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    read_headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    write_headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    credentials: Callable[[], Awaitable[S3Credentials]] | None = field(default=None, repr=False)
    profile: str | None = None
    quote_etags: bool = True
    connect_timeout_seconds: float = 10.0
    network_stream_timeout_seconds: float = 60.0
    multipart_threshold_bytes: int = 64 * 1024 * 1024
    conditional_multipart: bool | None = None
    """None: only at AWS."""
    read_only: bool = False
    user_agent: str | None = None
    """None: the library's name, and the driver's in requests that it sends."""


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a storage: a bucket and the prefix of its keys."""

    url: str
    bucket: str
    prefix: str
    """Empty, or ending in ``/``."""
    is_signed: bool = True
    """Whether requests say who asks; anonymous ones do not."""

    def full(self, key: str) -> str:
        """Return the key in the bucket of a key in the storage.

        Raises:
            InvalidObjectKeyError: it is no key, or too long with the prefix.
        """
        full = self.prefix + check_key(key)
        # A character has four bytes at most, so that most keys are known to be short without
        # encoding them.
        if len(full) * 4 > MAX_KEY_BYTES and len(full.encode()) > MAX_KEY_BYTES:
            raise InvalidObjectKeyError(
                f"{key[:200]!r} cannot name an object: with the prefix {self.prefix!r} it is "
                f"longer than the {MAX_KEY_BYTES} bytes that S3 allows. Use shorter names.",
                key=key,
            )
        return full


def place_of(url: str) -> Place:
    """Take ``s3://bucket/prefix`` apart; the prefix is taken literally.

    Raises:
        InvalidURLError: it names no bucket, or a prefix that no key can have.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise InvalidURLError(
            "An S3 URL holds no credentials. Use 's3://bucket/prefix', and pass access_key_id= and "
            "secret_access_key=."
        )
    if not url.startswith("s3://") or not _BUCKET.fullmatch(bucket):
        raise InvalidURLError(f"{url!r} names no bucket. Use 's3://bucket/prefix'.", url=url)
    if bucket.endswith("--x-s3"):
        raise InvalidURLError(
            f"{url!r} is a directory bucket, which lists its objects in no order. Use a "
            "general-purpose bucket.",
            url=url,
        )
    prefix = prefix.rstrip("/")
    if prefix:
        try:
            check_key(prefix)
        except InvalidObjectKeyError as error:
            raise InvalidURLError(
                f"{url!r} cannot be opened: its prefix cannot begin a key. {error}", url=url
            ) from error
    return Place(url, bucket, f"{prefix}/" if prefix else "")


def make_options(preset: object, given: Mapping[str, Any]) -> Options:
    """Check options and fill in those of the preset.

    Args:
        preset: None, or one of `PRESETS`.
        given: those that the caller gave, by name; None stands for not given.

    Raises:
        InvalidInputError: an option has a value that it cannot have, or contradicts another.
    """
    if preset is not None and preset not in PRESETS:
        raise _bad("preset", preset, f"use one of {', '.join(sorted(PRESETS))}, or none")
    merged: dict[str, Any] = dict(PRESETS[str(preset)]) if preset is not None else {}
    # Headers of a preset and of the caller are joined; all other options replace those of the
    # preset.
    headers: Mapping[str, str] = merged.pop("extra_headers", {})
    merged.update({name: value for name, value in given.items() if value is not None})
    for item in fields(Options):
        if item.name in merged:
            _CHECKS[item.name](item.name, merged[item.name])
    own: Mapping[str, str] = merged.get("extra_headers", {})
    extra = {name.lower(): value for name, value in own.items()}
    merged["extra_headers"] = {**headers, **extra}
    for kind in ("read_headers", "write_headers"):
        some: Mapping[str, str] = merged.get(kind, {})
        merged[kind] = {name.lower(): value for name, value in some.items()}
    options = Options(**merged)
    if options.endpoint_url is None and preset in _NEEDS_ENDPOINT:
        raise InvalidInputError(
            f"preset={preset!r} needs endpoint_url=, such as {_NEEDS_ENDPOINT[str(preset)]!r}.",
            option="endpoint_url",
        )
    _check_endpoint(options)
    _check_credentials(options)
    return options


def _bad(name: str, value: object, advice: str) -> InvalidInputError:
    return InvalidInputError(f"{name}={value!r:.200} is not possible: {advice}.", option=name)


def _check_endpoint(options: Options) -> None:
    endpoint = options.endpoint_url
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018 - it is checked by being read
    except ValueError:
        known, parts = False, urlsplit("")
    if parts.username is not None or parts.password is not None:
        raise InvalidInputError(
            "endpoint_url holds a user name or a password. Pass access_key_id= and "
            "secret_access_key= instead.",
            option="endpoint_url",
        )
    if not known or parts.query or parts.fragment:
        raise _bad("endpoint_url", endpoint, "use a URL such as 'https://s3.example.com'")
    if parts.scheme == "http" and not options.allow_http:
        raise InvalidInputError(
            f"endpoint_url={endpoint!r} is not encrypted. Use https, or pass allow_http=True if "
            "the network between is trusted.",
            option="allow_http",
        )


def _check_credentials(options: Options) -> None:
    ways = {
        "anonymous": options.anonymous,
        "access_key_id": options.access_key_id is not None,
        "credentials": options.credentials is not None,
        "profile": options.profile is not None,
    }
    chosen = [name for name, wanted in ways.items() if wanted]
    if len(chosen) > 1:
        raise InvalidInputError(
            f"{' and '.join(chosen)} exclude each other: give one way to get credentials, or none "
            "for the usual chain.",
            option=chosen[1],
        )
    if (options.access_key_id is None) != (options.secret_access_key is None):
        raise InvalidInputError(
            "access_key_id and secret_access_key belong together; one of them is missing.",
            option="secret_access_key" if options.access_key_id else "access_key_id",
        )
    if options.session_token is not None and options.access_key_id is None:
        raise InvalidInputError(
            "session_token needs access_key_id and secret_access_key beside it.",
            option="session_token",
        )


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _bad(name, value, "use True or False")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise _bad(name, value, "use text without spaces")


def _agent(_: str, value: object) -> None:
    check_user_agent(value)


def _secret(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable():
        raise InvalidInputError(f"{name} is not printable text, or is empty.", option=name)


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise _bad(name, value, "use a number of seconds, 0 for no limit")


def _size(name: str, value: object) -> None:
    # S3 takes no smaller parts, but for the last one.
    if isinstance(value, bool) or not isinstance(value, int) or value < 5 * 1024 * 1024:
        raise _bad(name, value, "use a number of bytes, at least 5 MiB")


def _checksum(name: str, value: object) -> None:
    if value not in CHECKSUMS:
        raise _bad(name, value, f"use one of {', '.join(sorted(CHECKSUMS))}, or none")


def _headers(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{name} is no mapping of names to values.", option=name)
    headers = cast("Mapping[object, object]", value)
    for header, content in headers.items():
        if not isinstance(header, str) or not _HEADER.fullmatch(header):
            raise InvalidInputError(f"{name} has a name that no header can have.", option=name)
        if header.lower() in _TAKEN:
            raise InvalidInputError(
                f"{name} cannot hold {header!r}, which the library sets for each request.",
                option=name,
            )
        if not isinstance(content, str) or not content.isascii() or not content.isprintable():
            raise InvalidInputError(f"{name}[{header!r}] is no printable ASCII text.", option=name)


def _callback(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidInputError(
            f"{name} is no asynchronous function that answers S3Credentials.", option=name
        )


_CHECKS: Final[Mapping[str, Callable[[str, object], None]]] = {
    "endpoint_url": _text,
    "region": _text,
    "force_path_style": _flag,
    "allow_http": _flag,
    "anonymous": _flag,
    "requester_pays": _flag,
    "checksum_algorithm": _checksum,
    "storage_class": _text,
    "extra_headers": _headers,
    "read_headers": _headers,
    "write_headers": _headers,
    "access_key_id": _secret,
    "secret_access_key": _secret,
    "session_token": _secret,
    "credentials": _callback,
    "profile": _text,
    "quote_etags": _flag,
    "connect_timeout_seconds": _seconds,
    "network_stream_timeout_seconds": _seconds,
    "multipart_threshold_bytes": _size,
    "conditional_multipart": _flag,
    "read_only": _flag,
    "user_agent": _agent,
}
