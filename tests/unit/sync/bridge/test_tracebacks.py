"""Tracebacks of the errors of blocking code."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from icechunk_async import errors
from icechunk_async.sync import IcechunkError, RefNotFoundError, Repository, in_memory_storage
from icechunk_async.sync.bridge import portal
from icechunk_async.sync.errors import translated

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
import icechunk_async.sync as ic
repo = ic.Repository.create(ic.in_memory_storage())
"""
_USERS_AND_ONE_CALL = 2
_LINES = 8
"""The first, the last, and at most three for each of two calls."""


def _stderr(place: Path, script: str, **environment: str) -> list[str]:
    (place / "script.py").write_text(dedent(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=place,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr.splitlines()


_MISTAKES = {
    "a branch": (
        _BEGIN + 'session = repo.readonly_session("mian")',
        "icechunk_async.sync.RefNotFoundError: There is no branch 'mian'. The repository has: ma",
    ),
    "a place": (
        'import icechunk_async.sync as ic\nic.Repository.open("nowhere")',
        "icechunk_async.sync.RepositoryNotFoundError: There is no Icechunk repository at",
    ),
    "an argument": (
        _BEGIN + 'repo.readonly_session("main", tag="v1")',
        "icechunk_async.sync.InvalidInputError: Must provide one of branch, tag, or snapshot_id.",
    ),
    "a loop": (
        _BEGIN + 'for it in repo.ancestry(branch="mian"):\n    pass',
        "icechunk_async.sync.RefNotFoundError: There is no branch 'mian'.",
    ),
}


@pytest.mark.parametrize("mistake", list(_MISTAKES))
def test_a_mistake_shows_the_users_line_and_one_sentence(tmp_path: Path, mistake: str) -> None:
    """And at most the call of the library, none of the event loop and of the error's causes."""
    script, sentence = _MISTAKES[mistake]
    lines = _stderr(tmp_path, script)
    assert lines[-1].startswith(sentence)
    assert lines[0].startswith("Traceback")
    assert len([line for line in lines if line.startswith("  File")]) <= _USERS_AND_ONE_CALL
    assert len(lines) <= _LINES
    assert not any("During handling" in line or "direct cause" in line for line in lines)
    assert 'script.py", line' in lines[1]


def test_the_environment_asks_for_everything(tmp_path: Path) -> None:
    """Frames of the engine, and the engine's error as the cause."""
    script, sentence = _MISTAKES["a branch"]
    lines = _stderr(tmp_path, script, ICECHUNK_ASYNC_FULL_TRACEBACK="1")
    text = "\n".join(lines)
    assert "direct cause" in text
    assert "icechunk_async.errors.BranchNotFoundError" in text
    assert "in find_branch" in text
    assert lines[-1].startswith(sentence)


def test_the_callers_own_error_stays_its_context(tmp_path: Path) -> None:
    """Of a call in a handler, as Python shows all errors."""
    script = """
    import icechunk_async.sync as ic
    repo = ic.Repository.create(ic.in_memory_storage())
    try:
        {}["mine"]
    except KeyError:
        repo.lookup_tag("v1")
    """
    lines = _stderr(tmp_path, script)
    assert "KeyError: 'mine'" in lines
    assert sum("During handling" in line for line in lines) == 1
    assert not any("icechunk_async/" in line for line in lines)


def _callers_function() -> None:
    raise KeyError("of the caller")


async def _refuse_for_the_caller() -> None:
    with translated():
        try:
            _callers_function()
        except KeyError as error:
            raise errors.InvalidInputError("It failed.") from error


def _files(error: BaseException) -> list[str]:
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return found


def test_the_callers_function_that_failed_is_shown() -> None:
    """A hook or a refresh of credentials: its error is the cause, with its own lines."""
    with pytest.raises(IcechunkError) as caught:
        portal.run(_refuse_for_the_caller())
    reason = caught.value.__cause__
    while reason is not None and not isinstance(reason, KeyError):
        reason = reason.__cause__
    assert reason is not None
    assert "_callers_function" in _files(reason)


async def _fail_unexpectedly() -> None:
    with translated():
        raise errors.StorageError("It failed in an unusual way.") from OSError("of the storage")


async def _fail_by_mistake() -> None:
    raise AssertionError("a mistake of this library")


def test_unexpected_errors_keep_everything() -> None:
    """A plain `StorageError` says to look at its cause; other errors are nobody's sentence."""
    with pytest.raises(errors.StorageError) as caught:
        portal.run(_fail_unexpectedly())
    assert isinstance(caught.value.__cause__, errors.StorageError)
    assert isinstance(caught.value.__cause__.__cause__, OSError)
    assert "_fail_unexpectedly" in _files(caught.value)
    with pytest.raises(AssertionError) as other:
        portal.run(_fail_by_mistake())
    assert "_wait_for" in _files(other.value)


def test_awaited_twins_show_the_same() -> None:
    """The frames are those of the test and of the event loop that it runs."""
    repository = Repository.create(in_memory_storage())

    async def ask() -> None:
        await repository.lookup_branch_async("mian")

    with pytest.raises(RefNotFoundError) as caught:
        asyncio.run(ask())
    assert _files(caught.value)[-1] == "ask"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_an_error_is_freed_without_the_garbage_collector() -> None:
    """It holds no frame that holds it: what the frames hold, such as arrays, goes with it."""
    repository = Repository.create(in_memory_storage())
    gc.collect()
    gc.disable()
    try:
        try:
            repository.lookup_branch("mian")
        except RefNotFoundError as error:
            seen = weakref.ref(error)
        for _ in range(3):  # the loop forgets the call that failed
            repository.list_branches()
        assert seen() is None
    finally:
        gc.enable()
