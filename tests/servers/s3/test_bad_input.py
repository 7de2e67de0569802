"""Each failure of a bucket, its credentials or the network has its own error."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import ssl
import subprocess
import urllib.parse
import urllib.request
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
    IcechunkError,
    InvalidInputError,
    InvalidObjectKeyError,
    NameResolutionError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    TLSError,
    UnreachableError,
    UnsafeStorageError,
    WrongRegionError,
)
from icechunk_async.storage import ABSENT, ByteRange, Version, open_storage
from icechunk_async.testing.proxy import FaultProxy
from icechunk_async.testing.proxy_plan import FaultPlan, Respond, Rule
from icechunk_async_s3 import S3Credentials
from tests.servers.process import free_port
from tests.servers.s3.running import KEYS, Server, ministack, s3_client
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from icechunk_async.storage import Storage

SECRET = "wJalrXUtnFEMI-not-a-secret"  # noqa: S105
IN_PARIS = ("x-amz-bucket-region", "eu-west-3")
PARIS = "<Region>eu-west-3</Region>"
TOKEN = "FwoGZXIvYXdzEBYaD-not-a-token"  # noqa: S105


async def fails_alike(storage: Storage, kind: type[IcechunkError]) -> list[IcechunkError]:
    """Expect an error of every operation, and answer them."""
    errors: list[IcechunkError] = []
    for operation in (
        storage.get("key"),
        storage.put("key", b"body"),
        storage.put("key", b"body", if_version=ABSENT),
        storage.put("key", b"body", if_version=Version("0" * 32)),
        storage.copy("key", "other"),
        anext(storage.list_prefix()),
    ):
        with pytest.raises(kind) as caught:
            await operation
        errors.append(caught.value)
    failures = await storage.delete(["key"])
    assert [type(failure.error) for failure in failures] == [kind]
    return [*errors, failures[0].error]


async def test_a_missing_bucket_is_named(ministack_server: Server) -> None:
    """It is not taken for a missing object, nor for a write that was refused."""
    options = ministack_server.options()
    async with open_storage("s3://no-such-bucket/prefix", **options) as storage:
        for error in await fails_alike(storage, BucketNotFoundError):
            assert error.context["bucket"] == "no-such-bucket"
            assert "no-such-bucket" in error.message


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    """The address is named; nothing was sent, so that nothing is unknown."""
    port = free_port()
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{port}", "allow_http": True}
    async with open_storage("s3://bucket", **options, **KEYS) as storage:
        for error in await fails_alike(storage, UnreachableError):
            assert str(port) in error.message


async def test_a_name_that_does_not_exist_is_named() -> None:
    """DNS is asked, and says no."""
    options: dict[str, Any] = {"endpoint_url": "https://nonexistent.invalid", **KEYS}
    async with open_storage("s3://bucket", **options) as storage:
        for error in await fails_alike(storage, NameResolutionError):
            assert "nonexistent.invalid" in error.message


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Make a certificate for 127.0.0.1 that nobody trusts."""
    path = tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(path), "-out", str(tmp_path / "public.pem")),
        ],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + (tmp_path / "public.pem").read_bytes())
    return path


async def test_a_certificate_that_is_not_trusted_is_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is sent. With AWS_CA_BUNDLE the server is trusted."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 4\r\n\r\nbody')
        await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        options: dict[str, Any] = {"endpoint_url": f"https://127.0.0.1:{port}", **KEYS}
        async with open_storage("s3://bucket", **options) as storage:
            for error in await fails_alike(storage, TLSError):
                assert "AWS_CA_BUNDLE" in error.message
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.with_name("public.pem")))
        async with open_storage("s3://bucket", **options) as storage:
            assert (await storage.get("key")).data == b"body"


async def test_a_server_without_tls_is_told(ministack_server: Server) -> None:
    """Encryption is asked of a server that speaks http."""
    endpoint = ministack_server.endpoint.replace("http:", "https:")
    async with open_storage("s3://bucket", endpoint_url=endpoint, **KEYS) as storage:
        await fails_alike(storage, TLSError)


