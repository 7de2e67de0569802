"""Outcomes of writes whose reply is lost, late or doubtful, through a faulty proxy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
    UnreachableError,
)
from icechunk_async.storage import ABSENT, Version, open_storage
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import (
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    Delay,
    FaultPlan,
    Hang,
    Reset,
    Respond,
    Rule,
    Truncate,
)
from icechunk_async_s3.writing import WRITE_ID
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage
    from tests.servers.s3.running import Server

_BEGUN = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
CONFLICT = Respond(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
TOO_MANY = Respond(429, b"<Error><Code>TooManyRequests</Code></Error>", (("Retry-After", "7"),))


@asynccontextmanager
async def behind(
    server: Server, *, direct: bool = False, **options: Any
) -> AsyncIterator[tuple[FaultProxy, Storage]]:
    """Open an empty bucket behind a proxy that does nothing yet."""
    bucket = await asyncio.to_thread(server.bucket)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        endpoint = server.endpoint if direct else proxy.url
        given = {**server.options(), "endpoint_url": endpoint, **options}
        async with open_storage(f"s3://{bucket}/prefix", **given) as storage:
            yield proxy, storage


def count(proxy: FaultProxy, method: str) -> int:
    """Return the number of requests of a method that went through."""
    return sum(entry.method == method for entry in proxy.log)


async def body_of(storage: Storage, key: str) -> bytes:
    """Return an object's bytes."""
    return bytes((await storage.get(key)).data)


@pytest.mark.parametrize("fault", [Reset(applied=True), Truncate()])
async def test_a_write_whose_answer_is_lost_is_found_by_its_id(
    ministack_server: Server, fault: Reset | Truncate
) -> None:
    """It landed: the version is answered, nothing is sent twice."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(fault, method="PUT", first=1),)))
        version = await storage.put("key", b"one", if_version=ABSENT)
        assert (await storage.get("key")).version == version
        assert count(proxy, "PUT") == 1
        proxy.use(FaultPlan((Rule(fault, method="PUT", first=1),)))
        version = await storage.put("key", b"two", if_version=version)
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"two", version)


@pytest.mark.parametrize("looks", [0, 1])
async def test_a_success_without_a_version_is_read_back(looks: int) -> None:
    """A proxy took the ETag away: the write landed, or, if it is never told, nobody knows."""
    told: dict[str, str] = {}

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.method == "PUT":
            told[WRITE_ID] = request.headers[WRITE_ID]
            return web.Response()
        return web.Response(headers={**told, **({"ETag": '"1"'} if looks else {})})

    async with (
        serving(answer) as url,
        open_storage(
            "s3://bucket", endpoint_url=url, allow_http=True, region="us-east-1", anonymous=True
        ) as storage,
    ):
        if looks:
            assert await storage.put("key", b"one", if_version=ABSENT) == Version("1")
            return
        with pytest.raises(OutcomeUnknownError, match="no ETag"):
            await storage.put("key", b"one", if_version=ABSENT)


@pytest.mark.parametrize(
    ("post", "headers"), [(b"", {}), (b"<html/>", {}), (_BEGUN, {}), (_BEGUN, {"ETag": ""})]
)
async def test_an_upload_whose_replies_are_odd_is_given_up(
    post: bytes, headers: dict[str, str]
) -> None:
    """The server tells no upload, or no version of a part: nothing was made."""

    async def answer(request: web.BaseRequest) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        if request.method == "POST":
            return web.Response(body=post, content_type="application/xml")
        return web.Response(headers=headers)

    options: dict[str, Any] = {"multipart_threshold_bytes": 5 << 20, "conditional_multipart": True}
    async with (
        serving(answer) as url,
        open_storage(
            "s3://bucket",
            endpoint_url=url,
            allow_http=True,
            region="us-east-1",
            anonymous=True,
            **options,
        ) as storage,
    ):
        for expected in (None, ABSENT):
            with pytest.raises(StorageError, match="does not follow"):
                await storage.put("key", bytes(6 << 20), if_version=expected)


async def test_a_copy_without_a_condition_may_be_refused_for_one() -> None:
    """A policy of the bucket may ask for one, or a header that the caller adds."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=412)

    async with (
        serving(answer) as url,
        open_storage(
            "s3://bucket", endpoint_url=url, allow_http=True, region="us-east-1", anonymous=True
        ) as storage,
    ):
        with pytest.raises(StorageError, match="412"):
            await storage.copy("key", "other")


