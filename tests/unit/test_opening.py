"""Repositories that are awaited or entered, and how they close."""

from __future__ import annotations

import asyncio
import gc
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, sync
from icechunk_async.engine.history import opening
from icechunk_async.errors import (
    InvalidInputError,
    RepositoryNotFoundError,
    StorageClosedError,
)
from icechunk_async.storage import open_storage, registry
from icechunk_async.storage.policies.wrapping import PassingStorage
from tests.helpers import memory_url, read, until, write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from icechunk_async.repository import Opening
    from icechunk_async.results import CommitEvent
    from icechunk_async.storage.protocol import RangeRequest, Retrieved

URL = "watched://here"


class Backend:
    """Counts the storages that it opened and closed; reads wait while ``blocked``."""

    def __init__(self) -> None:
        self.inner = memory_url()
        self.opened = self.closed = self.waiting = 0
        self.blocked = asyncio.Event()
        self.blocked.set()  # set: nothing waits

    @asynccontextmanager
    async def __call__(self, url: str, **options: object) -> AsyncGenerator[PassingStorage]:
        """Open a storage in memory."""
        backend = self

        class Watched(PassingStorage):
            async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
                backend.waiting += 1
                await backend.blocked.wait()
                return await super().get(key, byte_range)

        async with open_storage(self.inner) as storage:
            self.opened += 1
            try:
                yield Watched(storage)
            finally:
                await asyncio.sleep(0)  # closing takes a turn, as it does with connections
                self.closed += 1

    @property
    def is_open(self) -> bool:
        """Whether a storage is open."""
        return self.opened > self.closed


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Serve ``watched://`` URLs."""
    backend = Backend()
    monkeypatch.setitem(registry._loaded, "watched", backend)  # pyright: ignore[reportPrivateUsage]
    return backend


@pytest.fixture
async def created(backend: Backend) -> Backend:
    """Create a repository, and close it."""
    async with Repository.create(URL, probe=False):
        pass
    assert not backend.is_open
    return backend


@pytest.mark.parametrize("way", ["create", "open_or_create"])
async def test_an_awaited_repository_stays_open_until_it_is_closed(
    backend: Backend, way: str
) -> None:
    """Nobody keeps what was awaited; garbage collection closes nothing."""
    repository = await getattr(Repository, way)(URL, probe=False)
    gc.collect()
    session = await repository.writable_session("main")
    await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    await session.commit("open")
    assert backend.is_open
    await repository.aclose()
    assert not backend.is_open
    with pytest.raises(StorageClosedError):
        await repository.list_branches()


async def test_the_task_that_opened_it_may_end(created: Backend) -> None:
    """The repository is closed by another task."""
    repository = await asyncio.create_task(_opened())
    assert await repository.list_branches() == {"main"}
    await asyncio.create_task(repository.aclose())
    assert not created.is_open


async def _opened() -> Repository:
    return await Repository.open(URL)


async def test_a_block_closes_what_it_opened(created: Backend) -> None:
    """Also where it fails."""
    kept: list[Repository] = []

    async def fail() -> None:
        async with Repository.open(URL) as repository:
            kept.append(repository)
            assert created.is_open
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not created.is_open
    with pytest.raises(StorageClosedError):
        await kept[0].list_branches()


async def test_closing_twice_does_nothing(created: Backend) -> None:
    """In a block, after it, one after the other and at once."""
    async with Repository.open(URL) as repository:
        await repository.aclose()
        assert not created.is_open
        await repository.aclose()
    await repository.aclose()
    repository = await Repository.open(URL)
    await asyncio.gather(repository.aclose(), repository.aclose())
    await repository.aclose()
    assert (created.opened, created.closed) == (3, 3)


async def test_awaiting_again_returns_the_same_repository(created: Backend) -> None:
    """One after the other, or at once; nothing is opened twice."""
    opening = Repository.open(URL)
    first, second = await asyncio.gather(_of(opening), _of(opening))
    assert first is second is await opening
    assert created.opened == 2  # one of them created it
    await first.aclose()
    with pytest.raises(StorageClosedError, match="Open it again"):
        await opening
    with pytest.raises(StorageClosedError, match="Open it again"):
        await opening.__aenter__()


async def _of(opening: Opening[Repository]) -> Repository:
    return await opening


