"""Run work in several processes on one storage at the same time.

The processes are started as new programs, so that a backend inherits nothing through a fork, and
receive their work through a pipe.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

from icechunk_async.errors import PreconditionFailedError
from icechunk_async.storage import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage, StorageDescription

    type Reopen = Callable[[StorageDescription], AbstractAsyncContextManager[Storage]]
    type Work[A, R] = Callable[[Reopen, StorageDescription, A, Callable[[], None]], R]

__all__ = ["PROCESSES", "create_in_processes", "increment", "increment_in_processes", "serve"]

PROCESSES: Final = 4

_PROGRAM: Final = f"from {__name__} import serve; serve()"
_READY: Final = b"ready"


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
    task = pickle.dumps((work, reopen, description, argument))
    with ExitStack() as stack:
        pipes = [stack.enter_context(_process()) for _ in range(PROCESSES)]
        for to_child, _ in pipes:
            pickle.dump((sys.path, task), to_child)
            to_child.flush()
        for _, from_child in pipes:
            _receive(from_child)  # open and ready
        for to_child, _ in pipes:
            pickle.dump(_READY, to_child)  # begin together, so that the work overlaps
            to_child.flush()
        return [_receive(from_child) for _, from_child in pipes]


@contextmanager
def _process() -> Generator[tuple[IO[bytes], IO[bytes]]]:
    with subprocess.Popen(  # noqa: S603 - this very interpreter, and a program of ours
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdin, process.stdout
        except BaseException:
            process.kill()
            raise


def _receive(from_child: IO[bytes]) -> Any:
    try:
        value, error = pickle.load(from_child)  # noqa: S301 - from a process started here
    except EOFError:
        raise RuntimeError("a process ended without an answer; look at its output") from None
    if error is not None:
        raise error
    return value


def serve() -> None:
    """Run the work sent through the pipe. Runs in a new process."""
    with os.fdopen(os.dup(1), "wb") as to_parent:
        os.dup2(2, 1)  # what anyone prints must not mix with the answers
        from_parent = sys.stdin.buffer

        def answer(value: object, error: BaseException | None = None) -> None:
            pickle.dump((value, error), to_parent)
            to_parent.flush()

        def wait_for_all() -> None:
            answer(_READY)
            pickle.load(from_parent)  # noqa: S301 - from a process started here

        try:
            sys.path[:], task = pickle.load(from_parent)  # noqa: S301 - as above
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
