"""Failures around a bucket, each as its own error, without secrets."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import anyio.to_thread
import pytest
from aiohttp import web

from icechunk_async.errors import (
    BucketNotFoundError,
    ExpiredCredentialsError,
    IcechunkError,
    InvalidInputError,
    InvalidObjectKeyError,
    NameResolutionError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    UnsafeStorageError,
)
from icechunk_async.storage import ABSENT, ByteRange, SuffixRange, Version, open_storage
from icechunk_async_gcs import AccessToken, open_gcs
from tests.servers.gcs.running import ANONYMOUS
from tests.servers.gcs.scripted import scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from icechunk_async.storage import Storage
    from tests.servers.gcs.scripted import Scripted

_SECRET = "ya29.a-very-secret-token"  # noqa: S105 - for the test only


@pytest.fixture
async def script() -> AsyncIterator[Scripted]:
    """Run the server within the test."""
    async with scripted() as script:
        yield script


def _operations(storage: Storage) -> dict[str, Callable[[], Awaitable[object]]]:
    async def first() -> object:
        return await anext(storage.list_prefix())

    return {
        "get": lambda: storage.get("key"),
        "a range": lambda: storage.get("key", ByteRange(2, 5)),
        "no bytes": lambda: storage.get("key", SuffixRange(0)),
        "get_if_changed": lambda: storage.get_if_changed("key", Version("1")),
        "put": lambda: storage.put("key", b"body"),
        "create": lambda: storage.put("key", b"body", if_version=ABSENT),
        "large": lambda: storage.put("key", bytes(9 << 20)),
        "copy": lambda: storage.copy("key", "other"),
        "list": first,
    }


async def _all_fail(storage: Storage, kind: type[StorageError]) -> list[StorageError]:
    """Return the errors of all operations, which are of one kind and survive a pickle."""
    errors: list[StorageError] = []
    for name, operation in _operations(storage).items():
        with pytest.raises(kind) as caught:
            await operation()
        assert type(caught.value) is kind, name
        errors.append(caught.value)
    (failure,) = await storage.delete(["key"])
    assert type(failure.error) is kind
    errors.append(failure.error)
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (again.message, again.context) == (error.message, error.context)
    return errors


async def test_a_missing_bucket_is_named(script: Scripted) -> None:
    """Every operation names it. A deletion in it does not succeed."""
    async with open_storage(
        "gs://not-there/repo", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        for error in await _all_fail(storage, BucketNotFoundError):
            assert error.context["bucket"] == "not-there"
            assert "'not-there'" in error.message


async def test_a_host_that_refuses_connections_is_unreachable() -> None:
    """Nothing was sent, so that writes are not in doubt."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with open_storage(
            "gs://bucket", endpoint_url=url, allow_http=True, token=ANONYMOUS
        ) as storage:
            operations = _operations(storage)
            operations.pop("large")  # starts with a different request, see the next line
            for name, operation in operations.items():
                with pytest.raises(UnreachableError, match="refused") as caught:
                    await operation()
                assert type(caught.value) is UnreachableError, name
            failures = await storage.delete([f"key-{n}" for n in range(250)])
            assert len(failures) == 250


async def test_a_name_without_an_address_is_named() -> None:
    """The host is in the message."""
    async with open_storage(
        "gs://bucket",
        endpoint_url="http://nonexistent.invalid:1234",
        allow_http=True,
        token=ANONYMOUS,
    ) as storage:
        for error in await _all_fail(storage, NameResolutionError):
            assert "nonexistent.invalid" in error.message


async def test_a_host_that_speaks_no_tls_is_no_secure_host(script: Scripted) -> None:
    """It is not asked in the clear instead."""
    url = script.url.replace("http:", "https:")
    async with open_storage(
        "gs://bucket", endpoint_url=url, allow_http=True, token=ANONYMOUS
    ) as storage:
        await _all_fail(storage, TLSError)
    assert script.seen == []


