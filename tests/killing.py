"""Killing forked processes, as ``kill -9`` does, before or after a request to their storage.

Programs that kill run on their own, see `run_killer`: a process with threads, such as pytest, must
not fork.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from icechunk_async.testing.wrapping import WrappedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator
    from typing import Any

    from icechunk_async.storage import Storage

__all__ = ["FAST", "WRITES", "Killing", "in_child", "kills", "run_killer"]

_REPOSITORY = Path(__file__).parents[1]
_SECONDS = 400

FAST = {"durability": "none"}
"""A killed process loses nothing that the system has; only a power cut would."""
WRITES = ("put", "copy", "delete")
"""The requests that change a storage."""


class Killing(WrappedStorage):
    """Kills the process before or after its n-th request."""

    def __init__(self, storage: Storage, place: int, of: Collection[str] | None = None) -> None:
        """Die at a place: two for each request, before and after it; None counts all operations."""
        super().__init__(storage)
        self._left, self._of = place, of

    async def before(self, operation: str, key: str) -> None:
        """Count, and perhaps die: what is asked for is not done."""
        del key
        if self._of is not None and operation not in self._of:
            return
        # 0 is before the first request, 1 after it, 2 before the second: a reply that is lost is a
        # place apart from a request that is.
        if self._left == 0:
            # The signal and not `os._exit`: buffers, finally and atexit must not run.
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    async def after(self, operation: str, key: str) -> None:
        """Count, and perhaps die: what was asked for is done."""
        await self.before(operation, key)


def in_child(work: Coroutine[Any, Any, None]) -> bool:
    """Run in a forked process; return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 -- the parent shows it
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    # In the parent, where it never runs: else Python warns of a coroutine that nobody awaited.
    work.close()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        sys.exit("a child failed")
    return os.WIFSIGNALED(status)


def kills(
    fresh: Path, work: Callable[[Path, int], Coroutine[Any, Any, None]], first: int, step: int
) -> Iterator[tuple[Path, bool]]:
    """Kill at every ``step``-th place from ``first`` on, until the work comes to its end.

    Args:
        fresh: a directory; each child works on a copy of it, beside it.
        work: returns the work of a child on a copy that dies at a place.
        first: the first place.
        step: how far they are apart.

    Yields:
        Each copy, and whether the child was killed; the last one was not.
    """
    at, died = first, True
    # The first place that nobody dies at is behind the last request: all before it were tried.
    while died:
        root = fresh.with_name(f"at-{at}")
        shutil.copytree(fresh, root)
        died = in_child(work(root, at))
        yield root, died
        at += step


def run_killer(module: str, *arguments: object) -> str:
    """Run a program that kills its children; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=_REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
