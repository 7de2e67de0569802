"""Handles of repositories: they are closed whenever that happens, and leave nothing open."""

from __future__ import annotations

import asyncio
import pickle
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from icechunk_async import Packing, __version__, handles
from icechunk_async import Repository as NativeRepository
from icechunk_async._runtime.blocking.portal import run
from icechunk_async.errors import StorageClosedError
from icechunk_async.sync import Attribution, IcechunkError, Repository, Storage, http_storage
from icechunk_async.sync.opening import RepositoryHandle, Source
from icechunk_async_memory import MemoryStorage
from tests.helpers import memory_url
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from icechunk_async.storage import Storage as AsyncStorage


class SlowPlace(Storage):
    """A place that is found only after something else has happened."""

    happened: Callable[[], Awaitable[object]]

    async def place(self) -> tuple[str | AsyncStorage, dict[str, object]]:
        """Wait."""
        await self.happened()
        return await super().place()


@pytest.fixture
def open_storages(monkeypatch: pytest.MonkeyPatch) -> list[MemoryStorage]:
    """Return a list of the storages that are open at present."""
    found: list[MemoryStorage] = []
    begin, close = MemoryStorage.__init__, MemoryStorage.close

    def begun(storage: MemoryStorage, *args: Any, **kwargs: Any) -> None:
        begin(storage, *args, **kwargs)
        found.append(storage)

    def closed(storage: MemoryStorage) -> Any:
        if storage in found:
            found.remove(storage)
        return close(storage)

    monkeypatch.setattr(MemoryStorage, "__init__", begun)
    monkeypatch.setattr(MemoryStorage, "close", closed)
    return found


@pytest.fixture
def url() -> str:
    """Create a repository, and return its URL."""
    url = memory_url()
    Repository.create(url).close()
    return url


def test_closing_gives_up_an_opening_that_waits(url: str) -> None:
    """Nobody waits for ever: neither who closes nor who asked for the repository."""
    waiting = threading.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    place = SlowPlace(url)
    place.happened = never
    handle = RepositoryHandle(Source(place))
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            handle.now()
        except BaseException as error:  # noqa: BLE001 - it is looked at
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(60)
    handle.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(raised) == 1
    assert isinstance(raised[0], StorageClosedError)
    assert handle.ready is None


def test_a_repository_closed_at_any_moment_of_its_opening_is_closed(
    url: str, open_storages: list[MemoryStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in, and after each step; the one that asked is told, or got it before."""
    began = threading.Event()

    def announced[T](work: Coroutine[Any, Any, T]) -> T:
        began.set()
        return run(work)

    monkeypatch.setattr(handles, "run", announced)
    ends: set[str] = set()
    for steps in range(40):
        handle = RepositoryHandle(Source(Storage(url)))
        began.clear()
        ends.add(run(_close_after(handle, steps, began)))
        assert not open_storages, steps
        with pytest.raises(StorageClosedError):
            handle.now()
    assert ends == {"StorageClosedError", "opened"}


async def _close_after(handle: RepositoryHandle, steps: int, began: threading.Event) -> str:
    """Begin to open, let the loop turn, and close from another thread.

    The loop stands still until closing has started: it might open everything before that thread
    runs.
    """

    def close() -> None:
        try:
            handle.close()
        finally:
            began.set()  # also if there was nothing to wait for

    opening = asyncio.ensure_future(handle.repository())
    for _ in range(steps):
        await asyncio.sleep(0)
    closing = asyncio.get_running_loop().run_in_executor(None, close)
    while not began.is_set():
        pass  # a wait that lets the other thread run, and not the loop
    await closing
    try:
        await opening
    except StorageClosedError as error:
        return type(error).__name__
    return "opened"


def test_an_opening_whose_asker_gives_up_at_any_moment_stays_open_no_longer_than_the_handle(
    url: str, open_storages: list[MemoryStorage]
) -> None:
    """It is either undone, or kept for the next who asks and closed with the handle."""
    kept = set()
    for steps in range(40):
        handle = RepositoryHandle(Source(Storage(url)))
        run(_cancel_after(handle, steps))
        kept.add(handle.ready is not None)
        assert len(open_storages) == (handle.ready is not None), steps
        handle.close()
        assert not open_storages, steps
    assert kept == {False, True}


async def _cancel_after(handle: RepositoryHandle, steps: int) -> None:
    opening = asyncio.ensure_future(handle.repository())
    for _ in range(steps):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])


@pytest.mark.parametrize("given", [None, {"user-agent": "mine"}])
async def test_attribution_is_sent_also_after_pickling(given: dict[str, str] | None) -> None:
    """In the header by which access logs tell clients apart, unless the caller set that."""
    agents: list[str] = []

    async def nothing(request: web.Request) -> web.Response:
        agents.append(request.headers["User-Agent"])
        return web.Response(status=404)

    labels = Attribution(client="app/1.0", workload="nightly run", principal="joe")
    async with serving(nothing) as url:
        source = Source(http_storage(url, headers=given), attribution=labels)
        for each in (source, pickle.loads(pickle.dumps(source))):
            handle = RepositoryHandle(each)
            with suppress(IcechunkError):
                await asyncio.to_thread(handle.now)
            handle.close()
            sent = f"app/1.0 icechunk-async/{__version__} (workload=nightly run; principal=joe)"
            assert set(agents) == {"mine" if given else sent}
            agents.clear()


async def test_what_is_opened_natively_opens_alike_in_the_workers_of_blocking_code(
    tmp_path: Path,
) -> None:
    """With the settings that were given, after pickling as well."""
    async with NativeRepository.create(
        tmp_path, packing=Packing(), sums=True, verify_reads=True
    ) as repository:
        origin = (await (await repository.writable_session("main")).fork()).origin
    assert origin is not None
    source = pickle.loads(pickle.dumps(Source.of(origin)))
    assert (source.packing, source.sums, source.verify_reads) == (Packing(), True, True)
    assert source.storage.location == tmp_path.as_uri()


def test_a_copy_gives_the_same_properties_to_commits(url: str) -> None:
    """Set before it was pickled, before it opens, and while it is open."""
    with Repository.open(url) as repository:
        repository.set_default_commit_metadata({"by": "first"})
        copy = pickle.loads(pickle.dumps(repository))
    later = pickle.loads(pickle.dumps(copy))
    assert copy.handle.now().default_commit_metadata == {"by": "first"}
    later.set_default_commit_metadata({"by": "second"})
    assert later.handle.now().default_commit_metadata == {"by": "second"}
    later.set_default_commit_metadata({"by": "third"})
    assert later.handle.now().default_commit_metadata == {"by": "third"}
