"""Storages in memory, files and on web servers; stores of virtual chunk containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync._settings import S3Options
from icechunk_async.sync.config._stores import ObjectStoreConfig
from icechunk_async.sync.storage._storage import Storage

if TYPE_CHECKING:
    from icechunk_async.sync._settings import ChecksumAlgorithm

__all__ = [
    "AnyObjectStoreConfig",
    "azure_store",
    "gcs_store",
    "http_storage",
    "http_store",
    "in_memory_storage",
    "local_filesystem_storage",
    "local_filesystem_store",
    "redirect_storage",
    "s3_store",
]

AnyObjectStoreConfig = (
    ObjectStoreConfig.InMemory
    | ObjectStoreConfig.LocalFileSystem
    | ObjectStoreConfig.S3
    | ObjectStoreConfig.S3Compatible
    | ObjectStoreConfig.Gcs
    | ObjectStoreConfig.Azure
    | ObjectStoreConfig.Tigris
    | ObjectStoreConfig.Http
)


def in_memory_storage() -> Storage:
    """Return a storage in the memory of this process, empty at first.

    All repositories that are opened with this value, or a pickle of it that stays in this
    process, share its objects. They are dropped when nothing refers to it any more.
    """
    return Storage.new_in_memory()


def local_filesystem_storage(path: str) -> Storage:
    """Return a storage in a directory, which is made when something is written.

    Unlike the official one it is safe for several writers, wherever the file system has hard
    links and locks; where it has not, writing is refused.
    """
    return Storage.new_local_filesystem(path)


def http_storage(
    base_url: str, opts: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> Storage:
    """Return a storage on a web server, to read.

    Args:
        base_url: where the repository's root is.
        opts: only ``allow_http`` is known, and not needed.
        headers: sent with each request, such as credentials.

    Raises:
        StorageError: it is no HTTP URL.
        InvalidInputError: there is no such option.
    """
    return Storage.new_http(base_url, opts, headers)


def redirect_storage(base_url: str) -> Storage:
    """Return the storage that a web server points to, to read without credentials.

    The server is asked whenever a repository is opened. It answers with a redirect (3xx) to
    another server, or to a URL of ``s3://``, ``tigris://``, ``r2://``, ``gs://`` or
    ``http+icechunk://``; ``?region=`` and ``?endpoint_url=`` in the first three count.

    Raises:
        StorageError: it is no HTTP URL.
    """
    return Storage.new_redirect(base_url)


def s3_store(  # noqa: PLR0917 - as theirs
    region: str | None = None,
    endpoint_url: str | None = None,
    allow_http: bool = False,  # noqa: FBT001, FBT002 - as theirs, like those below
    anonymous: bool = False,  # noqa: FBT001, FBT002
    s3_compatible: bool = False,  # noqa: FBT001, FBT002
    force_path_style: bool = False,  # noqa: FBT001, FBT002
    network_stream_timeout_seconds: int = 60,
    requester_pays: bool = False,  # noqa: FBT001, FBT002
    checksum_algorithm: ChecksumAlgorithm | None = None,
) -> ObjectStoreConfig.S3Compatible | ObjectStoreConfig.S3:
    """Return the store of a virtual chunk container in S3; see :class:`S3Options`.

    Args:
        region: region of the bucket.
        endpoint_url: service other than the provider's own.
        allow_http: whether connections may be unencrypted.
        anonymous: whether requests go unsigned.
        s3_compatible: whether the service is not Amazon's.
        force_path_style: whether the bucket is part of the path instead of the host name.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        requester_pays: whether to agree to pay for requests.
        checksum_algorithm: checksum on writes.
    """
    options = S3Options(
        region=region,
        endpoint_url=endpoint_url,
        allow_http=allow_http,
        anonymous=anonymous,
        force_path_style=force_path_style,
        network_stream_timeout_seconds=network_stream_timeout_seconds,
        requester_pays=requester_pays,
        checksum_algorithm=checksum_algorithm,
    )
    kind = ObjectStoreConfig.S3Compatible if s3_compatible else ObjectStoreConfig.S3
    return kind(options)


def gcs_store(opts: dict[str, str] | None = None) -> ObjectStoreConfig.Gcs:
    """Return the store of a virtual chunk container in Google Cloud Storage."""
    return ObjectStoreConfig.Gcs(opts)


def azure_store(*, account: str, config: dict[str, str] | None = None) -> ObjectStoreConfig.Azure:
    """Return the store of a virtual chunk container in a storage account of Azure."""
    return ObjectStoreConfig.Azure({"account": account, **(config or {})})


def http_store(
    opts: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> ObjectStoreConfig.Http:
    """Return the store of a virtual chunk container on a web server."""
    return ObjectStoreConfig.Http(opts, headers)


def local_filesystem_store(path: str) -> ObjectStoreConfig.LocalFileSystem:
    """Return the store of a virtual chunk container of local files."""
    return ObjectStoreConfig.LocalFileSystem(path)
