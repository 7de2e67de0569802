"""aiobotocore's client: it carries out what is rare, and knows where buckets are."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore import exceptions as botocore_errors

from icechunk_async.errors import InvalidInputError
from icechunk_async_s3.keys import CallbackKeys, ChainKeys, FixedKeys, S3Credentials

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    import aiohttp

    from icechunk_async_s3.keys import KeySource
    from icechunk_async_s3.options import Options

__all__ = ["Stock", "given_keys", "sent_always"]

_ANY_KEY = "icechunk-async"


class _SendsOnce(AIOHTTPSession):
    """aiobotocore's HTTP, without aiohttp's habit of sending a request again by itself.

    A conditional copy that was sent twice may answer that it was refused although it landed.
    """

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = await super()._get_session(proxy_url)
        # There is no public switch.
        session._retry_connection = False  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return session


class Stock:
    """The client of one event loop, made on a thread when it is first needed.

    Most loops only read and write, which needs none.
    """

    def __init__(self, options: Options, bucket: str, given: KeySource | None) -> None:
        """Make nothing yet.

        Args:
            options: of the storage.
            bucket: for messages.
            given: the keys that the options name; None to search the usual chain.
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

        Cancellation: what was begun goes on on its thread, for the next who asks.
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
        """Return the keys that the usual chain finds; not on an event loop."""
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
                events.register("before-sign.s3", _HeaderAdder(sent_always(self._options)))
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
    """Return the keys that options name, for one event loop; None to search the usual chain."""
    if options.access_key_id is not None and options.secret_access_key is not None:
        return FixedKeys(
            S3Credentials(options.access_key_id, options.secret_access_key, options.session_token)
        )
    if options.anonymous:
        return FixedKeys(None)
    return None if options.credentials is None else CallbackKeys(options.credentials)


def sent_always(options: Options) -> dict[str, str]:
    """Return the headers that go with every request."""
    headers = dict(options.extra_headers)
    if options.requester_pays:
        headers["x-amz-request-payer"] = "requester"
    return headers


@cache
def _loader() -> Any:
    """Return what reads botocore's service descriptions, so that they are read once a process."""
    loader: Any = AioSession().get_component("data_loader")
    return loader


def _run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run one of aiobotocore's, which also read files, on a loop that may be blocked."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(asyncio.run, coroutine).result()


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
