"""Run tests on a busy machine: ``python -m tests.busy [arguments of pytest]``.

Four processes for each core compute without end, and every wait for the disk takes longer. The
tests run twice: a test that depends on who is quick fails in one of the runs, sooner or later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

_PROCESSES_A_CORE: Final = 4
_RUNS: Final = 2
_BUSY: Final = "while True: pass"


def main(arguments: list[str]) -> int:
    """Run pytest beside the load; return the exit code of the first run that failed, or 0."""
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.slow_disk",
        "-o",
        "timeout=1800",
        *arguments,
    ]
    with ExitStack() as stack:
        for _ in range(_PROCESSES_A_CORE * (os.cpu_count() or 1)):
            load = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(load.kill)
        codes = [subprocess.call(tests) for _ in range(_RUNS)]
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