def refusing(status: int, code: str, more: str = "", *headers: tuple[str, str]) -> Respond:
    """Return a reply that repeats every secret of the request."""
    body = f"<Error><Code>{code}</Code><Message>No: {SECRET} {TOKEN}</Message>{more}</Error>"
    return Respond(status, body.encode(), headers)


@asynccontextmanager
async def answering(server: Server, answer: Respond) -> AsyncIterator[Storage]:
    """Open a storage on a proxy that always answers the same."""
    async with FaultProxy("127.0.0.1", server.port, FaultPlan((Rule(answer),))) as proxy:
        options = {"endpoint_url": proxy.url, "region": "us-east-1", "allow_http": True}
        keys = {"access_key_id": "id", "secret_access_key": SECRET, "session_token": TOKEN}
        async with open_storage("s3://bucket/prefix", **options, **keys) as storage:
            yield storage


@pytest.mark.parametrize(
    ("kind", "answer", "advice"),
    [
        (PermissionDeniedError, refusing(403, "AccessDenied"), "policy"),
        (PermissionDeniedError, refusing(403, "InvalidAccessKeyId"), "access_key_id"),
        (PermissionDeniedError, refusing(403, "SignatureDoesNotMatch"), "secret_access_key"),
        (ExpiredCredentialsError, refusing(400, "ExpiredToken"), "credentials="),
        (ClockSkewError, refusing(403, "RequestTimeTooSkewed"), "clock"),
        (WrongRegionError, refusing(301, "PermanentRedirect", "", IN_PARIS), "eu-west-3"),
        (WrongRegionError, refusing(400, "AuthorizationHeaderMalformed", PARIS), "eu-west-3"),
        (StorageFullError, refusing(507, "XMinioStorageFull"), "room"),
        (InvalidObjectKeyError, refusing(400, "KeyTooLongError"), "shorter"),
        (StorageError, refusing(400, "SomethingNew"), "SomethingNew"),
    ],
)
async def test_refusals_are_told_apart_and_show_no_secret(
    ministack_server: Server,
    caplog: pytest.LogCaptureFixture,
    kind: type[IcechunkError],
    answer: Respond,
    advice: str,
) -> None:
    """Each says what to do; none repeats a secret, though the server does."""
    caplog.set_level(logging.INFO)
    async with answering(ministack_server, answer) as storage:
        for error in await fails_alike(storage, kind):
            assert advice in error.message
            shown = repr(error) + str(error) + str(error.context) + caplog.text
            assert SECRET not in shown
            assert TOKEN not in shown
            assert SECRET.encode() not in pickle.dumps(error)


async def test_a_denied_request_without_a_signature_is_told_so(ministack_server: Server) -> None:
    """A policy is no help to somebody who forgot that nothing is signed."""
    plan = FaultPlan((Rule(refusing(403, "AccessDenied")),))
    async with FaultProxy("127.0.0.1", ministack_server.port, plan) as proxy:
        options = {"endpoint_url": proxy.url, "region": "us-east-1", "allow_http": True}
        async with open_storage("s3://bucket", anonymous=True, **options) as storage:
            for error in await fails_alike(storage, PermissionDeniedError):
                assert "leave anonymous out" in error.message
                assert "policy" not in error.message


async def test_odd_headers_of_a_read_are_no_crash() -> None:
    """A time that no clock can show is left out; a size that is no number is refused."""
    headers = {"ETag": '"1"'}

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=206 if "Content-Range" in headers else 200, headers=headers)

    async with (
        serving(answer) as url,
        open_storage(
            "s3://bucket", endpoint_url=url, allow_http=True, region="us-east-1", anonymous=True
        ) as storage,
    ):
        for modified in (
            "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
            "Fri, 31 Dec 9999 23:59:59 -2300",
        ):
            headers["Last-Modified"] = modified
            found = await storage.get("key")
            assert (found.version, found.last_modified) == (Version("1"), None)
        headers["Content-Range"] = f"bytes 0-0/{'9' * 5000}"
        with pytest.raises(StorageError, match="does not follow"):
            await storage.get("key", ByteRange(0, 1))


async def test_an_archived_object_is_denied_with_the_reason(ministack_server: Server) -> None:
    """An object in a class that cannot be read at once."""
    async with answering(ministack_server, refusing(403, "InvalidObjectState")) as storage:
        with pytest.raises(PermissionDeniedError, match="archived"):
            await storage.get("key")


