"""One writer of a crowd, in a process of its own or a thread.

``python -m benchmarks.waiting ENGINE ENDPOINT PREFIX NUMBER COMMITS`` prints ``ready``, waits for a
line, commits, and prints for how many seconds each commit waited, and its processor time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("ICECHUNK_NO_LOGS", "1")

import zarr

from benchmarks.peers import PACKAGES, open_repository
from benchmarks.s3_peers import blocking_storage

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Waits", "processes", "threads"]

_CHUNK_BYTES = 600

type Waits = tuple[float, list[float], float]
"""Seconds until all were done, seconds of each commit, seconds of processor time."""


def _write(
    engine: str, end: str, prefix: str, number: int, commits: int, start: Callable[[], object]
) -> list[float]:
    """Open a repository, wait for the start, and commit a chunk of this writer again and again."""
    package = PACKAGES[engine]
    repository = open_repository(engine, blocking_storage(engine, end, prefix))
    buffer = zarr.core.buffer.default_buffer_prototype().buffer

    def changed(turn: int) -> Any:
        session = repository.writable_session("main")
        value = buffer.from_bytes(b"%0600d" % (number * 1000 + turn))
        asyncio.run(session.store.set(f"a/c/{number}", value))
        return session

    # Flushed and not committed: it does all that a commit does but for moving the branch.
    changed(0).flush("code is loaded, and connections are open")
    start()
    waits: list[float] = []
    for turn in range(commits):
        session = changed(turn)
        began = time.perf_counter()
        session.commit(f"{number} {turn}", rebase_with=package.ConflictDetector())
        waits.append(time.perf_counter() - began)
    return waits


def threads(engine: str, end: str, prefix: str, writers: int, commits: int) -> Waits:
    """Let threads of this process write, each with a repository of its own."""
    waits: list[float] = []
    start = threading.Barrier(writers + 1)

    def work(number: int) -> None:
        waits.extend(_write(engine, end, prefix, number, commits, start.wait))

    started = [threading.Thread(target=work, args=(number,)) for number in range(writers)]
    for thread in started:
        thread.start()
    start.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for thread in started:
        thread.join()
    return time.perf_counter() - began, waits, time.process_time() - cpu


def processes(engine: str, end: str, prefix: str, writers: int, commits: int) -> Waits:
    """Let processes write."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        __name__,
                        engine,
                        end,
                        prefix,
                        f"{number}",
                        f"{commits}",
                    ],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    encoding="utf-8",
                )
            )
            for number in range(writers)
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began = time.perf_counter()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.stdout.readline()) for process in started if process.stdout]
        seconds = time.perf_counter() - began
    waits = [wait for it in found for wait in it["waits"]]
    return seconds, waits, sum(it["cpu"] for it in found)


def _main(engine: str, end: str, prefix: str, number: str, commits: str) -> None:
    began = 0.0

    def start() -> None:
        nonlocal began
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        began = time.process_time()

    waits = _write(engine, end, prefix, int(number), int(commits), start)
    sys.stdout.write(json.dumps({"waits": waits, "cpu": time.process_time() - began}) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
