"""Pairs of methods have one text, one signature, and one body on the portal's loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

from icechunk_async._runtime.blocking.pairs import asked, awaited, blocking, twin_of
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.session import Session as AsyncSession
from icechunk_async.sync import ForkSession, IcechunkStore, Repository, Session, in_memory_storage


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
        if name in {"changed_cells", "changes", "ops_log", "watch"}:  # iterators, in both forms
            continue
        assert methods[name].__doc__ == methods[twin].__doc__
        assert (methods[name].__name__, methods[twin].__name__) == (name, twin)
        assert str(inspect.signature(methods[name])) == str(inspect.signature(methods[twin]))
        assert inspect.iscoroutinefunction(methods[twin])
        assert not inspect.iscoroutinefunction(methods[name])


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
    async def where(self, *, times: int = 1) -> list[str]:
        """Return the name of the thread that runs this."""
        return [threading.current_thread().name] * times


class _Special(_Native):
    async def where(self, *, times: int = 1) -> list[str]:
        return ["special"] * times


class _Handle:
    def __init__(self, native: _Native) -> None:
        self.native = native

    async def ask(self, question: Any) -> Any:
        return await question(self.native)


class _Facade:
    def __init__(self, native: _Native) -> None:
        self.handle = _Handle(native)

    where_async = asked(_Native.where)
    where = blocking(where_async)

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


def test_a_native_subclass_answers_with_its_own_method() -> None:
    """As a fork does for a method of sessions."""
    assert _Facade(_Special()).where() == ["special"]


def test_a_method_that_is_asked_raises_the_facades_errors() -> None:
    """The handle translates them."""
    with Repository.create(in_memory_storage()) as repository:
        with pytest.raises(Exception, match="There is no snapshot") as caught:
            repository.inspect_snapshot("1CECHNKREP0F1RSTCMTG")
        assert type(caught.value).__module__ == "icechunk_async.sync"