async def test_a_success_without_a_version_and_without_an_id_is_unknown() -> None:
    """An unconditional write, and a copy: nothing tells whose object is there, and it landed."""

    async def answer(request: web.BaseRequest) -> web.Response:
        del request
        return web.Response()

    async with (
        serving(answer) as url,
        open_storage(
            "s3://bucket", endpoint_url=url, allow_http=True, region="us-east-1", anonymous=True
        ) as storage,
    ):
        with pytest.raises(OutcomeUnknownError, match="no ETag"):
            await storage.put("key", b"one")
        with pytest.raises(OutcomeUnknownError, match="no ETag"):
            await storage.copy("key", "copy")


async def test_a_request_that_was_lost_is_sent_again(ministack_server: Server) -> None:
    """It did not land: another try with the same id does."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(Reset(applied=False), method="PUT", first=2),)))
        await storage.put("key", b"one", if_version=ABSENT)
        assert await body_of(storage, "key") == b"one"
        assert count(proxy, "PUT") == 3


async def test_a_refusal_after_a_lost_request_is_no_answer(ministack_server: Server) -> None:
    """Somebody else wrote: ours may have been there before, so that nobody can know."""
    async with behind(ministack_server) as (proxy, storage):
        version = await storage.put("key", b"one")
        await storage.put("key", b"two")
        proxy.use(FaultPlan((Rule(Reset(applied=False), method="PUT", first=1),)))
        with pytest.raises(OutcomeUnknownError):
            await storage.put("key", b"three", if_version=version)
        assert await body_of(storage, "key") == b"two"


async def test_a_server_that_failed_may_have_written(ministack_server: Server) -> None:
    """After 500 the object is looked at: not ours, so it is sent again; and in the end: unknown."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(S3_INTERNAL_ERROR, method="PUT", first=1),)))
        await storage.put("key", b"one", if_version=ABSENT)
        assert (count(proxy, "PUT"), count(proxy, "HEAD")) == (2, 1)
        proxy.use(FaultPlan((Rule(S3_INTERNAL_ERROR, method="PUT"),)))
        with pytest.raises(OutcomeUnknownError, match="InternalError"):
            await storage.put("other", b"one", if_version=ABSENT)


async def test_a_busy_server_leaves_no_doubt(ministack_server: Server) -> None:
    """It turned the write away: tried again, and in the end throttled, not unknown."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(S3_SLOW_DOWN, method="PUT", first=2),)))
        version = await storage.put("key", b"one", if_version=ABSENT)
        await storage.put("key", b"two", if_version=version)
        proxy.use(FaultPlan((Rule(S3_SLOW_DOWN, method="PUT", first=1),)))
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"three", if_version=version)
        proxy.use(FaultPlan((Rule(S3_SLOW_DOWN, method="PUT"),)))
        with pytest.raises(ThrottledError):
            await storage.put("other", b"one", if_version=ABSENT)


async def test_a_write_that_cannot_be_inspected_is_unknown(ministack_server: Server) -> None:
    """The reply is lost, and so is every answer to the question."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(Reset(applied=True)),)))
        with pytest.raises(OutcomeUnknownError):
            await storage.put("key", b"one", if_version=ABSENT)


