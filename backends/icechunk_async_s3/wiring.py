"""The two ways to a bucket on one event loop: aiobotocore's client and a plain HTTP session."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
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
from icechunk_async_s3.keys import CallbackKeys, ChainKeys, FixedKeys, S3Credentials

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from icechunk_async_s3.keys import KeySource
    from icechunk_async_s3.options import Options

__all__ = ["Connection", "Wiring", "connect", "prepare"]

_AWS_DOMAINS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
_PROBE_KEY: Final = "icechunk-async"
_KEEP_ALIVE_SECONDS: Final = 12.0


class _SendsOnce(AIOHTTPSession):
    """aiobotocore's HTTP, without aiohttp's habit of sending a request again by itself.

    A conditional copy that was sent twice may answer that it was refused although it landed.
    """

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = await super()._get_session(proxy_url)
        # There is no public switch.
        session._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return session


@dataclass(frozen=True, slots=True)
class Wiring:
    """What is found out, off the event loop, before the first request."""

    manager: Any
    """Closes ``client``."""
    client: Any
    base_url: str
    """The bucket's URL, ending in ``/``; keys follow."""
    region: str
    keys: KeySource
    tls: ssl.SSLContext | None
    proxy: str | None

    @property
    def host(self) -> str:
        """As it stands in the ``Host`` header."""
        parts = urlsplit(self.base_url)
        default = {"http": 80, "https": 443}[parts.scheme]
        name = parts.hostname or ""
        name = f"[{name}]" if ":" in name else name
        return name if parts.port in (None, default) else f"{name}:{parts.port}"

    @property
    def is_aws(self) -> bool:
        """Tell whether the bucket is at AWS, and not at a server that speaks the protocol."""
        name = urlsplit(self.base_url).hostname or ""
        return name.endswith(_AWS_DOMAINS)


@dataclass(frozen=True, slots=True)
class Connection:
    """A wiring with the HTTP session of its loop."""

    wiring: Wiring
    http: aiohttp.ClientSession


@cache
def _loader() -> Any:
    """Answer what reads botocore's service descriptions, so that they are read once a process."""
    loader: Any = AioSession().get_component("data_loader")
    return loader


def prepare(options: Options, bucket: str) -> Wiring:
    """Build a client and learn the bucket's URL; reads files, so not on an event loop.

    Raises:
        InvalidInputError: botocore cannot make sense of an option or of the AWS configuration.
    """
    try:
        with ThreadPoolExecutor(1) as aside:
            return _prepare(options, bucket, aside)
    except (botocore_errors.BotoCoreError, ValueError) as error:
        raise InvalidInputError(
            f"No S3 client can be made for bucket {bucket!r}: {error}. Correct the options, or the "
            "AWS configuration in the environment."
        ) from error


def _prepare(options: Options, bucket: str, aside: ThreadPoolExecutor) -> Wiring:
    def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one of aiobotocore's, which also read files, on a loop that may be blocked."""
        return aside.submit(asyncio.run, coroutine).result()

    session: Any = AioSession(profile=options.profile)
    session.register_component("data_loader", _loader())
    keys: KeySource | None = None
    arguments: dict[str, Any] = {}
    if options.access_key_id is not None and options.secret_access_key is not None:
        given = S3Credentials(
            options.access_key_id, options.secret_access_key, options.session_token
        )
        keys = FixedKeys(given)
        arguments["aws_access_key_id"] = given.access_key_id
        arguments["aws_secret_access_key"] = given.secret_access_key
        arguments["aws_session_token"] = given.session_token
    elif options.anonymous:
        keys = FixedKeys(None)
    elif options.credentials is not None:
        keys = callback = CallbackKeys(options.credentials)
        session.register_component("credential_provider", _Provider(callback))
    manager = session.create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        config=_config(options),
        **arguments,
    )
    client = run(manager.__aenter__())
    if keys is None:
        keys = ChainKeys(run(session.get_credentials()))
    client.meta.events.register_first("request-created.s3.HeadObject", _reveal)
    client.meta.events.register("before-sign.s3", _HeaderAdder(sent_always(options)))
    try:
        run(client.head_object(Bucket=bucket, Key=_PROBE_KEY))
        raise AssertionError("the request was sent")  # it cannot be: see _reveal
    except _RevealedError as revealed:
        url = revealed.url
    base_url = url.partition("?")[0].removesuffix(_PROBE_KEY)
    region = client.meta.region_name
    secure = base_url.startswith("https:")
    return Wiring(
        manager,
        client,
        base_url,
        region if region not in (None, "aws-global") else "us-east-1",
        keys,
        _tls(session.get_config_variable("ca_bundle")) if secure else None,
        get_environ_proxies(base_url).get("https" if secure else "http"),
    )


def _config(options: Options) -> AioConfig:
    return AioConfig(
        http_session_cls=_SendsOnce,
        signature_version=UNSIGNED if options.anonymous else "s3v4",
        s3={"addressing_style": "path"} if options.force_path_style else None,
        # Policies above the backend retry; a retry in here would make a copy that landed fail.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Many servers that speak the protocol do not know the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=options.connect_timeout_seconds or None,
        read_timeout=options.network_stream_timeout_seconds or None,
        max_pool_connections=64,
    )


def _tls(ca_bundle: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_bundle or get_cert_path(True))  # noqa: FBT003


def sent_always(options: Options) -> dict[str, str]:
    """Answer the headers that go with every request."""
    headers = dict(options.extra_headers)
    if options.requester_pays:
        headers["x-amz-request-payer"] = "requester"
    return headers


async def connect(wiring: Wiring, options: Options) -> AsyncGenerator[Connection]:
    """Answer the one connection of the running loop, and close it when the generator is closed.

    A loop that ends closes its asynchronous generators, and so also the sockets of a storage that
    is open longer than the loop runs.
    """
    connector = aiohttp.TCPConnector(
        limit=0,  # the budget of the repository counts requests
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        ssl=wiring.tls or True,
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
    # aiohttp would send a write again, and the second answer would be taken for the first.
    http._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        yield Connection(wiring, http)
    finally:
        try:
            await http.close()
        finally:
            await wiring.manager.__aexit__(None, None, None)


class _Provider:
    """Answers one set of credentials where aiobotocore would search the chain."""

    def __init__(self, keys: CallbackKeys) -> None:
        self._keys = keys

    async def load_credentials(self) -> CallbackKeys:
        return self._keys


class _HeaderAdder:
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def __call__(self, request: Any, **_: object) -> None:
        for name, value in self._headers.items():
            request.headers[name] = value


class _RevealedError(Exception):
    """Brings out where aiobotocore would send a request, which is then not sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def _reveal(request: Any, **_: object) -> None:
    """Stop the one operation that is never used otherwise, before it is signed."""
    raise _RevealedError(request.url)
