"""Storages in buckets and containers of the clouds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync._settings import S3Options
from icechunk_async.sync.credentials import azure_credentials, gcs_credentials, s3_credentials
from icechunk_async.sync.storage._storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from icechunk_async.sync._settings import ChecksumAlgorithm
    from icechunk_async.sync.credentials import GcsBearerCredential, S3StaticCredentials

__all__ = [
    "azure_storage",
    "gcs_storage",
    "s3_object_store_storage",
    "s3_storage",
]


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
        region: where the bucket is.
        endpoint_url: a server other than the provider's.
        allow_http: accept an ``endpoint_url`` that is not encrypted.
        access_key_id: fixed keys, with ``secret_access_key`` and perhaps ``session_token``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        expires_after: when the fixed keys end; an aware time.
        anonymous: do not sign requests.
        from_env: find credentials as AWS tools do, as is done where nothing else is given.
        get_credentials: a plain function that answers keys, asked again when they end.
        scatter_initial_credentials: ask it now, and let the answer travel with pickles.
        force_path_style: put the bucket into the path of URLs instead of the host name.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        requester_pays: agree to pay for the requests.
        checksum_algorithm: sent with each body, for the server to check and keep.
        legacy_rooted_keys: True is not possible: keys that begin with a slash are not read.
        read_headers: sent with every request; must be the same as ``write_headers``.
        write_headers: see ``read_headers``.
        headers: sent with every request.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: an option is one that this library does not have.
    """
    credentials = s3_credentials(
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        session_token=session_token,
        expires_after=expires_after,
        anonymous=anonymous,
        from_env=from_env,
        get_credentials=get_credentials,
        scatter_initial_credentials=scatter_initial_credentials,
    )
    options = S3Options(
        region=region,
        endpoint_url=endpoint_url,
        allow_http=allow_http,
        force_path_style=force_path_style,
        network_stream_timeout_seconds=network_stream_timeout_seconds,
        requester_pays=requester_pays,
        anonymous=anonymous or False,
        checksum_algorithm=checksum_algorithm,
    )
    return Storage.new_s3(
        config=options,
        bucket=bucket,
        prefix=prefix,
        credentials=credentials,
        legacy_rooted_keys=legacy_rooted_keys,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )


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
    """Return a storage in S3. There is one client here, so this is :func:`s3_storage`.

    Args:
        bucket: the bucket.
        prefix: beginning of all keys, taken literally; empty for the bucket's root, where no
            repository can be created.
        region: where the bucket is.
        endpoint_url: a server other than the provider's.
        allow_http: accept an ``endpoint_url`` that is not encrypted.
        access_key_id: fixed keys, with ``secret_access_key`` and perhaps ``session_token``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        expires_after: when the fixed keys end; an aware time.
        anonymous: do not sign requests.
        from_env: find credentials as AWS tools do, as is done where nothing else is given.
        force_path_style: put the bucket into the path of URLs instead of the host name.
        read_headers: sent with every request; must be the same as ``write_headers``.
        write_headers: see ``read_headers``.
        headers: sent with every request.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: an option is one that this library does not have.
    """
    credentials = s3_credentials(
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        session_token=session_token,
        expires_after=expires_after,
        anonymous=anonymous,
        from_env=from_env,
    )
    options = S3Options(
        region=region,
        endpoint_url=endpoint_url,
        allow_http=allow_http,
        anonymous=anonymous or False,
        force_path_style=force_path_style,
    )
    return Storage.new_s3_object_store(
        config=options,
        bucket=bucket,
        prefix=prefix,
        credentials=credentials,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )


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
        service_account_key: what stands in such a file.
        application_credentials: path of a file of application default credentials.
        bearer_token: an access token.
        anonymous: ask without credentials.
        from_env: find credentials as Google's tools do, as is done where nothing else is given.
        config: ``base_url`` names another server; no other option is known.
        get_credentials: a plain function that answers tokens, asked again when they end.
        scatter_initial_credentials: ask it now, and let the answer travel with pickles.
        read_headers: not possible.
        write_headers: not possible.
        headers: not possible.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: an option is one that this library does not have.
    """
    credentials = gcs_credentials(
        service_account_file=service_account_file,
        service_account_key=service_account_key,
        application_credentials=application_credentials,
        bearer_token=bearer_token,
        anonymous=anonymous,
        from_env=from_env,
        get_credentials=get_credentials,
        scatter_initial_credentials=scatter_initial_credentials,
    )
    return Storage.new_gcs(
        bucket=bucket,
        prefix=prefix,
        credentials=credentials,
        config=config,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )


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
        from_env: let the environment say who asks, as is done where nothing else is given.
        anonymous: ask without credentials.
        config: ``endpoint`` names another server, and ``allow_http`` accepts one that is not
            encrypted; no other option is known.

    Raises:
        ValueError: credentials of several kinds are given.
        InvalidInputError: an option is one that this library does not have.
    """
    credentials = azure_credentials(
        access_key=access_key,
        sas_token=sas_token,
        bearer_token=bearer_token,
        from_env=from_env,
        anonymous=anonymous,
    )
    return Storage.new_azure_blob(
        account=account,
        container=container,
        prefix=prefix,
        credentials=credentials,
        config=config,
    )
