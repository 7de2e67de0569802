"""S3, GCS and Azure through obstore's Rust client, for the least CPU per request.

``obstore+s3://bucket/prefix``, ``obstore+gs://bucket/prefix`` and ``obstore+az://container/prefix``
hold the same objects as the URLs without ``obstore+``.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio.to_thread

from icechunk_async.storage import StorageDescription
from icechunk_async_obstore.options import Options, build_client, read_url
from icechunk_async_obstore.storage import ObstoreStorage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["ObstoreStorage", "open_obstore"]


@asynccontextmanager
async def open_obstore(
    url: str,
    *,
    endpoint_url: str | None = None,
    allow_http: bool = False,
    anonymous: bool = False,
    timeout_seconds: float = 60.0,
    connect_timeout_seconds: float = 10.0,
    region: str | None = None,
    force_path_style: bool | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    token: str | None = None,
    account_name: str | None = None,
    account_key: str | None = None,
    sas_token: str | None = None,
) -> AsyncGenerator[ObstoreStorage]:
    """Open a bucket, or a prefix of one. Nothing is sent before the first operation.

    Missing options come from the service's usual environment variables and from the machine's
    identity. Profiles in AWS configuration files are not read.

    Args:
        url: where the objects are; the prefix is taken literally.
        endpoint_url: the server, where it is not the service's own.
        allow_http: let ``endpoint_url`` be a plain ``http://`` one.
        anonymous: send unsigned requests.
        timeout_seconds: how long a connection may be silent.
        connect_timeout_seconds: how long making a connection may take.
        region: S3: where the bucket is.
        force_path_style: S3: name the bucket in the path (the default with ``endpoint_url``)
            instead of the host.
        access_key_id: S3: credentials, with ``secret_access_key``.
        secret_access_key: S3.
        session_token: S3: for temporary credentials.
        token: GCS and Azure: an OAuth bearer token.
        account_name: Azure: the storage account.
        account_key: Azure: its key.
        sas_token: Azure: a shared access signature, as the portal shows it.

    Raises:
        InvalidURLError: the URL names no bucket.
        InvalidInputError: an option is wrong, or unknown to the service.
    """
    place = read_url(url)
    options = Options(
        endpoint_url=endpoint_url,
        allow_http=allow_http,
        anonymous=anonymous,
        timeout_seconds=timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
        region=region,
        force_path_style=force_path_style,
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        session_token=session_token,
        token=token,
        account_name=account_name,
        account_key=account_key,
        sas_token=sas_token,
    )
    options.check(place.service)
    client = await anyio.to_thread.run_sync(build_client, place, options)
    description = StorageDescription(url, options.given())
    storage = ObstoreStorage(client, place, description)
    try:
        yield storage
    finally:
        storage.close()
