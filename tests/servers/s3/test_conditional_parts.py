"""Large objects written on a condition: in parts, with the condition on joining them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import (
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageUnavailableError,
    ThrottledError,
    UnsafeStorageError,
)
from icechunk_async.storage import ABSENT, Version, open_storage
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import (
    S3_INTERNAL_ERROR,
    S3_SLOW_DOWN,
    FaultPlan,
    Hang,
    Reset,
    Respond,
    Rule,
    Truncate,
)
from tests.helpers import cancelled_when
from tests.servers.s3.running import Server, s3_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.storage import Expected, Storage

THRESHOLD: Final = 5 << 20
LARGE: Final = bytes(range(256)) * (17 << 12)  # two parts
ON: Final[dict[str, Any]] = {
    "multipart_threshold_bytes": THRESHOLD,
    "conditional_multipart": True,
}
NO_SUCH_UPLOAD: Final = Respond(404, b"<Error><Code>NoSuchUpload</Code></Error>")
CONFLICT: Final = Respond(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
JOIN: Final[dict[str, Any]] = {"method": "POST", "path": "uploadId"}


def large(mark: str) -> bytes:
    """Return bytes that are just large enough to go in parts, different for each mark."""
    return mark.encode() * (THRESHOLD // len(mark) + 1)


class Bucket:
    """An empty bucket behind a proxy, and a handle to it."""

    def __init__(self, server: Server, name: str, proxy: FaultProxy, storage: Storage) -> None:
        self.storage = storage
        self.proxy = proxy
        self._client = s3_client(server.endpoint)
        self._name = name

    async def body(self, key: str) -> bytes:
        """Return an object's bytes."""
        return bytes((await self.storage.get(key)).data)

    async def unfinished(self) -> int:
        """Return the number of uploads that wait to be joined."""
        listed = await asyncio.to_thread(self._client.list_multipart_uploads, Bucket=self._name)
        return len(listed.get("Uploads", ()))

    def spoil(self, *rules: Rule) -> None:
        """Let the proxy follow other rules, and forget what it saw."""
        self.proxy.use(FaultPlan(rules))
        self.proxy.forget()

    def sent(self) -> list[str]:
        """Return the requests sent: ``begin``, ``part``, ``join``, ``abort``, or a method."""
        return [_kind(entry.method, entry.target) for entry in self.proxy.log]


def _kind(method: str, target: str) -> str:
    if "partNumber" in target:
        return "part"
    if "uploadId" in target:
        return {"POST": "join", "DELETE": "abort"}[method]
    return "begin" if method == "POST" and "uploads" in target else method


@asynccontextmanager
async def bucket_on(server: Server, **options: Any) -> AsyncGenerator[Bucket]:
    """Open an empty bucket behind a proxy that does nothing yet."""
    name = await asyncio.to_thread(server.bucket)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        given = {**server.options(), "endpoint_url": proxy.url, **options}
        async with open_storage(f"s3://{name}/prefix", **given) as storage:
            yield Bucket(server, name, proxy, storage)


@pytest.mark.parametrize("checksum", [None, "crc32"])
async def test_a_large_object_is_created_and_updated_once(
    ministack_server: Server, checksum: str | None
) -> None:
    """Each condition holds when the parts are joined; a refusal leaves object and bucket alone."""
    async with bucket_on(ministack_server, **ON, checksum_algorithm=checksum) as bucket:
        storage = bucket.storage
        first = await storage.put("key", LARGE, if_version=ABSENT)
        assert sorted(bucket.sent()) == ["begin", "join", "part", "part"]
        second = await storage.put("key", LARGE[::-1], if_version=first)
        found = await storage.get("key")
        assert (found.data, found.version) == (LARGE[::-1], second)
        for stale in (ABSENT, first):
            bucket.spoil()
            with pytest.raises(PreconditionFailedError):
                await storage.put("key", large("refused"), if_version=stale)
            assert bucket.sent() == ["begin", "part", "join", "HEAD", "abort"]
        with pytest.raises(PreconditionFailedError):
            await storage.put("absent", large("refused"), if_version=second)
        assert (await storage.get("key")).version == second
        assert len([entry async for entry in storage.list_prefix()]) == 1
        assert await bucket.unfinished() == 0


async def test_of_racing_writers_of_large_objects_one_wins(ministack_server: Server) -> None:
    """Creators first, then updaters of the same version."""
    async with bucket_on(ministack_server, **ON) as bucket:
        expected: Expected = ABSENT
        for round_ in ("create", "update"):
            bodies = [large(f"{round_} {number} ") for number in range(6)]

            async def write(body: bytes, at: Expected = expected) -> tuple[bytes, Version] | None:
                try:
                    return body, await bucket.storage.put("key", body, if_version=at)
                except PreconditionFailedError:
                    return None

            told = await bounded_map(write, bodies, limit=6)
            won = [it for it in told if it is not None]
            found = await bucket.storage.get("key")
            assert won == [(bytes(found.data), found.version)]
            expected = found.version
        assert await bucket.unfinished() == 0


