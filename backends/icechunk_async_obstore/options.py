"""Options of obstore, the clients built from them, and versions as each service has them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from obstore.store import AzureStore, GCSStore, S3Store

from icechunk_async.errors import (
    InvalidInputError,
    InvalidURLError,
    OutcomeUnknownError,
    StorageError,
)
from icechunk_async.storage import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

    type Client = S3Store | GCSStore | AzureStore

__all__ = [
    "Options",
    "Place",
    "Service",
    "build_client",
    "condition",
    "is_possible",
    "read_url",
    "version_of",
]

# Some servers leave out the quotes.
_ETAG: Final = re.compile(r'(?:W/)?"[^"]*"|[A-Za-z0-9_.+/=-]+')
_GENERATION: Final = re.compile(r"[1-9][0-9]*")


class Service(StrEnum):
    """The service; the part of the URL scheme after ``obstore+``."""

    S3 = "s3"
    GS = "gs"
    AZ = "az"


def version_of(service: Service, answer: ObjectMeta | PutResult, key: str) -> Version:
    """Return the version in a reply of the client: a generation on GCS, else an ETag.

    Raises:
        StorageError: it is missing, so no write could be conditional on it.
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
    """Return whether the service can have issued this version.

    Others are never sent, because ``*`` and generation 0 have special meanings.
    """
    pattern = _GENERATION if service is Service.GS else _ETAG
    return pattern.fullmatch(version.token) is not None


def condition(service: Service, version: Version) -> UpdateVersion:
    """Return the client's argument for the condition of an update."""
    if service is Service.GS:
        return {"version": version.token}
    return {"e_tag": version.token}


_SCHEME: Final = "obstore+"
_NO_RETRIES: Final[RetryConfig] = {"max_retries": 0, "retry_timeout": timedelta(0)}
"""The client would repeat writes whose reply was lost, and then report a refusal."""
_ENDPOINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables of the environment from which the client takes an endpoint."""
_EVERYWHERE: Final = frozenset(
    {"endpoint_url", "allow_http", "anonymous", "timeout_seconds", "connect_timeout_seconds"}
)
_OF_SERVICE: Final[Mapping[Service, frozenset[str]]] = {
    Service.S3: frozenset(
        {"region", "force_path_style", "access_key_id", "secret_access_key", "session_token"}
    ),
    Service.GS: frozenset({"token"}),
    Service.AZ: frozenset({"account_name", "account_key", "sas_token", "token"}),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The location of the objects."""

    service: Service
    bucket: str
    root: str
    """The prefix of every key: empty, or ending with a slash."""


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """The caller's options; some are secret, so they are left out of the repr."""

    endpoint_url: str | None = None
    allow_http: bool = False
    anonymous: bool = False
    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 10.0
    region: str | None = None
    force_path_style: bool | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    token: str | None = None
    account_name: str | None = None
    account_key: str | None = None
    sas_token: str | None = None

    def given(self) -> dict[str, object]:
        """Return the options that differ from the defaults, as keyword arguments."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        return {item.name: value for item, value in values if value != item.default}

    def check(self, service: Service) -> None:
        """Validate the options for the service.

        Raises:
            InvalidInputError: it names the option, never its value.
        """
        known = _EVERYWHERE | _OF_SERVICE[service]
        for item in fields(self):
            if item.name not in known and getattr(self, item.name) is not None:
                raise InvalidInputError(
                    f"obstore+{service}:// storages have no option {item.name!r}. "
                    f"Options: {', '.join(sorted(known))}.",
                    option=item.name,
                )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise InvalidInputError(
                "Only one of 'access_key_id' and 'secret_access_key' was given. Give both, or "
                "neither to use those of the environment.",
                option="secret_access_key",
            )
        if self.endpoint_url is not None:
            self._check_endpoint(self.endpoint_url)
        else:
            # The client reads these variables by itself, without asking whether plain HTTP is
            # wanted.
            self._check_encrypted(*filter(None, map(os.environ.get, _ENDPOINTS[service])))
        for name in ("timeout_seconds", "connect_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(
                    f"The option {name!r} is {getattr(self, name)!r}. Give seconds, more than 0.",
                    option=name,
                )

    def _check_endpoint(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise InvalidInputError(
                "The option 'endpoint_url' is not an http:// or https:// URL of a host without "
                "user name. Give one such as 'https://storage.example.org'.",
                option="endpoint_url",
            )
        self._check_encrypted(url)

    def _check_encrypted(self, *urls: str) -> None:
        """Refuse an endpoint without encryption unless that was allowed, wherever it is named."""
        for url in urls:
            if url.lower().startswith("http://") and not self.allow_http:
                raise InvalidInputError(
                    f"The endpoint {urlsplit(url).hostname!r} is asked for over plain HTTP, which "
                    "anyone between can read and change. Use https://, or give 'allow_http=True'.",
                    option="allow_http",
                )


def read_url(url: str) -> Place:
    """Take ``obstore+s3://bucket/prefix`` apart; the prefix is taken literally.

    Raises:
        InvalidURLError: there is no bucket, or something that is no part of such a URL.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not scheme.startswith(_SCHEME) or scheme.removeprefix(_SCHEME) not in set(Service):
        raise InvalidURLError(
            "The URL is not one of this backend. Use obstore+s3://, obstore+gs:// or obstore+az://."
        )
    if not bucket or "@" in bucket or ":" in bucket:
        raise InvalidURLError(
            f"A {scheme}:// URL needs a bucket, without user, password or port. Use "
            f"'{scheme}://bucket/prefix', and options for the rest.",
        )
    return Place(Service(scheme.removeprefix(_SCHEME)), bucket, f"{prefix}/" if prefix else "")