async def test_entering_after_awaiting_closes_with_the_block(created: Backend) -> None:
    """Of the opening, or of the repository."""
    opening = Repository.open(URL)
    repository = await opening
    async with opening as same:
        assert same is repository
    assert not created.is_open
    async with await Repository.open(URL) as other:
        assert await other.list_branches() == {"main"}
    assert not created.is_open
    with pytest.raises(StorageClosedError, match="Open it again"):
        async with other:
            pass


async def test_entering_twice_is_refused(created: Backend) -> None:
    """And says what to do; the first block keeps its repository."""
    opening = Repository.open(URL)
    async with opening as repository:
        with pytest.raises(InvalidInputError, match=r"entered already.*open again"):
            await opening.__aenter__()
        assert await opening is repository  # awaiting in the block is the block's
        assert await repository.list_branches() == {"main"}
    assert not created.is_open


@pytest.mark.parametrize("entered", [False, True])
async def test_cancellation_while_opening_leaves_nothing_open(
    created: Backend, *, entered: bool
) -> None:
    """Neither awaited nor entered; the same opening can be tried again."""
    created.blocked.clear()
    opening, seen = Repository.open(URL), created.waiting
    task = asyncio.ensure_future(opening.__aenter__() if entered else _of(opening))
    await until(lambda: created.waiting > seen)
    assert created.is_open
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not created.is_open
    created.blocked.set()
    await (await opening).aclose()
    assert not created.is_open


async def test_cancellation_just_after_opening_leaves_nothing_open(created: Backend) -> None:
    """The holder has entered, and the awaiting task was not resumed yet."""
    for turns in range(40):  # cancel at every turn of the loop that opening takes
        before = created.opened
        task = asyncio.ensure_future(_opened())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            await task.result().aclose()
            assert created.opened == before + 1
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not created.is_open
    else:
        pytest.fail("opening takes more turns than were tried")
    assert not created.is_open


async def test_a_failed_opening_leaves_nothing_open(backend: Backend) -> None:
    """The error is the repository's; the next try may succeed."""
    opening = Repository.open(URL)
    with pytest.raises(RepositoryNotFoundError):
        await opening
    assert not backend.is_open
    async with Repository.create(URL, probe=False):
        pass
    await (await opening).aclose()
    assert not backend.is_open


@pytest.mark.parametrize("hooked", [False, True])
async def test_an_unclosed_repository_is_warned_of_when_it_is_collected(
    created: Backend, *, hooked: bool
) -> None:
    """Its sessions read and commit on, and tell its hooks."""
    told: list[str] = []

    async def hook(event: CommitEvent) -> None:
        told.append(event.snapshot.message)

    repository = await Repository.open(URL, after_commit=[hook] if hooked else [])
    session = await repository.writable_session("main")
    await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    with pytest.warns(ResourceWarning, match=r"'watched://here'.*never closed.*aclose"):  # noqa: PT031
        del repository
        gc.collect()
    await session.commit("after all")
    assert told == ["after all"] * hooked
    assert await read(session, "zarr.json") is not None
    async with Repository.open(URL) as again:
        assert (await anext(aiter(again.ancestry(branch="main")))).message == "after all"