@pytest.mark.parametrize("fault", [Reset(applied=True), Truncate()])
async def test_an_object_whose_joining_was_not_answered_is_found_by_its_id(
    ministack_server: Server, fault: Reset | Truncate
) -> None:
    """The parts were joined: the version is answered, nothing is sent twice."""
    async with bucket_on(ministack_server, **ON) as bucket:
        expected: Expected = ABSENT
        for body in (large("one"), large("two")):
            bucket.spoil(Rule(fault, first=1, **JOIN))
            expected = await bucket.storage.put("key", body, if_version=expected)
            assert bucket.sent() == ["begin", "part", "join", "HEAD"]
            found = await bucket.storage.get("key")
            assert (found.data, found.version) == (body, expected)
        assert await bucket.unfinished() == 0


@pytest.mark.parametrize(
    "fault",
    [
        Reset(applied=False),
        S3_INTERNAL_ERROR,
        S3_SLOW_DOWN,
        Respond(200, S3_INTERNAL_ERROR.body),
        Respond(200, S3_SLOW_DOWN.body),
        Respond(200, b'<?xml version="1.0" encoding="UTF-8"?>\n   '),
        Respond(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"),
    ],
)
async def test_parts_that_were_not_joined_are_joined_again(
    ministack_server: Server, fault: Reset | Respond
) -> None:
    """They are not sent again, also where a 200 holds an error; no success is made of it."""
    async with bucket_on(ministack_server, **ON) as bucket:
        bucket.spoil(Rule(fault, first=2, **JOIN))
        version = await bucket.storage.put("key", LARGE, if_version=ABSENT)
        sent = bucket.sent()
        assert [sent.count(kind) for kind in ("begin", "part", "join")] == [1, 2, 3]
        found = await bucket.storage.get("key")
        assert (found.data, found.version) == (LARGE, version)


async def test_a_conflict_of_two_joins_sends_the_parts_anew(ministack_server: Server) -> None:
    """S3 asks for that; nothing was changed, so that the answer stays certain."""
    async with bucket_on(ministack_server, **ON) as bucket:
        bucket.spoil(Rule(CONFLICT, first=1, **JOIN))
        version = await bucket.storage.put("key", large("one"), if_version=ABSENT)
        assert bucket.sent() == ["begin", "part", "join", "abort", "begin", "part", "join"]
        bucket.spoil(Rule(CONFLICT, first=1, **JOIN))
        with pytest.raises(PreconditionFailedError):
            await bucket.storage.put("key", large("two"), if_version=ABSENT)
        bucket.spoil(Rule(CONFLICT, **JOIN))
        with pytest.raises(StorageUnavailableError, match="others were writing"):
            await bucket.storage.put("key", large("three"), if_version=version)
        assert await bucket.body("key") == large("one")
        assert await bucket.unfinished() == 0


async def test_a_refusal_inside_of_a_success_is_a_refusal(ministack_server: Server) -> None:
    """The status was sent before the condition was looked at."""
    refused = Respond(200, b"<Error><Code>PreconditionFailed</Code></Error>")
    async with bucket_on(ministack_server, **ON) as bucket:
        bucket.spoil(Rule(refused, **JOIN))
        with pytest.raises(PreconditionFailedError):
            await bucket.storage.put("key", large("one"), if_version=ABSENT)
        assert bucket.sent() == ["begin", "part", "join", "HEAD", "abort"]


async def test_an_upload_that_is_gone_leaves_doubt_unless_the_id_is_there(
    ministack_server: Server,
) -> None:
    """An intermediary joined it before; or it was removed; or it was joined and replaced."""
    async with bucket_on(ministack_server, **ON) as bucket:
        storage: Any = bucket.storage
        original = storage._transport.call

        async def twice(operation: str, *args: Any, **named: Any) -> Any:
            if operation == "complete_multipart_upload":
                await original(operation, *args, **named)
            return await original(operation, *args, **named)

        storage._transport.call = twice
        version = await storage.put("key", large("one"), if_version=ABSENT)
        assert (await storage.get("key")).version == version
        storage._transport.call = original
        bucket.spoil(Rule(NO_SUCH_UPLOAD, **JOIN))
        with pytest.raises(OutcomeUnknownError, match="NoSuchUpload"):
            await storage.put("key", large("two"), if_version=version)
        assert await bucket.unfinished() == 0


async def test_a_refusal_after_a_lost_join_is_no_answer(ministack_server: Server) -> None:
    """Somebody else wrote: ours may have been there before, so that nobody can know."""
    async with bucket_on(ministack_server, **ON) as bucket:
        version = await bucket.storage.put("key", b"one")
        await bucket.storage.put("key", b"two")
        bucket.spoil(Rule(Reset(applied=False), first=1, **JOIN))
        with pytest.raises(OutcomeUnknownError):
            await bucket.storage.put("key", LARGE, if_version=version)
        assert await bucket.body("key") == b"two"
        assert await bucket.unfinished() == 0


async def test_a_join_that_is_never_answered_is_unknown_and_taken_back(
    ministack_server: Server,
) -> None:
    """Its parts are removed, so that it cannot land later; a busy server leaves no doubt."""
    async with bucket_on(ministack_server, **ON) as bucket:
        for fault, error in (
            (S3_INTERNAL_ERROR, OutcomeUnknownError),
            (Reset(applied=False), OutcomeUnknownError),
            (S3_SLOW_DOWN, ThrottledError),
        ):
            bucket.spoil(Rule(fault, **JOIN))
            with pytest.raises(error):
                await bucket.storage.put("key", large("one"), if_version=ABSENT)
            assert bucket.sent()[-1] == "abort"
        assert [entry async for entry in bucket.storage.list_prefix()] == []
        assert await bucket.unfinished() == 0


async def test_a_part_that_cannot_be_sent_leaves_nothing(ministack_server: Server) -> None:
    """No join was asked for, so the error says that nothing was written."""
    async with bucket_on(ministack_server, **ON) as bucket:
        bucket.spoil(Rule(S3_INTERNAL_ERROR, path="partNumber=2"))
        with pytest.raises(StorageUnavailableError):
            await bucket.storage.put("key", LARGE, if_version=ABSENT)
        assert "join" not in bucket.sent()
        assert await bucket.unfinished() == 0


@pytest.mark.parametrize("where", ["partNumber", "uploadId"])
async def test_a_cancelled_write_leaves_no_parts(ministack_server: Server, where: str) -> None:
    """It may be cancelled while parts are sent or joined."""
    method = "PUT" if where == "partNumber" else "POST"
    async with bucket_on(ministack_server, **ON) as bucket:
        bucket.spoil(Rule(Hang(applied=False), method=method, path=where))
        await cancelled_when(
            bucket.storage.put("key", large("one"), if_version=ABSENT),
            lambda: any(entry.outcome == "hung before" for entry in bucket.proxy.log),
        )
        assert bucket.sent()[-1] == "abort"
        assert await bucket.unfinished() == 0
        assert [entry async for entry in bucket.storage.list_prefix()] == []


async def test_only_servers_that_are_known_to_honour_it_get_it(moto_server: Server) -> None:
    """The server moto joins parts without checking the version: trusting it loses a write."""
    async with bucket_on(moto_server, multipart_threshold_bytes=THRESHOLD) as bucket:
        stale = await bucket.storage.put("key", large("one"), if_version=ABSENT)
        await bucket.storage.put("key", large("two"), if_version=stale)
        assert bucket.sent() == ["PUT", "PUT"]
        with pytest.raises(PreconditionFailedError):
            await bucket.storage.put("key", large("three"), if_version=stale)
        assert await bucket.body("key") == large("two")
    async with bucket_on(moto_server, **ON) as bucket:
        stale = await bucket.storage.put("key", b"one")
        await bucket.storage.put("key", b"two")
        await bucket.storage.put("key", large("three"), if_version=stale)
        assert await bucket.body("key") == large("three"), "moto honours it now"


async def test_too_large_bodies_are_refused_naming_the_option() -> None:
    """Without conditions on parts the limit is 5 GiB. Nothing is sent."""

    class Huge(bytes):
        def __len__(self) -> int:
            return 5 * 1024**3 + 1

    options: dict[str, Any] = {"endpoint_url": "https://s3.invalid", "region": "a"}
    async with open_storage("s3://bucket", anonymous=True, **options) as storage:
        with pytest.raises(UnsafeStorageError, match="conditional_multipart=True") as caught:
            await storage.put("key", Huge(), if_version=ABSENT)
        assert caught.value.context["option"] == "conditional_multipart"


@pytest.mark.parametrize(
    ("options", "environment", "is_aws"),
    [
        ({}, None, True),
        ({"region": "eu-west-1"}, None, True),
        ({"region": "cn-north-1"}, None, True),
        ({"endpoint_url": "https://vpce-1.s3.eu-west-1.vpce.amazonaws.com"}, None, True),
        ({"endpoint_url": "https://s3.example.com"}, None, False),
        ({"endpoint_url": "https://amazonaws.com.example.com"}, None, False),
        ({}, "https://s3.example.com", False),
        ({"preset": "tigris"}, None, False),
    ],
)
async def test_aws_is_known_by_where_requests_go(
    *, options: dict[str, Any], environment: str | None, is_aws: bool
) -> None:
    """An endpoint may also come from the environment; the option goes before it all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        if environment is not None:
            patch.setenv("AWS_ENDPOINT_URL_S3", environment)
        for said, expected in ((None, is_aws), (not is_aws, not is_aws)):
            given = {"anonymous": True, **options, "conditional_multipart": said}
            async with open_storage("s3://bucket", **given) as storage:
                transport = cast("Any", storage)._transport
                assert await transport.joins_conditionally() is expected
