"""Connections: where a bucket is, and one HTTP session and client for each event loop.

Clients belong to the event loop that created them, so a storage that is used from several loops
has one connection for each. Finding a bucket (endpoint, region, certificates, proxies) is left to
botocore, asked once and remembered, because building its client takes tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore import exceptions as botocore_errors
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from icechunk_async.errors import InvalidInputError
from icechunk_async.storage.ending import Ending
from icechunk_async_s3.credentials import CallbackKeys, ChainKeys, FixedKeys, S3Credentials

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Generator

    from icechunk_async_s3.credentials import KeySource
    from icechunk_async_s3.options import Options, Place

__all__ = [
    "Connection",
    "Connections",
    "Route",
    "Stock",
    "Wiring",
    "connect",
    "find_route",
    "given_keys",
    "prepare",
    "rewire",
    "sent_always",
]

_ANY_KEY = "icechunk-async"


class _SendsOnce(AIOHTTPSession):
    """aiobotocore's HTTP session with the automatic repetition of requests disabled.

    A conditional copy that was sent twice may be reported as refused although it landed.
    """

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = await super()._get_session(proxy_url)
        # There is no public switch.
        session._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return session


class Stock:
    """The client of one event loop, made on a thread when it is first needed.

    Most loops only read and write objects, which needs no client.
    """

    def __init__(self, options: Options, bucket: str, given: KeySource | None) -> None:
        """Remember the options; the client is created later.

        Args:
            options: of the storage.
            bucket: for messages.
            given: the credentials in the options; None to search the usual chain.
        """
        self._options = options
        self._bucket = bucket
        self._given = given
        self._known_session: Any = None
        self._manager: Any = None
        self._client: Any = None
        self._making: asyncio.Future[Any] | None = None

    async def client(self) -> Any:
        """Return the client of the running loop.

        Raises:
            InvalidInputError: botocore cannot make sense of an option or of the configuration.

        Cancellation: client creation continues in its thread; the next caller gets it.
        """
        if self._client is None:
            if self._making is None:
                self._making = asyncio.get_running_loop().run_in_executor(None, self._make)
            try:
                await asyncio.shield(self._making)
            except Exception:
                self._making = None
                raise
        return self._client

    async def close(self) -> None:
        """Close what the client opened."""
        if self._manager is not None:
            await self._manager.__aexit__(None, None, None)

    def where(self) -> tuple[str, str, str | None]:
        """Return the bucket's URL, its region, and a file of authorities; not on an event loop.

        Raises:
            InvalidInputError: botocore cannot make sense of an option or of the configuration.
        """
        client = self._make()
        with self._translated():
            try:
                _run(client.head_object(Bucket=self._bucket, Key=_ANY_KEY))
                raise AssertionError("the request was sent")  # it cannot be: see _reveal
            except _RevealedError as revealed:
                url = revealed.url
            region = client.meta.region_name
            return (
                url.partition("?")[0].removesuffix(_ANY_KEY),
                region if region not in (None, "aws-global") else "us-east-1",
                self._session().get_config_variable("ca_bundle"),
            )

    def chain(self) -> ChainKeys:
        """Return the credentials of the usual chain; not on an event loop."""
        with self._translated():
            return ChainKeys(_run(self._session().get_credentials()))

    def _session(self) -> Any:
        if self._known_session is None:
            session: Any = AioSession(profile=self._options.profile)
            session.register_component("data_loader", _loader())
            if isinstance(self._given, CallbackKeys):
                session.register_component("credential_provider", _Provider(self._given))
            self._known_session = session
        return self._known_session

    def _make(self) -> Any:
        if self._client is None:
            with self._translated():
                manager = self._session().create_client(
                    "s3",
                    region_name=self._options.region,
                    endpoint_url=self._options.endpoint_url,
                    config=_config(self._options),
                    **self._fixed(),
                )
                client = _run(manager.__aenter__())
                events = client.meta.events
                events.register_first("request-created.s3.HeadObject", _reveal)
                events.register("before-sign.s3", _HeaderAdder(self._options))
                self._manager, self._client = manager, client
        return self._client

    def _fixed(self) -> dict[str, str | None]:
        keys = self._given.last if isinstance(self._given, FixedKeys) else None
        if keys is None:
            return {}
        return {
            "aws_access_key_id": keys.access_key_id,
            "aws_secret_access_key": keys.secret_access_key,
            "aws_session_token": keys.session_token,
        }

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except (botocore_errors.BotoCoreError, ValueError) as error:
            raise InvalidInputError(
                f"No S3 client can be made for bucket {self._bucket!r}: {error}. Correct the "
                "options, or the AWS configuration in the environment."
            ) from error


def given_keys(options: Options) -> KeySource | None:
    """Return the credentials in the options, for one event loop; None to search the chain."""
    if options.access_key_id is not None and options.secret_access_key is not None:
        return FixedKeys(
            S3Credentials(options.access_key_id, options.secret_access_key, options.session_token)
        )
    if options.anonymous:
        return FixedKeys(None)
    return None if options.credentials is None else CallbackKeys(options.credentials)


def sent_always(options: Options, method: str) -> dict[str, str]:
    """Return the headers that go with every request of a method."""
    own = options.read_headers if method in ("GET", "HEAD") else options.write_headers
    headers = {**options.extra_headers, **own}
    if options.requester_pays:
        headers["x-amz-request-payer"] = "requester"
    return headers


@cache
def _loader() -> Any:
    """Return the loader of botocore's service descriptions, so that a process reads them once."""
    loader: Any = AioSession().get_component("data_loader")
    return loader


