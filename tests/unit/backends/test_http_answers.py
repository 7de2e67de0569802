"""The HTTP backend with servers that are incomplete or faulty."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import socket
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    InvalidURLError,
    NameResolutionError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
    TLSError,
    UnreachableError,
    UnsafeStorageError,
)
from icechunk_async.storage import ByteRange, SuffixRange, Version, open_storage
from tests.unit.backends.loopback import drop, serving, silent

if TYPE_CHECKING:
    from collections.abc import Mapping

BODY = b"0123456789"
MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"
RANGES = (ByteRange(2, 5), ByteRange(8, 99), ByteRange(99), ByteRange(3, 3), SuffixRange(3))


async def test_a_server_that_ignores_ranges_is_read_in_part() -> None:
    """Its whole answer is cut to what was asked for, with or without a length."""
    for chunked in (False, True):

        async def whole(request: web.Request, *, chunked: bool = chunked) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"ETag": '"1"'})
            answer.content_length = None if chunked else len(BODY)
            if chunked:
                answer.enable_chunked_encoding()
            await answer.prepare(request)
            await answer.write(BODY)
            await answer.write_eof()
            return answer

        async with serving(whole) as url, open_storage(url) as storage:
            for byte_range in (*RANGES, SuffixRange(0)):
                found = await storage.get("key", byte_range)
                assert bytes(found.data) == _cut(byte_range)
                assert (found.size_bytes, found.version) == (10, Version('"1"'))


async def test_no_more_than_needed_is_fetched_from_such_a_server() -> None:
    """A small range at the beginning of a large object does not wait for its end."""
    read = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"ETag": '"1"'})
        answer.content_length = 1 << 40
        await answer.prepare(request)
        await answer.write(BODY)
        await read.wait()
        drop(request)
        return answer

    async with serving(endless) as url, open_storage(url) as storage:
        found = await storage.get("key", ByteRange(2, 5))
        read.set()
        assert (found.data, found.size_bytes) == (b"234", 1 << 40)


def _cut(byte_range: ByteRange | SuffixRange) -> bytes:
    if isinstance(byte_range, SuffixRange):
        return BODY[len(BODY) - byte_range.length :]
    return BODY[byte_range.start : byte_range.stop]


async def test_without_an_etag_time_and_size_are_the_version() -> None:
    """Weak ETags do not count: they may stand for different bytes."""
    headers = {"Last-Modified": MODIFIED, "ETag": 'W/"1"'}
    body = BODY

    async def answer(request: web.Request) -> web.Response:
        assert "If-None-Match" not in request.headers
        return web.Response(body=body, headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        first = await storage.get("key")
        assert str(first.last_modified) == "2015-10-21 07:28:00+00:00"
        assert await storage.get_if_changed("key", first.version) is None
        for body, modified in ((BODY + b"x", MODIFIED), (BODY, MODIFIED.replace("2015", "2016"))):
            headers["Last-Modified"] = modified
            found = await storage.get_if_changed("key", first.version)
            assert found is not None
            assert (found.data, found.version == first.version) == (body, False)
        headers.clear()
        with pytest.raises(StorageError, match="neither ETag nor Last-Modified"):
            await storage.get("key")


async def test_an_object_without_version_counts_as_changed() -> None:
    """Where such servers are allowed at all; the option travels with the description."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=BODY)

    async with serving(answer) as url:
        async with open_storage(url) as storage:
            with pytest.raises(StorageError, match="unversioned=True"):
                await storage.get("key")
        async with open_storage(url, unversioned=True) as storage:
            found = await storage.get("key")
            assert found.data == BODY
            again = await storage.get_if_changed("key", found.version)
            assert again == found
            assert storage.description.options == {"unversioned": True}


