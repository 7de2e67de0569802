"""Turn a container and the reader's credential into a backend's URL and options.

The container says where its store is and how to reach it, the reader supplies the identity. Options
that the reader gives take precedence.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urlsplit

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Credential
from icechunk_async.errors import InvalidInputError, VirtualAccessError
from icechunk_async.format.config import (
    AzureStore,
    GcsStore,
    HttpStore,
    LocalFileSystemStore,
    S3CompatibleStore,
    S3Store,
    TigrisStore,
)
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.format.json.values import is_object

if TYPE_CHECKING:
    from icechunk_async.format.config import S3Options, VirtualChunkContainer

__all__ = ["SourcePlace", "source_options", "source_place"]

_log: Final = logging.getLogger(__name__)

_BACKENDS: Final = {"tigris": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "https": "http"}
"""Schemes of containers that the backend of another scheme serves."""
_PROOFS: Final = {
    "s3": frozenset(
        {
            *("anonymous", "access_key_id", "secret_access_key", "session_token"),
            *("credentials", "profile"),
        }
    ),
    "gs": frozenset({"token"}),
    "az": frozenset({"account_key", "sas_token", "connection_string", "credential", "anonymous"}),
}
"""Options that are an identity: they come from the container or the reader, never from both."""
_S3_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})
_SECONDS: Final = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where the objects of a container are."""

    backend: str
    """URL scheme of the backend."""
    url: str
    """The place that the backend opens: a bucket, a server, or a directory of files."""
    base: str
    """Prepended to keys, which are relative to the container; empty, or ending in ``/``."""


def source_place(url_prefix: str) -> SourcePlace:
    """Return where the objects of a container are; its prefix is a percent-encoded URL."""
    parts = urlsplit(url_prefix)
    backend = _BACKENDS.get(parts.scheme, parts.scheme)
    if backend == "file":
        return SourcePlace(backend, url_prefix, "")
    # The whole bucket is opened, with whole keys: backends do not decode prefixes.
    scheme = parts.scheme if backend == "http" else backend
    return SourcePlace(backend, f"{scheme}://{parts.netloc}", unquote(parts.path[1:]))


async def source_options(
    container: VirtualChunkContainer,
    access: Credential | Mapping[str, object] | None,
    named: VirtualChunkContainer | None = None,
) -> dict[str, object]:
    """Return the options with which the backend opens a container.

    Args:
        container: as the repository declares it.
        access: given by the reader.
        named: the same container in a configuration of the reader's own, if there is one.

    Raises:
        VirtualAccessError: nothing was given for a store that needs a credential, or the container
            would send the reader's credentials to an endpoint that the reader did not name.
        InvalidInputError: the credential is for another kind of store.
        ExpiredCredentialsError: the credential ended.
    """
    place = source_place(container.url_prefix)
    stored = _stored(container)
    match access:
        case None:
            _check_endpoint(container, stored, {}, named)
            # The repository's own proofs win over anonymous access: its author may publish a key to
            # read with.
            return {**_by_default(container, place, stored), **stored}
        case Credential():
            if access.backend != place.backend:
                raise InvalidInputError(
                    f"A {type(access).__name__} was given for the virtual chunk container "
                    f"{veiled_url(container.url_prefix)!r}, whose store takes none of that kind.",
                    url_prefix=veiled_url(container.url_prefix),
                )
            given = dict(await access.storage_options())
        case _:
            given = dict(access)
    _check_endpoint(container, stored, given, named)
    return _laid_over(place, stored, given)