def _run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of aiobotocore, which also reads files, on a loop that may be blocked."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(asyncio.run, coroutine).result()


def _config(options: Options) -> AioConfig:
    return AioConfig(
        http_session_cls=_SendsOnce,
        signature_version=UNSIGNED if options.anonymous else "s3v4",
        s3={"addressing_style": "path"} if options.force_path_style else None,
        # Policies above the backend retry; a retry here would report a copy that landed as failed.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Many servers that speak the protocol do not know the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=options.connect_timeout_seconds or None,
        read_timeout=options.network_stream_timeout_seconds or None,
        max_pool_connections=64,
    )


class _Provider:
    """Provides one set of credentials where aiobotocore would search the chain."""

    def __init__(self, keys: CallbackKeys) -> None:
        self._keys = keys

    async def load_credentials(self) -> CallbackKeys:
        return self._keys


class _HeaderAdder:
    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, request: Any, **_: object) -> None:
        for name, value in sent_always(self._options, request.method).items():
            request.headers[name] = value
        if self._options.user_agent is not None:
            request.headers["User-Agent"] = self._options.user_agent


class _RevealedError(Exception):
    """Carries the URL that aiobotocore would send a request to; the request is not sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _reveal(request: Any, **_: object) -> None:
    """Stop `HeadObject`, which is used for nothing else, before it is signed."""
    raise _RevealedError(request.url)


_AWS_DOMAINS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
_S3_ITSELF: Final = re.compile(
    r"(.+\.)?s3(-fips|-accelerate)?(\.dualstack)?(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?"
)
_KEPT: Final = 64
_SETTINGS: Final = ("AWS_", "BOTO", "HOME")
"""Prefixes of the environment variables that may change the route."""
_KEYS: Final = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})
"""Secrets, which do not change the route and must not be kept."""
_FILES: Final = (
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
)


@dataclass(frozen=True, slots=True)
class Route:
    """The address of a bucket, the same for all loops; plain data except for the TLS context."""

    base_url: str
    """The bucket's URL, ending in ``/``; keys follow."""
    path: str
    """Of ``base_url``."""
    host: str
    """As it stands in the ``Host`` header."""
    region: str
    is_aws: bool
    """Whether the bucket is at AWS rather than at a compatible server."""
    is_documented: bool
    """Whether it is S3 itself, encrypted: AWS documents that a condition and its write are one step
    there. Other services at AWS, such as S3 on Outposts, have other promises."""
    tls: ssl.SSLContext | None
    proxy: str | None


_Where = tuple[str, str, str | None]
_places: OrderedDict[object, _Where] = OrderedDict()
_contexts: dict[object, ssl.SSLContext] = {}


