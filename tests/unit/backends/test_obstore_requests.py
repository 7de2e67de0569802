"""The obstore backend's translation of replies, and of missing ones."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
    IcechunkError,
    NameResolutionError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    WrongRegionError,
)
from icechunk_async.storage import ABSENT, ByteRange, open_storage
from tests.unit.backends.loopback import drop, serving, silent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage

_SECRET = "a-very-secret-key"  # noqa: S105 - for a server of this test


class Bucket:
    """As much of S3 as one object needs, and the faults that a test asks for."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str | None]] = {}
        self.log: list[str] = []
        self.fault: Callable[[web.Request, Callable[[], web.Response]], web.Response | None]
        self.fault = lambda _request, _apply: None
        self.undeletable: set[str] = set()
        self.listing: list[str] = []

    async def __call__(self, request: web.Request) -> web.Response:
        """Return a request, or as the fault says."""
        body = await request.read()
        self.log.append(request.method)
        return self.fault(request, lambda: self.apply(request, body)) or self.apply(request, body)

    def apply(self, request: web.Request, body: bytes) -> web.Response:
        """Serve a request."""
        match request.method:
            case "PUT":
                return self._put(request, body)
            case "POST":
                return self._delete(body.decode())
            case _ if "list-type" in request.query:
                return self._list()
            case _:
                return self._get(request)

    def _put(self, request: web.Request, body: bytes) -> web.Response:
        found = self.objects.get(request.path)
        if "If-None-Match" in request.headers and found is not None:
            return refusal(412, "PreconditionFailed")
        wanted = request.headers.get("If-Match")
        if wanted is not None and (found is None or etag(found[0]) != wanted):
            return refusal(412, "PreconditionFailed")
        self.objects[request.path] = (body, request.headers.get("x-amz-meta-icechunkwriteid"))
        return web.Response(headers={"ETag": etag(body)})

    def _get(self, request: web.Request) -> web.Response:
        if request.path not in self.objects:
            return refusal(404, "NoSuchKey")
        body, write_id = self.objects[request.path]
        headers = {"ETag": etag(body), "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if write_id is not None:
            headers["x-amz-meta-icechunkwriteid"] = write_id
        return web.Response(body=body, headers=headers)

    def _delete(self, document: str) -> web.Response:
        parts = ["<DeleteResult>"]
        for key in re.findall("<Key>(.*?)</Key>", document):
            if key in self.undeletable:
                parts.append(f"<Error><Key>{key}</Key><Code>AccessDenied</Code>")
                parts.append("<Message>no</Message></Error>")
            else:
                self.objects.pop(f"/bucket/{key}", None)
                parts.append(f"<Deleted><Key>{key}</Key></Deleted>")
        return web.Response(text="".join([*parts, "</DeleteResult>"]))

    def _list(self) -> web.Response:
        contents = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
            '<ETag>"x"</ETag><Size>1</Size></Contents>'
            for key in self.listing
        )
        return web.Response(text=f"<ListBucketResult>{contents}</ListBucketResult>")


def etag(body: bytes) -> str:
    """Return the ETag of a body."""
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def refusal(status: int, code: str) -> web.Response:
    """Return an error document of S3."""
    return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>")


@pytest.fixture
def bucket() -> Bucket:
    """An empty bucket without faults."""
    return Bucket()


@pytest.fixture
async def storage(bucket: Bucket) -> AsyncIterator[Storage]:
    """A handle on the bucket."""
    async with serving(bucket) as url, opened(url) as storage:
        yield storage


def opened(url: str, **options: object) -> AbstractAsyncContextManager[Storage]:
    """Open the bucket at a server."""
    given: dict[str, Any] = {
        "endpoint_url": url,
        "allow_http": True,
        "region": "us-east-1",
        "access_key_id": "someone",
        "secret_access_key": _SECRET,
    }
    return open_storage("obstore+s3://bucket", **(given | options))


def once(bucket: Bucket, method: str, answer: Callable[..., web.Response]) -> None:
    """Let ``answer(request, apply)`` stand for the first answer to a method."""

    def fault(request: web.Request, apply: Callable[[], web.Response]) -> web.Response | None:
        if request.method != method:
            return None
        bucket.fault = lambda _request, _apply: None
        return answer(request, apply)

    bucket.fault = fault


