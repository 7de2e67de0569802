"""Requests and replies: one client for each event loop, on gcsfs' sessions."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, urlencode

import aiohttp
import anyio.to_thread
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped, unused-ignore]
from yarl import URL

from icechunk_async.errors import StorageError
from icechunk_async.storage.ending import Ending
from icechunk_async_gcs.failures import NETWORK_ERRORS, Refused, never_sent, not_reached, refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from icechunk_async_gcs.authority import Authority
    from icechunk_async_gcs.options import Options

__all__ = ["Reply", "Service", "Silence"]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Return whether it is a success."""
        return 200 <= self.status < 300

    @property
    def in_doubt(self) -> bool:
        """Return whether the service failed, so that the request may have been applied."""
        return self.status >= 500 or self.status == 408

    def refused(self) -> Refused:
        """Parse the error in it."""
        return Refused.read(self.status, self.headers, self.body)

    def document(self) -> dict[str, Any]:
        """Parse the JSON object in a success, which a proxy on the way may have replaced.

        Raises:
            StorageError: it holds none.
        """
        try:
            found: object = json.loads(self.body)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return cast("dict[str, Any]", found)
        raise StorageError(
            "The service answered with a success that holds no document. Check the endpoint, and "
            "proxies before it."
        )


@dataclass(frozen=True, slots=True)
class Silence:
    """A request was sent, in whole or in part, and no reply came."""

    error: BaseException


_GOOGLE: Final = "https://storage.googleapis.com"


@dataclass(slots=True)
class _Client:
    """The state of one event loop."""

    system: Any
    """gcsfs' file system, which closes the session when it is no longer referred to."""
    session: aiohttp.ClientSession
    authority: Authority
    lifetime: AsyncGenerator[None]


