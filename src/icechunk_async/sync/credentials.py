"""Credentials for object stores, in the classes and functions of the official package.

Functions that are asked for credentials may block; they pickle with it, by their name.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Final

from icechunk_async.sync._credential_kinds import (
    AzureCredentials,
    AzureRefreshableCredential,
    AzureStaticCredentials,
    Credentials,
    GcsBearerCredential,
    GcsCredentials,
    GcsStaticCredentials,
    S3Credentials,
    S3StaticCredentials,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

__all__ = [
    "AnyAzureCredential",
    "AnyAzureStaticCredential",
    "AnyCredential",
    "AnyGcsCredential",
    "AnyGcsStaticCredential",
    "AnyS3Credential",
    "AzureCredentials",
    "AzureRefreshableCredential",
    "AzureStaticCredentials",
    "Credentials",
    "GcsBearerCredential",
    "GcsCredentials",
    "GcsStaticCredentials",
    "HttpAccess",
    "LocalFileSystemAccess",
    "S3Credentials",
    "S3StaticCredentials",
    "azure_anonymous_credentials",
    "azure_credentials",
    "azure_from_env_credentials",
    "azure_refreshable_credentials",
    "azure_static_credentials",
    "containers_credentials",
    "gcs_anonymous_credentials",
    "gcs_credentials",
    "gcs_from_env_credentials",
    "gcs_refreshable_credentials",
    "gcs_static_credentials",
    "s3_anonymous_credentials",
    "s3_credentials",
    "s3_from_env_credentials",
    "s3_refreshable_credentials",
    "s3_static_credentials",
]

AnyS3Credential = (
    S3Credentials.FromEnv
    | S3Credentials.Anonymous
    | S3Credentials.Static
    | S3Credentials.Refreshable
)
AnyGcsStaticCredential = (
    GcsStaticCredentials.ServiceAccount
    | GcsStaticCredentials.ServiceAccountKey
    | GcsStaticCredentials.ApplicationCredentials
    | GcsStaticCredentials.BearerToken
)
AnyGcsCredential = (
    GcsCredentials.FromEnv
    | GcsCredentials.Anonymous
    | GcsCredentials.Static
    | GcsCredentials.Refreshable
)
AnyAzureStaticCredential = (
    AzureStaticCredentials.AccessKey
    | AzureStaticCredentials.SasToken
    | AzureStaticCredentials.BearerToken
)
AnyAzureCredential = (
    AzureCredentials.FromEnv
    | AzureCredentials.Anonymous
    | AzureCredentials.Static
    | AzureCredentials.Refreshable
)
AnyCredential = (
    Credentials.S3
    | Credentials.Gcs
    | Credentials.Azure
    | Credentials.LocalFileSystemAccess
    | Credentials.HttpAccess
)

LocalFileSystemAccess: Final = Credentials.LocalFileSystemAccess()
"""Authorises a container of local files, which needs no credentials."""
HttpAccess: Final = Credentials.HttpAccess()
"""Authorises a container on a web server, which needs no credentials."""


def _scattered[T](get_credentials: Callable[[], T], *, scatter: bool) -> tuple[bytes, T | None]:
    """Return the function pickled, and a first credential to travel with it."""
    return pickle.dumps(get_credentials), get_credentials() if scatter else None


def _conflicting(function: str, advice: str) -> ValueError:
    return ValueError(f"Conflicting arguments to {function}: {advice}.")


def s3_refreshable_credentials(
    get_credentials: Callable[[], S3StaticCredentials],
    scatter_initial_credentials: bool = False,  # noqa: FBT001, FBT002 - as theirs
) -> S3Credentials.Refreshable:
    """Return credentials that a function is asked for, again when they end.

    Args:
        get_credentials: answers keys; a plain function that can be pickled.
        scatter_initial_credentials: ask it now, and let the answer travel with every pickle, so
            that many workers do not all ask at once. Whoever has the pickle has the keys.
    """
    return S3Credentials.Refreshable(
        *_scattered(get_credentials, scatter=scatter_initial_credentials)
    )


def s3_static_credentials(
    *,
    access_key_id: str,
    secret_access_key: str,
    session_token: str | None = None,
    expires_after: datetime | None = None,
) -> S3Credentials.Static:
    """Return credentials that stay the same."""
    return S3Credentials.Static(
        S3StaticCredentials(access_key_id, secret_access_key, session_token, expires_after)
    )


def s3_anonymous_credentials() -> S3Credentials.Anonymous:
    """Return that requests are not signed."""
    return S3Credentials.Anonymous()


def s3_from_env_credentials() -> S3Credentials.FromEnv:
    """Return that credentials are found as AWS tools find them."""
    return S3Credentials.FromEnv()


def s3_credentials(
    *,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    expires_after: datetime | None = None,
    anonymous: bool | None = None,
    from_env: bool | None = None,
    get_credentials: Callable[[], S3StaticCredentials] | None = None,
    scatter_initial_credentials: bool = False,
) -> AnyS3Credential:
    """Return credentials of the kind that the arguments ask for; without any, the environment's.

    Raises:
        ValueError: they ask for several kinds, or for none.
    """
    keys = (access_key_id, secret_access_key, session_token, expires_after)
    ways = {
        "keys": any(part is not None for part in keys),
        "anonymous": bool(anonymous),
        "from_env": bool(from_env),
        "get_credentials": get_credentials is not None,
    }
    chosen = [name for name, wanted in ways.items() if wanted]
    match chosen:
        case ["keys"] if access_key_id and secret_access_key:
            return s3_static_credentials(
                access_key_id=access_key_id,
                secret_access_key=secret_access_key,
                session_token=session_token,
                expires_after=expires_after,
            )
        case ["anonymous"]:
            return s3_anonymous_credentials()
        case ["get_credentials"] if get_credentials is not None:
            return s3_refreshable_credentials(get_credentials, scatter_initial_credentials)
        case ["from_env"]:
            return s3_from_env_credentials()
        case [] if from_env is None:
            return s3_from_env_credentials()
        case _:
            raise _conflicting(
                "s3_credentials",
                "give access_key_id and secret_access_key, or anonymous, or get_credentials, or "
                "from_env",
            )


def gcs_static_credentials(
    *,
    service_account_file: str | None = None,
    service_account_key: str | None = None,
    application_credentials: str | None = None,
    bearer_token: str | None = None,
) -> AnyGcsStaticCredential:
    """Return credentials that stay the same; of several, the first in this order.

    Raises:
        ValueError: nothing is given.
    """
    if service_account_file is not None:
        return GcsStaticCredentials.ServiceAccount(service_account_file)
    if service_account_key is not None:
        return GcsStaticCredentials.ServiceAccountKey(service_account_key)
    if application_credentials is not None:
        return GcsStaticCredentials.ApplicationCredentials(application_credentials)
    if bearer_token is not None:
        return GcsStaticCredentials.BearerToken(bearer_token)
    raise _conflicting("gcs_static_credentials", "give one of them")


def gcs_refreshable_credentials(
    get_credentials: Callable[[], GcsBearerCredential],
    scatter_initial_credentials: bool = False,  # noqa: FBT001, FBT002 - as theirs
) -> GcsCredentials.Refreshable:
    """Return tokens that a function is asked for; see :func:`s3_refreshable_credentials`."""
    return GcsCredentials.Refreshable(
        *_scattered(get_credentials, scatter=scatter_initial_credentials)
    )


def gcs_anonymous_credentials() -> GcsCredentials.Anonymous:
    """Return that nobody in particular asks."""
    return GcsCredentials.Anonymous()


def gcs_from_env_credentials() -> GcsCredentials.FromEnv:
    """Return that credentials are found as Google's tools find them."""
    return GcsCredentials.FromEnv()


