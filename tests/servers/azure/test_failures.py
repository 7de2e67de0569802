"""Errors of the service and the network, translated and without secrets."""

from __future__ import annotations

import ssl
import traceback
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)

from icechunk_async.errors import (
    BucketNotFoundError,
    ClockSkewError,
    ExpiredCredentialsError,
    IcechunkError,
    InvalidObjectKeyError,
    NameResolutionError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
)
from icechunk_async.storage import ABSENT, ByteRange, Version, open_storage
from icechunk_async_azure.failures import explain, redact, was_not_applied
from icechunk_async_azure.writing import Write, settle
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from icechunk_async.storage import Storage

_HOST = ConnectionKey(
    "acc.example", 443, is_ssl=True, ssl=True, proxy=None, proxy_auth=None, proxy_headers_hash=None
)


def answer(status: int, code: str = "", headers: Mapping[str, str] | None = None) -> Any:
    """Return the error that the driver raises for a response of the service."""
    response: Any = SimpleNamespace(
        status_code=status,
        reason=code,
        headers={"x-ms-error-code": code, **(headers or {})},
        content_type="",
    )
    return HttpResponseError(f"https://acc/box?sig=c2VjcmV0 {code}", response=response)


def told(error: BaseException, **more: Any) -> IcechunkError:
    """Return our error for it."""
    return explain(error, "read", "'key' in container 'box'", container="box", key="key", **more)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "BlobNotFound", ObjectNotFoundError),
        (404, "", ObjectNotFoundError),
        (404, "ContainerNotFound", BucketNotFoundError),
        (409, "ContainerBeingDeleted", BucketNotFoundError),
        (401, "InvalidAuthenticationInfo", PermissionDeniedError),
        (403, "AuthenticationFailed", PermissionDeniedError),
        (403, "AuthorizationPermissionMismatch", PermissionDeniedError),
        (429, "", ThrottledError),
        (503, "ServerBusy", ThrottledError),
        (503, "", StorageUnavailableError),
        (500, "OperationTimedOut", StorageUnavailableError),
        (507, "", StorageFullError),
        (400, "OutOfRangeInput", InvalidObjectKeyError),
        (418, "Teapot", StorageError),
    ],
)
def test_an_answer_has_a_class(status: int, code: str, kind: type[IcechunkError]) -> None:
    """With what was found and what to do, and the driver's words as its cause."""
    error = told(answer(status, code))
    assert type(error) is kind
    assert error.context["key"] == "key"
    assert "'key' in container 'box'" in error.message
    assert error.message.count(". ") >= 1 or error.message.endswith(".")
    assert "c2VjcmV0" not in "".join(traceback.format_exception(error))
    assert "REDACTED" in "".join(traceback.format_exception(error))


def test_an_expired_token_is_not_a_wrong_one() -> None:
    """The SAS token's expiry and the service's clock decide, or the service's message."""
    ended = datetime.now(UTC) - timedelta(minutes=1)
    denied = answer(403, "AuthenticationFailed")
    assert type(told(denied, expires=ended)) is ExpiredCredentialsError
    later = datetime.now(UTC) + timedelta(minutes=1)
    assert type(told(denied, expires=later)) is PermissionDeniedError
    by_its_clock = format_datetime(datetime.now(UTC) + timedelta(minutes=2), usegmt=True)
    denied = answer(403, "AuthenticationFailed", {"date": by_its_clock})
    assert type(told(denied, expires=later)) is ExpiredCredentialsError
    denied = answer(401, "InvalidAuthenticationInfo")
    denied.message = denied.args = ("Lifetime validation failed. The token is expired.",)
    assert type(told(denied)) is ExpiredCredentialsError


