"""Virtual chunks on web servers: good ones, lazy ones, and what changed there."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import (
    HttpAccess,
    HttpBearerToken,
    HttpHeaders,
    HttpRefreshable,
    S3Anonymous,
)
from icechunk_async.errors import (
    InvalidInputError,
    StorageError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config import HttpStore, VirtualChunkContainer
from tests.helpers import make_array, memory_url, read
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async import Session

BODY = bytes(range(200))
MOMENT = datetime(2015, 10, 21, 7, 28, tzinfo=UTC)
MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


class Source:
    """A file on a web server, and how that answers."""

    def __init__(self) -> None:
        self.body = BODY
        self.headers: dict[str, str] = {"ETag": '"one"', "Last-Modified": MODIFIED}
        self.status = 200
        self.ranges = True
        self.chunked = False
        self.asked: list[Any] = []

    async def __call__(self, request: Any) -> web.StreamResponse:
        """Return a request."""
        self.asked.append(request)
        if self.status != 200:
            return web.Response(status=self.status)
        if self.chunked:
            answer = web.StreamResponse(headers=self.headers)
            answer.enable_chunked_encoding()
            await answer.prepare(request)
            await answer.write(self.body)
            return answer
        wanted = request.http_range if self.ranges and "Range" in request.headers else slice(None)
        start, stop, _ = wanted.indices(len(self.body))
        if wanted == slice(None):
            return web.Response(body=self.body, headers=self.headers)
        size = len(self.body)
        if start >= size:
            unsatisfied = {**self.headers, "Content-Range": f"bytes */{size}"}
            return web.Response(status=416, headers=unsatisfied)
        held = {**self.headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        return web.Response(status=206, body=self.body[start:stop], headers=held)


@asynccontextmanager
async def session_on(
    source: Source,
    access: Any = None,
    *,
    options: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    path: str = "data/",
) -> AsyncGenerator[tuple[Session, str]]:
    """Return a session with an array of ten chunks, and the prefix of a container on a server."""
    async with serving(source) as url:
        prefix = f"{url}/{path}"
        store = HttpStore(options or {}, headers or {})
        container = VirtualChunkContainer(prefix, store, name="web")
        async with Repository.create(
            memory_url(),
            config=RepositoryConfig(virtual_chunk_containers=(container,)),
            authorize_virtual_chunk_access={prefix: access},
        ) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (10,), (1,))
            yield session, prefix


@pytest.mark.parametrize("access", [None, HttpAccess(), {}], ids=["none", "access", "options"])
async def test_a_range_is_read(access: Any) -> None:
    """One request asks for exactly the chunk, by URL or by the container's name."""
    source = Source()
    async with session_on(source, access) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f%20%3F.nc?x=1", offset=10, length=20)
        session.store.set_virtual_ref("a/c/1", "vcc://web/deep/g.nc", offset=0, length=5)
        assert await read(session, "a/c/0") == BODY[10:30]
        assert await read(session, "a/c/1") == BODY[:5]
        assert await session.all_virtual_chunk_locations() == [
            f"{prefix}f%20%3F.nc?x=1",
            f"{prefix}deep/g.nc",
        ]
    assert [it.raw_path for it in source.asked] == ["/data/f%20%3F.nc", "/data/deep/g.nc"]
    assert [it.headers["Range"] for it in source.asked] == ["bytes=10-29", "bytes=0-4"]


async def test_an_encoded_prefix_is_decoded_once() -> None:
    """A container's prefix is a URL: its escapes are those of the wire."""
    source = Source()
    async with session_on(source, path="my%20data/a%2Bb/") as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f.nc", offset=0, length=3)
        assert await read(session, "a/c/0") == BODY[:3]
    assert source.asked[0].path == "/my data/a+b/f.nc"


