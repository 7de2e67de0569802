"""Credentials for object stores, in the classes and functions of the official package.

They convert to those of `icechunk_async.credentials`. A function that provides credentials may
block; it pickles by its name.
"""

from __future__ import annotations

import pickle
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.sync.official.display import Displayed, public
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.variants import Items, Kinds, kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    type AzureFunction = Callable[
        [],
        AzureRefreshableCredential.AccessKey
        | AzureRefreshableCredential.SasToken
        | AzureRefreshableCredential.BearerToken,
    ]

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


def _engine(name: str) -> Any:
    """Return one of the engine's credentials, imported at first use."""
    return getattr(import_module("icechunk_async.credentials"), name)


def _check_zone(name: str, expires_after: datetime | None) -> None:
    if expires_after is not None and expires_after.tzinfo is None:
        raise TypeError(
            f"{name}(expires_after=...) has no time zone. Use an aware time, such as "
            "datetime.now(UTC) + timedelta(hours=1)."
        )


@dataclass(frozen=True)
class _Function:
    """Calls a pickled function of the user, in any process."""

    pickled_function: bytes = field(repr=False)

    def __call__(self) -> Any:
        """Call the function, which may block, and return the engine's credential."""
        return to_native(pickle.loads(self.pickled_function)())  # noqa: S301 - the user's own


@public("credentials")
@dataclass(repr=False)
class S3StaticCredentials(Displayed):
    """Keys for S3, and for stores that speak its protocol.

    Attributes:
        access_key_id: the key's name.
        secret_access_key: the key.
        session_token: for temporary keys.
        expires_after: when they expire; an aware time.

    Raises:
        TypeError: the time has no zone.
    """

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None
    expires_after: datetime | None = None

    def __post_init__(self) -> None:
        _check_zone("S3StaticCredentials", self.expires_after)

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("access_key_id", f"{self.access_key_id[:4]}****"),
            ("secret_access_key", "****"),
            ("session_token", None if self.session_token is None else "****"),
            ("expires_after", self.expires_after and self.expires_after.isoformat()),
        ]

    def to_native(self) -> Any:
        """Return the engine's counterpart."""
        return _engine("S3StaticCredentials")(
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            session_token=self.session_token,
            expires_after=self.expires_after,
        )


class _ByName(Items):
    """A kind that becomes the engine's credential of the name `engine`, with the same values."""

    _engine_name: ClassVar[str] = ""

    def __init_subclass__(cls, *, engine: str = "") -> None:
        """Note the engine's name."""
        super().__init_subclass__()
        cls._engine_name = engine

    @override
    def to_native(self) -> Any:
        return _engine(self._engine_name)(*map(to_native, self.values()))


class _Within(Items):
    """A kind that adds nothing to the credential within."""

    @override
    def to_native(self) -> Any:
        return to_native(self[0])


_MOST_REFRESHABLES: Final = 64
_refreshables: Final[dict[tuple[str, bytes], Any]] = {}
"""The engine's credentials of this process, which know the newest answer of their function."""


class _Refreshable(_ByName):
    """Credentials from a function, which is called again when they expire."""

    _named: ClassVar = True

    pickled_function: bytes = field(repr=False)
    current: Any = field(default=None, repr=False)

    @override
    def to_native(self) -> Any:
        # One for all that open the storage, so that the function is called once for them.
        key = self._engine_name, self.pickled_function
        current = to_native(self.current)
        known = _refreshables.get(key)
        # Another first answer, as after a pickle, is newer than the one that is known.
        if known is None or known.initial != current:
            function = _Function(self.pickled_function)
            known = _refreshables[key] = _engine(self._engine_name)(function, current)
            # The oldest goes: programs that make functions without end must not fill the memory.
            while len(_refreshables) > _MOST_REFRESHABLES:
                _refreshables.pop(next(iter(_refreshables)))
        return known


class _Expiring(_ByName):
    """A secret for Azure that may expire."""

    _named: ClassVar = True

    def __post_init__(self) -> None:
        _check_zone(type(self).__qualname__, self.values()[1])


