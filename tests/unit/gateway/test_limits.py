"""Limits of number and time, the end of a gateway, and browsers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.errors import InvalidInputError, PermissionDeniedError, ThrottledError
from icechunk_async.gateway import app
from icechunk_async.gateway.requests import status_of
from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import group_document, make_array, memory_url, until, write
from tests.unit.gateway.client import ask
from tests.unit.gateway.conftest import NATIVE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

    from icechunk_async.storage import Storage
    from tests.unit.gateway.conftest import Served


_LONGER_AND_LONGER = (0.2, 2, 20)
"""Deadlines in seconds: on a busy machine the first may pass before what is in time, too."""


class Gate(WrappedStorage):
    """Holds reads of chunks until it is opened, and counts those that wait."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.opened = asyncio.Event()
        self.waiting = self.most = 0
        self.error: Exception | None = None

    async def before(self, operation: str, key: str) -> None:
        """Wait."""
        if operation != "get" or not key.startswith("chunks/"):
            return
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await self.opened.wait()
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
async def gated(served: Served) -> AsyncIterator[tuple[Repository, Gate]]:
    """Open the repository behind a gate."""
    gate = Gate(served.storage)
    async with Repository.open(gate) as repository:
        yield repository, gate


@pytest.fixture
async def many() -> AsyncIterator[tuple[Repository, Gate]]:
    """Make an array of 40 chunks that are separate objects."""
    async with open_storage(memory_url()) as plain:
        async with Repository.create(plain) as repository:
            session = await repository.writable_session("main")
            await write(session, "zarr.json", group_document())
            await make_array(session, "a", (40_000,), (1000,))
            for number in range(40):
                await write(session, f"a/c/{number}", bytes([number]) * 1000)
            await session.commit("filled")
        gate = Gate(plain)
        async with Repository.open(gate) as repository:
            yield repository, gate


async def test_no_more_than_the_limit_is_read_at_once(many: tuple[Repository, Gate]) -> None:
    """Others wait for their turn, and too many are told to come again."""
    repository, gate = many
    gateway = app(repository, max_concurrent_requests=3, max_waiting_requests=5)
    await ask(gateway, "/@branch.main/a/zarr.json")
    asked = [asyncio.create_task(ask(gateway, f"/@branch.main/a/c/{n}")) for n in range(20)]
    await until(lambda: sum(task.done() for task in asked) == 12 and gate.waiting == 3)
    gate.opened.set()
    answers = await asyncio.gather(*asked)
    refused = [it for it in answers if it.status == 503]
    assert len(refused) == 12
    assert all(it.sentence and it.headers["retry-after"] == "1" for it in refused)
    assert sum(it.status == 200 for it in answers) == 8
    assert gate.most == 3


