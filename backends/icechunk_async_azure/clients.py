"""Clients of the Azure SDK, one for each event loop, and the credentials they send."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Self, cast
from urllib.parse import parse_qs
from urllib.request import getproxies_environment
from weakref import WeakKeyDictionary

import aiohttp
from adlfs import AzureBlobFileSystem  # type: ignore[import-untyped, unused-ignore]
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobServiceClient

from icechunk_async.errors import InvalidInputError
from icechunk_async.storage.ending import Ending
from icechunk_async_azure.options import is_async

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from azure.storage.blob.aio import BlobClient, ContainerClient

    from icechunk_async_azure.options import Login, Place

__all__ = ["Client", "Clients", "Proof", "Tuning", "released"]

_EARLY: Final = timedelta(minutes=2)
"""A SAS token is renewed this long before it expires."""
_RECENT: Final = 16
"""Earlier SAS tokens kept, because requests in flight may still carry them."""
_SCOPE: Final = "https://storage.azure.com/.default"
_LATER: Final = datetime.max.replace(tzinfo=UTC)


class Proof:
    """The credential that one client sends, and how it is kept fresh."""

    def __init__(self, login: Login) -> None:
        """Make the credential; may read files, so call it off the loop."""
        self.credential: Any = None
        self.expires: datetime | None = None
        """When the SAS token or bearer token in use expires."""
        self._login = login
        self._owned: Any = None
        self._fetch: Callable[[], Awaitable[str]] | None = None
        # Bounded: a request with an older token than these is refused for good, as it would be
        # without this.
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._turn = asyncio.Lock()
        secret: Any = login.secret
        match login.kind:
            case "key":
                self.credential = AzureNamedKeyCredential(login.account_name or "", secret)
            case "sas":
                self.credential = AzureSasCredential(secret)
                self.expires = _end_of(secret)
            case "sas-callback":
                self._fetch = secret
                self.credential = AzureSasCredential("sig=none")  # replaced before anything is sent
            case "token" | "default":
                self.credential = _Tokens(self._token_source(), self)
            case "anonymous":
                pass

    def _token_source(self) -> Callable[..., Awaitable[AccessToken]]:
        secret: Any = self._login.secret
        if self._login.kind == "default":
            from azure.identity.aio import DefaultAzureCredential  # noqa: PLC0415 - slow

            self._owned = DefaultAzureCredential()
        elif is_async(secret):
            return lambda *_, **__: secret()
        elif isinstance(secret, type) or not hasattr(secret, "get_token"):
            self._owned = secret()
        source: Any = secret if self._owned is None else self._owned
        fetch: Callable[..., Awaitable[AccessToken]] = source.get_token
        return fetch

    async def refresh(self) -> None:
        """Fetch a new SAS token if the current one comes from a callback and is about to expire.

        Raises:
            InvalidInputError: the callback did not return a SAS token.
            Exception: the callback failed.
        """
        if self._fetch is None or not self._is_ending():
            return
        async with self._turn:
            # Asked again: another request may have renewed it while this one waited for its turn.
            if self._is_ending():
                await self._renew(self._fetch)

    async def renewed(self, url: str) -> str | None:
        """Return a URL that the service refused, with a newer SAS token; None without a newer one.

        Requests that were refused with the same token share one call of the function.
        """
        used = next((token for token in self._recent if url.endswith(token)), None)
        if self._fetch is None or used is None:
            return None
        async with self._turn:
            # Else another request that was refused has renewed it meanwhile.
            if self.credential.signature == used:
                await self._renew(self._fetch)
            newest: str = self.credential.signature
        return url.removesuffix(used) + newest if newest != used else None

    async def _renew(self, fetch: Callable[[], Awaitable[str]]) -> None:
        answer: object = await fetch()
        token = getattr(answer, "token", answer)
        if not isinstance(token, str) or "sig=" not in token:
            raise InvalidInputError(
                "The function given as sas_token returned no SAS token. It must return "
                "what follows the '?' of a SAS URL.",
                option="sas_token",
            )
        token = token.strip().removeprefix("?")
        self.credential.update(token)
        told: datetime | None = getattr(answer, "expires_at", None)
        self.expires = told or _end_of(token) or _LATER
        self._recent.append(token)

    def _is_ending(self) -> bool:
        return self.expires is None or self.expires - _EARLY <= datetime.now(UTC)

    async def bearer(self) -> str | None:
        """Return an ``Authorization`` for the source of a copy, if tokens are in use."""
        if self._login.kind not in ("token", "default"):
            return None
        return f"Bearer {(await self.credential.get_token(_SCOPE)).token}"

    async def close(self) -> None:
        """Close a credential that was created here."""
        owned, self._owned = self._owned, None
        close = getattr(owned, "close", None)
        if close is not None:
            await close()


class _Tokens:
    """The token credential given to the driver, which keeps a token until it expires.

    The expiry is recorded, because a refusal without a body does not say that it was the reason.
    """

    def __init__(self, fetch: Callable[..., Awaitable[AccessToken]], proof: Proof) -> None:
        """Wrap a credential or function."""
        self._fetch = fetch
        self._proof = proof

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return a fresh token."""
        token = await self._fetch(*scopes, **options)
        if not hasattr(cast("object", token), "expires_on"):
            raise InvalidInputError(
                "The function given as credential returned no AccessToken(token, expires_on).",
                option="credential",
            )
        seconds = min(token.expires_on, _LATER.timestamp() - 1)
        self._proof.expires = datetime.fromtimestamp(seconds, UTC)
        return token

    async def close(self) -> None:
        """Do nothing: the owner of the wrapped credential closes it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _end_of(token: str) -> datetime | None:
    """Return when a SAS token expires, if it says so."""
    try:
        end = datetime.fromisoformat(parse_qs(token)["se"][0])
    except (KeyError, ValueError):
        return None
    return end.replace(tzinfo=UTC) if end.tzinfo is None else end


_CONNECTIONS: Final = 128
_IDLE_SECONDS: Final = 4.0
"""How long an unused connection is kept: less than servers do (Azurite: 5 s). A request sent into a
closing connection has an unknown outcome."""
_PIECE_BYTES: Final = 512 * 1024
_REFUSED: Final = frozenset({"AuthenticationFailed", "InvalidAuthenticationInfo"})
"""Error codes of invalid or expired credentials."""
_CLOSE_SECONDS: Final = 1.0
_WHOLE_BYTES: Final = 1 << 40
"""Download any object in one reply, so that all its bytes are from one version."""


class Tuning:
    """Timeouts of a client, and its name."""

    __slots__ = ("connect_timeout_seconds", "timeout_seconds", "user_agent")

    def __init__(
        self, timeout_seconds: float, connect_timeout_seconds: float, user_agent: str | None = None
    ) -> None:
        """Take the options of these names."""
        self.user_agent = user_agent
        self.timeout_seconds = timeout_seconds
        self.connect_timeout_seconds = connect_timeout_seconds


class LostReplyError(aiohttp.ClientConnectionError):
    """A conditional write was sent and its connection broke."""


async def _send_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Prevent aiohttp from repeating a conditional write when a connection breaks.

    The repetition would be refused because the first request landed, and another writer may have
    replaced the blob in between.
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
    """Release the connections of the requests in the block, also if it is cancelled.

    The driver leaves them to the garbage collector if reading a body is interrupted.
    """
    responses: list[aiohttp.ClientResponse] = []
    token = _opened.set(responses)
    try:
        yield
    finally:
        _opened.reset(token)
        for response in responses:
            response.close()  # no effect if the body was read to its end


class _Session:
    """An aiohttp session that sends large bodies in pieces, so that the loop is not blocked.

    A request whose SAS token the service refuses is sent once more if there is a newer token.
    """

    auto_decompress = False

    def __init__(self, session: aiohttp.ClientSession, proof: Proof) -> None:
        """Send through ``session`` with the credential of ``proof``."""
        self._session = session
        self._proof = proof

    async def request(
        self, method: str, url: str, *, data: object, **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request."""
        response = await self._send(method, url, data, options)
        code = response.headers.get("x-ms-error-code")
        # Bytes can be sent again; a body that is read from a file or a generator is gone.
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
    """adlfs's file system over a client created here.

    Its own way of connecting lets the environment override the caller's options, does not know
    plain http, and passes on neither timeouts nor retries.
    """

    def do_connect(self) -> None:
        """Use the given client."""
        self.service_client: BlobServiceClient = self.kwargs["client"]  # pyright: ignore[reportUnknownMemberType]


