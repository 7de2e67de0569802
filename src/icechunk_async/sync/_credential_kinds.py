"""Credentials as the official package has them: values that convert to the engine's."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, override

from icechunk_async.sync._display import Displayed, public
from icechunk_async.sync._mirrors import to_native
from icechunk_async.sync._variants import Items, Kinds, Variant, kinds

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "AzureCredentials",
    "AzureRefreshableCredential",
    "AzureStaticCredentials",
    "Credentials",
    "GcsBearerCredential",
    "GcsCredentials",
    "GcsStaticCredentials",
    "S3Credentials",
    "S3StaticCredentials",
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
class _Asked:
    """Asks a pickled function of the user; travels to other processes as it is."""

    pickled_function: bytes = field(repr=False)

    def __call__(self) -> Any:
        """Call the function, which may block, and answer the engine's credential."""
        return to_native(pickle.loads(self.pickled_function)())  # noqa: S301 - the user's own


@public("credentials")
@dataclass(repr=False)
class S3StaticCredentials(Displayed):
    """Keys for S3, and for stores that speak its protocol.

    Attributes:
        access_key_id: the key's name.
        secret_access_key: the key.
        session_token: for temporary keys.
        expires_after: when they end; an aware time.

    Raises:
        TypeError: the time has no zone.
    """

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None
    expires_after: datetime | None = None

    def __post_init__(self) -> None:
        """Refuse a time that could mean any time."""
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
    """A kind without data, or with one credential within; ``engine_name`` is what it becomes."""

    engine_name: ClassVar[str]

    @override
    def to_native(self) -> Any:
        return _engine(self.engine_name)(*map(to_native, self.values()))


class _Within(Items):
    """A kind that adds nothing to the credential within."""

    @override
    def to_native(self) -> Any:
        return to_native(self[0])


@dataclass(frozen=True, repr=False)
class _Refreshable(Variant):
    """Credentials of a function that is called again when they end."""

    engine_name: ClassVar[str]

    pickled_function: bytes = field(repr=False)
    current: Any = field(default=None, repr=False)

    @override
    def to_native(self) -> Any:
        asked = _Asked(self.pickled_function)
        return _engine(self.engine_name)(asked, to_native(self.current))


@kinds("credentials")
class S3Credentials(Kinds):
    """How requests to S3, and to stores that speak its protocol, are signed."""

    @dataclass(frozen=True, repr=False)
    class FromEnv(_ByName):
        """The usual chain: environment, configuration files, the role of the machine."""

        engine_name: ClassVar = "S3FromEnvironment"

    @dataclass(frozen=True, repr=False)
    class Anonymous(_ByName):
        """Requests are not signed."""

        engine_name: ClassVar = "S3Anonymous"

    @dataclass(frozen=True, repr=False)
    class Static(_Within):
        """Always the same keys."""

        _0: S3StaticCredentials = field(repr=False)

    @dataclass(frozen=True, repr=False)
    class Refreshable(_Refreshable):
        """Keys of a function that is called again when they end."""

        engine_name: ClassVar = "S3Refreshable"


@public("credentials")
@dataclass(frozen=True)
class GcsBearerCredential:
    """An access token for Google Cloud Storage.

    Raises:
        TypeError: ``expires_after`` has no zone.
    """

    bearer: str = field(repr=False)
    expires_after: datetime | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a time that could mean any time."""
        _check_zone("GcsBearerCredential", self.expires_after)

    def to_native(self) -> Any:
        """Return the engine's counterpart."""
        return _engine("GcsBearerToken")(self.bearer, self.expires_after)


@kinds("credentials")
class GcsStaticCredentials(Kinds):
    """Credentials for Google Cloud Storage that stay the same."""

    @dataclass(frozen=True, repr=False)
    class ServiceAccount(_ByName):
        """The path of the key file of a service account."""

        engine_name: ClassVar = "GcsServiceAccountFile"

        _0: str

    @dataclass(frozen=True, repr=False)
    class ServiceAccountKey(_ByName):
        """What stands in the key file of a service account."""

        engine_name: ClassVar = "GcsServiceAccountKey"

        _0: str = field(repr=False)

    @dataclass(frozen=True, repr=False)
    class ApplicationCredentials(_ByName):
        """The path of a file of application default credentials."""

        engine_name: ClassVar = "GcsServiceAccountFile"

        _0: str

    @dataclass(frozen=True, repr=False)
    class BearerToken(_ByName):
        """An access token."""

        engine_name: ClassVar = "GcsBearerToken"

        _0: str = field(repr=False)


