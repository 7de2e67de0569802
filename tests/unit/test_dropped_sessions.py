"""Sessions that vanish with changes in them give a warning, and others do not."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import StorageUnavailableError
from icechunk_async.session import Session
from tests.helpers import make_array, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async import Repository


@pytest.fixture(scope="module", autouse=True)
def _what_others_left_is_passed_over() -> Iterator[None]:
    """The tests collect garbage; looking at what thousands of others left takes them a while."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # later tests may collect it


def _warnings_of_dropping() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    return [str(it.message) for it in caught if "was dropped with" in str(it.message)]


async def test_a_dropped_session_tells_how_many_changes_vanish(filled: Repository) -> None:
    """One new array, and three chunks."""
    _warnings_of_dropping()
    session = await filled.writable_session("main")
    await make_array(session, "b", (10,), (1,))
    for number in range(3):
        await write(session, f"a/c/{number}", b"x")
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            del session
            gc.collect()
    finally:
        gc.enable()
    (message,) = [str(it.message) for it in caught if it.category is ResourceWarning]
    assert "'main' was dropped with 4 uncommitted change(s)" in message


@pytest.mark.parametrize("how", ["committed", "discarded", "unchanged", "reader", "rolled back"])
async def test_sessions_whose_changes_are_not_missed_are_silent(
    filled: Repository, how: str
) -> None:
    """Nor does a fork warn, whose session does."""
    _warnings_of_dropping()
    if how == "rolled back":
        with pytest.raises(ValueError, match="no"):
            await _roll_back(filled)
    elif how == "reader":
        await filled.readonly_session("main")
    else:
        session = await filled.writable_session("main")
        if how != "unchanged":
            fork = await session.fork()
            await write(fork, "a/c/3", b"x")
            session.discard_fork(fork)
            await write(session, "a/c/2", b"x")
            del fork
        if how == "committed":
            await session.commit("kept")
        elif how == "discarded":
            session.discard_changes()
        del session
    assert not _warnings_of_dropping()


@pytest.mark.parametrize("how", ["committed", "discarded", "unchanged", "reader"])
async def test_a_session_is_freed_as_soon_as_nobody_holds_it(filled: Repository, how: str) -> None:
    """No collection is needed for its changes, which may be most of what a process holds."""
    begin = filled.readonly_session if how == "reader" else filled.writable_session
    gc.disable()
    try:
        session = await begin("main")
        parts: list[weakref.ref[object]] = [weakref.ref(session)]
        parts.append(weakref.ref(session.workspace))
        if how in ("committed", "discarded"):
            await write(session, "a/c/2", b"x")
        if how == "committed":
            await session.commit("kept")
        elif how == "discarded":
            session.discard_changes()
        del session
        assert [it() for it in parts] == [None, None]
    finally:
        gc.enable()


async def _roll_back(repository: Repository) -> None:
    async with repository.transaction("main", message="never") as store:
        await write(store.session, "a/c/2", b"x")
        raise ValueError("no")


async def test_a_squash_that_fails_warns_of_no_changes(
    filled: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is not the caller's, and its changes are commits of the branch."""
    first = await filled.lookup_branch("main")
    for number in range(2):
        session = await filled.writable_session("main")
        await write(session, f"a/c/{number}", b"x")
        await session.commit("one of two")

    async def refuse(*_: object, **__: object) -> None:
        raise StorageUnavailableError("the storage is busy")

    monkeypatch.setattr(Session, "flush", refuse)
    _warnings_of_dropping()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with suppress(StorageUnavailableError):
            await filled.squash("main", since=first)
        gc.collect()
    assert [str(it.message) for it in caught] == []
