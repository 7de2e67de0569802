"""Credentials for Azure Blob Storage."""

from __future__ import annotations

from dataclasses import field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Newest, Refresher, check_end, check_fresh

if TYPE_CHECKING:
    from icechunk_async.credentials._refresh import Callback

    type _Answer = AzureAccountKey | AzureSasToken | AzureBearerToken

__all__ = [
    "AzureAccountKey",
    "AzureAnonymous",
    "AzureBearerToken",
    "AzureFromEnvironment",
    "AzureRefreshable",
    "AzureSasToken",
]

# The driver asks for a number: one that never comes stands for "not known".
_FAR: Final = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class AzureAccountKey:
    """One of the account's keys, in base64."""

    backend: ClassVar[str] = "az"

    token: str = field(repr=False)
    expires_after: datetime | None = None
    """When it ends (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Refuse an end without a zone."""
        check_end("AzureAccountKey", self.expires_after)

    @property
    def expires_at(self) -> datetime | None:
        """The end, under the name that the backend asks for."""
        return self.expires_after

    async def storage_options(self) -> dict[str, object]:
        """Return the key."""
        check_fresh(self)
        return {"account_key": self.token}


@dataclass(frozen=True, slots=True)
class AzureSasToken:
    """A shared access signature: what follows the ``?`` of a SAS URL."""

    backend: ClassVar[str] = "az"

    token: str = field(repr=False)
    expires_after: datetime | None = None
    """When it ends (aware); None where that is not known, or the token says so itself."""

    def __post_init__(self) -> None:
        """Refuse an end without a zone."""
        check_end("AzureSasToken", self.expires_after)

    @property
    def expires_at(self) -> datetime | None:
        """The end, under the name that the backend asks for."""
        return self.expires_after

    async def storage_options(self) -> dict[str, object]:
        """Return the token."""
        check_fresh(self)
        return {"sas_token": self.token}


@dataclass(frozen=True, slots=True)
class AzureBearerToken:
    """An access token of Microsoft Entra."""

    backend: ClassVar[str] = "az"

    token: str = field(repr=False)
    expires_after: datetime | None = None
    """When it ends (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Refuse an end without a zone."""
        check_end("AzureBearerToken", self.expires_after)

    @property
    def expires_on(self) -> int:
        """The end in seconds since the epoch, as the driver asks for it."""
        return int((self.expires_after or _FAR).timestamp())

    async def storage_options(self) -> dict[str, object]:
        """Return a function that answers this token."""
        check_fresh(self)
        # A function, as the backend asks for. Called again near the end of the token, it raises
        # here, before a request is refused by the server.
        return {"credential": _Same(self)}


@dataclass(frozen=True, slots=True)
class _Same:
    """Always the same token."""

    token: AzureBearerToken

    async def __call__(self) -> AzureBearerToken:
        check_fresh(self.token)
        return self.token


@dataclass(frozen=True, slots=True)
class AzureFromEnvironment:
    """The identity in the environment, or else the user who is logged in."""

    backend: ClassVar[str] = "az"

    async def storage_options(self) -> dict[str, object]:
        """Return nothing: it is what the backend does by itself."""
        # Said, and not left out: the container in a configuration may ask for anonymous requests.
        return {"anonymous": False}


@dataclass(frozen=True, slots=True)
class AzureAnonymous:
    """No credentials, for containers that anyone may read."""

    backend: ClassVar[str] = "az"

    async def storage_options(self) -> dict[str, object]:
        """Return so."""
        return {"anonymous": True}


@dataclass(frozen=True, slots=True)
class AzureRefreshable:
    """Tokens of a function that is called again before they end.

    Its first answer is asked for when the repository is opened. The kind of that stays, and an
    account key is used until the repository is closed.
    """

    backend: ClassVar[str] = "az"

    get_credentials: Callback[_Answer] = field(repr=False)
    initial: _Answer | None = None
    """Begin with this where it is still good, so that many workers do not all ask at once."""
    _newest: Newest = field(default_factory=Newest, init=False, repr=False, compare=False)

    async def storage_options(self) -> dict[str, object]:
        """Get the first credential, and return a function with which the backend gets the next.

        Raises:
            InvalidInputError: the function answered no credential for Azure.
            Exception: what the function raised.
        """
        # Asked before the client is made: which of its options is used depends on the kind of the
        # answer.
        kinds = (AzureAccountKey, AzureSasToken, AzureBearerToken)
        owner = "AzureRefreshable"
        ask = Refresher(owner, self.get_credentials, self.initial, kinds, self._newest)
        first = await ask()
        # The client takes a function for the other two only.
        if isinstance(first, AzureAccountKey):
            return await first.storage_options()
        option = "sas_token" if isinstance(first, AzureSasToken) else "credential"
        return {option: Refresher(owner, self.get_credentials, first, (type(first),), self._newest)}
