"""A program that kills its children at every system call of a cached write or removal.

It is run on its own because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icechunk_async.storage import Retrieved, Version
from tests.unit.storage.cache_tools import files_of, tier, used

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = (
    *("open", "write", "utime", "fstat", "close", "rename", "unlink", "stat", "lstat", "mkdir"),
    *("ftruncate", "pread", "pwrite", "scandir", "rmdir", "listdir"),
)
CAPACITY = 10 * 4096
KEYS = [f"chunks/{number}" for number in range(10)]


def answer(key: str) -> Retrieved:
    """Make what is kept under a key."""
    data = key.encode() * 100
    return Retrieved(data, Version("v"), len(data))


def write(directory: Path, key: str) -> None:
    """Keep one object."""
    tier(directory, CAPACITY).write(key, None, answer(key), still_right=lambda: True)


def write_new(directory: Path) -> None:
    """Keep an object that was not cached before."""
    write(directory, "chunks/new")


def write_again(directory: Path) -> None:
    """Replace an object."""
    write(directory, "chunks/0")


def drop(directory: Path) -> None:
    """Remove objects."""
    tier(directory, CAPACITY).drop(KEYS[:3])


def kill_at(call: int) -> None:
    """Let this process die just before its n-th system call."""
    calls = 0

    def counted(original: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return original(*arguments, **keywords)

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    setattr(fcntl, "flock", counted(fcntl.flock))  # noqa: B010 - as above, which types allow


def run_until_killed(directory: Path, operation: Callable[[Path], None], call: int) -> bool:
    """Run an operation in a child that dies at a call; return whether it died."""
    child = os.fork()
    if child == 0:
        kill_at(call)
        operation(directory)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def check(directory: Path) -> None:
    """Look at what a killed process left, as one that knows nothing of it."""
    assert used(directory) <= CAPACITY
    disk = tier(directory, CAPACITY)
    for key in (*KEYS, "chunks/new"):
        assert disk.read(key, None) in (None, answer(key))
    # A new writer proceeds, and the room that the dead one had is used again, all of it.
    later = [f"chunks/later-{number}" for number in range(12)]
    for key in later:
        write(directory, key)
        assert used(directory) <= CAPACITY
        assert disk.read(key, None) == answer(key)
    assert not [file for file in files_of(directory) if file.parent.name == "unfinished"]
    for key in later[:10]:
        write(directory, key)
    assert len(files_of(directory)) >= 9


def main(root: Path) -> None:
    """Kill each operation at each of its calls, in an empty directory and in a full one."""
    for operation in (write_new, write_again, drop):
        for filled in (0, 5, 10):
            call = 0
            killed = True
            while killed:
                directory = root / f"{operation.__name__}-{filled}-{call}"
                for key in KEYS[:filled]:
                    write(directory, key)
                killed = run_until_killed(directory, operation, call)
                check(directory)
                call += 1
            sys.stdout.write(f"{operation.__name__} {filled} {call - 1}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