def gcs_credentials(
    *,
    service_account_file: str | None = None,
    service_account_key: str | None = None,
    application_credentials: str | None = None,
    bearer_token: str | None = None,
    from_env: bool | None = None,
    anonymous: bool | None = None,
    get_credentials: Callable[[], GcsBearerCredential] | None = None,
    scatter_initial_credentials: bool = False,
) -> AnyGcsCredential:
    """Return credentials of the kind that the arguments ask for; without any, the environment's.

    ``anonymous`` goes before all others, and ``from_env`` before ``get_credentials``.

    Raises:
        ValueError: ``from_env`` contradicts what else is given.
    """
    if anonymous:
        return gcs_anonymous_credentials()
    static = (service_account_file, service_account_key, application_credentials, bearer_token)
    if any(given is not None for given in static):
        if not from_env:
            return GcsCredentials.Static(
                gcs_static_credentials(
                    service_account_file=service_account_file,
                    service_account_key=service_account_key,
                    application_credentials=application_credentials,
                    bearer_token=bearer_token,
                )
            )
    elif get_credentials is not None and not from_env:
        return gcs_refreshable_credentials(get_credentials, scatter_initial_credentials)
    elif from_env is None or from_env:
        return gcs_from_env_credentials()
    raise _conflicting("gcs_credentials", "from_env goes with no other credential, and needs one")