def _check_endpoint(
    container: VirtualChunkContainer,
    stored: Mapping[str, object],
    given: Mapping[str, object],
    named: VirtualChunkContainer | None,
) -> None:
    """Refuse an endpoint of S3 that gets the reader's credentials by the repository's word alone.

    A signed request carries the session token, and its signature holds for some minutes.
    """
    if source_place(container.url_prefix).backend != "s3":
        return  # of other stores no endpoint is followed, or the prefix names the host
    endpoint = stored.get("endpoint_url")
    proofs = given if _PROOFS["s3"] & given.keys() else stored
    if not isinstance(endpoint, str) or "endpoint_url" in given or proofs.get("anonymous") is True:
        return
    known = [os.environ.get(name) for name in _S3_ENDPOINTS]  # those go with the environment's keys
    if named is not None:
        known.append(cast("str | None", _stored(named).get("endpoint_url")))
    if endpoint in known:
        return
    prefix = veiled_url(container.url_prefix)
    host = veiled_url(endpoint)
    raise VirtualAccessError(
        f"The virtual chunk container {prefix!r} is at the endpoint {host!r}. Only the repository "
        "says so, so your credentials are not sent there. If you trust that endpoint with them, "
        f"name it: authorize_virtual_chunk_access={{{prefix!r}: S3FromEnvironment(endpoint_url="
        f"{host!r})}}, or as an option of the credential that you give; or open the repository "
        "with a config= that has this container. S3Anonymous() reads without credentials.",
        url_prefix=prefix,
        endpoint_url=host,
    )


def _by_default(
    container: VirtualChunkContainer, place: SourcePlace, stored: Mapping[str, object]
) -> dict[str, object]:
    """Return the identity to use if the reader gave none."""
    if place.backend == "gs":
        return {"token": "anonymous"}
    if place.backend == "az" and not _PROOFS["az"] & stored.keys():
        raise VirtualAccessError(
            f"The virtual chunk container {veiled_url(container.url_prefix)!r} needs a "
            "credential, and None was given. Give one of icechunk_async.credentials, such as "
            "AzureFromEnvironment() or AzureAnonymous().",
            url_prefix=veiled_url(container.url_prefix),
        )
    return {}