@pytest.mark.parametrize("minutes", [-30, 30])
def test_a_wrong_clock_is_named(minutes: int) -> None:
    """With both times."""
    theirs = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)
    error = told(answer(403, "AuthenticationFailed", {"date": theirs}))
    assert type(error) is ClockSkewError
    assert "clock" in error.message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"x-ms-retry-after-ms": "250"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "²"}, None),  # a digit for `isdigit`, and no number
        ({"retry-after": "9" * 5000}, None),
        ({"x-ms-retry-after-ms": "9" * 400}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 -0000"}, 0.0),  # a time without a zone
        ({"retry-after": "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_reported(headers: dict[str, str], seconds: float | None) -> None:
    """In seconds, where it is told."""
    error = told(answer(503, "ServerBusy", headers))
    assert error.context.get("retry_after_seconds") == seconds


@pytest.mark.parametrize("date", ["Wed, 21 Oct 99999999999999999999 07:28:00 GMT", "now"])
def test_an_odd_date_of_the_service_is_left_out(date: str) -> None:
    """The refusal keeps its class."""
    error = told(answer(403, "AuthenticationFailed", {"date": date}))
    assert type(error) is PermissionDeniedError


def test_retry_after_as_a_date_is_reported() -> None:
    """Is one from now on."""
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    pause = told(answer(503, "ServerBusy", {"retry-after": at})).context["retry_after_seconds"]
    assert isinstance(pause, float)
    assert 20 < pause <= 30


_ODD = "Wed, 21 Oct 99999999999999999999 07:28:00 GMT"
_PAGE = (
    '<?xml version="1.0"?><EnumerationResults ServiceEndpoint="x" ContainerName="box"><Blobs>{}'
    "</Blobs><NextMarker/></EnumerationResults>"
)
_BLOB = (
    "<Blob><Name>a</Name><Properties><Last-Modified>{}</Last-Modified><Etag>1</Etag>"
    "<Content-Length>{}</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
)
_TIME = "Wed, 21 Oct 2015 07:28:00 GMT"


@asynccontextmanager
async def _answering(
    answer: Callable[[web.BaseRequest], web.Response],
) -> AsyncGenerator[Storage]:
    async def serve(request: web.BaseRequest) -> web.Response:
        return answer(request)

    async with (
        serving(serve) as url,
        open_storage("az://box", endpoint_url=url, allow_http=True, anonymous=True) as storage,
    ):
        yield storage


@pytest.mark.parametrize(
    ("modified", "content_range"),
    [
        (_ODD, "bytes 0-0/1"),
        (_TIME, "junk"),
        (_TIME, f"bytes 0-0/{'9' * 5000}"),
        (_TIME, None),
        ("soon", "bytes 0-0/1"),
    ],
)
async def test_odd_headers_of_a_read_are_refused(modified: str, content_range: str | None) -> None:
    """The driver fails with errors of every kind on them."""
    headers = {"ETag": '"1"', "Last-Modified": modified}
    if content_range is not None:
        headers["Content-Range"] = content_range
    async with _answering(
        lambda _: web.Response(status=206, headers=headers, body=b"b")
    ) as storage:
        for byte_range in (None, ByteRange(0, 1)):
            with pytest.raises(StorageError):
                await storage.get("key", byte_range)


@pytest.mark.parametrize(
    "body",
    [
        *("", "<html/>", "<EnumerationResults/>", _PAGE.format("<Blob/>")),
        _PAGE.format("<Blob><Name>a</Name></Blob>"),
        _PAGE.format("<Blob><Name>a</Name><Properties/></Blob>"),
        _PAGE.format(_BLOB.format(_ODD, 1)),
        _PAGE.format(_BLOB.format("soon", 1)),
        _PAGE.format(_BLOB.format(_TIME, "many")),
        _PAGE.format(_BLOB.format(_TIME, "9" * 5000)),
    ],
)
async def test_a_reply_that_is_no_list_is_refused(body: str) -> None:
    """Neither is it an empty one."""
    async with _answering(
        lambda _: web.Response(body=body.encode(), content_type="application/xml")
    ) as storage:
        with pytest.raises(StorageError):
            [entry async for entry in storage.list_prefix()]


async def test_a_blob_without_a_version_is_refused() -> None:
    """No commit could be conditional on it."""
    headers = {"Last-Modified": _TIME, "Content-Range": "bytes 0-0/1"}
    async with _answering(
        lambda request: web.Response(
            status=206 if request.method == "GET" else 200, headers=headers, body=b"b"
        )
    ) as storage:
        for byte_range in (None, ByteRange(0, 1), ByteRange(0, 0)):
            with pytest.raises(StorageError, match="ETag"):
                await storage.get("key", byte_range)


async def test_a_write_with_an_odd_reply_is_read_back() -> None:
    """It landed, which the blob tells; if that is odd as well, nobody knows."""
    kept: dict[str, str] = {}
    modified = _TIME

    def answer(request: web.BaseRequest) -> web.Response:
        if request.method == "PUT":
            kept.update({n: v for n, v in request.headers.items() if n.startswith("x-ms-meta")})
            return web.Response(status=201, headers={"ETag": '"1"', "Last-Modified": _ODD})
        return web.Response(headers={"ETag": '"1"', "Last-Modified": modified, **kept})

    async with _answering(answer) as storage:
        assert await storage.put("key", b"body", if_version=ABSENT) == Version('"1"')
        modified = _ODD
        with pytest.raises(OutcomeUnknownError):
            await storage.put("key", b"body", if_version=ABSENT)


async def test_a_success_without_a_version_is_read_back() -> None:
    """A proxy took the ETag away: the write landed, and the blob tells its version."""
    task = Write.of("key", ABSENT)
    kept = SimpleNamespace(etag='"1"', metadata={"icechunkwriteid": task.write_id})

    async def properties(*_: object, **__: object) -> object:
        return kept

    async def sent() -> dict[str, Any]:
        return {"etag": None}

    def explained(error: BaseException, action: str, *, key: str) -> IcechunkError:
        assert (action, key) == ("write", "key")
        return told(error)

    requests: Any = SimpleNamespace(
        properties=properties,
        explain=explained,
        clients=SimpleNamespace(closed=False),
    )
    client: Any = None
    assert await settle(requests, client, task, sent()) == Version('"1"')
    kept.metadata = {}
    with pytest.raises(OutcomeUnknownError):
        await settle(requests, client, task, sent())


def _sent(inner: Exception, kind: type[ServiceRequestError] = ServiceRequestError) -> Any:
    return kind(inner, error=inner)


_NOT_SENT = (
    (_sent(aiohttp.ClientConnectorDNSError(_HOST, OSError(-2, "unknown"))), NameResolutionError),
    (_sent(aiohttp.ClientConnectorError(_HOST, OSError(111, "refused"))), UnreachableError),
    (_sent(aiohttp.ClientConnectorSSLError(_HOST, ssl.SSLError(1, "bad"))), TLSError),
    (
        _sent(aiohttp.ConnectionTimeoutError("to https://acc/?sig=c2VjcmV0")),
        UnreachableError,
    ),
)
_SENT = (
    (_sent(aiohttp.ServerDisconnectedError()), StorageUnavailableError),
    (_sent(aiohttp.ClientOSError(104, "reset")), StorageUnavailableError),
    (ServiceResponseError("truncated"), StorageUnavailableError),
    (ServiceResponseTimeoutError("", error=TimeoutError()), UnreachableError),
)


@pytest.mark.parametrize(("error", "kind"), [*_NOT_SENT, *_SENT])
def test_a_broken_connection_has_a_class(error: Exception, kind: type[IcechunkError]) -> None:
    """From the host's name to the certificate."""
    ours = told(error)
    assert type(ours) is kind
    assert "c2VjcmV0" not in "".join(traceback.format_exception(ours))


def test_only_unsent_or_refused_writes_changed_nothing() -> None:
    """The rest is in doubt; a busy service is believed where the write may be repeated."""
    for error, _ in _NOT_SENT:
        assert was_not_applied(error, conditional=True)
    for error, _ in _SENT:
        assert not was_not_applied(error, conditional=False)
    assert was_not_applied(answer(403), conditional=True)
    assert was_not_applied(answer(503, "ServerBusy"), conditional=False)
    assert not was_not_applied(answer(503, "ServerBusy"), conditional=True)
    assert not was_not_applied(answer(503), conditional=False)
    assert not was_not_applied(answer(500), conditional=True)


def test_no_credentials_are_told_from_a_broken_connection() -> None:
    """The identity library raises without an answer."""
    error = told(ClientAuthenticationError("DefaultAzureCredential failed"))
    assert type(error) is PermissionDeniedError
    assert "account_key" in error.message


@pytest.mark.parametrize(
    "text",
    [
        "GET https://a/b?sv=1&sig=c2VjcmV0%3D&se=2",
        "AccountName=a;AccountKey=c2VjcmV0==;x=1",
        "Authorization: SharedKey acc:c2VjcmV0+/=",
        "Authorization: Bearer c2VjcmV0.abc",
        "SharedAccessSignature=sv=1&sig=c2VjcmV0",
    ],
)
def test_secrets_are_taken_out_of_texts(text: str) -> None:
    """In every form that they are sent in."""
    assert "c2Vj" not in redact(text)
    assert "REDACTED" in redact(text)
