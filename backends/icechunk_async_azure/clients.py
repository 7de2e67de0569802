"""One driver client per running event loop: made at first use, closed with its storage or loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.request import getproxies_environment
from weakref import WeakKeyDictionary

import aiohttp
from adlfs import AzureBlobFileSystem  # type: ignore[import-untyped, unused-ignore]
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobServiceClient

from icechunk_async.errors import StorageClosedError
from icechunk_async_azure.credentials import Proof

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from datetime import datetime

    from azure.storage.blob.aio import BlobClient, ContainerClient

    from icechunk_async_azure.options import Login, Place

__all__ = ["Client", "Clients", "Tuning", "released"]

_CONNECTIONS: Final = 128
_IDLE_SECONDS: Final = 4.0
"""How long an unused connection is kept: less than servers do (Azurite: 5 s). What is sent into a
connection that is being closed has an unknown outcome."""
_PIECE_BYTES: Final = 512 * 1024
_REFUSED: Final = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo"})
"""What the service says of credentials that are not, or no longer, good."""
_CLOSE_SECONDS: Final = 1.0
_WHOLE_BYTES: Final = 1 << 40
"""Objects come in one answer, and so from one version, however large they are."""


class Tuning:
    """How patient a client is."""

    __slots__ = ("connect_timeout_seconds", "timeout_seconds")

    def __init__(self, timeout_seconds: float, connect_timeout_seconds: float) -> None:
        """Take the options of these names."""
        self.timeout_seconds = timeout_seconds
        self.connect_timeout_seconds = connect_timeout_seconds


class LostReplyError(aiohttp.ClientConnectionError):
    """A conditional write was sent and its connection broke."""


async def _send_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a conditional write again when a connection breaks.

    The second one would be refused because the first one landed, and another writer may have
    replaced it in between.
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise  # nothing was sent, and aiohttp does not send it again
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        names = ("If-Match", "If-None-Match", "x-ms-copy-source")
        if request.method == "PUT" and any(name in request.headers for name in names):
            raise LostReplyError(f"the connection broke: {error}") from error
        raise


_opened: Final[ContextVar[list[aiohttp.ClientResponse] | None]] = ContextVar(
    "_opened", default=None
)


@contextmanager
def released() -> Generator[None]:
    """Give back the connections of the requests in the block, also where it is cancelled.

    The driver leaves them to the garbage collector when the reading of a body is broken off.
    """
    responses: list[aiohttp.ClientResponse] = []
    token = _opened.set(responses)
    try:
        yield
    finally:
        _opened.reset(token)
        for response in responses:
            response.close()  # nothing, where the body was read to its end


class _Session:
    """An aiohttp session that sends large bodies in pieces, so that the loop goes on meanwhile.

    A request whose SAS token the service refuses is sent once more where there is a newer one.
    """

    auto_decompress = False

    def __init__(self, session: aiohttp.ClientSession, proof: Proof) -> None:
        """Send through ``session``, for whom ``proof`` shows."""
        self._session = session
        self._proof = proof

    async def request(
        self, method: str, url: str, *, data: object, **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request."""
        response = await self._send(method, url, data, options)
        code = response.headers.get("x-ms-error-code")
        if response.status in (401, 403) and code in _REFUSED and isinstance(data, bytes | None):
            renewed = await self._proof.renewed(url)
            if renewed is not None:  # what was refused has changed nothing
                response.release()
                return await self._send(method, renewed, data, options)
        return response

    async def _send(
        self, method: str, url: str, data: object, options: dict[str, Any]
    ) -> aiohttp.ClientResponse:
        if isinstance(data, bytes) and len(data) > _PIECE_BYTES:
            data = BytesIO(data)
        response = await self._session.request(method, url, data=data, **options)
        responses = _opened.get()
        if responses is not None:
            responses.append(response)
        return response

    async def __aenter__(self) -> Self:
        return self


class _FileSystem(AzureBlobFileSystem):  # type: ignore[misc, unused-ignore]
    """adlfs's file system over a client of our making.

    Its own way of connecting lets the environment override what the caller gave, knows no plain
    http, and passes on neither timeouts nor retries.
    """

    def do_connect(self) -> None:
        """Take the client that was given."""
        self.service_client: BlobServiceClient = self.kwargs["client"]  # pyright: ignore[reportUnknownMemberType]