async def test_an_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    """The request is not sent to an untrusted server."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate, is not installed")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
                *("ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj", "/CN=other"),
                *("-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    seen: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append(request.path)
        return web.Response()

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        async with open_storage(
            "gs://bucket", endpoint_url=url, allow_http=True, token=ANONYMOUS
        ) as storage:
            with pytest.raises(TLSError, match="certificate"):
                await storage.get("key")
    finally:
        await runner.cleanup()
    assert seen == []


async def test_a_service_that_does_not_answer_is_given_up(script: Scripted) -> None:
    """After the time that was allowed."""
    ended = anyio.Event()

    async def never(request: web.BaseRequest) -> web.Response:
        del request
        await ended.wait()
        return web.Response()

    script.steps.append(("GET", never))
    async with open_storage(
        "gs://bucket",
        endpoint_url=script.url,
        allow_http=True,
        token=ANONYMOUS,
        read_timeout_seconds=0.2,
    ) as storage:
        with pytest.raises(UnreachableError, match="in time"):
            await storage.get("key")
    ended.set()


async def test_a_busy_service_is_told_with_its_pause(script: Scripted) -> None:
    """In seconds, or until a time; a quota is told with 403."""
    later = (datetime.now(UTC) + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    quota = json.dumps({"error": {"errors": [{"reason": "rateLimitExceeded"}], "message": "slow"}})
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        for status, body, header, seconds in (
            (429, "", "3", 3),
            (503, "", "0.5", 0.5),
            (429, "", later, 89),
            (403, quota, "4", 4),
            (429, "", "soon", None),
            (429, "", "Wed, 21 Oct 99999999999999999999 07:28:00 GMT", None),
            (429, "[" * 100_000, "5", 5),
        ):
            script.answer("GET", status, body=body, Retry_After=header)
            with pytest.raises(ThrottledError) as caught:
                await storage.get("key")
            found: Any = caught.value.context.get("retry_after_seconds")
            assert found == pytest.approx(seconds, abs=2) if seconds else found is None
        script.answer("GET", 500)
        with pytest.raises(StorageUnavailableError):
            await storage.get("key")


async def test_denied_expired_and_anonymous_differ(script: Scripted) -> None:
    """Each has another cure."""
    script.server._tokens = {"denied": "denied", "expired": "expired"}
    for token, kind in (
        (AccessToken("denied"), PermissionDeniedError),
        (AccessToken("expired"), ExpiredCredentialsError),
        ("anonymous", PermissionDeniedError),
    ):
        async with open_storage(
            "gs://bucket", endpoint_url=script.url, allow_http=True, token=token
        ) as storage:
            await _all_fail(storage, kind)


async def test_a_token_that_ended_is_not_sent(script: Scripted) -> None:
    """The error says when it ended."""
    token = AccessToken(_SECRET, datetime(2020, 1, 1, tzinfo=UTC))
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=token
    ) as storage:
        with pytest.raises(ExpiredCredentialsError, match="2020"):
            await storage.get("key")
    assert script.seen == []


async def test_a_function_renews_tokens(script: Scripted) -> None:
    """Before they end, and when one is refused in mid-flight; once for many requests."""
    script.server._tokens = {"token-1": "valid", "token-2": "valid", "token-3": "valid"}
    asked = 0

    async def renew() -> AccessToken:
        nonlocal asked
        asked += 1
        await anyio.lowlevel.checkpoint()
        # The second one is about to end.
        seconds = 10 if asked == 2 else 3600
        return AccessToken(f"token-{asked}", datetime.now(UTC) + timedelta(seconds=seconds))

    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=renew
    ) as storage:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(storage.put, f"key-{number}", b"body")
        assert asked == 1
        script.server._tokens["token-1"] = "expired"
        version = await storage.put("key", b"body", if_version=ABSENT)
        assert asked == 2
        assert (await storage.get("key")).version == version
        assert asked == 3


async def test_a_function_that_only_has_bad_tokens_is_asked_twice(script: Scripted) -> None:
    """There is no endless asking."""
    script.server._tokens = {}
    asked = 0

    async def renew() -> AccessToken:
        nonlocal asked
        asked += 1
        return AccessToken(_SECRET)

    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=renew
    ) as storage:
        with pytest.raises(ExpiredCredentialsError):
            await storage.get("key")
    assert asked == 2


async def test_a_function_that_fails_is_named() -> None:
    """Its own error is the cause."""

    async def fail() -> AccessToken:
        raise LookupError("no token today")

    async def wrong() -> AccessToken:
        return "token"  # type: ignore[return-value]

    async with open_gcs(
        "gs://bucket", endpoint_url="http://127.0.0.1:9", allow_http=True, token=fail
    ) as storage:
        with pytest.raises(PermissionDeniedError, match="LookupError") as caught:
            await storage.get("key")
        assert isinstance(caught.value.__cause__, LookupError)
    async with open_gcs(
        "gs://bucket", endpoint_url="http://127.0.0.1:9", allow_http=True, token=wrong
    ) as storage:
        with pytest.raises(InvalidInputError, match="AccessToken"):
            await storage.get("key")


async def test_no_secret_is_shown(
    script: Scripted, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Messages, contexts, causes, representations, logs and URLs have none."""
    caplog.set_level(logging.DEBUG)
    script.server._tokens = {_SECRET: "denied"}
    shown: list[str] = []
    token = AccessToken(_SECRET)
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=token
    ) as storage:
        shown += [repr(storage), repr(storage.description), repr(token), str(token)]
        errors: list[BaseException] = list(await _all_fail(storage, PermissionDeniedError))
        script.lose_request("POST")
        script.server._tokens = {_SECRET: "valid"}
        with pytest.raises(IcechunkError) as caught:
            await storage.put("key", b"body")
        errors.append(caught.value)
    while errors:
        error = errors.pop()
        shown += [str(error), repr(error), repr(getattr(error, "context", None))]
        errors += filter(None, (error.__cause__, error.__context__))
    shown += [caplog.text, *capfd.readouterr(), *script.seen]
    assert not [text for text in shown if _SECRET in text]