class Service:
    """The JSON API of one host, for one bucket."""

    def __init__(
        self, name: str, bucket: str, options: Options, authorities: Callable[[], Authority]
    ) -> None:
        """Connect nothing yet; ``name`` is the name of the storage in errors."""
        self._name = name
        self._bucket = bucket
        self._options = options
        self._authorities = authorities
        self._clients: dict[asyncio.AbstractEventLoop, _Client] = {}
        self._lock = threading.Lock()  # held over no await
        self._closed: Ending | None = None
        self._host = ""
        self.objects: Final = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self.project = options.project
        self._agent = options.user_agent or "icechunk-async"
        self.endpoint: Final = options.endpoint_url

    @property
    def is_documented(self) -> bool:
        """Whether the host is Google's."""
        return self._host == _GOOGLE

    def object(self, name: str) -> str:
        """Return the path of an object."""
        return f"{self.objects}/{quote(name, safe='')}"

    def check_open(self) -> None:
        """Raise StorageClosedError after the storage was closed."""
        if self._closed is not None:
            raise self._closed.error(self._name)

    async def close(self) -> None:
        """Close all connections; those of other loops are closed there."""
        with self._lock:
            self._closed = Ending()
            clients, self._clients = self._clients, {}
        here = asyncio.get_running_loop()
        for loop, client in clients.items():
            if loop is here:
                await client.lifetime.aclose()
            elif loop.is_running():
                # Not waited for: that loop may be blocked, waiting for this one.
                asyncio.run_coroutine_threadsafe(_finish(client.lifetime), loop)

    async def ask(
        self,
        method: str,
        path: str,
        what: str,
        *,
        key: str | None = None,
        accept: tuple[int, ...] = (),
        **request: Any,
    ) -> Reply:
        """Send a request that changes nothing, or that may be repeated.

        Args:
            method: of the request.
            path: below the host.
            what: the operation, for errors.
            key: the key concerned, for errors.
            accept: statuses beside 2xx that the caller handles.
            request: as for `exchange`.

        Raises:
            StorageError: the subclass for the failure.
        """
        reply = await self.exchange(method, path, what, **request)
        if isinstance(reply, Silence):
            raise self.silence(reply, what) from reply.error
        if not reply.ok and reply.status not in accept:
            raise self.refusal(reply, what, key)
        return reply

    def refusal(self, reply: Reply, what: str, key: str | None) -> StorageError:
        """Return the error that a reply stands for."""
        return refusal(reply.refused(), what, self._bucket, key)

    def silence(self, silence: Silence, what: str) -> StorageError:
        """Return the error for a request that changed nothing and got no reply."""
        return not_reached(silence.error, what, self._bucket, self._host)

    async def exchange(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        start: int = 0,
    ) -> Reply | Silence:
        """Send a request, from byte ``start`` of its body on, and return the reply.

        A request refused with 401 is sent once more if the credentials can be renewed.

        Raises:
            StorageError: it was not sent at all.
        """
        query = dict(query or {})
        if self.project is not None:
            query["userProject"] = self.project
        for last in (False, True):
            client = await self._client()
            authorization = await client.authority.headers()
            self.check_open()
            try:
                sent = {**(headers or {}), **authorization}
                reply = await self._send(client, (method, path), query, sent, (body, start))
            except (*NETWORK_ERRORS, RuntimeError) as error:
                if self._closed:  # RuntimeError: the session was closed under the request
                    self.check_open()
                if isinstance(error, RuntimeError):
                    raise
                if never_sent(error):
                    raise not_reached(error, what, self._bucket, self._host) from error
                return Silence(error)
            if reply.status != 401 or last or not await client.authority.renew(authorization):
                return reply
        raise AssertionError  # the second round returns

    async def _send(
        self,
        client: _Client,
        line: tuple[str, str],
        query: Mapping[str, str],
        headers: Mapping[str, str],
        content: tuple[bytes | None, int],
    ) -> Reply:
        (method, path), (body, start) = line, content
        url = f"{self._host}{path}"
        if query:
            url += ("&" if "?" in path else "?") + urlencode(query, quote_via=quote)
        data = None
        if body is not None:
            data = io.BytesIO(body)  # shares the bytes, and is sent piece by piece
            data.seek(start)
        async with client.session.request(
            method,
            URL(url, encoded=True),
            # Not compressed: ranges, lengths and sums are those of the stored object.
            headers={"User-Agent": self._agent, "Accept-Encoding": "identity", **headers},
            data=data,
            # A redirect is an error: another server would get the token.
            allow_redirects=False,
        ) as response:
            return Reply(response.status, response.headers, await response.read())

    async def connect(self) -> None:
        """Create the client of the running loop, so that errors in its options show now."""
        await self._client()

    async def _client(self) -> _Client:
        """Return the client of the running loop."""
        self.check_open()
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is not None:
            return client
        system = await anyio.to_thread.run_sync(self._system)  # may read files about certificates
        certified = getattr(system, "_use_client_cert", False)  # of gcsfs since 2026.10
        if "connector" not in system.session_kwargs and not certified:
            # aiohttp's cache of addresses would leave a task behind when a request is cancelled.
            system.session_kwargs["connector"] = aiohttp.TCPConnector(use_dns_cache=False)
        session: aiohttp.ClientSession = await system._set_session()  # noqa: SLF001
        client = _Client(system, session, self._authorities(), _lifetime(session))
        await anext(client.lifetime)  # from here on the loop closes it when it ends itself
        with self._lock:
            known = None if self._closed else self._clients.setdefault(loop, client)
            for ended in [other for other in self._clients if other.is_closed()]:
                del self._clients[ended]
        if known is not client:  # another request made one meanwhile, or the storage was closed
            await client.lifetime.aclose()
        self.check_open()
        return known or client

    def _system(self) -> Any:
        """Create gcsfs' file system, of which only the session and the host are used. Blocks."""
        # The class in gcsfs.core: the one that gcsfs itself exports wants gRPC, also of emulators.
        system: Any = GCSFileSystem(
            project="",
            token="anon",  # noqa: S106 - requests are authenticated here
            endpoint_url=self._options.endpoint_url,
            session_kwargs={
                "timeout": aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=self._options.connect_timeout_seconds,
                    sock_read=self._options.read_timeout_seconds,
                )
            },
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        self._host = system._location.rstrip("/")  # noqa: SLF001
        self._options.check_encrypted(self._host)
        return system


async def _lifetime(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    """Close a session when this generator is closed, which an ending loop does by itself."""
    try:
        yield
    finally:
        await session.close()


async def _finish(lifetime: AsyncGenerator[None]) -> None:
    await lifetime.aclose()