async def test_a_conflict_of_two_writes_is_tried_again(ministack_server: Server) -> None:
    """The server put it off: nothing changed, so that the answer stays certain."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(CONFLICT, method="PUT", first=3),)))
        version = await storage.put("key", b"one", if_version=ABSENT)
        proxy.use(FaultPlan((Rule(CONFLICT, method="PUT", first=1),)))
        await storage.put("key", b"two", if_version=version)
        proxy.use(FaultPlan((Rule(CONFLICT, method="PUT", first=1),)))
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"three", if_version=version)
        proxy.use(FaultPlan((Rule(CONFLICT, method="PUT"),)))
        with pytest.raises(StorageUnavailableError, match="others were writing"):
            await storage.put("key", b"four", if_version=ABSENT)


async def test_a_refused_write_has_not_landed(ministack_server: Server) -> None:
    """One request to write, one to look whether an intermediary had repeated it."""
    async with behind(ministack_server) as (proxy, storage):
        await storage.put("key", b"one")
        proxy.forget()
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"two", if_version=ABSENT)
        assert [entry.method for entry in proxy.log] == ["PUT", "HEAD"]


async def test_an_intermediary_that_repeats_a_write_does_no_harm(ministack_server: Server) -> None:
    """The second answer says "refused", and the object carries our id."""
    async with behind(ministack_server) as (proxy, storage):
        original = storage._transport.send  # type: ignore[attr-defined]

        async def twice(method: str, *args: Any, **named: Any) -> Any:
            if method == "PUT":
                await original(method, *args, **named)
            return await original(method, *args, **named)

        storage._transport.send = twice  # type: ignore[attr-defined]
        version = await storage.put("key", b"one", if_version=ABSENT)
        assert (await storage.get("key")).version == version
        assert count(proxy, "PUT") == 2


async def test_throttling_tells_how_long_to_wait(ministack_server: Server) -> None:
    """Nothing changed, and the pause that the server asked for is in the context."""
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(TOO_MANY),)))
        for operation in (
            storage.get("key"),
            storage.put("key", b"one", if_version=ABSENT),
            storage.put("key", b"one"),
            storage.copy("key", "other"),
            anext(storage.list_prefix()),
        ):
            with pytest.raises(ThrottledError) as caught:
                await operation
            assert caught.value.context["retry_after_seconds"] == 7
        assert [it.key for it in await storage.delete(["a", "b"])] == ["a", "b"]
        proxy.use(FaultPlan((Rule(S3_SLOW_DOWN),)))
        with pytest.raises(ThrottledError):
            await storage.get("key")


async def test_reads_survive_one_stale_connection(ministack_server: Server) -> None:
    """A server may close a connection that was idle: the request is sent once more."""
    async with behind(ministack_server) as (proxy, storage):
        await storage.put("key", b"one")
        proxy.use(FaultPlan((Rule(Reset(applied=False), first=1),)))
        assert await body_of(storage, "key") == b"one"
        proxy.use(FaultPlan((Rule(Truncate(), first=1),)))
        assert await body_of(storage, "key") == b"one"
        proxy.use(FaultPlan((Rule(Truncate()),)))
        with pytest.raises(StorageUnavailableError):
            await storage.get("key")


async def test_an_unconditional_change_is_sent_once(ministack_server: Server) -> None:
    """A repetition could undo what somebody else wrote in between: the caller decides."""
    async with behind(ministack_server) as (proxy, storage):
        await storage.put("key", b"one")
        for fault in (Reset(applied=False), Reset(applied=True), S3_INTERNAL_ERROR):
            proxy.use(FaultPlan((Rule(fault, method="PUT|POST"),)))
            proxy.forget()
            with pytest.raises(OutcomeUnknownError):
                await storage.put("key", b"two")
            failures = await storage.delete(["other"])
            assert [type(failure.error) for failure in failures] == [OutcomeUnknownError]
            with pytest.raises(OutcomeUnknownError):
                await storage.copy("key", "third")
            assert [entry.method for entry in proxy.log] == ["PUT", "POST", "PUT"]


async def test_aiobotocore_sends_a_copy_once(ministack_server: Server) -> None:
    """A copy that was repeated could be refused by its own condition, although it landed."""
    async with behind(ministack_server) as (proxy, storage):
        version = await storage.put("key", b"one")
        proxy.use(FaultPlan((Rule(Reset(applied=True), method="PUT"),)))
        proxy.forget()
        with pytest.raises(OutcomeUnknownError):
            await storage.copy("key", "other", if_version=version)
        assert count(proxy, "PUT") == 1


async def test_a_server_that_does_not_answer_is_given_up(ministack_server: Server) -> None:
    """After the longest pause that was allowed; a caller's own deadline ends it as well."""
    options: dict[str, Any] = {"network_stream_timeout_seconds": 0.3}
    async with behind(ministack_server, **options) as (proxy, storage):
        proxy.use(FaultPlan((Rule(Hang(applied=False)),)))
        with pytest.raises(UnreachableError, match="no answer in time"):
            await storage.get("key")
        with pytest.raises(OutcomeUnknownError):
            await storage.put("key", b"two", if_version=ABSENT)
        with pytest.raises(OutcomeUnknownError):
            await storage.put("key", b"two")
    async with behind(ministack_server) as (proxy, storage):
        proxy.use(FaultPlan((Rule(Delay(30)),)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await storage.get("key")


async def test_an_object_in_parts_is_whole_or_absent(ministack_server: Server) -> None:
    """A part that is lost is sent again; one that cannot be sent leaves nothing."""
    body = bytes(range(256)) * (40 * 4096)
    async with behind(ministack_server, multipart_threshold_bytes=8 << 20) as (proxy, storage):
        proxy.use(FaultPlan((Rule(Reset(applied=True), path="partNumber", first=2),)))
        version = await storage.put("large", body)
        found = await storage.get("large")
        assert (found.data, found.version) == (body, version)
        proxy.use(FaultPlan((Rule(S3_INTERNAL_ERROR, path="partNumber=2"),)))
        with pytest.raises(IcechunkError):
            await storage.put("other", body)
        assert [entry.method for entry in proxy.log][-1] == "DELETE"
        proxy.use(FaultPlan((Rule(Reset(applied=True), method="POST", path="uploadId"),)))
        with pytest.raises(OutcomeUnknownError):
            await storage.put("third", body)
