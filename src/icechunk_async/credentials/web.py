"""Access to web servers and to local files."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Refresher, check_end, check_fresh, is_good

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from icechunk_async.credentials._refresh import Callback

    type _Answer = HttpHeaders | HttpBearerToken

__all__ = [
    "HttpAccess",
    "HttpBearerToken",
    "HttpHeaders",
    "HttpRefreshable",
    "LocalFileSystemAccess",
]


@dataclass(frozen=True, slots=True)
class LocalFileSystemAccess:
    """Files below a container's path may be read."""

    backend: ClassVar[str] = "file"

    async def storage_options(self) -> dict[str, object]:
        """Return nothing: the operating system decides."""
        return {}


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """A web server may be asked, without credentials."""

    backend: ClassVar[str] = "http"

    async def storage_options(self) -> dict[str, object]:
        """Return nothing."""
        return {}


@dataclass(frozen=True, slots=True)
class HttpHeaders:
    """Headers that say who asks; never sent to another server that this one redirects to."""

    backend: ClassVar[str] = "http"

    headers: Mapping[str, str] = field(repr=False, hash=False)
    expires_after: datetime | None = None
    """When they end (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Keep a copy; refuse an end without a zone."""
        check_end("HttpHeaders", self.expires_after)
        # The caller may change theirs, and a value that is shared by handles must not.
        object.__setattr__(self, "headers", dict(self.headers))

    async def storage_options(self) -> dict[str, object]:
        """Return the headers."""
        check_fresh(self)
        return {"headers": dict(self.headers)}


@dataclass(frozen=True, slots=True)
class HttpBearerToken:
    """A token for the ``Authorization`` header."""

    backend: ClassVar[str] = "http"

    token: str = field(repr=False)
    expires_after: datetime | None = None
    """When it ends (aware); None where that is not known."""

    def __post_init__(self) -> None:
        """Refuse an end without a zone."""
        check_end("HttpBearerToken", self.expires_after)

    @property
    def headers(self) -> dict[str, str]:
        """The header that carries it."""
        return {"Authorization": f"Bearer {self.token}"}

    async def storage_options(self) -> dict[str, object]:
        """Return the header."""
        check_fresh(self)
        return {"headers": self.headers}


@dataclass(frozen=True, slots=True)
class HttpRefreshable:
    """Headers or tokens of a function that is called again five minutes before they end.

    Where they do not say when that is, it is called before each request.
    """

    backend: ClassVar[str] = "http"

    get_credentials: Callback[_Answer] = field(repr=False)
    initial: _Answer | None = None
    """Begin with this where it is still good, so that many workers do not all ask at once."""

    async def storage_options(self) -> dict[str, object]:
        """Return a function for the backend."""
        return {"headers": _Headers(self)}


class _Headers:
    """Returns the headers of the next request; concurrent requests share one call."""

    def __init__(self, source: HttpRefreshable) -> None:
        kinds = (HttpHeaders, HttpBearerToken)
        self._refresh: Refresher[_Answer] = Refresher(
            "HttpRefreshable", source.get_credentials, source.initial, kinds
        )
        self._current: _Answer | None = None
        # Without an end each request asks, and a read of chunks sends many at the same time.
        self._flights = SingleFlight[None, "_Answer"]()
        self._source = source

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as what it was made of."""
        return type(self), (self._source,)

    async def __call__(self) -> Mapping[str, str]:
        current = self._current
        # Without an end nothing else tells when one is over.
        if current is None or current.expires_after is None or not is_good(current):
            current = self._current = await self._flights.run(None, self._refresh)
        return current.headers