def applied_then(answer: Callable[[web.Request], web.Response]) -> Callable[..., web.Response]:
    """Carry the request out and answer something else."""

    def fault(request: web.Request, apply: Callable[[], web.Response]) -> web.Response:
        apply()
        return answer(request)

    return fault


async def test_a_write_whose_answer_was_lost_is_found_to_have_landed(
    bucket: Bucket, storage: Storage
) -> None:
    """Creations and updates know their own object again by its write id."""
    once(bucket, "PUT", applied_then(drop))
    version = await storage.put("key", b"created", if_version=ABSENT)
    once(bucket, "PUT", applied_then(lambda _: refusal(500, "InternalError")))
    version = await storage.put("key", b"updated", if_version=version)
    assert (await storage.get("key")).version == version
    assert bucket.log.count("PUT") == 2


async def test_a_refusal_of_a_write_that_landed_is_no_refusal(
    bucket: Bucket, storage: Storage
) -> None:
    """Something between may send a request twice; the second one is refused by the first."""
    for status in (412, 409):

        def say(_: web.Request, status: int = status) -> web.Response:
            return refusal(status, "Whatever")

        once(bucket, "PUT", applied_then(say))
        version = await storage.put(f"key-{status}", b"mine", if_version=ABSENT)
        assert (await storage.get(f"key-{status}")).version == version


async def test_a_write_without_an_answer_is_unknown(bucket: Bucket, storage: Storage) -> None:
    """It was not found, but it may land later; nothing is sent again."""
    for answer in (drop, lambda _: refusal(503, "ServiceUnavailable")):
        for expected in (ABSENT, None):
            bucket.log.clear()
            once(bucket, "PUT", lambda request, _, answer=answer: answer(request))
            with pytest.raises(OutcomeUnknownError):
                await storage.put("key", b"body", if_version=expected)
            assert bucket.log.count("PUT") == 1


async def test_a_write_that_cannot_be_read_back_is_unknown(
    bucket: Bucket, storage: Storage
) -> None:
    """A refusal that may be of a write that landed is not reported as one."""
    bucket.fault = lambda request, apply: (
        applied_then(lambda _: refusal(412, "PreconditionFailed"))(request, apply)
        if request.method == "PUT"
        else refusal(500, "InternalError")
    )
    with pytest.raises(OutcomeUnknownError):
        await storage.put("key", b"body", if_version=ABSENT)


async def test_a_refusal_by_another_writer_is_one(bucket: Bucket, storage: Storage) -> None:
    """The object that is there has another write id."""
    await storage.put("key", b"first", if_version=ABSENT)
    with pytest.raises(PreconditionFailedError):
        await storage.put("key", b"first", if_version=ABSENT)
    assert bucket.log.count("PUT") == 2


async def test_a_conflict_is_a_refusal_only_where_the_state_differs(
    bucket: Bucket, storage: Storage
) -> None:
    """S3 answers 409 while another write is in progress, whether or not that one lands."""
    version = await storage.put("key", b"first")
    for key, expected, kind in (
        ("new", ABSENT, StorageUnavailableError),
        ("key", version, StorageUnavailableError),
        ("key", ABSENT, PreconditionFailedError),
    ):
        once(bucket, "PUT", lambda *_: refusal(409, "ConditionalRequestConflict"))
        with pytest.raises(kind):
            await storage.put(key, b"second", if_version=expected)
    assert (await storage.get("key")).data == b"first"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "NoSuchKey", (ObjectNotFoundError, BucketNotFoundError)),
        (404, "NoSuchBucket", (BucketNotFoundError, BucketNotFoundError)),
        (403, "AccessDenied", (PermissionDeniedError, PermissionDeniedError)),
        (401, "Unauthorized", (PermissionDeniedError, PermissionDeniedError)),
        (400, "ExpiredToken", (ExpiredCredentialsError, ExpiredCredentialsError)),
        (403, "RequestTimeTooSkewed", (ClockSkewError, ClockSkewError)),
        (301, "PermanentRedirect", (WrongRegionError, WrongRegionError)),
        (503, "SlowDown", (ThrottledError, ThrottledError)),
        (429, "TooManyRequests", (ThrottledError, ThrottledError)),
        (500, "InternalError", (StorageUnavailableError, OutcomeUnknownError)),
        (400, "InvalidRequest", (StorageError, StorageError)),
    ],
)
async def test_refusals_have_names(
    bucket: Bucket,
    storage: Storage,
    status: int,
    code: str,
    expected: tuple[type[IcechunkError], type[IcechunkError]],
) -> None:
    """Each is raised after one request, names the key, and shows no secret."""
    bucket.fault = lambda *_: refusal(status, code)
    for operation, kind in (
        (lambda: storage.get("a key"), expected[0]),
        (lambda: storage.put("a key", b"body"), expected[1]),
    ):
        bucket.log.clear()
        with pytest.raises(kind) as caught:
            await operation()
        assert type(caught.value) is kind
        assert len(bucket.log) == 1
        assert "a key" in str(caught.value)
        assert caught.value.__cause__ is None
        assert _SECRET not in f"{caught.value!r} {caught.value.context}"