async def test_names_that_the_service_refuses_are_refused(script: Scripted) -> None:
    """Before anything is sent: line ends, and what is too long with its prefix."""
    async with open_storage(
        "gs://bucket/repo", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        for key in ("a\nb", "a\rb", "x" * 1020):
            with pytest.raises(InvalidObjectKeyError):
                await storage.put(key, b"body")
        await storage.put("x" * 1019, b"body")


async def test_a_reader_does_not_write(script: Scripted) -> None:
    """Nothing is sent, and there is a reason."""
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS, read_only=True
    ) as storage:
        assert not storage.capabilities.writable
        for operation in (
            lambda: storage.put("key", b"body"),
            lambda: storage.delete(["key"]),
            lambda: storage.copy("key", "other"),
        ):
            with pytest.raises(UnsafeStorageError, match="read_only"):
                await operation()
    assert script.seen == []


async def test_an_answer_without_a_generation_is_no_answer(script: Scripted) -> None:
    """Emulators without generations are not taken for the service."""
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        script.answer("GET", 200, body="body")
        with pytest.raises(StorageError, match="generation"):
            await storage.get("key")
        # The object is read back, since it may have landed.
        script.answer("POST", 200, body="{}")
        with pytest.raises(OutcomeUnknownError) as caught:
            await storage.put("key", b"body")
        assert "generation" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "headers",
    [
        {"Last-Modified": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"},
        {"Last-Modified": "Fri, 31 Dec 9999 23:59:59 -2300"},
        {"X-Goog-Hash": "md5=odd"},
    ],
)
async def test_an_odd_header_beside_the_bytes_is_left_out(
    script: Scripted, headers: dict[str, Any]
) -> None:
    """The bytes and the generation are what counts."""
    named = {name.replace("-", "_"): value for name, value in headers.items()}
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        script.answer("GET", 200, body="body", X_Goog_Generation="1", **named)
        found = await storage.get("key")
    assert (bytes(found.data), found.version) == (b"body", Version("1"))
    assert (found.last_modified, found.etag) == (None, None)


@pytest.mark.parametrize("stored", ["many", "9" * 5000])
async def test_a_stored_length_that_is_no_number_is_refused(script: Scripted, stored: str) -> None:
    """So is a part whose Content-Range is odd."""
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        script.answer(
            "GET", 200, body="b", X_Goog_Generation="1", X_Goog_Stored_Content_Length=stored
        )
        with pytest.raises(StorageError, match="other bytes"):
            await storage.get("key")
        script.answer(
            "GET", 206, body="b", X_Goog_Generation="1", Content_Range=f"bytes 0-0/{stored}"
        )
        with pytest.raises(StorageError, match="other bytes"):
            await storage.get("key", ByteRange(0, 1))


_ITEM = '{"name": "a", "size": "1", "updated": "2026-01-01T00:00:00Z"}'


@pytest.mark.parametrize(
    "body",
    [
        *("", "<html>", "[]", "null", "[" * 100_000, '{"items": 1}', '{"items": [1]}'),
        *('{"items": [{}]}', _ITEM.join(('{"items": [', "]")).replace('"1"', '"many"')),
        _ITEM.join(('{"items": [', "]}")).replace('"1"', f'"{"9" * 5000}"'),
        _ITEM.join(('{"items": [', "]}")).replace("2026-01-01T00:00:00Z", "today"),
        _ITEM.join(('{"items": [', "]}"))
        .replace("2026-01-01T00", "9999-12-31T23")
        .replace("Z", "-23"),
        '{"prefixes": 7}',
    ],
)
async def test_a_success_that_is_no_document_is_refused(script: Scripted, body: str) -> None:
    """A proxy may answer with a page that is no document: reads and listings say so."""
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        script.answer("GET", 200, body=body)
        with pytest.raises(StorageError):
            [entry async for entry in storage.list_prefix()]
        script.answer("GET", 200, body=body)
        with pytest.raises(StorageError):
            await storage.get("key", ByteRange(3, 3))


async def test_a_listing_that_would_miss_names_is_refused(script: Scripted) -> None:
    """Out of order, or the same page again and again: copies would miss objects silently."""
    first = _ITEM.replace('"a"', '"b"').join(('{"items": [', '], "nextPageToken": "more"}'))
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        script.answer("GET", 200, body=first)
        script.answer("GET", 200, body=_ITEM.join(('{"items": [', "]}")))
        with pytest.raises(StorageError, match="order"):
            [entry async for entry in storage.list_prefix()]
        script.answer("GET", 200, body=first)
        script.answer("GET", 200, body=first)
        with pytest.raises(StorageError, match="same page"):
            [entry async for entry in storage.list_prefix()]


async def test_the_project_that_pays_is_told_with_every_request(script: Scripted) -> None:
    """Within batches, too."""
    async with open_storage(
        "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS, project="payer"
    ) as storage:
        await storage.put("key", b"body")
        await storage.put("large", bytes(9 << 20))
        await storage.copy("key", "other")
        assert [entry async for entry in storage.list_prefix()]
        assert await storage.delete(["key", "other", "large"]) == []
    asked = [*script.seen, *(line for line in script.server.requests if line.startswith("DELETE"))]
    assert len(asked) == len(script.seen) + 3
    assert all("userProject=payer" in line for line in asked if "/batch/" not in line)