async def test_server_without_ranges_is_read_up_to_the_chunk() -> None:
    """Bytes beyond the chunk are dropped."""
    source = Source()
    source.ranges = False
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=150, length=50)
        assert await read(session, "a/c/0") == BODY[150:]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_server_that_ignores_ranges_is_not_read_without_end(
    chunked: bool,  # noqa: FBT001
) -> None:
    """Beyond a limit the caller is told, and may allow more."""
    source = Source()
    source.ranges = False
    source.body = bytes(3 << 20)
    source.chunked = chunked
    async with session_on(source, {"max_unranged_bytes": 1 << 20}) as (session, prefix):
        url = f"{prefix}f"
        session.store.set_virtual_ref("a/c/0", url, offset=(1 << 20) + 1, length=50)
        with pytest.raises(StorageError, match=r"ignores ranges.*max_unranged_bytes") as caught:
            await read(session, "a/c/0")
        assert caught.value.context["location"] == url
        session.store.set_virtual_ref("a/c/1", url, offset=(1 << 20) - 50, length=50)
        if not chunked:
            assert await read(session, "a/c/1") == bytes(50)
    async with session_on(source, {"max_unranged_bytes": 4 << 20}) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=(1 << 20) + 1, length=50)
        assert await read(session, "a/c/0") == bytes(50)


@pytest.mark.parametrize(
    ("status", "kind", "found"),
    [
        (404, VirtualSourceChangedError, "is gone"),
        (410, VirtualSourceChangedError, "is gone"),
        (403, VirtualAccessError, "status 403"),
        (401, VirtualAccessError, "status 401"),
        (400, StorageError, "status 400"),
    ],
)
async def test_refusals_name_the_location(status: int, kind: type[Exception], found: str) -> None:
    """This holds for missing objects, forbidden objects and all other errors."""
    source = Source()
    source.status = status
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f.nc", offset=0, length=3)
        with pytest.raises(kind, match=found) as caught:
            await read(session, "a/c/0")
        assert getattr(caught.value, "context")["location"] == f"{prefix}f.nc"  # noqa: B009
        told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert f"{prefix}f.nc" in told


@pytest.mark.parametrize("offset", [190, 200, 10**9])
async def test_short_source_is_reported_with_its_size(offset: int) -> None:
    """Partly or wholly beyond the end, which a server answers with 416; little is fetched."""
    source = Source()
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f.nc", offset=offset, length=30)
        with pytest.raises(VirtualSourceChangedError, match="has only 200 bytes"):
            await read(session, "a/c/0")
    assert all("Range" in it.headers for it in source.asked)


async def test_names_that_no_object_has_are_refused() -> None:
    """Empty segments and dots are kept in references, and name nothing on a web server."""
    async with session_on(Source()) as (session, prefix):
        for name in ("a//b.nc", "a/%2E%2E/b.nc"):
            session.store.set_virtual_ref("a/c/0", f"{prefix}{name}", offset=0, length=3)
            with pytest.raises(VirtualContainerError, match="names no object") as caught:
                await read(session, "a/c/0")
            assert caught.value.context["location"] == f"{prefix}{name}"


@pytest.mark.parametrize(
    ("given", "recorded", "good"),
    [
        ('"one"', "one", True),
        ('"one"', '"one"', True),
        ('"two"', '"one"', False),
        ('W/"one"', 'W/"one"', True),
        ('W/"two"', 'W/"one"', False),
        (None, '"one"', False),
    ],
)
async def test_changed_etag_is_refused(given: str | None, recorded: str, good: bool) -> None:  # noqa: FBT001
    """Strong or weak, with or without quotes; a server without one cannot be trusted."""
    source = Source()
    source.headers = {"Last-Modified": MODIFIED} | ({} if given is None else {"ETag": given})
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=3, checksum=recorded)
        if good:
            assert await read(session, "a/c/0") == BODY[:3]
        else:
            with pytest.raises(VirtualSourceChangedError, match="ETag"):
                await read(session, "a/c/0")


@pytest.mark.parametrize(
    ("recorded", "good"),
    [
        (MOMENT, True),
        (MOMENT + timedelta(days=1), True),
        (MOMENT - timedelta(microseconds=1), True),  # recorded times are rounded up
        (MOMENT - timedelta(seconds=1), False),
    ],
)
async def test_later_modification_is_refused(recorded: datetime, good: bool) -> None:  # noqa: FBT001
    """A server tells whole seconds; what was modified later is refused."""
    async with session_on(Source()) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=3, checksum=recorded)
        if good:
            assert await read(session, "a/c/0") == BODY[:3]
        else:
            with pytest.raises(VirtualSourceChangedError, match="was modified at 2015-10-21"):
                await read(session, "a/c/0")


