"""A program that kills its children at every system call of a write, and looks at what is left.

It is run on its own because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icechunk_async.storage import ABSENT
from icechunk_async_local.paths import RESERVED_PREFIX, place_of
from tests.unit.backends.local_tools import make_files, read, write

if TYPE_CHECKING:
    from icechunk_async_local.files import Files

_CALLS = (
    *("open", "write", "utime", "fstat", "close", "fsync", "rename", "link", "unlink", "stat"),
    *("mkdir", "copy_file_range"),
)
_BODY = 1 << 16


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

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    setattr(fcntl, "flock", counted(fcntl.flock))  # noqa: B010 - as above, which types allow


def run_until_killed(files: Files, operation: Any, call: int) -> bool:
    """Run an operation in a child that dies at a call; return whether it died."""
    child = os.fork()
    if child == 0:
        kill_at(call)
        operation(files)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def check(root: Path, key: str, allowed: set[bytes | None]) -> None:
    """Look at what a killed writer left, as a process that knows nothing of it."""
    files = make_files(root, lock_timeout_seconds=2.0)
    path = root / key
    found = path.read_bytes() if path.exists() else None
    assert found in allowed, f"{key} holds {found[:20] if found else found!r}"
    names = [name for _, _, names in os.walk(root) for name in names]
    others = {name for name in names if not name.startswith(RESERVED_PREFIX.decode())}
    assert others <= {"key", "source"}, others
    # A new writer proceeds: nobody holds a lock.
    if found is None:
        write(files, key, b"next", ABSENT)
    else:
        version = files.read(place_of(key)).version
        write(files, key, b"next", version)
    assert read(files, key) == b"next"


def main(root: Path) -> None:
    """Kill each kind of write at each of its calls."""
    old, new = b"o" * _BODY, b"n" * _BODY

    def put(files: Files) -> None:
        write(files, "folder/key", new)

    def create(files: Files) -> None:
        write(files, "folder/key", new, ABSENT)

    def update(files: Files) -> None:
        write(files, "folder/key", new, files.read(place_of("folder/key")).version)

    def copy(files: Files) -> None:
        files.copy(place_of("folder/source"), place_of("folder/key"), None)

    def delete(files: Files) -> None:
        files.delete([place_of("folder/key")])

    for operation, before in (
        (put, old),
        (put, None),
        (create, None),
        (update, old),
        (copy, old),
        (delete, old),
    ):
        call = 0
        killed = True
        while killed:
            place = root / operation.__name__ / f"{before is None}-{call}"
            place.mkdir(parents=True)
            files = make_files(place)
            if before is not None:
                write(files, "folder/key", before)
            if operation is copy:
                write(files, "folder/source", new)
            killed = run_until_killed(files, operation, call)
            after = None if operation is delete else new
            check(place, "folder/key", {before, after} if killed else {after})
            call += 1
        sys.stdout.write(f"{operation.__name__} {call - 1}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
