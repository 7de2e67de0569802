"""Listings, deletions and copies: what is sent, what it costs, and replies that nobody expects."""

from __future__ import annotations

import base64
import hashlib
import zlib
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async.errors import (
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
)
from icechunk_async.storage import CommonPrefix, ObjectInfo, Version, open_storage
from icechunk_async_s3.connections import Stock
from icechunk_async_s3.documents import parse
from icechunk_async_s3.listing import PAGE_KEYS, _page
from tests.helpers import counted_calls
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import ListEntry, Storage

HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
DATE = "2026-11-27T20:15:58.000Z"
ENTRY = f"<Contents><Key>%s</Key><LastModified>{DATE}</LastModified><Size>%d</Size></Contents>"


def result(*parts: str) -> str:
    """Return a page."""
    return f"{HEAD}<ListBucketResult {SPACE}>{''.join(parts)}</ListBucketResult>"


class Server:
    """Replies with given documents, and keeps the requests."""

    def __init__(self, *replies: str | bytes, status: int = 200) -> None:
        """Reply with these, one after the other; the last one again and again."""
        self.replies = list(replies)
        self.status = status
        self.seen: list[web.BaseRequest] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        """Reply with the next document."""
        self.seen.append(request)
        self.bodies.append(await request.read())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        body = reply.encode() if isinstance(reply, str) else reply
        return web.Response(status=self.status, body=body, content_type="application/xml")


@asynccontextmanager
async def opened(server: Server, **options: Any) -> AsyncIterator[Storage]:
    """Open a bucket of the server."""
    async with (
        serving(server) as url,
        open_storage(
            "s3://bucket/at",
            endpoint_url=url,
            allow_http=True,
            region="us-east-1",
            access_key_id="id",
            secret_access_key="secret",  # noqa: S106
            **options,
        ) as storage,
    ):
        yield storage


async def listed(storage: Storage, **options: Any) -> list[ListEntry]:
    """List everything."""
    return [entry async for entry in storage.list_prefix(**options)]


async def test_pages_are_put_together() -> None:
    """Keys that XML could not hold are decoded, and the token of a page asks for the next."""
    first = result(
        "<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>",
        "<NextContinuationToken>t+/=</NextContinuationToken>",
        ENTRY % ("at/a%01+b%2B", 7),
        "<CommonPrefixes><Prefix>at/folder/</Prefix></CommonPrefixes>",
    )
    server = Server(first, result("<IsTruncated>false</IsTruncated>", ENTRY % ("at/z", 0)))
    async with opened(server) as storage:
        found = await listed(storage, delimiter="/", start_after="a")
    modified = datetime(2026, 11, 27, 20, 15, 58, tzinfo=UTC)
    assert found == [
        ObjectInfo("a\1 b+", 7, modified),
        CommonPrefix("folder/"),
        ObjectInfo("z", 0, modified),
    ]
    assert [it.path for it in server.seen] == ["/bucket", "/bucket"]
    asked = {
        "list-type": "2", "encoding-type": "url", "max-keys": str(PAGE_KEYS), "prefix": "at/",
        "delimiter": "/", "start-after": "at/a",
    }  # fmt: skip
    assert [dict(it.query) for it in server.seen] == [
        asked,
        {**asked, "continuation-token": "t+/="},
    ]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no xml",
        result()[:-5],
        f'{HEAD}<!DOCTYPE x [<!ENTITY a "at/a">]>{result(ENTRY % ("&a;", 1))[len(HEAD) :]}',
        f"{HEAD[:-4]}16{HEAD[-3:]}<!DOCTYPE x>{result()[len(HEAD) :]}".encode("utf-16"),
        f"{HEAD[:-4]}16{HEAD[-3:]}<!DOCTYPE x>{result()[len(HEAD) :]}".encode("utf-16-le"),
        f"{HEAD.replace('UTF-8', 'cp037')}<!DOCTYPE x>{result()[len(HEAD) :]}".encode("cp037"),
        result("<Contents><Size>1</Size></Contents>"),
        result("<CommonPrefixes/>"),
        result(ENTRY.replace("%d", "many") % "at/a"),
        result(ENTRY.replace(DATE, "yesterday") % ("at/a", 1)),
        result(ENTRY.replace(DATE, "0001-01-01T00:00:00+23:00") % ("at/a", 1)),
        result(ENTRY.replace("%d", "9" * 5000) % "at/a"),
    ],
)
async def test_what_is_no_list_is_refused(body: str | bytes) -> None:
    """No entity is ever expanded."""
    async with opened(Server(body)) as storage:
        with pytest.raises(StorageError, match="no list of objects"):
            await listed(storage)


