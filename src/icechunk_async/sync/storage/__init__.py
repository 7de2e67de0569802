"""Storages of repositories and stores of virtual chunk containers, as in the official package.

`place` has the class `Storage`, and `options` translates the official options of each kind of
store.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.sync.official.containers import AnyObjectStoreConfig, ObjectStoreConfig
from icechunk_async.sync.official.sections import (
    ChecksumAlgorithm,
    S3Options,
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
    StorageTimeoutSettings,
)
from icechunk_async.sync.official.states import ChunkType, StorageObjectInfo
from icechunk_async.sync.storage.place import Storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from icechunk_async.sync.credentials import GcsBearerCredential, S3StaticCredentials

__all__ = [
    "AnyObjectStoreConfig",
    "ChecksumAlgorithm",
    "ChunkType",
    "ObjectStoreConfig",
    "S3Options",
    "Storage",
    "StorageConcurrencySettings",
    "StorageObjectInfo",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
    "azure_storage",
    "azure_store",
    "gcs_storage",
    "gcs_store",
    "hf_storage",
    "http_storage",
    "http_store",
    "in_memory_storage",
    "local_filesystem_storage",
    "local_filesystem_store",
    "r2_storage",
    "redirect_storage",
    "s3_object_store_storage",
    "s3_storage",
    "s3_store",
    "tigris_storage",
]


def in_memory_storage() -> Storage:
    """Return a storage in the memory of this process, empty at first.

    All repositories that are opened with this value, or a pickle of it that stays in this
    process, share its objects. The objects are dropped when nothing refers to it any more.
    """
    return Storage.new_in_memory()


def local_filesystem_storage(path: str) -> Storage:
    """Return a storage in a directory, which is made when something is written.

    Unlike the official one it is safe for several writers, if the file system has hard links and
    locks; otherwise writing is refused.
    """
    return Storage.new_local_filesystem(path)


def http_storage(
    base_url: str, opts: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> Storage:
    """Return a storage on a web server, to read.

    Args:
        base_url: the root of the repository.
        opts: only `allow_http`, which is not needed.
        headers: sent with each request, such as credentials.

    Raises:
        StorageError: it is not an HTTP URL.
        InvalidInputError: there is no such option.
    """
    return Storage.new_http(base_url, opts, headers)


def redirect_storage(base_url: str) -> Storage:
    """Return the storage that a web server redirects to, to read without credentials.

    Each opening of a repository sends a request. The server redirects (3xx) to another server, or
    to a URL of `s3://`, `tigris://`, `r2://`, `gs://` or `http+icechunk://`; the first three may
    have `?region=` and `?endpoint_url=`.

    Raises:
        StorageError: it is not an HTTP URL.
    """
    return Storage.new_redirect(base_url)


def s3_store(  # noqa: PLR0917 - the official order
    region: str | None = None,
    endpoint_url: str | None = None,
    allow_http: bool = False,  # noqa: FBT001, FBT002
    anonymous: bool = False,  # noqa: FBT001, FBT002
    s3_compatible: bool = False,  # noqa: FBT001, FBT002
    force_path_style: bool = False,  # noqa: FBT001, FBT002
    network_stream_timeout_seconds: int = 60,
    requester_pays: bool = False,  # noqa: FBT001, FBT002
    checksum_algorithm: ChecksumAlgorithm | None = None,
) -> ObjectStoreConfig.S3Compatible | ObjectStoreConfig.S3:
    """Return the store of a virtual chunk container in S3; see `S3Options`.

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
    options = _s3_options(locals())
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


_OPTIONS: Final = frozenset(inspect.signature(S3Options).parameters)


def _s3_options(arguments: dict[str, Any]) -> S3Options:
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    if "anonymous" in options:
        options["anonymous"] = bool(options["anonymous"])
    return S3Options(**options)


def _described(
    make: Callable[..., Storage], identify: Callable[..., object], arguments: dict[str, Any]
) -> Storage:
    """Make a storage; `identify` takes the arguments that are about credentials."""
    known = inspect.signature(identify).parameters
    keys = {name: value for name, value in arguments.items() if name in known}
    place = {name: value for name, value in arguments.items() if name not in known}
    return make(credentials=identify(**keys), **place)


def _s3(make: Callable[..., Storage], arguments: dict[str, Any]) -> Storage:
    """Make a storage whose client has options; `anonymous` concerns its credentials as well."""
    from icechunk_async.sync.credentials import s3_credentials  # noqa: PLC0415 -- on use

    shared = _OPTIONS - {"anonymous"}
    others = {name: value for name, value in arguments.items() if name not in shared}
    return _described(make, s3_credentials, {**others, "config": _s3_options(arguments)})


