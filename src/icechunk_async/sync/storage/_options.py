"""The official options of each kind of store, as options of this library's backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from icechunk_async.sync._mirrors import to_native
from icechunk_async.sync._settings import ChecksumAlgorithm
from icechunk_async.sync.errors import InvalidInputError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.sync._settings import S3Options

__all__ = [
    "azure_options",
    "check_web_url",
    "gcs_options",
    "one_set_of_headers",
    "s3_options",
    "s3_rows",
    "web_options",
]

_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})


def s3_options(config: S3Options, headers: Mapping[str, str] | None) -> dict[str, Any]:
    """Return options for ``s3://``; what has its default is left to the backend.

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
        "extra_headers": headers,
    }
    return {name: value for name, value in given.items() if value is not None}


def s3_rows(config: S3Options) -> dict[str, object]:
    """Return what is shown of the options, as far as it differs from the defaults."""
    return {
        "region": config.region,
        "endpoint_url": config.endpoint_url,
        "allow_http": config.allow_http or None,
        "anonymous": config.anonymous or None,
        "force_path_style": config.force_path_style or None,
        "requester_pays": config.requester_pays or None,
        "checksum_algorithm": config.checksum_algorithm and config.checksum_algorithm.name,
    }


def one_set_of_headers(
    headers: Mapping[str, str] | None,
    read_headers: Mapping[str, str] | None,
    write_headers: Mapping[str, str] | None,
) -> dict[str, str] | None:
    """Return the headers for all requests.

    Raises:
        InvalidInputError: reads and writes are to have different ones.
    """
    if (read_headers or {}) != (write_headers or {}):
        raise InvalidInputError(
            "read_headers and write_headers differ, but this library sends the same headers with "
            "every request. Pass headers=, or both alike.",
            "storage-config",
        )
    return {**(headers or {}), **(read_headers or {})} or None


_GCS: Final = {"base_url": "endpoint_url", "google_base_url": "endpoint_url"}
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
    """Return options for ``gs://``."""
    return _known("gcs_storage(config=...)", config, _GCS)


def azure_options(config: Mapping[str, str]) -> dict[str, Any]:
    """Return options for ``az://``."""
    return _known("azure_storage(config=...)", config, _AZURE)


def web_options(
    url: str, config: Mapping[str, str], headers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return options for ``http://`` and ``https://``; plain HTTP is what the caller wrote."""
    options = _known("http_storage(opts=...)", config, _WEB)
    options.pop("allow_http", None)
    if headers:
        options["headers"] = dict(headers)
        if url.lower().startswith("http://"):
            options["allow_http"] = True
    return options


def check_web_url(url: str) -> None:
    """Refuse what no web server could have.

    Raises:
        StorageError: it is no HTTP URL.
    """
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