async def test_a_list_without_a_namespace_is_read() -> None:
    """Some servers leave it out, or write dates in another form."""
    body = result(ENTRY.replace(DATE, "Fri, 27 Nov 2026 20:15:58 GMT") % ("at/a&amp;b", 1))
    async with opened(Server(body.replace(f" {SPACE}", ""))) as storage:
        (found,) = await listed(storage)
    assert found == ObjectInfo("a&b", 1, datetime(2026, 11, 27, 20, 15, 58, tzinfo=UTC))


async def test_an_error_in_a_success_is_an_error() -> None:
    """A server that begins to answer cannot take its status back."""
    busy = f"{HEAD}<Error><Code>SlowDown</Code><Message>later</Message></Error>"
    async with opened(Server(busy)) as storage:
        with pytest.raises(ThrottledError, match="SlowDown"):
            await listed(storage)
    async with opened(Server(busy.replace("SlowDown", "Odd"))) as storage:
        with pytest.raises(StorageUnavailableError, match="Odd"):
            await listed(storage)


async def test_listing_deleting_and_copying_make_no_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client of aiobotocore takes tens of milliseconds to make."""
    made: list[Stock] = []
    make = Stock.client

    async def noted(self: Stock) -> Any:
        made.append(self)
        return await make(self)

    monkeypatch.setattr(Stock, "client", noted)
    copied = f"{HEAD}<CopyObjectResult {SPACE}><ETag>&quot;abc&quot;</ETag></CopyObjectResult>"
    server = Server(result(), copied, "<DeleteResult/>", "")
    async with opened(server, checksum_algorithm="crc32", storage_class="STANDARD_IA") as storage:
        assert await listed(storage) == []
        version = await storage.copy("a b", "c", if_version=Version("old"))
        assert version == Version("abc")
        assert await storage.delete(["a&b", "<c>", "d\1"]) == []
    assert made == []
    _, sent, together, alone = server.seen
    assert (together.method, together.path) == ("POST", "/bucket")
    assert dict(together.query) == {"delete": ""}
    objects = "".join(f"<Object><Key>at/{it}</Key></Object>" for it in ("a&amp;b", "&lt;c&gt;"))
    body = f"<Delete {SPACE}>{objects}<Quiet>true</Quiet></Delete>".encode()
    assert server.bodies[2] == body
    checksum = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    assert together.headers["x-amz-checksum-crc32"] == checksum
    assert together.headers["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
    assert (alone.method, alone.raw_path) == ("DELETE", "/bucket/at/d%01")
    assert (sent.method, sent.path) == ("PUT", "/bucket/at/c")
    told = {name: it for name, it in sent.headers.items() if name.startswith("x-amz-")}
    assert told.pop("x-amz-date")
    assert told == {
        "x-amz-copy-source": "bucket/at/a%20b",
        "x-amz-copy-source-if-match": '"old"',
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-content-sha256": told["x-amz-content-sha256"],
    }


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<Error><Code>InternalError</Code></Error>", OutcomeUnknownError),
        ("<Error><Code>SlowDown</Code></Error>", OutcomeUnknownError),
        ("<Error><Code>PreconditionFailed</Code></Error>", PreconditionFailedError),
        ("<CopyObjectResult></CopyObjectResult>", StorageError),
    ],
)
async def test_a_copy_that_fails_after_it_began_did_not_succeed(
    body: str, kind: type[StorageError]
) -> None:
    """Its status was sent before; only an ETag says that it landed."""
    async with opened(Server(f"{HEAD}\n\n  {body}")) as storage:
        with pytest.raises(kind):
            await storage.copy("a", "b", if_version=Version("old"))


@pytest.mark.parametrize(
    "body", ["<Error><Code>InternalError</Code></Error>", "no xml", "<DeleteResult>"]
)
async def test_a_deletion_without_a_result_is_in_doubt(body: str) -> None:
    """They may be gone, all or some of them."""
    async with opened(Server(body)) as storage:
        failures = await storage.delete(["a", "b"])
    assert [it.key for it in failures] == ["a", "b"]
    assert all(isinstance(it.error, OutcomeUnknownError) for it in failures)


def test_a_page_takes_few_calls_a_key() -> None:
    """The client of aiobotocore makes hundreds for each."""
    body = result(*[ENTRY % (f"at/{number:020}", number) for number in range(PAGE_KEYS)]).encode()
    with counted_calls() as calls:
        page = _page(parse(body))
    assert [size for _, size, _ in page.objects] == list(range(PAGE_KEYS))
    assert len(calls) < 16 * PAGE_KEYS