@kinds("credentials")
class GcsCredentials(Kinds):
    """Who asks Google Cloud Storage."""

    @dataclass(frozen=True, repr=False)
    class Anonymous(_ByName):
        """Nobody in particular, for buckets that anyone may read."""

        engine_name: ClassVar = "GcsAnonymous"

    @dataclass(frozen=True, repr=False)
    class FromEnv(_ByName):
        """Google's default credentials."""

        engine_name: ClassVar = "GcsFromEnvironment"

    @dataclass(frozen=True, repr=False)
    class Static(_Within):
        """Always the same."""

        _0: AnyGcsStaticCredential

    @dataclass(frozen=True, repr=False)
    class Refreshable(_Refreshable):
        """Tokens of a function that is called again when they end."""

        engine_name: ClassVar = "GcsRefreshable"


type AnyGcsStaticCredential = (
    GcsStaticCredentials.ServiceAccount
    | GcsStaticCredentials.ServiceAccountKey
    | GcsStaticCredentials.ApplicationCredentials
    | GcsStaticCredentials.BearerToken
)


class _Ending(Variant):
    """A secret for Azure that may end."""

    engine_name: ClassVar[str]

    def __post_init__(self) -> None:
        """Refuse a time that could mean any time."""
        _check_zone(type(self).__qualname__, self.values()[1])

    @override
    def to_native(self) -> Any:
        return _engine(self.engine_name)(*self.values())


@kinds("credentials")
class AzureRefreshableCredential(Kinds):
    """What a function may answer that is asked for credentials for Azure."""

    @dataclass(frozen=True, repr=False)
    class AccessKey(_Ending):
        """A key of the account."""

        engine_name: ClassVar = "AzureAccountKey"

        key: str = field(repr=False)
        expires_after: datetime | None = None

    @dataclass(frozen=True, repr=False)
    class SasToken(_Ending):
        """A shared access signature."""

        engine_name: ClassVar = "AzureSasToken"

        token: str = field(repr=False)
        expires_after: datetime | None = None

    @dataclass(frozen=True, repr=False)
    class BearerToken(_Ending):
        """An access token."""

        engine_name: ClassVar = "AzureBearerToken"

        bearer: str = field(repr=False)
        expires_after: datetime | None = None


@kinds("credentials")
class AzureStaticCredentials(Kinds):
    """Credentials for Azure Blob Storage that stay the same."""

    @dataclass(frozen=True, repr=False)
    class AccessKey(_ByName):
        """A key of the account."""

        engine_name: ClassVar = "AzureAccountKey"

        _0: str = field(repr=False)

    @dataclass(frozen=True, repr=False)
    class SasToken(_ByName):
        """A shared access signature."""

        engine_name: ClassVar = "AzureSasToken"

        _0: str = field(repr=False)

    @dataclass(frozen=True, repr=False)
    class BearerToken(_ByName):
        """An access token."""

        engine_name: ClassVar = "AzureBearerToken"

        _0: str = field(repr=False)


@kinds("credentials")
class AzureCredentials(Kinds):
    """Who asks Azure Blob Storage."""

    @dataclass(frozen=True, repr=False)
    class FromEnv(_ByName):
        """What the environment says, else whoever is logged in."""

        engine_name: ClassVar = "AzureFromEnvironment"

    @dataclass(frozen=True, repr=False)
    class Anonymous(_ByName):
        """Nobody in particular, for containers that anyone may read."""

        engine_name: ClassVar = "AzureAnonymous"

    @dataclass(frozen=True, repr=False)
    class Static(_Within):
        """Always the same."""

        _0: AnyAzureStaticCredential

    @dataclass(frozen=True, repr=False)
    class Refreshable(_Refreshable):
        """Credentials of a function that is called again when they end."""

        engine_name: ClassVar = "AzureRefreshable"


type AnyAzureStaticCredential = (
    AzureStaticCredentials.AccessKey
    | AzureStaticCredentials.SasToken
    | AzureStaticCredentials.BearerToken
)


@kinds("credentials")
class Credentials(Kinds):
    """Leave to read what a virtual chunk container holds."""

    @dataclass(frozen=True, repr=False)
    class S3(_Within):
        """For S3, and for stores that speak its protocol."""

        _0: Any

    @dataclass(frozen=True, repr=False)
    class Gcs(_Within):
        """For Google Cloud Storage."""

        _0: Any

    @dataclass(frozen=True, repr=False)
    class Azure(_Within):
        """For Azure Blob Storage."""

        _0: Any

    @dataclass(frozen=True, repr=False)
    class LocalFileSystemAccess(_ByName):
        """For files of this machine."""

        engine_name: ClassVar = "LocalFileSystemAccess"

    @dataclass(frozen=True, repr=False)
    class HttpAccess(_ByName):
        """For a web server that asks nobody who they are."""

        engine_name: ClassVar = "HttpAccess"
