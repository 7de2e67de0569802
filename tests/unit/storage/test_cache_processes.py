"""Processes that share a cache directory, and that die while they write to it."""

from __future__ import annotations

import fcntl
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.unit.storage import cache_crash_driver, cache_worker

REPOSITORY = Path(__file__).parents[3]
CAPACITY = 40 * 4096


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a process that reads chunks."""
    command = [sys.executable, "-m", cache_worker.__name__, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def used_now(directory: Path) -> int:
    """Return the room that files take at one moment.

    Nobody makes a file while the ledger is locked. Files can still be moved and removed, so that
    each is counted once, however long it takes to look at all.
    """
    ledgers = list(directory.glob("*/ledger"))
    if not ledgers:
        return 0
    sizes: dict[int, int] = {}
    with ledgers[0].open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        for path in directory.rglob("*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode) and path.name != "ledger":
                    sizes[found.st_ino] = -(-found.st_size // 4096) * 4096
    return sum(sizes.values())


def test_processes_share_a_directory(tmp_path: Path) -> None:
    """Each reads right, none exceeds the capacity, and one's misses are another's hits."""
    processes = [start(tmp_path, CAPACITY, seed, 400) for seed in range(4)]
    most = 0
    try:
        while any(process.poll() is None for process in processes):
            most = max(most, used_now(tmp_path))
            time.sleep(0.01)  # the core is theirs
    finally:
        for process in processes:
            process.kill()
        answers = [process.communicate() for process in processes]
    for out, errors in answers:
        assert not errors
        assert int(out) > 20
    # At the end as well, since this process may not have had its turn before.
    assert CAPACITY // 2 < max(most, used_now(tmp_path)) <= CAPACITY
    assert not list(next(tmp_path.rglob("unfinished")).iterdir())


def test_a_second_process_sends_no_request(tmp_path: Path) -> None:
    """The entries of one process serve the next."""
    for expected in (False, True):
        process = start(tmp_path, 1 << 30, 7, 100)
        out, errors = process.communicate(timeout=240)
        assert not errors
        assert (int(out) > 90) is expected


def test_a_process_that_is_killed_leaves_a_cache_that_works(tmp_path: Path) -> None:
    """At any system call: nothing wrong is answered, nothing is left for ever."""
    done = subprocess.run(
        [sys.executable, "-m", cache_crash_driver.__name__, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    calls = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert len(calls) == 9
    assert min(calls) >= 4
    assert max(calls) > 25
