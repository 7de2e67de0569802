"""The processes in which the conformance suite works on one storage."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import open_storage, registry
from icechunk_async.testing._processes import PROCESSES, create_in_processes

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

BEGUN = """
import asyncio, os, signal
from icechunk_async.storage import open_storage, registry
from icechunk_async.testing import _processes

async def describe():
    async with open_storage("here") as storage:
        return storage.description

_processes.PROCESSES = 1
_processes.create_in_processes(registry.reopen, asyncio.run(describe()), ["key"])
"""
INTERRUPTED = f"""{BEGUN}
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.killpg(os.getpgid(0), signal.SIGINT)  # as a terminal does
"""
FORKING = f"""{BEGUN}
fork = os.fork()
if not fork:
    signal.pause()
print(fork, flush=True)
_processes._PATIENCE_SECONDS = 0.1
"""


def refuse_to_open(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Fail in the other process."""
    raise ConnectionRefusedError(description.url)


def open_here(description: StorageDescription) -> AbstractAsyncContextManager[Storage]:
    """Open the working directory, wherever that is, instead of what is described."""
    del description
    return open_storage(Path.cwd())


def test_processes_work_where_the_test_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its working directory, also if they were started by a test in another one."""

    async def describe() -> StorageDescription:
        async with open_storage(tmp_path) as storage:
            return storage.description

    description = asyncio.run(describe())
    for name in ("first", "second"):
        there = tmp_path / name
        there.mkdir()
        monkeypatch.chdir(there)
        create_in_processes(open_here, description, [f"key of {name}"])
        assert (there / f"key of {name}").exists()


def test_work_that_fails_is_told_and_leaves_the_next_work_alone(tmp_path: Path) -> None:
    """The same processes serve again; after an error others take their place."""

    async def describe() -> StorageDescription:
        async with open_storage(tmp_path) as storage:
            return storage.description

    description = asyncio.run(describe())
    for first in ("a", "b"):
        keys = [f"{first}{number}" for number in range(5)]
        won = create_in_processes(registry.reopen, description, keys)
        assert len(won) == PROCESSES
        assert sorted(key for winner in won for key in winner) == keys
        with pytest.raises(ConnectionRefusedError):
            create_in_processes(refuse_to_open, description, keys)


def test_idle_processes_end_quietly_with_an_interrupted_run(tmp_path: Path) -> None:
    """An interrupt from a terminal reaches them as well; they print no tracebacks beside it."""
    finished = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        start_new_session=True,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_run_ends_although_a_fork_of_it_stays(tmp_path: Path) -> None:
    """The fork has copies of the pipes, so that processes do not see that theirs was closed."""
    program = [sys.executable, "-c", FORKING]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        fork = int(run.stdout.readline())
        try:
            assert run.wait(timeout=60) == 0
        finally:
            os.kill(fork, signal.SIGKILL)
            run.kill()