def build_client(place: Place, options: Options) -> Client:
    """Create the client; reads certificates and the environment, so it blocks. Sends nothing.

    Raises:
        InvalidInputError: the client refuses the options.
    """
    http: ClientConfig = {
        "allow_http": options.allow_http,
        "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
        "read_timeout": timedelta(seconds=options.timeout_seconds),
        # A whole transfer may take long; silence within it may not.
        "timeout": timedelta(days=1),
    }
    common: dict[str, Any] = {"client_options": http, "retry_config": _NO_RETRIES}
    try:
        match place.service:
            case Service.S3:
                return S3Store(place.bucket, **_s3_options(place, options), **common)
            case Service.GS:
                return GCSStore(place.bucket, **_gs_options(options), **common)
            case Service.AZ:
                return AzureStore(place.bucket, **_az_options(options), **common)
    except Exception as error:  # noqa: BLE001 - many classes, and texts that may hold secrets
        kind = type(error).__name__
    raise InvalidInputError(
        f"The client for {place.bucket!r} could not be made from these options ({kind}). Check "
        "them, and the service's variables in the environment.",
        bucket=place.bucket,
    )


def _given(options: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _s3_options(place: Place, options: Options) -> dict[str, Any]:
    endpoint, path_style = options.endpoint_url, options.force_path_style
    if path_style is None:  # certificates cover one level of names below the service's
        path_style = endpoint is not None or "." in place.bucket
    if endpoint is not None and not path_style:  # the client uses such an endpoint unchanged
        parts = urlsplit(endpoint)
        endpoint = urlunsplit(parts._replace(netloc=f"{place.bucket}.{parts.netloc}"))
    return _given(
        {
            "endpoint": endpoint,
            "virtual_hosted_style_request": not path_style,
            "region": options.region,
            "access_key_id": options.access_key_id,
            "secret_access_key": options.secret_access_key,
            "session_token": options.session_token,
            "skip_signature": options.anonymous or None,
        }
    )


def _gs_options(options: Options) -> dict[str, Any]:
    return _given(
        {
            "base_url": options.endpoint_url,
            "bearer_token": options.token,
            "skip_signature": options.anonymous or None,
        }
    )


def _az_options(options: Options) -> dict[str, Any]:
    return _given(
        {
            "endpoint": options.endpoint_url,
            "account_name": options.account_name,
            "account_key": options.account_key,
            "sas_key": options.sas_token,
            "token": options.token,
            "skip_signature": options.anonymous or None,
        }
    )