async def test_a_read_only_storage_sends_no_write(ministack_server: Server) -> None:
    """It reads, and says why it does not write."""
    bucket = await asyncio.to_thread(ministack_server.bucket)
    options = ministack_server.options()
    async with open_storage(f"s3://{bucket}", **options) as storage:
        await storage.put("key", b"body")
    async with open_storage(f"s3://{bucket}", read_only=True, **options) as storage:
        assert not storage.capabilities.writable
        assert (await storage.get("key")).data == b"body"
        for operation in (
            storage.put("key", b"x"),
            storage.delete(["key"]),
            storage.copy("key", "other"),
        ):
            with pytest.raises(UnsafeStorageError):
                await operation
        assert (await storage.get("key")).data == b"body"


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run ministack so that it checks signatures."""
    with ministack(tmp_path_factory.mktemp("guarded"), auth=True) as server:
        yield server


def user(server: Server) -> dict[str, str]:
    """Make a user who may do everything; answer the keys. Blocks."""

    def ask(**fields: str) -> str:
        request = urllib.request.Request(  # noqa: S310 - loopback
            server.endpoint,
            data=urllib.parse.urlencode({"Version": "2010-05-08", **fields}).encode(),
            headers={
                "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/iam/"
                "aws4_request, SignedHeaders=host, Signature=0",
                "Content-Type": "application/x-www-form-urlencoded",
            },
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - loopback
            text: str = answer.read().decode()
        return text

    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    policy = {"Version": "2012-10-17", "Statement": [everything]}
    ask(Action="CreateUser", UserName="someone")
    ask(
        Action="PutUserPolicy",
        UserName="someone",
        PolicyName="all",
        PolicyDocument=json.dumps(policy),
    )
    keys = ask(Action="CreateAccessKey", UserName="someone")

    def element(name: str) -> str:
        return keys.split(f"<{name}>")[1].split("<")[0]

    return {
        "access_key_id": element("AccessKeyId"),
        "secret_access_key": element("SecretAccessKey"),
    }


async def test_a_server_that_checks_signatures_accepts_ours(guarded: Server) -> None:
    """For awkward keys, ranges, conditions and parts; and a wrong secret is refused."""
    keys = await asyncio.to_thread(user, guarded)
    client = s3_client(guarded.endpoint, **keys)
    await asyncio.to_thread(client.create_bucket, Bucket="guarded")
    options: dict[str, Any] = {
        "endpoint_url": guarded.endpoint,
        "region": "us-east-1",
        "allow_http": True,
        "multipart_threshold_bytes": 8 << 20,
        **keys,
    }
    async with open_storage("s3://guarded/a prefix/é", **options) as storage:
        for key in ("a b", "a+b", "a%25", "日本/語", "😀", "~a", "a=b&c", "k'(1)*!"):
            version = await storage.put(key, key.encode(), if_version=ABSENT)
            version = await storage.put(key, key.encode() * 2, if_version=version)
            assert (await storage.get(key)).data == key.encode() * 2
        await storage.put("large", bytes(9 << 20))
        await storage.copy("a b", "copy")
        assert await storage.delete(["copy"]) == []
    async with open_storage("s3://guarded", **{**options, "secret_access_key": SECRET}) as storage:
        for error in await fails_alike(storage, PermissionDeniedError):
            assert SECRET not in repr(error)
    checked = {**options, "checksum_algorithm": "crc32c", "storage_class": "STANDARD_IA"}
    headers = {"extra_headers": {"x-amz-meta-note": "hello"}, "requester_pays": True}
    async with open_storage("s3://guarded", **checked, **headers) as storage:
        await storage.put("checked", b"body", if_version=ABSENT)
        await storage.put("large", bytes(9 << 20))
        await storage.copy("checked", "copy")
        assert [entry async for entry in storage.list_prefix()]
    head = await asyncio.to_thread(client.head_object, Bucket="guarded", Key="checked")
    assert (head["StorageClass"], head["Metadata"]["note"]) == ("STANDARD_IA", "hello")


async def test_credentials_that_expire_in_mid_flight_are_renewed(ministack_server: Server) -> None:
    """The callback is asked once, however many requests are under way."""
    asked: list[int] = []

    async def credentials() -> S3Credentials:
        asked.append(len(asked))
        await asyncio.sleep(0)
        ends = datetime.now(UTC) + timedelta(hours=1)
        return S3Credentials(f"key-{len(asked)}", SECRET, TOKEN, ends)

    bucket = await asyncio.to_thread(ministack_server.bucket)
    expired = refusing(400, "ExpiredToken")
    async with FaultProxy("127.0.0.1", ministack_server.port) as proxy:
        options = {**ministack_server.options(), "endpoint_url": proxy.url}
        for name in KEYS:
            del options[name]
        async with open_storage(f"s3://{bucket}", credentials=credentials, **options) as storage:
            await asyncio.gather(*(storage.put(f"key-{n}", b"x") for n in range(20)))
            assert asked == [0]
            proxy.use(FaultPlan((Rule(expired, first=1),)))
            await storage.put("new", b"x", if_version=ABSENT)
            proxy.use(FaultPlan((Rule(expired, first=1),)))
            assert [entry async for entry in storage.list_prefix("new")]
            assert asked == [0, 1, 2]
            proxy.use(FaultPlan((Rule(expired),)))
            await fails_alike(storage, ExpiredCredentialsError)


async def test_keys_are_renewed_before_they_end(ministack_server: Server) -> None:
    """Keys that expire within five minutes are not used for another request."""
    asked: list[int] = []

    async def credentials() -> S3Credentials:
        asked.append(len(asked))
        ends = datetime.now(UTC) + timedelta(minutes=1 if len(asked) == 1 else 60)
        return S3Credentials("id", SECRET, expires_at=ends)

    options = {n: v for n, v in ministack_server.options().items() if n not in KEYS}
    bucket = await asyncio.to_thread(ministack_server.bucket)
    async with open_storage(f"s3://{bucket}", credentials=credentials, **options) as storage:
        for _ in range(3):
            await storage.put("key", b"x")
    assert asked == [0, 1]


async def test_a_callback_that_fails_is_named(ministack_server: Server) -> None:
    """Its error is the cause, and not repeated, since it may hold a secret."""

    async def broken() -> S3Credentials:
        raise OSError(SECRET)

    async def wrong() -> S3Credentials:
        return SECRET  # type: ignore[return-value]

    options = {n: v for n, v in ministack_server.options().items() if n not in KEYS}
    async with open_storage("s3://bucket", credentials=broken, **options) as storage:
        with pytest.raises(PermissionDeniedError, match="OSError") as caught:
            await storage.get("key")
        assert SECRET not in str(caught.value)
    async with open_storage("s3://bucket", credentials=wrong, **options) as storage:
        with pytest.raises(InvalidInputError, match="S3Credentials") as invalid:
            await storage.get("key")
        assert SECRET not in str(invalid.value)


async def test_missing_credentials_are_explained(
    ministack_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The usual chain finds none; it does find those of the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {n: v for n, v in ministack_server.options().items() if n not in KEYS}
    bucket = await asyncio.to_thread(ministack_server.bucket)
    async with open_storage(f"s3://{bucket}", **options) as storage:
        for error in await fails_alike(storage, PermissionDeniedError):
            assert "AWS_ACCESS_KEY_ID" in error.message
    async with open_storage(f"s3://{bucket}", anonymous=True, **options) as storage:
        await storage.put("key", b"body")
        assert [entry async for entry in storage.list_prefix()]
    (tmp_path / "none").write_text(
        f"[work]\naws_access_key_id=id\naws_secret_access_key={SECRET}\n",
        encoding="utf-8",
    )
    async with open_storage(f"s3://{bucket}", profile="work", **options) as storage:
        assert (await storage.get("key")).data == b"body"
    async with open_storage(f"s3://{bucket}", profile="play", **options) as storage:
        with pytest.raises(InvalidInputError, match="play"):
            await storage.get("key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    async with open_storage(f"s3://{bucket}", **options) as storage:
        assert (await storage.get("key")).data == b"body"
        with pytest.raises(ObjectNotFoundError):
            await storage.get("missing")