async def test_a_body_that_ends_early_is_no_answer(bucket: Bucket, storage: Storage) -> None:
    """Neither the whole object nor a range is ever answered in part."""
    await storage.put("key", b"0123456789")

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            status=206 if "Range" in request.headers else 200,
            headers={
                "ETag": '"x"',
                "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT",
                "Content-Length": "10",
                "Content-Range": "bytes 0-9/10",
            },
        )
        await response.prepare(request)
        await response.write(b"0123")
        drop(request)
        return response

    async with serving(cut) as url, opened(url) as broken:
        for byte_range in (None, ByteRange(0, 10)):
            with pytest.raises(StorageUnavailableError):
                await broken.get("key", byte_range)


async def test_a_range_of_other_bytes_is_no_answer() -> None:
    """A server or a cache that answers another range is not believed."""

    async def other(_request: web.Request) -> web.Response:
        headers = {
            "ETag": '"x"',
            "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT",
            "Content-Range": "bytes 4-7/10",
        }
        return web.Response(status=206, body=b"4567", headers=headers)

    async with serving(other) as url, opened(url) as storage:
        with pytest.raises(StorageUnavailableError):
            await storage.get("key", ByteRange(0, 4))


async def test_failed_deletions_are_reported_one_by_one(bucket: Bucket, storage: Storage) -> None:
    """The client tells only of the first; the others are deleted all the same."""
    keys = [f"key-{n}" for n in range(40)]
    for key in keys:
        await storage.put(key, b"body")
    bucket.undeletable = {"key-3", "key-30"}
    failures = await storage.delete(keys)
    assert [failure.key for failure in failures] == ["key-3", "key-30"]
    assert all(isinstance(failure.error, IcechunkError) for failure in failures)
    assert sorted(bucket.objects) == ["/bucket/key-3", "/bucket/key-30"]


async def test_a_listing_out_of_order_is_refused(bucket: Bucket, storage: Storage) -> None:
    """The engine skips and merges by order; a wrong one would lose objects."""
    bucket.listing = ["a", "c", "b"]
    with pytest.raises(StorageError, match="out of order"):
        _ = [entry async for entry in storage.list_prefix()]


async def test_hosts_that_do_not_answer_have_names() -> None:
    """No connection, no such host and no TLS differ, and nothing was written."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        async with serving(Bucket()) as url:
            for endpoint, kind in (
                (f"http://127.0.0.1:{port}", UnreachableError),
                ("http://nowhere.invalid", NameResolutionError),
                (url.replace("http:", "https:"), TLSError),
            ):
                async with opened(endpoint) as storage:
                    for expected in (ABSENT, None):
                        with pytest.raises(kind):
                            await storage.put("key", b"body", if_version=expected)
                    with pytest.raises(kind):
                        await storage.get("key")


async def test_silence_ends_a_request_after_its_time() -> None:
    """A server that takes a request and says nothing holds nobody for ever."""
    with silent() as url:
        async with opened(url, timeout_seconds=1) as storage:
            with pytest.raises(StorageUnavailableError):
                await storage.get("key")
            with pytest.raises(OutcomeUnknownError):
                await storage.put("key", b"body")


async def test_a_cancelled_request_ends_at_once() -> None:
    """The server may never reply."""
    with silent() as url:
        async with opened(url) as storage:
            for operation in (storage.get("key"), storage.put("key", b"body")):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await operation
