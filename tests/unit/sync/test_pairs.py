"""Pairs of methods have one text, one signature, and one body on the portal's loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from icechunk_async._runtime.blocking.pairs import asked, awaited, iterated, owned, twin_of
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.session import Session as AsyncSession
from icechunk_async.sync import (
    ConflictDetector,
    ForkSession,
    IcechunkStore,
    InvalidInputError,
    Repository,
    Session,
    in_memory_storage,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sized


def _methods(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(cls)
        if inspect.isroutine(value) and not name.startswith("_")
    }


@pytest.mark.parametrize("cls", [Repository, Session, ForkSession, IcechunkStore])
def test_every_public_method_has_help(cls: type) -> None:
    """Whether its text is written here or comes from the native method."""
    silent = [name for name, it in _methods(cls).items() if not (it.__doc__ or "").strip()]
    assert not silent


@pytest.mark.parametrize("cls", [Repository, Session])
def test_both_methods_of_a_pair_have_one_text_and_one_signature(cls: type) -> None:
    """And the name by which each is called."""
    methods = _methods(cls)
    pairs = {name: f"{name}_async" for name in methods if f"{name}_async" in methods}
    assert len(pairs) > 5
    for name, twin in pairs.items():
        assert methods[name].__doc__ == methods[twin].__doc__
        assert (methods[name].__name__, methods[twin].__name__) == (name, twin)
        assert not inspect.iscoroutinefunction(methods[name])
        taken, also_taken = map(inspect.signature, (methods[name], methods[twin]))
        if str(taken.return_annotation).startswith("Iterator["):
            returned = str(taken.return_annotation).replace("Iterator", "AsyncCloseableIterator")
            assert str(also_taken) == str(taken.replace(return_annotation=returned))
        else:
            assert str(also_taken) == str(taken)
            assert inspect.iscoroutinefunction(methods[twin])


def test_wrong_arguments_are_those_of_the_method_that_was_called() -> None:
    """Python names the function: not the twin, and not one that looks in memory first."""
    with Repository.create(in_memory_storage()) as repository:
        wrong: Any = repository
        with pytest.raises(TypeError, match=r"Repository\.create_tag\(\) missing 1 required"):
            wrong.create_tag("v1")
        with pytest.raises(TypeError, match=r"Repository\.diff\(\) takes 1 positional"):
            wrong.diff("v1", "main")
        for open_it in (Repository.open, Repository.exists):
            with pytest.raises(InvalidInputError, match=r"a path, a URL or a Storage, not a None"):
                open_it(cast("str", None))
        for pack in (ConflictDetector, "ours"):
            with pytest.raises(InvalidInputError, match="object with a method 'solve'"):
                wrong.writable_session("main").commit("text", rebase_with=pack)


@pytest.mark.parametrize(
    ("facade", "native"),
    [
        (Repository.create_tag, AsyncRepository.create_tag),
        (Repository.list_tags_async, AsyncRepository.list_tags),
        (Session.move, AsyncSession.move),
        (Session.commit_async, AsyncSession.commit),
    ],
)
def test_shared_text_is_that_of_the_native_method(facade: Any, native: Any) -> None:
    """The whole of it: errors, cancellation, cost."""
    assert facade.__doc__ == native.__doc__
    assert "Return" in native.__doc__ or "Raises:" in native.__doc__


class _Native:
    begun = 0

    async def where(self, *, times: int = 1) -> list[str]:
        """Return the name of the thread that runs this."""
        return [threading.current_thread().name] * times

    async def names(self, n: int, *, fail: bool = False) -> AsyncIterator[str]:
        """Iterate over the name of this thread."""
        if fail:
            raise ValueError("nothing to begin with")
        for _ in range(n):
            self.begun += 1
            yield threading.current_thread().name


class _Special(_Native):
    async def where(self, *, times: int = 1) -> list[str]:
        return ["special"] * times


class _Handle:
    def __init__(self, native: _Native) -> None:
        self.native = native

    async def ask(self, question: Any) -> Any:
        return await question(self.native)

    async def each(self, question: Any, convert: Any) -> AsyncIterator[Any]:
        async for item in question(self.native):
            yield convert(item)


def _known_times(facade: _Facade, *, times: int = 1) -> int | None:
    del facade
    return -1 if times == 0 else None


def _not_ten(*, times: Any = 1) -> None:
    if times == 10:
        raise ValueError("too often")


class _Twice:
    """A value that stands for one of the native library."""

    def to_native(self) -> int:
        return 2


def _number(found: Sized) -> int:
    return len(found)


def _with_handle(handle: Any, found: list[str]) -> tuple[Any, int]:
    return handle, len(found)


class _Facade:
    def __init__(self, native: _Native) -> None:
        self.handle = _Handle(native)

    where, where_async = asked(_Native.where)
    times, times_async = asked(_Native.where, _number, known=_known_times)
    owned, owned_async = owned(_Native.where, _with_handle)
    few, few_async = asked(_Native.where, check=_not_ten)
    names, names_async = iterated(_Native.names)
    lengths, lengths_async = iterated(_Native.names, _number, parts=lambda n, **_: n, ahead=False)

    @twin_of(_Native.where)
    async def first_async(self) -> str:
        names: list[str] = await self.handle.ask(lambda it: it.where())
        return names[0]

    @awaited
    async def second_async(self) -> None:
        """Do nothing."""


def test_what_is_asked_runs_on_the_portals_thread_from_blocking_and_asynchronous_code() -> None:
    """Arguments are passed on."""
    facade = _Facade(_Native())
    assert facade.where(times=2) == ["icechunk-async-portal"] * 2
    assert asyncio.run(facade.where_async()) == ["icechunk-async-portal"]
    assert asyncio.run(facade.first_async()) == "icechunk-async-portal"
    asyncio.run(facade.second_async())


def test_what_is_asked_may_be_converted_and_may_be_known_on_the_callers_thread() -> None:
    """The signature names the class of the result."""
    facade = _Facade(_Native())
    assert facade.times(times=3) == 3
    assert asyncio.run(facade.times_async(times=2)) == 2
    assert facade.times(times=0) == -1
    assert facade.owned(times=2) == (facade.handle, 2)
    assert inspect.signature(facade.owned_async).return_annotation == "tuple[Any, int]"
    assert inspect.signature(Repository.undo).return_annotation == "str"
    assert inspect.signature(Repository.lookup_snapshot).return_annotation == "SnapshotInfo"


def test_arguments_are_checked_before_the_question_and_converted_for_it() -> None:
    """By both methods of a pair."""
    facade = _Facade(_Native())
    given: Any = _Twice()
    assert len(facade.few(times=given)) == len(asyncio.run(facade.few_async(times=given))) == 2
    with pytest.raises(ValueError, match="too often"):
        facade.few(times=10)
    with pytest.raises(ValueError, match="too often"):
        asyncio.run(facade.few_async(times=10))


def test_what_is_iterated_runs_on_the_portals_thread() -> None:
    """In ``for`` and ``async for``, converted or not."""
    facade = _Facade(_Native())

    async def all_of(items: AsyncIterator[Any]) -> list[Any]:
        return [it async for it in items]

    assert list(facade.names(3)) == ["icechunk-async-portal"] * 3
    assert asyncio.run(all_of(facade.names_async(2))) == ["icechunk-async-portal"] * 2
    assert list(facade.lengths(2)) == [len("icechunk-async-portal")] * 2
    assert asyncio.run(all_of(facade.lengths_async(1))) == [len("icechunk-async-portal")]


def test_an_iteration_that_blocks_begins_when_it_is_called() -> None:
    """For errors in the arguments; unless its first item may come much later."""
    native = _Native()
    facade = _Facade(native)
    with pytest.raises(ValueError, match="nothing to begin with"):
        facade.names(1, fail=True)
    facade.names_async(1, fail=True)
    facade.lengths(1, fail=True)
    facade.names(5)
    assert native.begun == 1


def test_items_of_a_size_that_the_arguments_tell_are_fetched_one_by_one() -> None:
    """Small ones in batches that double."""
    native = _Native()
    items = _Facade(native).lengths(1_000_000)
    for _ in range(5):
        next(items)
    assert native.begun == 5
    few = _Facade(native).lengths(10)
    native.begun = 0
    for _ in range(5):
        next(few)
    assert native.begun == 7


def test_a_native_subclass_answers_with_its_own_method() -> None:
    """As a fork does for a method of sessions."""
    assert _Facade(_Special()).where() == ["special"]


def test_a_method_that_is_asked_raises_the_facades_errors() -> None:
    """The handle translates them."""
    with Repository.create(in_memory_storage()) as repository:
        with pytest.raises(Exception, match="There is no snapshot") as caught:
            repository.inspect_snapshot("1CECHNKREP0F1RSTCMTG")
        assert type(caught.value).__module__ == "icechunk_async.sync"