@kinds("credentials")
class S3Credentials(Kinds):
    """The signatures of requests to S3, and to stores that speak its protocol."""

    class FromEnv(_ByName, engine="S3FromEnvironment"):
        """The usual chain: environment, configuration files, the role of the machine."""

    class Anonymous(_ByName, engine="S3Anonymous"):
        """Requests are not signed."""

    class Static(_Within):
        """Fixed keys."""

        _0: S3StaticCredentials = field(repr=False)

    class Refreshable(_Refreshable, engine="S3Refreshable"):
        """Keys from a function, which is called again when they expire."""


@public("credentials")
@dataclass(frozen=True)
class GcsBearerCredential:
    """An access token for Google Cloud Storage.

    Raises:
        TypeError: `expires_after` has no zone.
    """

    bearer: str = field(repr=False)
    expires_after: datetime | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_zone("GcsBearerCredential", self.expires_after)

    def to_native(self) -> Any:
        """Return the engine's counterpart."""
        return _engine("GcsBearerToken")(self.bearer, self.expires_after)


@kinds("credentials")
class GcsStaticCredentials(Kinds):
    """Credentials for Google Cloud Storage that stay the same."""

    class ServiceAccount(_ByName, engine="GcsServiceAccountFile"):
        """The path of the key file of a service account."""

        _0: str

    class ServiceAccountKey(_ByName, engine="GcsServiceAccountKey"):
        """The contents of the key file of a service account."""

        _0: str = field(repr=False)

    class ApplicationCredentials(_ByName, engine="GcsServiceAccountFile"):
        """The path of a file of application default credentials."""

        _0: str

    class BearerToken(_ByName, engine="GcsBearerToken"):
        """An access token."""

        _0: str = field(repr=False)


@kinds("credentials")
class GcsCredentials(Kinds):
    """The identity for requests to Google Cloud Storage."""

    class Anonymous(_ByName, engine="GcsAnonymous"):
        """No credentials, for public buckets."""

    class FromEnv(_ByName, engine="GcsFromEnvironment"):
        """Google's default credentials."""

    class Static(_Within):
        """Fixed credentials."""

        _0: AnyGcsStaticCredential

    class Refreshable(_Refreshable, engine="GcsRefreshable"):
        """Tokens from a function, which is called again when they expire."""


@kinds("credentials")
class AzureRefreshableCredential(Kinds):
    """The credentials that a function may return for Azure."""

    class AccessKey(_Expiring, engine="AzureAccountKey"):
        """A key of the account."""

        key: str = field(repr=False)
        expires_after: datetime | None = None

    class SasToken(_Expiring, engine="AzureSasToken"):
        """A shared access signature."""

        token: str = field(repr=False)
        expires_after: datetime | None = None

    class BearerToken(_Expiring, engine="AzureBearerToken"):
        """An access token."""

        bearer: str = field(repr=False)
        expires_after: datetime | None = None


@kinds("credentials")
class AzureStaticCredentials(Kinds):
    """Credentials for Azure Blob Storage that stay the same."""

    class AccessKey(_ByName, engine="AzureAccountKey"):
        """A key of the account."""

        _0: str = field(repr=False)

    class SasToken(_ByName, engine="AzureSasToken"):
        """A shared access signature."""

        _0: str = field(repr=False)

    class BearerToken(_ByName, engine="AzureBearerToken"):
        """An access token."""

        _0: str = field(repr=False)


@kinds("credentials")
class AzureCredentials(Kinds):
    """The identity for requests to Azure Blob Storage."""

    class FromEnv(_ByName, engine="AzureFromEnvironment"):
        """The identity in the environment, or else the user who is logged in."""

    class Anonymous(_ByName, engine="AzureAnonymous"):
        """No credentials, for public containers."""

    class Static(_Within):
        """Fixed credentials."""

        _0: AnyAzureStaticCredential

    class Refreshable(_Refreshable, engine="AzureRefreshable"):
        """Credentials from a function, which is called again when they expire."""