def find_route(options: Options, bucket: str, stock: Stock) -> Route:
    """Return the route to a bucket; reads files, so not on an event loop.

    Args:
        options: of the storage.
        bucket: its name.
        stock: used if the route is not cached, which takes tens of milliseconds.

    Raises:
        InvalidInputError: botocore cannot make sense of an option or of the configuration, or the
            endpoint that it finds is not encrypted and that was not allowed.
    """
    # Without a lock: two threads may both ask botocore, and are told the same.
    known_by = _decisive(options, bucket)
    found = _places.get(known_by)
    if found is None:
        found = stock.where()
        _places[known_by] = found
        # A service that opens ever new buckets must not keep them all.
        while len(_places) > _KEPT:
            _places.popitem(last=False)
    base_url, region, authorities = found
    parts = urlsplit(base_url)
    secure = parts.scheme == "https"
    name = parts.hostname or ""
    if not secure and not options.allow_http:
        # The option was checked before; this one is from the environment or from a profile.
        raise InvalidInputError(
            f"The endpoint of bucket {bucket!r}, {name!r}, comes from the environment or the AWS "
            "configuration and is not encrypted. Use https there, or pass allow_http=True if the "
            "network between is trusted.",
            option="allow_http",
        )
    shown = f"[{name}]" if ":" in name else name
    return Route(
        base_url,
        "/" + base_url.split("/", 3)[3],
        shown if parts.port in (None, 443 if secure else 80) else f"{shown}:{parts.port}",
        region,
        name.endswith(_AWS_DOMAINS),
        secure and parts.port in (None, 443) and _S3_ITSELF.fullmatch(name) is not None,
        _tls(authorities or get_cert_path(True)) if secure else None,  # noqa: FBT003
        get_environ_proxies(base_url).get("https" if secure else "http"),
    )


def _decisive(options: Options, bucket: str) -> object:
    """Return a cache key of everything that botocore's route depends on."""
    settings = {
        name: os.environ.get(name, "")  # another thread may have removed it
        for name in os.environ  # which decodes no value that does not matter
        if name.startswith(_SETTINGS) and name not in _KEYS
    }
    files = [_state(Path(settings.get(name, default)).expanduser()) for name, default in _FILES]
    return (
        bucket,
        options.endpoint_url,
        options.region,
        options.force_path_style,
        options.anonymous,
        options.profile,
        frozenset(settings.items()),
        *files,
    )