@pytest.mark.parametrize(
    "content_range",
    [
        *("bytes 3-5/10", "bytes 2-3/10", "bytes 2-4/*", "bytes 4-2/10", "", "items 2-4/10"),
        f"bytes 2-4/{'9' * 5000}",  # Python reads no number of more than 4300 digits
    ],
)
async def test_a_range_of_other_bytes_is_refused(content_range: str) -> None:
    """The range that a server or cache reports must be the requested one."""

    async def answer(_: web.Request) -> web.Response:
        headers = {"ETag": '"1"', "Content-Range": content_range}
        return web.Response(status=206, body=b"234", headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        with pytest.raises(StorageError):
            await storage.get("key", ByteRange(2, 5))


ODD_DATES = (
    "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
    "Fri, 31 Dec 9999 23:59:59 -2300",
    "yesterday",
)


@pytest.mark.parametrize("modified", ODD_DATES)
async def test_a_date_that_no_clock_can_show_is_left_out(modified: str) -> None:
    """A server may send any text; the object is read all the same."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=BODY, headers={"ETag": '"1"', "Last-Modified": modified})

    async with serving(answer) as url, open_storage(url) as storage:
        found = await storage.get("key")
        assert (found.data, found.last_modified) == (BODY, None)


async def test_a_pause_until_an_odd_date_is_left_out() -> None:
    """The refusal keeps its class."""
    for until in ODD_DATES:

        async def answer(_: web.Request, *, until: str = until) -> web.Response:
            return web.Response(status=429, headers={"Retry-After": until})

        async with serving(answer) as url, open_storage(url) as storage:
            with pytest.raises(ThrottledError) as caught:
                await storage.get("key")
            assert "retry_after_seconds" not in caught.value.context


async def test_a_range_of_another_version_says_so() -> None:
    """A reader of pieces detects that the object was replaced between two of them."""
    version = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal version
        version += 1
        headers = {"ETag": f'"{version}"', "Content-Range": "bytes 2-4/10"}
        return web.Response(status=206, body=b"234", headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        first = await storage.get("key", ByteRange(2, 5))
        second = await storage.get("key", ByteRange(2, 5))
        assert first.version != second.version


@pytest.mark.parametrize("promised", [5, 2, None])
async def test_a_partial_answer_of_another_length_is_refused(promised: int | None) -> None:
    """Bytes that are missing are not made up, and surplus ones are not passed on."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"ETag": '"1"', "Content-Range": "bytes 2-4/10"}
        response = web.StreamResponse(status=206, headers=headers)
        response.content_length = promised
        if promised is None:
            response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"23" if promised != 5 else b"23456")
        await response.write_eof()
        return response

    async with serving(answer) as url, open_storage(url) as storage:
        with pytest.raises(StorageUnavailableError):
            await storage.get("key", ByteRange(2, 5))


async def test_a_truncated_reply_is_an_error() -> None:
    """Neither as a whole nor as a part of one."""

    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"ETag": '"1"'})
        answer.content_length = 10
        await answer.prepare(request)
        await answer.write(BODY[:4])
        drop(request)
        return answer

    async with serving(cut) as url, open_storage(url) as storage:
        for byte_range in (None, ByteRange(2, 8)):
            with pytest.raises(StorageUnavailableError):
                await storage.get("key", byte_range)


