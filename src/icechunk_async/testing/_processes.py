"""Run work in several processes on one storage at the same time.

The processes are started as new programs, so that a backend inherits nothing through a fork, and
receive their work through a pipe. Importing takes them longer than the work, so they stay for the
next test, which opens a handle anew in its working directory; they end with this process. They
import this module and what the work needs: it is not in the room of the suite, which brings pytest.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import PreconditionFailedError
from icechunk_async.storage import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

    type Reopen = Callable[[StorageDescription], AbstractAsyncContextManager[Storage]]
    type Work[A, R] = Callable[[Reopen, StorageDescription, A, Callable[[], None]], R]

__all__ = ["PROCESSES", "create_in_processes", "increment", "increment_in_processes", "serve"]

PROCESSES: Final = 4

_PROGRAM: Final = f"from {__name__} import serve; serve()"
_READY: Final = b"ready"
_PATIENCE_SECONDS: Final = 5.0
"""For a process to end by itself."""
_idle: list[_Worker] = []
"""Processes that wait for work."""


def create_in_processes(
    reopen: Reopen, description: StorageDescription, keys: Sequence[str]
) -> list[list[str]]:
    """Let processes race to create each key; return the keys that each of them won. Blocks."""
    return _run(_create, reopen, description, list(keys))


def increment_in_processes(
    reopen: Reopen, description: StorageDescription, key: str, times: int
) -> None:
    """Let processes increment one number, ``times`` each. Blocks."""
    _run(_increment, reopen, description, (key, times))


async def increment(storage: Storage, key: str, times: int) -> None:
    """Increment the number in an object by compare-and-set, again until it lands."""
    for _ in range(times):
        while True:
            found = await storage.get(key)
            following = b"%d" % (int(bytes(found.data)) + 1)
            try:
                await storage.put(key, following, if_version=found.version)
            except PreconditionFailedError:
                continue
            break


def _run[A, R](
    work: Work[A, R], reopen: Reopen, description: StorageDescription, argument: A
) -> list[R]:
    # Pickled by itself: what it needs may be importable only once the process has this one's path.
    task = pickle.dumps((work, reopen, description, argument))
    workers = [_worker() for _ in range(PROCESSES)]
    try:
        for worker in workers:
            worker.send((sys.path, dict(os.environ), Path.cwd(), task))
        for worker in workers:
            worker.receive()  # open and ready
        for worker in workers:
            worker.send(_READY)  # begin together, so that the work overlaps
        found = [worker.receive() for worker in workers]
    except BaseException:
        for worker in workers:  # one may be in the middle of its work
            worker.end(kill=True)
        raise
    _idle.extend(workers)
    return found


def _worker() -> _Worker:
    """Return a process that waits for work."""
    while _idle:
        worker = _idle.pop()
        if worker.is_alive:
            return worker
        worker.end()
    return _Worker()


class _Worker:
    """A process that does one piece of work after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this very interpreter, and a program of ours
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, value: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            value, error = pickle.load(self._process.stdout)  # noqa: S301 - from a process of ours
        except EOFError:
            raise RuntimeError("a process ended without an answer; look at its output") from None
        if error is not None:
            raise error
        return value

    def end(self, *, kill: bool = False) -> None:
        """Let the process end, which it does where it waits for work; or kill it.

        It is killed as well if it stays: a fork of this process may have a copy of its pipe, or its
        backend a thread that does not end.
        """
        with suppress(BrokenPipeError), self._process as process:
            if not kill and process.stdin is not None:
                process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_SECONDS)
            process.kill()  # does nothing if it has ended


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


def serve() -> None:
    """Run the work sent through the pipe, until it is closed. Runs in a new process."""
    # An interrupt of the run reaches this process as well; the run is the one to tell of it.
    with suppress(KeyboardInterrupt), os.fdopen(os.dup(1), "wb") as to_parent:
        os.dup2(2, 1)  # what anyone prints must not mix with the answers
        from_parent = sys.stdin.buffer

        def answer(value: object, error: BaseException | None = None) -> None:
            pickle.dump((value, error), to_parent)
            to_parent.flush()

        def wait_for_all() -> None:
            answer(_READY)
            pickle.load(from_parent)  # noqa: S301 - from a process started here

        while True:
            try:
                path, environment, directory, task = pickle.load(from_parent)  # noqa: S301 - as above
            except EOFError:
                return
            try:
                sys.path[:] = path
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(directory)
                work, reopen, description, argument = pickle.loads(task)  # noqa: S301 - as above
                answer(work(reopen, description, argument, wait_for_all))
            except Exception as error:  # noqa: BLE001 - it is raised where the process was started
                answer(None, error)


def _create(
    reopen: Reopen,
    description: StorageDescription,
    keys: list[str],
    wait_for_all: Callable[[], None],
) -> list[str]:
    async def race() -> list[str]:
        won: list[str] = []
        async with reopen(description) as storage:
            await asyncio.to_thread(wait_for_all)
            for key in keys:
                try:
                    await storage.put(key, b"mine", if_version=ABSENT)
                except PreconditionFailedError:
                    continue
                won.append(key)
        return won

    return asyncio.run(race())


def _increment(
    reopen: Reopen,
    description: StorageDescription,
    task: tuple[str, int],
    wait_for_all: Callable[[], None],
) -> None:
    async def race() -> None:
        async with reopen(description) as storage:
            await asyncio.to_thread(wait_for_all)
            await increment(storage, *task)

    asyncio.run(race())