class Client:
    """What one event loop uses."""

    def __init__(
        self, session: aiohttp.ClientSession, service: BlobServiceClient, proof: Proof, place: Place
    ) -> None:
        """Take over all of them."""
        self.filesystem = _file_system(service)
        self.container: ContainerClient = service.get_container_client(place.container)
        self.proof = proof
        self._session = session
        self._service = service
        self._closed = False

    def blob(self, name: str) -> BlobClient:
        """Return the driver's handle on one blob; nothing is sent."""
        return self.container.get_blob_client(name)

    async def close(self) -> None:
        """Close its connections; what is under way fails."""
        if not self._closed:
            self._closed = True
            try:
                await self.proof.close()
                await self._service.close()
            finally:
                await self._session.close()


def _file_system(service: BlobServiceClient) -> AzureBlobFileSystem:
    filesystem = _FileSystem(
        account_name=service.account_name or "custom",
        anon=True,  # so that it looks for no credentials of its own
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        skip_instance_cache=True,
        use_listings_cache=False,
        client=service,
    )
    # It would be kept alive until the program ends, to be closed on a loop that is gone by then.
    for reference in weakref.getweakrefs(filesystem):
        finalizer: Any = reference.__callback__
        if isinstance(finalizer, weakref.finalize):
            finalizer.detach()
    return filesystem


class Clients:
    """The clients of one storage."""

    def __init__(self, login: Login, place: Place, tuning: Tuning) -> None:
        """Remember how to connect; nothing is opened."""
        self.login = login
        self._place = place
        self._tuning = tuning
        self._lock = threading.Lock()  # held over no await
        self._open: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[Client, AsyncGenerator[None]]
        ] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )
        self.closed = False

    def check_open(self) -> None:
        """Refuse use after the end.

        Raises:
            StorageClosedError: the storage was closed.
        """
        if self.closed:
            raise StorageClosedError(
                "The storage was used after its 'async with' block ended. Open it again."
            )

    def expires(self, loop: asyncio.AbstractEventLoop) -> datetime | None:
        """Return when the SAS token or token that ``loop`` uses ends, where it says so."""
        found = self._open.get(loop)
        return found[0].proof.expires if found is not None else None

    async def here(self) -> Client:
        """Return the running loop's client, with credentials that are fresh.

        Raises:
            StorageClosedError: the storage was closed.

        Cancellation: no effect.
        """
        self.check_open()
        found = self._open.get(asyncio.get_running_loop())
        client = found[0] if found is not None else await self._make()
        await client.proof.refresh()
        return client

    async def _make(self) -> Client:
        loop = asyncio.get_running_loop()
        with self._lock:
            turn = self._turns.setdefault(loop, asyncio.Lock())
        async with turn:
            found = self._open.get(loop)
            if found is not None:
                return found[0]
            client = await self._connect()
            keeper = self._keep(loop, client)
            await anext(keeper)  # asyncio ends it with the loop, if the storage does not before
            with self._lock:  # between looking and adding there is no await
                if not self.closed:
                    self._open[loop] = client, keeper
                    return client
            await keeper.aclose()
            self.check_open()
            raise AssertionError  # unreachable: it is closed

    async def _connect(self) -> Client:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=_IDLE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=bool(getproxies_environment()),  # looking costs a hop for each request
            middlewares=(_send_once,),
        )
        try:
            # Making credentials and the driver's first client reads files.
            proof = await asyncio.to_thread(Proof, self.login)
            service = await asyncio.to_thread(partial(self._service, session, proof))
            return Client(session, service, proof, self._place)
        except BaseException:
            await session.close()
            raise

    def _service(self, session: aiohttp.ClientSession, proof: Proof) -> BlobServiceClient:
        tuning = self._tuning
        return BlobServiceClient(
            self.login.account_url,
            credential=proof.credential,
            transport=AioHttpTransport(
                session=cast("aiohttp.ClientSession", _Session(session, proof)),  # all that it uses
                session_owner=False,
                connection_timeout=tuning.connect_timeout_seconds,
                read_timeout=tuning.timeout_seconds,
            ),
            retry_total=0,  # a retry of a write that landed is refused, or hides another's
            max_single_get_size=_WHOLE_BYTES,
            max_chunk_get_size=_WHOLE_BYTES,
        )

    async def _keep(self, loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(loop, None)
            await client.close()

    async def close(self) -> None:
        """Close the clients of all loops; those of others are waited for, but not for long."""
        with self._lock:
            self.closed = True
            clients = dict(self._open)
        here = asyncio.get_running_loop()
        for loop, (client, keeper) in clients.items():
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                # A loop that is blocked closes its client as soon as it is free.
                closing = asyncio.run_coroutine_threadsafe(client.close(), loop)
                with suppress(TimeoutError, asyncio.CancelledError, RuntimeError):
                    waiting = asyncio.wrap_future(closing)
                    await asyncio.wait_for(asyncio.shield(waiting), _CLOSE_SECONDS)