def azure_static_credentials(
    *,
    access_key: str | None = None,
    sas_token: str | None = None,
    bearer_token: str | None = None,
) -> AnyAzureStaticCredential:
    """Return credentials that stay the same.

    Raises:
        ValueError: not exactly one is given.
    """
    if (access_key, sas_token, bearer_token).count(None) == 2:
        if access_key is not None:
            return AzureStaticCredentials.AccessKey(access_key)
        if sas_token is not None:
            return AzureStaticCredentials.SasToken(sas_token)
        if bearer_token is not None:
            return AzureStaticCredentials.BearerToken(bearer_token)
    raise _conflicting("azure_static_credentials", "give exactly one of them")


def azure_refreshable_credentials(
    get_credentials: Callable[
        [],
        AzureRefreshableCredential.AccessKey
        | AzureRefreshableCredential.SasToken
        | AzureRefreshableCredential.BearerToken,
    ],
    scatter_initial_credentials: bool = False,  # noqa: FBT001, FBT002 - as theirs
) -> AzureCredentials.Refreshable:
    """Return credentials that a function is asked for; see :func:`s3_refreshable_credentials`."""
    return AzureCredentials.Refreshable(
        *_scattered(get_credentials, scatter=scatter_initial_credentials)
    )


def azure_from_env_credentials() -> AzureCredentials.FromEnv:
    """Return that the environment says who asks, else whoever is logged in."""
    return AzureCredentials.FromEnv()


def azure_anonymous_credentials() -> AzureCredentials.Anonymous:
    """Return that nobody in particular asks."""
    return AzureCredentials.Anonymous()


def azure_credentials(
    *,
    access_key: str | None = None,
    sas_token: str | None = None,
    bearer_token: str | None = None,
    from_env: bool | None = None,
    anonymous: bool | None = None,
    get_credentials: Callable[
        [],
        AzureRefreshableCredential.AccessKey
        | AzureRefreshableCredential.SasToken
        | AzureRefreshableCredential.BearerToken,
    ]
    | None = None,
    scatter_initial_credentials: bool = False,
) -> AnyAzureCredential:
    """Return credentials of the kind that the arguments ask for; without any, the environment's.

    ``anonymous`` goes before all others, then ``get_credentials``.

    Raises:
        ValueError: ``from_env`` contradicts what else is given, or several are given.
    """
    if anonymous:
        return azure_anonymous_credentials()
    if get_credentials is not None:
        return azure_refreshable_credentials(get_credentials, scatter_initial_credentials)
    if any(given is not None for given in (access_key, sas_token, bearer_token)):
        if not from_env:
            return AzureCredentials.Static(
                azure_static_credentials(
                    access_key=access_key, sas_token=sas_token, bearer_token=bearer_token
                )
            )
    elif from_env is None or from_env:
        return azure_from_env_credentials()
    raise _conflicting("azure_credentials", "from_env goes with no other credential, and needs one")


def containers_credentials(
    m: Mapping[
        str,
        AnyS3Credential
        | AnyGcsCredential
        | AnyAzureCredential
        | Credentials.LocalFileSystemAccess
        | Credentials.HttpAccess
        | None,
    ],
) -> dict[str, AnyCredential | None]:
    """Return credentials by URL prefix, as ``authorize_virtual_chunk_access`` takes them.

    Raises:
        ValueError: a value is no credential.
    """
    found: dict[str, AnyCredential | None] = {}
    for prefix, credential in m.items():
        if credential is None or isinstance(credential, AnyCredential):
            found[prefix] = credential
        elif isinstance(credential, AnyS3Credential):
            found[prefix] = Credentials.S3(credential)
        elif isinstance(credential, AnyGcsCredential):
            found[prefix] = Credentials.Gcs(credential)
        elif isinstance(credential, AnyAzureCredential):  # pyright: ignore[reportUnnecessaryIsInstance]
            found[prefix] = Credentials.Azure(credential)
        else:
            raise ValueError(
                f"The value for {prefix!r} is of type {type(credential).__name__}, no "
                "credential. Use s3_credentials(), gcs_credentials(), azure_credentials(), "
                "LocalFileSystemAccess or HttpAccess."
            )
    return found