async def test_a_storage_that_does_not_reply_ends_in_504(gated: tuple[Repository, Gate]) -> None:
    """After the deadline; the read is cancelled, and the slot is free again."""
    repository, gate = gated
    for seconds in _LONGER_AND_LONGER:
        gateway = app(repository, deadline_seconds=seconds, max_concurrent_requests=1)
        began = await ask(gateway, "/@branch.main/zarr.json")
        answer = await ask(gateway, "/@branch.main/air/c/0")
        assert (answer.status, answer.headers["cache-control"]) == (504, "no-store")
        assert answer.sentence
        assert gate.waiting == 0
        if began.status == (await ask(gateway, "/@branch.main/zarr.json")).status == 200:
            break
    else:
        pytest.fail("the slot is still taken")
    gate.opened.set()
    assert (await ask(app(repository), "/@branch.main/air/c/0")).body == NATIVE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PermissionDeniedError("bucket secret-name denies"), 502),
        (RuntimeError("secret-name"), 500),
    ],
)
async def test_errors_are_sentences_and_the_log_has_the_rest(
    gated: tuple[Repository, Gate],
    error: Exception,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No traceback and no name of a place reaches a client."""
    repository, gate = gated
    gate.error = error
    gate.opened.set()
    gateway = app(repository, deadline_seconds=60)
    with caplog.at_level(logging.WARNING):
        answer = await ask(gateway, "/@branch.main/air/c/0")
    assert answer.status == status
    assert "secret" not in answer.sentence
    assert "secret-name" in caplog.text


def test_a_busy_storage_is_no_fault_of_the_gateway() -> None:
    """The client is told to come again."""
    status, sentence = status_of(ThrottledError("bucket secret-name: slow down"))
    assert (status, "later" in sentence, "secret" in sentence) == (503, True, False)


async def test_a_client_that_does_not_take_its_reply_is_left(served: Served) -> None:
    """The reply stays incomplete, so that the server closes the connection; the slot is free."""
    sent: list[str] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("a gateway reads no body")

    scope = {"type": "http", "method": "GET", "path": "/@branch.main/air/c/0", "headers": []}
    for seconds in _LONGER_AND_LONGER:
        sent.clear()
        gateway = app(served.repository, deadline_seconds=seconds, max_concurrent_requests=1)
        await gateway(scope, receive, send)
        assert sent == ["http.response.start", "http.response.body"]
        if (await ask(gateway, "/@branch.main/air/c/0")).body == NATIVE:
            break
    else:
        pytest.fail("the slot is still taken")


async def test_closing_waits_for_what_is_read(many: tuple[Repository, Gate]) -> None:
    """New requests are refused meanwhile; what was given open stays open."""
    repository, gate = many
    gateway = app(repository)
    async with gateway:
        await ask(gateway, "/@branch.main/a/zarr.json")
        asked = asyncio.create_task(ask(gateway, "/@branch.main/a/c/7"))
        await until(lambda: gate.waiting == 1)
        closing = asyncio.create_task(gateway.__aexit__())
        await asyncio.sleep(0)
        assert (await ask(gateway, "/@branch.main/a/zarr.json")).status == 503
        assert not closing.done()
        gate.opened.set()
        await closing
        assert (await asked).body == bytes([7]) * 1000
    assert await repository.lookup_branch("main")


async def test_a_location_is_opened_and_closed_with_the_server() -> None:
    """By the lifespan protocol; before and after, requests are refused in a sentence."""
    url = memory_url()
    async with open_storage(url), Repository.create(url) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await session.commit("a group")
        gateway = app(url)
        assert (await ask(gateway, "/@branch.main/zarr.json")).status == 503
        events, sent = asyncio.Queue[str](), asyncio.Queue[str]()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": await events.get()}

        async def send(message: MutableMapping[str, Any]) -> None:
            await sent.put(message["type"])

        living = asyncio.create_task(gateway({"type": "lifespan"}, receive, send))
        await events.put("lifespan.startup")
        assert await sent.get() == "lifespan.startup.complete"
        assert (await ask(gateway, "/@branch.main/zarr.json")).status == 200
        await events.put("lifespan.shutdown")
        assert await sent.get() == "lifespan.shutdown.complete"
        await living
        assert (await ask(gateway, "/@branch.main/zarr.json")).status == 503


async def test_a_location_without_a_repository_fails_to_start() -> None:
    """The server shows the sentence."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(memory_url())({"type": "lifespan"}, receive, send)
    assert [it["type"] for it in sent] == ["lifespan.startup.failed"]
    assert "There is no Icechunk repository" in sent[0]["message"]


async def test_pages_of_other_origins_may_read(served: Served) -> None:
    """All, or those that are named; a preflight asks for no token and reads nothing."""
    gateway = app(served.repository)
    answer = await ask(gateway, "/@branch.main/air/c/0", origin="https://maps.example")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "Content-Range" in answer.headers["access-control-expose-headers"]
    some = app(served.repository, cors=["https://maps.example"])
    served.storage.forget()
    flight = await ask(some, "/@branch.main/x", "OPTIONS", origin="https://maps.example")
    assert (flight.status, flight.body) == (204, b"")
    assert flight.headers["access-control-allow-origin"] == "https://maps.example"
    assert "Range" in flight.headers["access-control-allow-headers"]
    assert served.storage.requests == {}
    refused = await ask(some, "/@branch.main/air/c/0", origin="https://other.example")
    assert "access-control-allow-origin" not in refused.headers
    assert refused.headers["vary"] == "Origin"
    none = await ask(app(served.repository, cors=[]), "/@branch.main/air/c/0", origin="https://a.b")
    assert not [it for it in none.headers if it.startswith("access-control")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent_requests": 0},
        {"max_waiting_requests": -1},
        {"deadline_seconds": 0},
        {"deadline_seconds": float("nan")},
        {"refresh_seconds": -1},
        {"verify_reads": True},
    ],
)
async def test_wrong_arguments_are_refused(served: Served, wrong: dict[str, Any]) -> None:
    """Each in a sentence with its name."""
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        app(served.repository, **wrong)


async def test_websockets_are_closed(served: Served) -> None:
    """A gateway has none."""
    sent: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message["type"])

    await app(served.repository)({"type": "websocket", "path": "/"}, receive, send)
    assert sent == ["websocket.close"]