def _state(path: Path) -> object:
    """Return a value that changes when the file changes."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _tls(authorities: Any) -> ssl.SSLContext:
    """Return a TLS context for a file of authorities; reading it takes 20 milliseconds."""
    known_by = (authorities, _state(Path(authorities)))
    context = _contexts.get(known_by)
    if context is None:
        context = ssl.create_default_context(cafile=authorities)
        if len(_contexts) >= _KEPT:
            _contexts.clear()
        _contexts[known_by] = context
    return context


# As in aiobotocore: S3 closes a connection that was idle for 20 seconds, and a request that is sent
# into one that is closing has an unknown outcome.
_KEEP_ALIVE_SECONDS: Final = 12.0


@dataclass(frozen=True, slots=True)
class Wiring:
    """The parts that one loop needs before its first request."""

    route: Route
    keys: KeySource
    stock: Stock


@dataclass(frozen=True, slots=True)
class Connection:
    """A wiring with the HTTP session of its loop."""

    wiring: Wiring
    http: aiohttp.ClientSession


def prepare(options: Options, bucket: str) -> Wiring:
    """Find the route and the credentials; reads files.

    Not to be called on an event loop, but used on one.

    Raises:
        InvalidInputError: botocore cannot make sense of an option or of the AWS configuration.
    """
    given = given_keys(options)
    stock = Stock(options, bucket, given)
    return Wiring(find_route(options, bucket, stock), given or stock.chain(), stock)


def rewire(route: Route, options: Options, bucket: str) -> Wiring | None:
    """Return the wiring of another loop at once; None if the credential chain must be searched."""
    given = given_keys(options)
    return None if given is None else Wiring(route, given, Stock(options, bucket, given))


async def connect(wiring: Wiring, options: Options) -> AsyncGenerator[Connection]:
    """Return the one connection of the running loop, and close it when the generator is closed.

    A loop that ends closes its asynchronous generators, and so also the sockets of a storage that
    is open longer than the loop runs.
    """
    connector = aiohttp.TCPConnector(
        limit=0,  # the budget of the repository counts requests
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        ssl=wiring.route.tls or True,
    )
    http = aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Content-Type", "Accept", "Accept-Encoding", "User-Agent"),
        timeout=aiohttp.ClientTimeout(
            sock_connect=options.connect_timeout_seconds or None,
            sock_read=options.network_stream_timeout_seconds or None,
        ),
    )
    # aiohttp would repeat a write, and the second reply would be taken for the first.
    http._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        yield Connection(wiring, http)
    finally:
        try:
            await http.close()
        finally:
            await wiring.stock.close()


class _Entry:
    """The state of one loop. Only that loop touches it, except for closing."""

    def __init__(self, wiring: asyncio.Future[Wiring]) -> None:
        self.wiring = wiring
        self.keeper: AsyncGenerator[Connection] | None = None
        self.connection: Connection | None = None


class Connections:
    """The connections of one storage, by event loop."""

    def __init__(self, place: Place, options: Options) -> None:
        """Open nothing yet."""
        self._place = place
        self._options = options
        self._route: Route | None = None  # found out by the loop that comes first
        self._entries: dict[asyncio.AbstractEventLoop, _Entry] = {}
        self._lock = threading.Lock()  # held over no await
        self._closed: Ending | None = None

    @property
    def is_documented(self) -> bool:
        """Whether the bucket is known to be in S3 itself; False before the first request."""
        return self._route is not None and self._route.is_documented

    def check_open(self) -> None:
        """Raise an error after the storage was closed.

        Raises:
            StorageClosedError: the storage's block has ended.
        """
        if self._closed is not None:
            raise self._closed.error(repr(self._place.url))

    async def here(self) -> Connection:
        """Return the connection of the running loop.

        Raises:
            StorageClosedError: the storage's block has ended.
            InvalidInputError: no client can be made with these options.

        Cancellation: client creation continues in its thread; the next caller gets it.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is not None and entry.connection is not None:
            return entry.connection
        if entry is None:
            entry = self._begin(loop)
        try:
            wiring = await asyncio.shield(entry.wiring)
        except Exception:
            with self._lock:
                self._entries.pop(loop, None)
            raise
        self.check_open()
        self._route = wiring.route
        if entry.connection is None:  # creation does not await, so no other task intervenes
            entry.keeper = connect(wiring, self._options)
            entry.connection = await anext(entry.keeper)
        return entry.connection

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _Entry:
        with self._lock:
            for other in [it for it in self._entries if it.is_closed()]:
                del self._entries[other]
            entry = _Entry(self._wire(loop))
            self._entries[loop] = entry
            return entry

    def _wire(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Wiring]:
        options, bucket = self._options, self._place.bucket
        if self._route is not None and (wiring := rewire(self._route, options, bucket)):
            known: asyncio.Future[Wiring] = loop.create_future()
            known.set_result(wiring)
            return known
        return loop.run_in_executor(None, partial(prepare, options, bucket))

    async def close(self) -> None:
        """Close the connection of this loop, and have other loops close theirs.

        They are not awaited, because a blocked loop would never finish.
        """
        self._closed = Ending()
        here = asyncio.get_running_loop()
        with self._lock:
            entries, self._entries = self._entries, {}
        for loop, entry in entries.items():
            keeper = entry.keeper
            if keeper is None or loop.is_closed():
                continue
            if loop is here:
                await keeper.aclose()
                continue
            with suppress(RuntimeError):  # it has ended just now, and closed its generators
                loop.call_soon_threadsafe(_begin_closing, loop, keeper)


_closing: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive, which a loop does not."""


def _begin_closing(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[Connection]) -> None:
    # Created only now: a loop that stopped without being closed never runs this.
    task = loop.create_task(_close(keeper))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _close(keeper: AsyncGenerator[Connection]) -> None:
    with suppress(RuntimeError):  # the loop itself is closing it
        await keeper.aclose()
