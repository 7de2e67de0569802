"""HTTP requests: one session for each event loop, and the errors of aiohttp."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import aiohttp
from yarl import URL

from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    NameResolutionError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
    TLSError,
    UnreachableError,
)
from icechunk_async.storage.ending import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    type Headers = Mapping[str, str] | Callable[[], Awaitable[Mapping[str, str]]]

__all__ = ["Sessions", "Transport", "check_headers"]


class Sessions:
    """The sessions of one storage, by event loop.

    Each is held by an asynchronous generator, because a loop that ends closes its generators, and
    with them its connections.
    """

    def __init__(
        self, name: str, timeout: aiohttp.ClientTimeout, user_agent: str | None = None
    ) -> None:
        """Open nothing yet."""
        self._always = {"Accept-Encoding": "identity"}
        if user_agent is not None:
            self._always["User-Agent"] = user_agent
        self._name = name
        self._timeout = timeout
        self._lock = threading.Lock()  # held over no await
        self._held: dict[
            asyncio.AbstractEventLoop,
            tuple[AsyncGenerator[aiohttp.ClientSession], aiohttp.ClientSession],
        ] = {}
        self.closed: Ending | None = None

    def check_open(self) -> None:
        """Raise an error after the storage was closed.

        Raises:
            StorageClosedError: the storage's block has ended.
        """
        if self.closed is not None:
            raise self.closed.error(self._name)

    async def here(self) -> aiohttp.ClientSession:
        """Return the session of the running loop."""
        self.check_open()
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            keeper = self._keep()
            held = (keeper, await anext(keeper))  # making it does not wait
            with self._lock:
                for other in [it for it in self._held if it.is_closed()]:
                    del self._held[other]
                self._held[loop] = held
        return held[1]

    async def close(self) -> None:
        """Close this loop's session, and make the other loops close theirs without waiting."""
        self.closed = Ending()
        here = asyncio.get_running_loop()
        with self._lock:
            all_held, self._held = self._held, {}
        for loop, (keeper, _) in all_held.items():
            if loop is here:
                await keeper.aclose()
            elif not loop.is_closed():
                closing = _close(keeper)
                try:
                    asyncio.run_coroutine_threadsafe(closing, loop)
                except RuntimeError:  # it has ended just now, and closed its generators
                    closing.close()

    async def _keep(self) -> AsyncGenerator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(
            # The caller's budget bounds requests; a queue here would only hide that.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            # What one reply sets must not change the next request.
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers=self._always,
        ) as session:
            yield session


async def _close(keeper: AsyncGenerator[aiohttp.ClientSession]) -> None:
    with suppress(RuntimeError):  # the loop itself is closing it
        await keeper.aclose()


_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MOST_REDIRECTS: Final = 10
_OURS: Final = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "expect", "host", "range", "trailer"),
        *("if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since"),
        *("transfer-encoding", "upgrade"),
    }
)
"""Headers with a part in the protocol, which the caller must not set."""


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of headers that can be sent.

    Raises:
        InvalidInputError: one cannot; it is named, its value is not.
    """
    for name, value in headers.items():
        if name.lower() in _OURS:
            raise InvalidInputError(
                f"The header {name!r} is set by the library itself. Leave it out.", header=name
            )
        if not name or not (name + value).isprintable():
            raise InvalidInputError(
                f"The header {name!r} cannot be sent: its name is empty, or it holds a control "
                "character such as a line break. Remove that.",
                header=name,
            )
    return dict(headers)


class Transport:
    """Sends the requests of one storage."""

    def __init__(self, sessions: Sessions, headers: Headers) -> None:
        """Use `open_http`."""
        self._sessions = sessions
        self._headers = headers

    @asynccontextmanager
    async def get(
        self, url: URL, key: str, own: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Hold the reply to a GET with our ``own`` headers and the caller's.

        Raises:
            StorageUnavailableError: no complete reply came.
            StorageError: redirects lead nowhere, or to where must not be followed.
        """
        self._sessions.check_open()
        theirs = self._headers if not callable(self._headers) else await self._headers()
        headers = {**check_headers(theirs), **own}
        here = url
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                session = await self._sessions.here()
                # Redirects are followed here: of the caller's headers any may be a credential, and
                # aiohttp knows only the usual ones.
                async with session.get(here, headers=headers, allow_redirects=False) as answer:
                    if answer.status not in _REDIRECTS:
                        yield answer
                        return
                    target = _target(here, answer.headers.get("Location"), key)
                if target.origin() != here.origin():
                    headers = dict(own)
                here = target
        except IcechunkError:
            raise
        except RuntimeError:
            if not self._sessions.closed:  # aiohttp's error for a closed session
                raise
            self._sessions.check_open()
        except (aiohttp.ClientError, OSError) as error:
            # The cause may show a signed URL that the server redirected to.
            raise self._translated(error, key, here.host or "") from None
        raise StorageError(
            f"Reading {key!r} from {url.host}: more than {_MOST_REDIRECTS} redirects followed each "
            "other. Check the server.",
            key=key,
        )

    def _translated(self, error: Exception, key: str, host: str) -> IcechunkError:
        if self._sessions.closed:
            return StorageClosedError(
                f"The storage was closed while {key!r} was read. Open it again."
            )
        asked = f"Reading {key!r} from {host}"
        kind, found = _explain(error)
        return kind(f"{asked}: {found}. Check server and network, and try again.", key=key)


def _explain(error: Exception) -> tuple[type[IcechunkError], str]:
    match error:
        case aiohttp.ClientConnectorDNSError():
            return NameResolutionError, "the host's name could not be resolved"
        case aiohttp.ClientSSLError():
            return TLSError, "no trusted TLS connection could be made"
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return UnreachableError, "no connection could be made"
        case TimeoutError():
            return StorageUnavailableError, "the server was silent for too long"
        case _:
            return StorageUnavailableError, f"the answer broke off ({type(error).__name__})"


def _target(here: URL, location: str | None, key: str) -> URL:
    """Return where a redirect leads.

    Raises:
        StorageError: nowhere, or from TLS to plain text.
    """
    try:
        target = here.join(URL(location or "", encoded=True))
        usable = bool(location and target.host and target.user is None)
    except ValueError:
        target, usable = here, False
    if not usable or target.scheme not in ("http", "https"):
        problem = "without a target that is a URL"
    elif (here.scheme, target.scheme) == ("https", "http"):
        problem = "from https:// to http://, where it could be read and changed on its way"
    else:
        return target
    raise StorageError(
        f"Reading {key!r} from {here.host}: the server redirects {problem}. Check the server.",
        key=key,
    )