async def test_encoded_bodies_are_refused() -> None:
    """None is accepted in the request; ranges and sizes of one would not be the object's."""

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        headers = {"ETag": '"1"', "Content-Encoding": "gzip"}
        return web.Response(body=gzip.compress(BODY), headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        for byte_range in (None, ByteRange(0, 3)):
            with pytest.raises(StorageError, match="encoding 'gzip'"):
                await storage.get("key", byte_range)


async def test_redirects_are_followed_and_headers_stay_behind() -> None:
    """Credentials go to the server of the URL, and to no other, not even by way of it."""
    seen: list[tuple[str, str | None, str | None]] = []
    places = {"one": "", "two": ""}

    async def answer(request: web.Request) -> web.Response:
        name = "one" if places["one"].endswith(f":{request.url.port}") else "two"
        sent = request.headers
        seen.append((name + request.path, sent.get("Authorization"), sent.get("Range")))
        target = {
            "one/key": "/moved/key",
            "one/moved/key": f"{places['two']}/key?signature=hidden",
            "two/key": f"{places['one']}/final",
        }.get(name + request.path)
        if target is not None:
            return web.Response(status=302, headers={"Location": target})
        headers = {"ETag": '"1"', "Content-Range": "bytes 2-4/10"}
        return web.Response(status=206, body=b"234", headers=headers)

    async with serving(answer) as one, serving(answer) as two:
        places |= {"one": one, "two": two}
        async with open_storage(
            one, headers={"Authorization": "a-secret"}, allow_http=True
        ) as storage:
            assert (await storage.get("key", ByteRange(2, 5))).data == b"234"
    assert seen == [
        ("one/key", "a-secret", "bytes=2-4"),
        ("one/moved/key", "a-secret", "bytes=2-4"),
        ("two/key", None, "bytes=2-4"),
        ("one/final", None, "bytes=2-4"),
    ]


@pytest.mark.parametrize("location", ["/key", None, "", "ftp://host/key", "http://a@b/"])
async def test_redirects_that_lead_nowhere_end(location: str | None) -> None:
    """After ten, or at once where there is no server to ask."""
    count = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        headers = {} if location is None else {"Location": location}
        return web.Response(status=302, headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        with pytest.raises(StorageError, match="redirect"):
            await storage.get("key")
    assert count == (11 if location == "/key" else 1)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "pause"),
    [
        (404, {}, ObjectNotFoundError, None),
        (410, {}, ObjectNotFoundError, None),
        (401, {}, PermissionDeniedError, None),
        (403, {}, PermissionDeniedError, None),
        (429, {}, ThrottledError, None),
        (503, {"Retry-After": "7"}, ThrottledError, 7.0),
        (
            429,
            {"Retry-After": MODIFIED, "Date": MODIFIED.replace(":00 ", ":30 ")},
            ThrottledError,
            0,
        ),
        (
            503,
            {"Retry-After": MODIFIED.replace(":00 ", ":09 "), "Date": MODIFIED},
            ThrottledError,
            9,
        ),
        (503, {"Retry-After": "soon"}, StorageUnavailableError, None),
        (500, {}, StorageUnavailableError, None),
        (204, {}, StorageError, None),
        (304, {}, StorageError, None),
        (400, {}, StorageError, None),
    ],
)
async def test_refusals_have_names(
    status: int, headers: Mapping[str, str], kind: type[IcechunkError], pause: float | None
) -> None:
    """With the pause that the server asks for."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    async with serving(answer) as url, open_storage(url) as storage:
        for byte_range in (None, ByteRange(0, 5)):
            with pytest.raises(kind) as caught:
                await storage.get("a key", byte_range)
            assert type(caught.value) is kind
            assert caught.value.context["key"] == "a key"
            assert caught.value.context.get("retry_after_seconds") == pause


async def test_headers_may_come_from_a_callback() -> None:
    """It is asked before each request, so that tokens can be refreshed."""
    tokens = iter(["first", "second"])
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response(body=BODY, headers={"ETag": '"1"'})

    async def current() -> dict[str, str]:
        return {"Authorization": next(tokens)}

    async with (
        serving(answer) as url,
        open_storage(url, headers=current, allow_http=True) as storage,
    ):
        await storage.get("key")
        await storage.get("key")
    assert seen == ["first", "second"]


@pytest.mark.parametrize(
    "headers", [{"Range": "x"}, {"host": "x"}, {"A": "b\r\nC: secret"}, {"": "x"}, {"A\n": "x"}]
)
async def test_headers_that_cannot_be_sent_are_refused(headers: dict[str, str]) -> None:
    """When the storage is opened; the value is not shown."""
    with pytest.raises(InvalidInputError) as caught:
        async with open_storage("https://host.invalid", headers=headers):
            pass
    assert "secret" not in str(caught.value)


async def test_credentials_need_tls() -> None:
    """Headers are not sent over plain HTTP unless that is asked for."""
    with pytest.raises(InvalidInputError, match="allow_http"):
        async with open_storage("http://host.invalid", headers={"Authorization": "x"}):
            pass


async def test_secrets_are_shown_nowhere() -> None:
    """They travel with the description, which does not show them."""
    options = {"headers": {"Authorization": "a-secret"}}
    async with open_storage("https://host.invalid/path", **options) as storage:
        description = pickle.loads(pickle.dumps(storage.description))
        assert description.options == options
        with pytest.raises(NameResolutionError) as caught:
            await storage.get("key")
        shown = f"{storage!r} {storage.description!r} {caught.value!r} {caught.value.context}"
        assert "a-secret" not in shown


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "https:///path",
        "http://me:hidden@host/",
        "http://h/?hidden=1",
        "http://h/#hidden",
    ],
)
async def test_urls_without_a_host_or_with_secrets_are_refused(url: str) -> None:
    """The message does not repeat them."""
    with pytest.raises(InvalidURLError) as caught:
        async with open_storage(url):
            pass
    assert "hidden" not in str(caught.value)


async def test_hosts_that_do_not_answer_have_names() -> None:
    """No connection, no such host, no TLS and silence differ."""
    with socket.socket() as nobody, silent() as mute:
        nobody.bind(("127.0.0.1", 0))
        refusing = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with serving(_not_found) as url:
            for place, kind in (
                (refusing, UnreachableError),
                ("http://nowhere.invalid", NameResolutionError),
                (url.replace("http:", "https:"), TLSError),
                (mute, StorageUnavailableError),
            ):
                async with open_storage(place, timeout_seconds=0.3) as storage:
                    with pytest.raises(kind) as caught:
                        await storage.get("key")
                    assert type(caught.value) is kind


async def _not_found(_: web.Request) -> web.Response:
    return web.Response(status=404)


async def test_writes_and_listings_are_refused() -> None:
    """With the reason; nothing is sent."""
    async with open_storage("http://host.invalid") as storage:
        assert not storage.capabilities.writable
        for operation in (
            lambda: storage.put("key", b""),
            lambda: storage.delete(["key"]),
            lambda: storage.copy("key", "other"),
            lambda: anext(storage.list_prefix()),
        ):
            with pytest.raises(UnsafeStorageError):
                await operation()