def _laid_over(
    place: SourcePlace, stored: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    proofs: frozenset[str] = _PROOFS.get(place.backend, frozenset())
    if proofs & given.keys():
        stored = {name: value for name, value in stored.items() if name not in proofs}
    # It names an account, which must not be mixed with the container's.
    if "connection_string" in given:
        stored = {name: value for name, value in stored.items() if name != "account_name"}
    merged = {**stored, **given}
    if place.backend != "http":
        return merged
    headers = {"headers": merged.pop("headers", None)}
    if "headers" in given:
        # Only the reader may decide to send the reader's headers over plain http.
        if "allow_http" not in given:
            merged.pop("allow_http", None)
        headers["headers"] = _joined(stored.get("headers"), given["headers"])
    return {**merged, **{name: value for name, value in headers.items() if value is not None}}


def _joined(stored: object, given: object) -> object:
    """Return headers of both; of equal names the reader's."""
    common = cast("Mapping[str, str]", stored or {})
    if not given:
        return common
    if not common:
        return given
    if isinstance(given, Mapping):
        return _join(common, cast("Mapping[str, str]", given))
    return _JoinedHeaders(common, cast("Callable[[], Awaitable[Mapping[str, str]]]", given))


def _join(common: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    taken = {name.lower() for name in own}
    return {**{name: it for name, it in common.items() if name.lower() not in taken}, **own}


@dataclass(frozen=True, slots=True)
class _JoinedHeaders:
    """Headers of a function, and those of the container."""

    common: Mapping[str, str]
    ask: Callable[[], Awaitable[Mapping[str, str]]]

    async def __call__(self) -> dict[str, str]:
        return _join(self.common, await self.ask())


def _stored(container: VirtualChunkContainer) -> dict[str, object]:
    """Return the options that the repository has for a container's store."""
    match container.store:
        case S3Store(options) | S3CompatibleStore(options):
            return _of_s3(options)
        case TigrisStore(options):
            return {**_of_s3(options), "preset": "tigris"}
        case GcsStore(options):
            return _of_gcs(options)
        case AzureStore(options):
            return _of_azure(options)
        case HttpStore(options, headers):
            return _of_http(options, headers, plain=container.url_prefix.startswith("http:"))
        case LocalFileSystemStore():
            return {"follow_links": True}  # archives have links to the current version of a file
        case _:
            return {}


def _of_s3(options: S3Options) -> dict[str, object]:
    """Return the options that differ from the defaults; reading sends no checksums."""
    values = {it.name: getattr(options, it.name) for it in fields(options)}
    del values["checksum_algorithm"]
    return {name: value for name, value in values.items() if value is not None and value != ""}


def _of_gcs(options: Mapping[str, str]) -> dict[str, object]:
    """Return the options of a key, or of a switch for anonymous access.

    Neither addresses nor files of credentials are followed: a repository's author must not be
    able to send the reader's token elsewhere.
    """
    known = _Known(options, "google_")
    found: dict[str, object] = {}
    if known.flag("skip_signature"):
        found["token"] = "anonymous"  # noqa: S105 - no secret
    key = known.take("service_account_key")
    if key is not None:
        found["token"] = _as_key(key)
    _timeouts(known, found, silence="read_timeout_seconds")
    known.finish()
    return found


def _as_key(text: str) -> dict[str, object]:
    """Return the key of a service account, which the repository holds as JSON.

    Raises:
        InvalidInputError: it is no JSON object.
    """
    try:
        key: object = json.loads(text)
    except (ValueError, RecursionError):
        key = None
    # gcsfs takes null, a name or the path of a file as well, and would use the reader's identity.
    if not is_object(key):
        raise InvalidInputError(
            "The service account key in the configuration of a virtual chunk container is no "
            "JSON object. Correct the configuration."
        )
    return key


def _of_azure(options: Mapping[str, str]) -> dict[str, object]:
    """Return the account, and the options of a key, a signature or anonymous access."""
    known = _Known(options, "azure_storage_", "azure_")
    found: dict[str, object] = {}
    account = known.take("account", "account_name")
    if account is not None:
        found["account_name"] = account
    key = known.take("account_key", "access_key", "master_key")
    signature = known.take("sas_token", "sas_key")
    if known.flag("skip_signature"):
        found["anonymous"] = True
    elif key is not None:
        found["account_key"] = key
    elif signature is not None:
        found["sas_token"] = signature
    _timeouts(known, found, silence="timeout_seconds")
    known.finish()
    return found


def _of_http(
    options: Mapping[str, str], headers: Mapping[str, str], *, plain: bool
) -> dict[str, object]:
    known = _Known(options)
    sent = dict(headers)
    agent = known.take("user_agent")
    if agent is not None:
        sent = _join({"User-Agent": agent}, sent)
    # References that need a guard against changes have one, which such a server cannot satisfy.
    found: dict[str, object] = {"unversioned": True}
    if sent:
        found["headers"] = sent
        # They are stored in the repository, so plain http reveals nothing new.
        found |= {"allow_http": True} if plain else {}
    known.take("allow_http", "http1_only", "http2_only")
    _timeouts(known, found, silence="timeout_seconds")
    known.finish()
    return found


class _Known:
    """String options of a store, taken one by one under any of their names."""

    def __init__(self, options: Mapping[str, str], *beginnings: str) -> None:
        self._left = {key.lower(): value for key, value in options.items()}
        self._beginnings = ("", *beginnings)

    def take(self, *names: str) -> str | None:
        found = None
        for name in (f"{start}{name}" for name in names for start in self._beginnings):
            value = self._left.pop(name, None)
            found = value if found is None else found
        return found

    def flag(self, name: str) -> bool:
        return (self.take(name) or "").lower() in _TRUE

    def finish(self) -> None:
        """Name what is left, which nothing here can act on."""
        if self._left:
            _log.warning(
                "Options of a virtual chunk container's store have no counterpart and are left "
                "out: %s",
                ", ".join(sorted(self._left)),
            )


def _timeouts(known: _Known, found: dict[str, object], *, silence: str) -> None:
    for name, option in (("timeout", silence), ("connect_timeout", "connect_timeout_seconds")):
        # The official engine's options are texts of Rust's `object_store`, such as "30 seconds".
        # What is not understood is left to the backend's default.
        match = _DURATION.fullmatch((known.take(name) or "").strip().lower())
        if match is not None and match[2] in _SECONDS:
            found[option] = float(match[1]) * _SECONDS[match[2]]
