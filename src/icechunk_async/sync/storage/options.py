"""The official options of each kind of store as options of this library's backends."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from icechunk_async.sync.errors import InvalidInputError, StorageError
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.sections import ChecksumAlgorithm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.sync.official.sections import S3Options

__all__ = [
    "azure_options",
    "check_web_url",
    "gcs_options",
    "s3_options",
    "s3_rows",
    "sets_of_headers",
    "web_options",
]

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})


def s3_options(config: S3Options, headers: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return options for `s3://`, without those that have their default.

    Args:
        config: the official options.
        headers: see `sets_of_headers`.

    Raises:
        InvalidInputError: the checksum is one that this library cannot make.
    """
    if config.checksum_algorithm == ChecksumAlgorithm.Crc64Nvme:
        raise InvalidInputError(
            "ChecksumAlgorithm.Crc64Nvme is not possible here. Use Crc32c, Crc32, Sha256 or Sha1.",
            "storage-config",
        )
    given = {
        "region": config.region,
        "endpoint_url": config.endpoint_url,
        "allow_http": config.allow_http or None,
        "anonymous": config.anonymous or None,
        "force_path_style": config.force_path_style or None,
        "requester_pays": config.requester_pays or None,
        "network_stream_timeout_seconds": config.network_stream_timeout_seconds,
        "checksum_algorithm": None
        if config.checksum_algorithm is None
        else str(to_native(config.checksum_algorithm)),
        **headers,
    }
    return {name: value for name, value in given.items() if value is not None}


def s3_rows(config: S3Options) -> dict[str, object]:
    """Return the options to display: those that differ from their defaults."""
    shown = s3_options(replace(config, network_stream_timeout_seconds=None), {})
    if config.checksum_algorithm is not None:
        shown["checksum_algorithm"] = config.checksum_algorithm.name
    return shown


def sets_of_headers(
    headers: Mapping[str, str] | None,
    read_headers: Mapping[str, str] | None,
    write_headers: Mapping[str, str] | None,
) -> dict[str, dict[str, str]]:
    """Return the engine's options for the headers of all requests, of reads and of writes.

    Raises:
        InvalidInputError: a name or a value cannot be a header's.
    """
    given = {"headers": headers, "read_headers": read_headers, "write_headers": write_headers}
    for option, some in given.items():
        for name, value in (some or {}).items():
            _check_header(option, name, value)
    if (read_headers or {}) == (write_headers or {}):
        every = {**(headers or {}), **(read_headers or {})}
        return {"extra_headers": every} if every else {}
    named = {**given, "extra_headers": headers}
    names = ("extra_headers", "read_headers", "write_headers")
    return {name: dict(some) for name in names if (some := named[name])}


def _check_header(option: str, name: str, value: str) -> None:
    if not _HEADER.fullmatch(name):
        raise InvalidInputError(
            f"{option}= has {name[:100]!r}, which no header can be called. Use letters, digits "
            "and '-'.",
            "storage-config",
        )
    if not value.isascii() or not value.isprintable():  # it may be a secret
        raise InvalidInputError(
            f"{option}[{name!r}] is no printable ASCII text. Leave out line breaks, or encode it.",
            "storage-config",
        )


_GCS: Final = {
    "base_url": "endpoint_url",
    "google_base_url": "endpoint_url",
    "allow_http": "allow_http",
}
_AZURE: Final = {
    "endpoint": "endpoint_url",
    "azure_endpoint": "endpoint_url",
    "azure_storage_endpoint": "endpoint_url",
    "allow_http": "allow_http",
}
_WEB: Final = {"allow_http": "allow_http"}


def _known(function: str, config: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Any]:
    """Translate the keys of a dictionary of client options.

    Raises:
        InvalidInputError: there is no such option here; the message names it, not its value.
    """
    # The official package passes any key to its client. One that is ignored here could leave
    # requests unencrypted or unsigned without a word.
    unknown = sorted(key for key in config if key.lower() not in names)
    if unknown:
        raise InvalidInputError(
            f"{function} has no option {', '.join(map(repr, unknown))} here. Options: "
            f"{', '.join(sorted(names))}. Storage.from_url() takes all options of a backend.",
            "storage-config",
        )
    options: dict[str, Any] = {names[key.lower()]: value for key, value in config.items()}
    if "allow_http" in options:
        options["allow_http"] = str(options["allow_http"]).lower() in _TRUE
    return options


def gcs_options(config: Mapping[str, str]) -> dict[str, Any]:
    """Return options for `gs://`."""
    return _known("gcs_storage(config=...)", config, _GCS)


def azure_options(config: Mapping[str, str]) -> dict[str, Any]:
    """Return options for `az://`."""
    return _known("azure_storage(config=...)", config, _AZURE)


def web_options(
    url: str, config: Mapping[str, str], headers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return options for `http://` and `https://`; the URL decides about encryption."""
    options = _known("http_storage(opts=...)", config, _WEB)
    options.pop("allow_http", None)
    if headers:
        options["headers"] = dict(headers)
        if url.lower().startswith("http://"):
            options["allow_http"] = True
    return options


def check_web_url(url: str) -> None:
    """Raise `StorageError` unless it is an HTTP URL."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fits = False
    if not fits:
        raise StorageError(
            f"{url[:200]!r} is no http:// or https:// URL. Use one such as 'https://host/path'.",
            "cannot-parse-url",
        )
