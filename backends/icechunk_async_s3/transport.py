"""The transport: one signed request to one object, or to the bucket, over plain HTTP.

Requests go through aiohttp directly. aiobotocore needs several times the processor time of its HTTP
library for each of them, and much more to take a listing apart; and it repeats requests by itself,
which makes a conditional write that landed look refused. The requests about uploads in parts still
go through aiobotocore, see `Transport.call`.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import numpy as np
from yarl import URL

from icechunk_async.errors import StorageClosedError, StorageError
from icechunk_async.storage import Version
from icechunk_async_s3.connections import sent_always
from icechunk_async_s3.failures import LostReplyError, Refusal, explain, lost, not_sent, of_driver
from icechunk_async_s3.signing import (
    EMPTY_SHA256,
    UNSIGNED_PAYLOAD,
    checksum_header,
    content_sha256,
    encode_key,
    encode_query,
    sign,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from aiohttp import ClientResponse

    from icechunk_async.errors import IcechunkError
    from icechunk_async.storage import Data
    from icechunk_async_s3.connections import Connection, Connections, Wiring
    from icechunk_async_s3.credentials import S3Credentials
    from icechunk_async_s3.options import Options, Place

    type Body = bytes | memoryview

__all__ = [
    "COPY_SOURCE",
    "RefusedError",
    "Reply",
    "Transport",
    "as_bytes",
    "body_to_send",
    "condition",
    "is_etag",
    "parse_etag",
    "receive",
    "version_of",
]

COPY_SOURCE: Final = "x-amz-copy-source"
_PIECE_BYTES: Final = 256 * 1024


def as_bytes(data: Data) -> Body:
    """Return the bytes of a buffer, not copied if that is safe.

    The bytes of an array, which is what zarr writes, are copied while they are sent, see
    `body_to_send`. A buffer that its owner could resize is copied here: a view would block resizing
    it even after a cancelled write.
    """
    if isinstance(data, bytes):
        return data
    if (
        isinstance(data, memoryview)
        and isinstance(data.obj, bytes | np.ndarray)
        and data.c_contiguous
    ):
        return data.cast("B") if data.nbytes else b""
    return bytes(data)


def body_to_send(body: Body) -> bytes | AsyncIterator[Body]:
    """Return a body for aiohttp; a large one in pieces, so that other tasks run in between.

    A connection that is given up still sends the bytes it holds, which must not change. So it gets
    copies of anything the owner may change after a cancellation: of a large body one piece at a
    time, copied just before it is sent and so still in the processor's cache.
    """
    return bytes(body) if len(body) <= _PIECE_BYTES else _pieces(memoryview(body))


async def _pieces(view: memoryview) -> AsyncIterator[Body]:
    fixed = isinstance(view.obj, bytes)
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        yield piece if fixed else bytes(piece)


async def receive(response: ClientResponse, into: memoryview | None) -> Body:
    """Return the body of a reply: ``into``, filled, if it is a part of exactly that length."""
    if into is None or response.status != 206 or response.content_length != len(into):
        return await response.read()
    filled = 0
    async for piece, _ in response.content.iter_chunks():
        into[filled : filled + len(piece)] = piece
        filled += len(piece)
    # aiohttp raises if a connection ends early, and reads no more than the announced length.
    assert filled == len(into)
    return into


_HASHED_HERE_BYTES: Final = 256 * 1024
"""Larger bodies are hashed on a thread, which takes longer but leaves the loop free."""

_TRANSPORT_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    key: str
    headers: Mapping[str, str]
    query: str
    body: Body
    into: memoryview | None
    asked: str

    def path(self, bucket: str) -> str:
        """Return the path of what is asked for, given the bucket's, which ends in ``/``."""
        if self.key:
            return bucket + encode_key(self.key)
        # As botocore sends it: without a slash after the bucket's name, since some servers would
        # look for an object with an empty key.
        return bucket.removesuffix("/") or "/"

    @property
    def is_upload(self) -> bool:
        """Whether the body is an object, or a part of one."""
        return self.method == "PUT" and COPY_SOURCE not in self.headers


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply."""

    status: int
    headers: Mapping[str, str]
    body: Body
    """The given buffer, if the length fitted."""


class Transport:
    """Sends the requests of one storage and returns every reply, refusals included."""

    def __init__(self, place: Place, options: Options, connections: Connections) -> None:
        """Use `open_s3`."""
        self.place = place
        self._options = options
        self._connections = connections

    async def send(
        self,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: tuple[tuple[str, str], ...] = (),
        body: Body = b"",
        into: memoryview | None = None,
        asked: str = "",
    ) -> Reply:
        """Send one request once, or again with new credentials if those of a callback expired.

        Args:
            method: the verb, in capitals.
            key: of the object, with the prefix; empty for the bucket itself.
            headers: names in lower case.
            query: see `encode_query`.
            body: to be sent; nobody may change it before this returns or is cancelled.
            into: where to put the part of the object that comes, if it has exactly that length.
            asked: beginning of the sentence for errors; by default about the object.

        Raises:
            LostReplyError: no complete reply came; the server may have acted.
            IcechunkError: nothing was sent.

        Cancellation: the server may have acted.
        """
        request = _Request(
            method, key, headers or {}, encode_query(query) if query else "", body, into, asked
        )
        connection = await self._connections.here()
        for again in (True, False):
            keys = await connection.wiring.keys.current()
            signed = await self._signed(request, connection.wiring, keys)
            reply = await self._exchange(request, connection, signed)
            # AWS says with 400 that a session token expired; other services say it with these.
            if reply.status not in (400, 401, 403) or not again:
                break
            refusal = Refusal.of_reply(reply.status, reply.headers, reply.body, keys)
            # The answer to a HEAD has no body that could say why.
            expired = refusal.is_expired or (method == "HEAD" and not reply.body)
            if not expired or not connection.wiring.keys.reject(keys):
                break
        return reply

    async def read(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        *,
        query: tuple[tuple[str, str], ...] = (),
        into: memoryview | None = None,
        asked: str = "",
    ) -> Reply:
        """Send a request that changes nothing; once more if the connection was stale.

        Raises:
            StorageUnavailableError: no complete answer came.
        """
        try:
            return await self.send(
                method, key, headers=headers, query=query, into=into, asked=asked
            )
        except LostReplyError as error:
            # A server closes connections that were idle, and the client finds out by using one:
            # that says nothing about the service. Silence does, and asking again would double it.
            if error.timed_out:
                raise error.as_read(asked or f"reading {key!r} in", self.place) from error
        try:
            return await self.send(
                method, key, headers=headers, query=query, into=into, asked=asked
            )
        except LostReplyError as error:
            raise error.as_read(asked or f"reading {key!r} in", self.place) from error

    async def call(self, operation: str, asked: str, **parameters: object) -> dict[str, Any]:
        """Run one operation on the bucket through aiobotocore.

        Raises:
            LostReplyError: no complete reply came; the server may have acted.
            RefusedError: the server said no.
            IcechunkError: nothing was sent.
        """
        wiring = (await self._connections.here()).wiring
        client = await wiring.stock.client()
        self.check_open()
        keys = wiring.keys
        for again in (True, False):
            used = keys.last
            method = getattr(client, operation)
            try:
                answer: dict[str, Any] = await method(Bucket=self.place.bucket, **parameters)
            except Exception as error:
                self._check_open(error)
                found = of_driver(error, asked, self.place, keys.last)
                if not isinstance(found, Refusal):
                    raise found from error
                # `reject` says whether other keys are available: static ones are final.
                if again and found.is_expired and keys.reject(used or keys.last):
                    continue
                raise RefusedError(found) from error
            return answer
        raise AssertionError  # the second round returns or raises

    async def joins_conditionally(self) -> bool:
        """Return whether the server honours conditions when it joins the parts of an upload."""
        said = self._options.conditional_multipart
        if said is not None:
            return said
        return (await self._connections.here()).wiring.route.is_aws

    async def refusal(self, reply: Reply) -> Refusal:
        """Parse a reply that is not a success."""
        connection = await self._connections.here()
        keys = connection.wiring.keys.last
        return Refusal.of_reply(reply.status, reply.headers, reply.body, keys)

    async def explain(self, reply: Reply, asked: str, key: str) -> IcechunkError:
        """Return the error for a reply that is not a success."""
        return explain(await self.refusal(reply), asked, self.place, key=key)

    def check_open(self) -> None:
        """Raise an error after the storage was closed.

        Raises:
            StorageClosedError: the storage's block has ended.
        """
        self._connections.check_open()

    def _check_open(self, error: BaseException) -> None:
        try:
            self.check_open()
        except StorageClosedError as closed:
            raise closed from error

    async def _signed(
        self, request: _Request, wiring: Wiring, keys: S3Credentials | None
    ) -> dict[str, str]:
        body = request.body
        always = sent_always(self._options, request.method)
        headers = {"host": wiring.route.host, **always, **request.headers}
        algorithm = self._options.checksum_algorithm
        payload = EMPTY_SHA256
        if request.is_upload:
            if algorithm is not None:
                name, value = await _hashed(lambda: checksum_header(algorithm, body), body)
                headers[name] = value
            # The checksum's header is signed and the connection sealed, so that the body cannot
            # be changed on the way. Hashing it once more would cost more than sending it.
            if algorithm is not None and wiring.route.tls is not None:
                payload = UNSIGNED_PAYLOAD
            elif keys is not None:
                payload = await _hashed(lambda: content_sha256(body), body)
        elif body and keys is not None:
            payload = content_sha256(body)
        if keys is None:
            return headers
        return sign(
            request.method,
            request.path(wiring.route.path),
            request.query,
            headers,
            payload=payload,
            credentials=keys,
            region=wiring.route.region,
            now=datetime.now(UTC),
        )

    async def _exchange(
        self, request: _Request, connection: Connection, headers: dict[str, str]
    ) -> Reply:
        route = connection.wiring.route
        url = route.base_url.removesuffix(route.path) + request.path(route.path)
        if request.query:
            url += "?" + request.query
        # Not signed, because intermediaries change them.
        headers["accept-encoding"] = "identity"
        headers["user-agent"] = self._options.user_agent or "icechunk-async"
        data = None
        if request.method in ("PUT", "POST"):
            headers["content-length"] = str(len(request.body))
            data = body_to_send(request.body)
        try:
            async with connection.http.request(
                request.method,
                URL(url, encoded=True),
                headers=headers,
                data=data,
                allow_redirects=False,  # the signature is for this host, and not for another's eyes
                proxy=route.proxy,
            ) as response:
                return Reply(
                    response.status, response.headers, await receive(response, request.into)
                )
        except (*_TRANSPORT_ERRORS, RuntimeError) as error:
            self._check_open(error)
            if isinstance(error, RuntimeError):  # ours, or aiohttp's word for a closed session
                raise
            doing = "writing" if request.method == "PUT" else "reading"
            asked = request.asked or f"{doing} {request.key!r} in"
            sent = not_sent(error, asked, self.place)
            raise (lost(error) if sent is None else sent) from error


class RefusedError(Exception):
    """A refusal that aiobotocore raised. Never leaves the backend."""

    def __init__(self, refusal: Refusal) -> None:
        """Keep what the server answered."""
        super().__init__(refusal.said)
        self.refusal = refusal


async def _hashed[T](digest: Callable[[], T], body: Body) -> T:
    if len(body) <= _HASHED_HERE_BYTES:
        return digest()
    return await asyncio.to_thread(digest)


_ETAG: Final = re.compile(r"[!#-)+-~]|[!#-~]{2,}")
"""The text between the quotes; a lone ``*`` would match any version."""


def parse_etag(value: str) -> str:
    """Return an ETag without quotes and without the weak mark that some proxies add."""
    return value.removeprefix("W/").strip('"')


def version_of(headers: Mapping[str, str], asked: str, place: Place) -> Version:
    """Return the version in the headers of a reply.

    Raises:
        StorageError: it is missing, so nothing could be written safely.
    """
    etag = parse_etag(headers.get("etag", ""))
    if not etag:
        raise StorageError(
            f"{asked} {place.url!r}: the server's answer has no ETag, without which no version is "
            "known. Use a server that answers ETags.",
            url=place.url,
        )
    return Version(etag)


def is_etag(version: Version) -> bool:
    """Return whether a server can have issued this version."""
    return _ETAG.fullmatch(version.token) is not None


def condition(version: Version, *, quoted: bool) -> str:
    """Return a version as it stands in ``If-Match`` and ``If-None-Match``."""
    return f'"{version.token}"' if quoted else version.token