@kinds("credentials")
class Credentials(Kinds):
    """Permission to read a virtual chunk container."""

    class S3(_Within):
        """For S3, and for stores that speak its protocol."""

        _0: Any

    class Gcs(_Within):
        """For Google Cloud Storage."""

        _0: Any

    class Azure(_Within):
        """For Azure Blob Storage."""

        _0: Any

    class LocalFileSystemAccess(_ByName, engine="LocalFileSystemAccess"):
        """For files of this machine."""

    class HttpAccess(_ByName, engine="HttpAccess"):
        """For a web server that needs no credentials."""


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
    """Return the pickled function, and a first credential to travel with it."""
    return pickle.dumps(get_credentials), get_credentials() if scatter else None


def _conflicting(function: str, advice: str) -> ValueError:
    return ValueError(f"Conflicting arguments to {function}: {advice}.")


def s3_refreshable_credentials(
    get_credentials: Callable[[], S3StaticCredentials],
    scatter_initial_credentials: bool = False,  # noqa: FBT001, FBT002 - as theirs
) -> S3Credentials.Refreshable:
    """Return credentials from a function, which is called again when they expire.

    Args:
        get_credentials: returns keys; a plain function that can be pickled.
        scatter_initial_credentials: call it now, and add the result to all pickles, so that many
            workers do not all call it at once. Anyone who has a pickle has the keys.
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
    """Return fixed keys."""
    return S3Credentials.Static(
        S3StaticCredentials(access_key_id, secret_access_key, session_token, expires_after)
    )


def s3_anonymous_credentials() -> S3Credentials.Anonymous:
    """Return the credentials of unsigned requests."""
    return S3Credentials.Anonymous()


def s3_from_env_credentials() -> S3Credentials.FromEnv:
    """Return credentials that are found as AWS tools find them."""
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
            return S3Credentials.Static(
                S3StaticCredentials(access_key_id, secret_access_key, session_token, expires_after)
            )
        case ["anonymous"]:
            return s3_anonymous_credentials()
        case ["get_credentials"] if get_credentials is not None:
            return s3_refreshable_credentials(get_credentials, scatter_initial_credentials)
        case ["from_env"] | [] if from_env is None or from_env:
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
    """Return fixed credentials; of several, the first in this order.

    Raises:
        ValueError: none is given.
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
    """Return tokens from a function; see `s3_refreshable_credentials`."""
    return GcsCredentials.Refreshable(
        *_scattered(get_credentials, scatter=scatter_initial_credentials)
    )


def gcs_anonymous_credentials() -> GcsCredentials.Anonymous:
    """Return no credentials, for public buckets."""
    return GcsCredentials.Anonymous()


def gcs_from_env_credentials() -> GcsCredentials.FromEnv:
    """Return credentials that are found as Google's tools find them."""
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

    `anonymous` precedes all others, and `from_env` precedes `get_credentials`.

    Raises:
        ValueError: `from_env` contradicts the other arguments.
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
    *, access_key: str | None = None, sas_token: str | None = None, bearer_token: str | None = None
) -> AnyAzureStaticCredential:
    """Return fixed credentials.

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
    get_credentials: AzureFunction,
    scatter_initial_credentials: bool = False,  # noqa: FBT001, FBT002 - as theirs
) -> AzureCredentials.Refreshable:
    """Return credentials from a function; see `s3_refreshable_credentials`."""
    return AzureCredentials.Refreshable(
        *_scattered(get_credentials, scatter=scatter_initial_credentials)
    )


def azure_from_env_credentials() -> AzureCredentials.FromEnv:
    """Return the identity in the environment, or else that of the user who is logged in."""
    return AzureCredentials.FromEnv()


def azure_anonymous_credentials() -> AzureCredentials.Anonymous:
    """Return no credentials, for public containers."""
    return AzureCredentials.Anonymous()


def azure_credentials(
    *,
    access_key: str | None = None,
    sas_token: str | None = None,
    bearer_token: str | None = None,
    from_env: bool | None = None,
    anonymous: bool | None = None,
    get_credentials: AzureFunction | None = None,
    scatter_initial_credentials: bool = False,
) -> AnyAzureCredential:
    """Return credentials of the kind that the arguments ask for; without any, the environment's.

    `anonymous` precedes all others, then `get_credentials`.

    Raises:
        ValueError: `from_env` contradicts the other arguments, or several are given.
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
    """Return credentials by URL prefix, as `authorize_virtual_chunk_access` takes them.

    Raises:
        ValueError: a value is not a credential.
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