class Client:
    """The client, session and credential of one event loop."""

    def __init__(
        self, session: aiohttp.ClientSession, service: BlobServiceClient, proof: Proof, place: Place
    ) -> None:
        """Take ownership of all of them."""
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
        """Close its connections; requests in flight fail."""
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
        anon=True,  # so that it does not search for credentials
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        skip_instance_cache=True,
        use_listings_cache=False,
        client=service,
    )
    # It would stay alive until the program ends, and be closed on a loop that is gone by then.
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
        self.closed: Ending | None = None

    def check_open(self) -> None:
        """Raise an error after the storage was closed.

        Raises:
            StorageClosedError: the storage was closed.
        """
        if self.closed is not None:
            raise self.closed.error("The storage")

    def expires(self, loop: asyncio.AbstractEventLoop) -> datetime | None:
        """Return when the token that ``loop`` uses expires, if it says so."""
        found = self._open.get(loop)
        return found[0].proof.expires if found is not None else None

    async def here(self) -> Client:
        """Return the running loop's client, with valid credentials.

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
                # The storage may have been closed while this connected; nobody else would close
                # this client then.
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
            trust_env=bool(getproxies_environment()),  # checking costs a hop for each request
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
            **cast("Any", {} if tuning.user_agent is None else {"user_agent": tuning.user_agent}),
        )

    async def _keep(self, loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(loop, None)
            await client.close()

    async def close(self) -> None:
        """Close the clients of all loops; wait a short time for those of other loops."""
        with self._lock:
            self.closed = Ending()
            # A copy: each client takes itself out of the dictionary when it is closed.
            clients = dict(self._open)
        here = asyncio.get_running_loop()
        for loop, (client, keeper) in clients.items():
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                # A blocked loop closes its client once it runs again.
                closing = asyncio.run_coroutine_threadsafe(client.close(), loop)
                with suppress(TimeoutError, asyncio.CancelledError, RuntimeError):
                    waiting = asyncio.wrap_future(closing)
                    await asyncio.wait_for(asyncio.shield(waiting), _CLOSE_SECONDS)
