"""Runs contests: ``python -m benchmarks [words of a row] [--size quick|full|huge] [...]``.

Words choose tests as pytest's ``-k`` does: ``python -m benchmarks store and get_10_kb``. Without
any, all are run. What begins with a dash goes to pytest.
"""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path

import pytest


def main(arguments: list[str]) -> int:
    """Run pytest on this directory."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    return pytest.main(
        [
            *("-p", "no:cacheprovider", "-W", "default", "-o", "timeout=0", "-q", "-rs"),
            *("-o", "asyncio_debug=false", "--benchmark-quiet", "--no-header"),
            *(["-k", " ".join(words)] if words else []),
            *arguments[len(words) :],
            str(Path(__file__).parent),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