async def test_unverifiable_guard_is_refused() -> None:
    """A server that tells no time cannot be read by a reference with a time."""
    source = Source()
    source.headers = {"ETag": '"one"'}
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=3, checksum=MOMENT)
        with pytest.raises(VirtualSourceChangedError, match="does not tell when"):
            await read(session, "a/c/0")


@pytest.mark.parametrize("ranges", [True, False])
async def test_stateless_server_is_read_without_a_guard(
    ranges: bool,  # noqa: FBT001
) -> None:
    """Such references do not check for changes. A reference that does is refused."""
    source = Source()
    source.headers, source.ranges = {}, ranges
    async with session_on(source) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=5, length=3)
        session.store.set_virtual_ref("a/c/1", f"{prefix}f", offset=5, length=3, checksum="one")
        session.store.set_virtual_ref("a/c/2", f"{prefix}f", offset=300, length=3)
        assert await read(session, "a/c/0") == BODY[5:8]
        with pytest.raises(VirtualSourceChangedError, match="has ETag 'unknown"):
            await read(session, "a/c/1")
        with pytest.raises(VirtualSourceChangedError, match="has only 200 bytes"):
            await read(session, "a/c/2")


async def test_headers_of_container_and_reader_are_joined() -> None:
    """The reader's go first; what the repository says needs no leave, what the reader says does."""
    source = Source()
    stored = {"X-Common": "1", "Authorization": "theirs"}
    options = {"user_agent": "tester", "timeout": "5s", "allow_http": "true"}
    async with session_on(source, options=options, headers=stored) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=3)
        await read(session, "a/c/0")
    own = {"headers": {"authorization": "mine"}, "allow_http": True}
    async with session_on(source, own, options=options, headers=stored) as (session, prefix):
        session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=3)
        await read(session, "a/c/0")
    first, second = source.asked
    assert (first.headers["X-Common"], first.headers["Authorization"]) == ("1", "theirs")
    assert first.headers["User-Agent"] == "tester"
    assert (second.headers["X-Common"], second.headers["Authorization"]) == ("1", "mine")
    for secret in (HttpBearerToken("t"), HttpHeaders({"Authorization": "x"})):
        with pytest.raises(InvalidInputError, match="over plain HTTP"):
            async with session_on(source, secret, options=options, headers=stored):
                pass


async def test_tokens_are_asked_for_again_when_they_end() -> None:
    """A token that ends soon is not used again; one that is good is kept, and asked for once."""
    source = Source()
    given: list[timedelta | None] = [timedelta(minutes=1), timedelta(hours=1), None]
    asked = 0

    async def ask() -> HttpBearerToken:
        nonlocal asked
        asked += 1
        lasting = given[min(asked, 3) - 1]
        ends = None if lasting is None else datetime.now(UTC) + lasting
        return HttpBearerToken(f"token-{asked}", ends)

    options = await HttpRefreshable(ask).storage_options()
    async with session_on(source, {**options, "allow_http": True}, headers={"X-Common": "1"}) as (
        session,
        prefix,
    ):
        for number in range(4):
            session.store.set_virtual_ref(f"a/c/{number}", f"{prefix}f", offset=0, length=3)
            await read(session, f"a/c/{number}")
    sent = [it.headers["Authorization"] for it in source.asked]
    assert sent == ["Bearer token-1", *["Bearer token-2"] * 3]
    assert {it.headers["X-Common"] for it in source.asked} == {"1"}


async def test_tokens_without_an_end_are_asked_for_each_time() -> None:
    """Their lifetime is unknown."""
    source = Source()
    tokens = iter("abc")
    options = await HttpRefreshable(lambda: HttpBearerToken(next(tokens))).storage_options()
    async with session_on(source, {**options, "allow_http": True}) as (session, prefix):
        for number in range(3):
            session.store.set_virtual_ref(f"a/c/{number}", f"{prefix}f", offset=0, length=3)
            await read(session, f"a/c/{number}")
    assert [it.headers["Authorization"] for it in source.asked] == [
        f"Bearer {token}" for token in "abc"
    ]


async def test_a_credential_for_another_store_is_refused() -> None:
    """A slip is told when the repository is opened."""
    with pytest.raises(InvalidInputError, match="S3Anonymous was given for"):
        async with session_on(Source(), S3Anonymous()):
            pass