def test_an_unclosed_repository_closes_when_its_loop_ends(backend: Backend) -> None:
    """In order, with one warning and nothing in the log of asyncio."""
    problems: list[dict[str, Any]] = []

    async def forget() -> Repository:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        backend.blocked = asyncio.Event()
        backend.blocked.set()
        return await Repository.create(URL, probe=False)

    with pytest.warns(ResourceWarning) as caught:
        repository = asyncio.run(forget())
    assert len(caught) == 1
    assert (backend.opened, backend.closed, problems) == (1, 1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del repository
        gc.collect()


async def test_a_closed_repository_is_not_warned_of(created: Backend) -> None:
    """Nor is one that a block closed, nor an opening that nobody used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repository = await Repository.open(URL)
        await repository.aclose()
        async with Repository.open(URL):
            pass
        Repository.open(URL)
        del repository
        gc.collect()


async def test_reopening_can_be_awaited(created: Backend) -> None:
    """The first repository stays open, whatever happens to the second."""
    async with Repository.open(URL) as repository:
        again = await repository.reopen()
        await again.aclose()
        assert await repository.list_branches() == {"main"}


async def test_using_an_opening_as_a_repository_says_what_was_forgotten(tmp_path: Path) -> None:
    """In place of a riddle; secrets of its URL are not shown."""
    opening = Repository.open("watched://user:secret@host/path?token=hidden")
    with pytest.raises(AttributeError, match=r"not open yet: write 'await Repository\.open"):
        opening.readonly_session  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'misspelt'\.$"):
        opening.misspelt  # type: ignore[attr-defined]  # noqa: B018
    assert "secret" not in repr(opening)
    assert "hidden" not in repr(opening)
    assert "host/path" in repr(opening)
    assert str(tmp_path) in repr(Repository.open(tmp_path))


async def test_options_beside_an_open_storage_are_refused() -> None:
    """It has its own, so that those given would count for nothing. Their values are not shown."""
    given = {"secret_access_key": "hidden"}
    async with open_storage(memory_url()) as storage:
        for ask in (Repository.create, Repository.open, Repository.open_or_create):
            with pytest.raises(InvalidInputError, match="is open and has its own") as caught:
                await ask(storage, storage_options=given)
            assert "hidden" not in str(caught.value)
        with pytest.raises(InvalidInputError, match="is open and has its own"):
            await Repository.exists(storage, storage_options=given)
        async with (
            Repository.create(storage, storage_options={}) as repository,
            open_storage(memory_url()) as other,
        ):
            with pytest.raises(InvalidInputError, match="is open and has its own"):
                await repository.copy_to(other, storage_options=given)
            assert [it async for it in other.list_prefix("")] == []


class _Counted:
    """A storage that needs no event loop, and remembers what was read."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str, *arguments: Any, **named: Any) -> Any:
        """Read an object."""
        self.read.append(key)
        return await self._inner.get(key, *arguments, **named)

    def get_blocking(self, *arguments: Any) -> Any:
        """Read an object on this thread."""
        return self._inner.get_blocking(*arguments)

    def put_blocking(self, *arguments: Any) -> Any:
        """Write an object on this thread."""
        return self._inner.put_blocking(*arguments)


@pytest.mark.parametrize(("version", "objects"), [(2, 1), (1, 3)])
async def test_where_nothing_waits_a_repo_info_is_all_that_is_read(
    tmp_path: Path, version: int, objects: int
) -> None:
    """Other ways of publishing are looked for only if it is missing."""
    async with Repository.create(tmp_path, spec_version=version):
        pass
    async with open_storage(tmp_path) as storage:
        counted = _Counted(storage)
        assert await opening.find(counted) is not None
        assert len(counted.read) == objects, counted.read


@pytest.mark.parametrize("way", ["await", "async with"])
async def test_a_constructor_that_fails_leaves_nothing_open(created: Backend, way: str) -> None:
    """The engine is open when the caller's class is made. It closes again, without a warning."""

    class Failing(Repository):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            raise ZeroDivisionError

    async def use() -> None:
        if way == "await":
            await Failing.open(URL)
        else:
            async with Failing.open(URL):
                pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(ZeroDivisionError):
            await use()
        gc.collect()
    assert not created.is_open
    assert [str(it.message) for it in caught] == []


def test_what_is_no_hook_is_refused_before_anything_is_opened(backend: Backend) -> None:
    """And so before a repository is created."""
    with pytest.raises(InvalidInputError, match="is no hook"):
        Repository.create(URL, probe=False, after_commit=["no function"])  # type: ignore[list-item]
    assert backend.opened == 0


async def test_hooks_that_can_be_iterated_over_once_only_are_told(created: Backend) -> None:
    """Checking them does not use them up."""
    told: list[str] = []

    async def hook(event: CommitEvent) -> None:
        told.append(event.snapshot.message)

    given: Any = (it for it in [hook])
    async with Repository.open(URL, after_commit=given) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
        await session.commit("told")
    assert told == ["told"]


@pytest.mark.parametrize("given", [print, 5])
def test_a_function_in_place_of_a_list_of_hooks_is_refused(backend: Backend, given: Any) -> None:
    """The message says how to give one, and that of the facade as well."""
    words = r"takes a list .*, not .*\. Write after_commit=\[function\]"
    with pytest.raises(InvalidInputError, match=words):
        Repository.open(URL, after_commit=given)
    with pytest.raises(InvalidInputError, match=words):
        sync.Repository.open(memory_url(), after_commit=given)
    assert backend.opened == 0
