"""Storages of other services that speak the protocol of S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.sync._settings import S3Options
from icechunk_async.sync.credentials import s3_credentials
from icechunk_async.sync.storage._storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from icechunk_async.sync._settings import ChecksumAlgorithm
    from icechunk_async.sync.credentials import S3StaticCredentials

__all__ = ["hf_storage", "r2_storage", "tigris_storage"]


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

    Args:
        bucket: the bucket.
        prefix: beginning of all keys, taken literally; empty for the bucket's root, where no
            repository can be created.
        region: where the bucket is.
        endpoint_url: a server other than the provider's.
        allow_http: accept an ``endpoint_url`` that is not encrypted.
        use_weak_consistency: read from the nearest copy, which may be old; nothing is written.
        access_key_id: fixed keys, with ``secret_access_key`` and perhaps ``session_token``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        expires_after: when the fixed keys end; an aware time.
        anonymous: do not sign requests.
        from_env: find credentials as AWS tools do, as is done where nothing else is given.
        get_credentials: a plain function that answers keys, asked again when they end.
        scatter_initial_credentials: ask it now, and let the answer travel with pickles.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        checksum_algorithm: sent with each body, for the server to check and keep.
        legacy_rooted_keys: True is not possible: keys that begin with a slash are not read.
        read_headers: sent with every request; must be the same as ``write_headers``.
        write_headers: see ``read_headers``.
        headers: sent with every request.

    Raises:
        StorageError: there is no region, and full consistency is asked for.
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
        network_stream_timeout_seconds=network_stream_timeout_seconds,
        anonymous=anonymous or False,
        checksum_algorithm=checksum_algorithm,
    )
    return Storage.new_tigris(
        config=options,
        bucket=bucket,
        prefix=prefix,
        use_weak_consistency=use_weak_consistency,
        credentials=credentials,
        legacy_rooted_keys=legacy_rooted_keys,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )


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

    Args:
        bucket: the bucket; without it the first part of ``prefix`` names it.
        prefix: beginning of all keys, taken literally.
        account_id: the account, where ``endpoint_url`` does not name it.
        endpoint_url: the account's server.
        region: ``auto`` by default.
        allow_http: accept an ``endpoint_url`` that is not encrypted.
        access_key_id: fixed keys, with ``secret_access_key`` and perhaps ``session_token``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        expires_after: when the fixed keys end; an aware time.
        anonymous: do not sign requests.
        from_env: find credentials as AWS tools do, as is done where nothing else is given.
        get_credentials: a plain function that answers keys, asked again when they end.
        scatter_initial_credentials: ask it now, and let the answer travel with pickles.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        checksum_algorithm: sent with each body, for the server to check and keep.
        legacy_rooted_keys: True is not possible: keys that begin with a slash are not read.
        read_headers: sent with every request; must be the same as ``write_headers``.
        write_headers: see ``read_headers``.
        headers: sent with every request.

    Raises:
        StorageError: neither bucket nor prefix, or neither account nor server are given.
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
        network_stream_timeout_seconds=network_stream_timeout_seconds,
        anonymous=anonymous or False,
        checksum_algorithm=checksum_algorithm,
    )
    return Storage.new_r2(
        config=options,
        bucket=bucket,
        prefix=prefix,
        account_id=account_id,
        credentials=credentials,
        legacy_rooted_keys=legacy_rooted_keys,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )


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

    Args:
        bucket: the bucket, without its owner.
        prefix: beginning of all keys, taken literally; empty for the bucket's root, where no
            repository can be created.
        namespace: the bucket's owner, a user or an organisation.
        access_key_id: S3 keys made from an access token, with ``secret_access_key``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        expires_after: when the S3 keys made from an access token end; an aware time.
        from_env: find credentials as AWS tools do, as is done where nothing else is given.
        get_credentials: a plain function that answers keys, asked again when they end.
        scatter_initial_credentials: ask it now, and let the answer travel with pickles.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
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
        from_env=from_env,
        get_credentials=get_credentials,
        scatter_initial_credentials=scatter_initial_credentials,
    )
    options = S3Options(network_stream_timeout_seconds=network_stream_timeout_seconds)
    return Storage.new_hf(
        config=options,
        bucket=bucket,
        prefix=prefix,
        namespace=namespace,
        credentials=credentials,
        legacy_rooted_keys=legacy_rooted_keys,
        read_headers=read_headers,
        write_headers=write_headers,
        headers=headers,
    )
