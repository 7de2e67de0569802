"""Credentials for Google Cloud Storage."""

from __future__ import annotations

import json
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Newest, Refresher, check_end, check_fresh
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    import os
    from datetime import datetime

    from icechunk_async.credentials._refresh import Callback

__all__ = [
    "GcsAnonymous",
    "GcsBearerToken",
    "GcsFromEnvironment",
    "GcsRefreshable",
    "GcsServiceAccountFile",
    "GcsServiceAccountKey",
]


@dataclass(frozen=True, slots=True)
class GcsServiceAccountFile:
    """A file of credentials: a service account's key, or application default credentials."""

    backend: ClassVar[str] = "gs"

    path: str | os.PathLike[str]

    async def storage_options(self) -> dict[str, object]:
        """Return the path, which the backend reads."""
        return {"token": self.path}


@dataclass(frozen=True, slots=True)
class GcsServiceAccountKey:
    """The contents of the key file of a service account."""

    backend: ClassVar[str] = "gs"

    key: str = field(repr=False)
    """JSON."""

    async def storage_options(self) -> dict[str, object]:
        """Return the document."""
        try:
            document: object = json.loads(self.key)
        # Raised without its cause: the error of the parser holds the text, which is a private key.
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise InvalidInputError(
                "GcsServiceAccountKey holds no JSON object. Give the text of a key file."
            ) from None
        return {"token": cast("dict[str, object]", document)}


@dataclass(frozen=True, slots=True)
class GcsBearerToken:
    """An access token."""

    backend: ClassVar[str] = "gs"

    token: str = field(repr=False)
    expires_after: datetime | None = None
    """When it ends (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Refuse an end without a zone."""
        check_end("GcsBearerToken", self.expires_after)

    @property
    def expires_at(self) -> datetime | None:
        """The end, under the name that the backend asks for."""
        return self.expires_after

    async def storage_options(self) -> dict[str, object]:
        """Return a function that answers this token."""
        check_fresh(self)
        return {"token": _Same(self)}


@dataclass(frozen=True, slots=True)
class _Same:
    """Always the same token."""

    token: GcsBearerToken

    async def __call__(self) -> GcsBearerToken:
        check_fresh(self.token)
        return self.token


@dataclass(frozen=True, slots=True)
class GcsFromEnvironment:
    """Google's default credentials: a file, a login, the machine's service account."""

    backend: ClassVar[str] = "gs"

    async def storage_options(self) -> dict[str, object]:
        """Return so."""
        return {"token": None}


@dataclass(frozen=True, slots=True)
class GcsAnonymous:
    """No credentials, for buckets that anyone may read."""

    backend: ClassVar[str] = "gs"

    async def storage_options(self) -> dict[str, object]:
        """Return so."""
        return {"token": "anonymous"}


@dataclass(frozen=True, slots=True)
class GcsRefreshable:
    """Access tokens of a function that is called again before they end, or when refused."""

    backend: ClassVar[str] = "gs"

    get_credentials: Callback[GcsBearerToken] = field(repr=False)
    initial: GcsBearerToken | None = None
    """Begin with this where it is still good, so that many workers do not all ask at once."""
    _newest: Newest = field(default_factory=Newest, init=False, repr=False, compare=False)

    async def storage_options(self) -> dict[str, object]:
        """Return a function for the backend."""
        refresher = Refresher(
            "GcsRefreshable", self.get_credentials, self.initial, (GcsBearerToken,), self._newest
        )
        return {"token": refresher}
