"""Runs contests: ``python -m benchmarks [words of a row] [--size quick|full|huge] [...]``.

Words choose tests as pytest's ``-k`` does: ``python -m benchmarks store and get_10_kb``. Without
words all tests run, each file in a separate process. In one process some reads took half as long
again after twenty minutes of other contests, because of the memory left behind in the allocator.
Arguments that start with a dash go to pytest.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from benchmarks.docs import load
from benchmarks.report import print_table
from benchmarks.results import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE: Final = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Run pytest on this directory; return its exit code, or the first that is not 0."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    options = arguments[len(words) :]
    if words or "quick" in options:
        return pytest.main(_for_pytest(["-k", " ".join(words)] if words else [], options, _HERE))
    began = datetime.now(UTC).isoformat(timespec="seconds")
    codes = [
        subprocess.call([sys.executable, "-m", "pytest", *_for_pytest(["--part"], options, file)])
        for file in sorted(_HERE.glob("test_*.py"))
    ]
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--results", type=Path, default=RESULTS)
    path = parser.parse_known_args(options)[0].results
    if path.exists():
        print_table(result for result in load(path)[1] if result.taken >= began)
    return next(filter(None, codes), 0)


def _for_pytest(choice: Sequence[str], options: Sequence[str], where: Path) -> list[str]:
    return [
        *("-p", "no:cacheprovider", "-W", "default", "-o", "timeout=0", "-q", "-rs"),
        *("--benchmark-quiet", "--no-header"),
        *choice,
        *options,
        str(where),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