def s3_storage(
    *,
    bucket: str,
    prefix: str | None,
    region: str | None = None,
    endpoint_url: str | None = None,
    allow_http: bool = False,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    get_credentials: Callable[[], S3StaticCredentials] | None = None,
    scatter_initial_credentials: bool = False,
    force_path_style: bool = False,
    network_stream_timeout_seconds: int = 60,
    requester_pays: bool = False,
    checksum_algorithm: ChecksumAlgorithm | None = None,
    legacy_rooted_keys: bool | None = None,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in S3, or on a server that speaks its protocol.

    Args:
        bucket: the bucket.
        prefix: beginning of all keys, taken literally; empty for the bucket's root, where no
            repository can be created.
        region: the region of the bucket.
        endpoint_url: a server other than the provider's.
        allow_http: accept an `endpoint_url` without encryption.
        access_key_id: fixed keys, with `secret_access_key` and perhaps `session_token`.
        secret_access_key: see `access_key_id`.
        session_token: see `access_key_id`.
        expires_after: the time when the fixed keys expire; aware.
        anonymous: do not sign requests.
        from_env: find credentials as AWS tools do; the default.
        get_credentials: a plain function that returns keys, called again when they expire.
        scatter_initial_credentials: call it now, and add the result to pickles.
        force_path_style: put the bucket into the path of URLs instead of the host name.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        requester_pays: agree to pay for the requests.
        checksum_algorithm: sent with each body, for the server to check and keep.
        legacy_rooted_keys: must not be True: keys that begin with a slash are not supported.
        read_headers: sent with requests that read or list.
        write_headers: sent with requests that write, copy or delete.
        headers: sent with every request.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: this library does not have the option.
    """
    return _s3(Storage.new_s3, locals())


def s3_object_store_storage(
    *,
    bucket: str,
    prefix: str | None,
    region: str | None = None,
    endpoint_url: str | None = None,
    allow_http: bool = False,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    force_path_style: bool = False,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in S3. This library has one client, so it is `s3_storage`."""
    return _s3(Storage.new_s3_object_store, locals())


def gcs_storage(
    *,
    bucket: str,
    prefix: str | None,
    service_account_file: str | None = None,
    service_account_key: str | None = None,
    application_credentials: str | None = None,
    bearer_token: str | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    config: dict[str, str] | None = None,
    get_credentials: Callable[[], GcsBearerCredential] | None = None,
    scatter_initial_credentials: bool = False,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in Google Cloud Storage.

    Args:
        bucket: the bucket.
        prefix: beginning of all keys, taken literally; empty for the bucket's root, where no
            repository can be created.
        service_account_file: path of the key file of a service account.
        service_account_key: the contents of such a file.
        application_credentials: path of a file of application default credentials.
        bearer_token: an access token.
        anonymous: use no credentials.
        from_env: find credentials as Google's tools do; the default.
        config: `base_url` names another server; there is no other option.
        get_credentials: a plain function that returns tokens, called again when they expire.
        scatter_initial_credentials: call it now, and add the result to pickles.
        read_headers: not supported.
        write_headers: not supported.
        headers: not supported.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: this library does not have the option.
    """
    given = locals()  # before the import, whose name is a local one, too
    from icechunk_async.sync.credentials import gcs_credentials  # noqa: PLC0415 -- on use

    return _described(Storage.new_gcs, gcs_credentials, given)


def azure_storage(
    *,
    account: str,
    container: str,
    prefix: str,
    access_key: str | None = None,
    sas_token: str | None = None,
    bearer_token: str | None = None,
    from_env: bool | None = None,
    anonymous: bool | None = None,
    config: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in Azure Blob Storage.

    Args:
        account: the storage account.
        container: the container, which must exist.
        prefix: beginning of all keys.
        access_key: a key of the account.
        sas_token: a shared access signature.
        bearer_token: an access token.
        from_env: use the identity in the environment; the default.
        anonymous: use no credentials.
        config: `endpoint` names another server, and `allow_http` accepts one without
            encryption; there is no other option.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: this library does not have the option.
    """
    given = locals()  # before the import, whose name is a local one, too
    from icechunk_async.sync.credentials import azure_credentials  # noqa: PLC0415 -- on use

    return _described(Storage.new_azure_blob, azure_credentials, given)


def tigris_storage(
    *,
    bucket: str,
    prefix: str | None,
    region: str | None = None,
    endpoint_url: str | None = None,
    use_weak_consistency: bool = False,
    allow_http: bool = False,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    get_credentials: Callable[[], S3StaticCredentials] | None = None,
    scatter_initial_credentials: bool = False,
    network_stream_timeout_seconds: int = 60,
    checksum_algorithm: ChecksumAlgorithm | None = None,
    legacy_rooted_keys: bool | None = None,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in Tigris.

    Arguments and errors that are not described here are those of `s3_storage`.

    Differences:
        use_weak_consistency: read from the nearest copy, which may be old; nothing is written.

    Raises:
        StorageError: full consistency needs a region.
    """
    return _s3(Storage.new_tigris, locals())


def r2_storage(
    *,
    bucket: str | None = None,
    prefix: str | None = None,
    account_id: str | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    allow_http: bool = False,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    get_credentials: Callable[[], S3StaticCredentials] | None = None,
    scatter_initial_credentials: bool = False,
    network_stream_timeout_seconds: int = 60,
    checksum_algorithm: ChecksumAlgorithm | None = None,
    legacy_rooted_keys: bool | None = None,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in Cloudflare's R2.

    Arguments and errors that are not described here are those of `s3_storage`.

    Differences:
        bucket: the bucket; if None, the first part of `prefix`.
        account_id: the account, if `endpoint_url` does not name it.
        endpoint_url: the account's server.
        region: `auto` by default.

    Raises:
        StorageError: neither bucket nor prefix, or neither account nor server is given.
    """
    return _s3(Storage.new_r2, locals())


def hf_storage(
    *,
    bucket: str,
    prefix: str | None,
    namespace: str,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    from_env: bool | None = None,
    get_credentials: Callable[[], S3StaticCredentials] | None = None,
    scatter_initial_credentials: bool = False,
    network_stream_timeout_seconds: int = 60,
    legacy_rooted_keys: bool | None = None,
    read_headers: dict[str, str] | None = None,
    write_headers: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> Storage:
    """Return a storage in a Hugging Face storage bucket, by its S3 gateway.

    Arguments and errors that are not described here are those of `s3_storage`.

    Differences:
        bucket: the bucket, without its owner.
        namespace: the bucket's owner, a user or an organisation.
    """
    return _s3(Storage.new_hf, locals())
