"""Credentials for S3, and for stores that speak its protocol."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Newest, Refresher, check_end, check_fresh
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.credentials._refresh import Callback

__all__ = ["S3Anonymous", "S3FromEnvironment", "S3Refreshable", "S3StaticCredentials"]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3StaticCredentials:
    """Keys that do not change."""

    backend: ClassVar[str] = "s3"

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_after: datetime | None = None
    """When they end (aware); None where that is not known."""
    endpoint_url: str | None = None
    """The endpoint that they are for, in place of the one that a container
    names; None for that of AWS, or of a container in a configuration of your own."""

    def __post_init__(self) -> None:
        """Refuse keys that cannot sign a request."""
        # Empty ones come from unset variables. Signed with them, a request is refused as a wrong
        # signature, which sends people looking elsewhere.
        if not self.access_key_id or not self.secret_access_key:
            raise InvalidInputError(
                "S3StaticCredentials need an access_key_id and a secret_access_key; one of them is "
                "empty."
            )
        check_end("S3StaticCredentials", self.expires_after)

    @property
    def expires_at(self) -> datetime | None:
        """The end, under the name that the backend asks for."""
        return self.expires_after

    async def storage_options(self) -> dict[str, object]:
        """Return the keys."""
        check_fresh(self)
        options: dict[str, object] = {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }
        if self.session_token is not None:
            options["session_token"] = self.session_token
        return {**options, **_at(self.endpoint_url)}


@dataclass(frozen=True, slots=True)
class S3FromEnvironment:
    """The usual chain: environment variables, configuration files, the machine's role."""

    backend: ClassVar[str] = "s3"

    endpoint_url: str | None = None
    """As for `S3StaticCredentials`."""

    async def storage_options(self) -> dict[str, object]:
        """Return the endpoint; all else the backend does by itself."""
        # Said, and not left out: the options of a container in a configuration may ask for unsigned
        # requests.
        return {"anonymous": False, **_at(self.endpoint_url)}


@dataclass(frozen=True, slots=True)
class S3Anonymous:
    """Requests that are not signed, for buckets that anyone may read."""

    backend: ClassVar[str] = "s3"

    async def storage_options(self) -> dict[str, object]:
        """Return so."""
        return {"anonymous": True}


@dataclass(frozen=True, slots=True)
class S3Refreshable:
    """Keys of a function that is called again five minutes before they end, or when refused."""

    backend: ClassVar[str] = "s3"

    get_credentials: Callback[S3StaticCredentials] = field(repr=False)
    initial: S3StaticCredentials | None = None
    """Begin with these where they are still good, so that many workers do not all ask at once."""
    endpoint_url: str | None = None
    """As for `S3StaticCredentials`; that of what the function returns does not count."""
    _newest: Newest = field(default_factory=Newest, init=False, repr=False, compare=False)

    async def storage_options(self) -> dict[str, object]:
        """Return a function for the backend."""
        refresher = Refresher(
            "S3Refreshable",
            self.get_credentials,
            self.initial,
            (S3StaticCredentials,),
            self._newest,
        )
        # The endpoint counts here and not in what the function returns: where keys are sent is
        # decided when the repository is opened, or a function that reads a file would decide it.
        return {"credentials": refresher, **_at(self.endpoint_url)}


def _at(endpoint_url: str | None) -> dict[str, object]:
    return {} if endpoint_url is None else {"endpoint_url": endpoint_url}
