"""The page about the architecture describes the present source."""

from __future__ import annotations

import re

from tools import architecture

from tests.docs.run_page import REPOSITORY

_MODULE = re.compile(r"`([\w/]+(?:\.py|/))`")


def test_picture_and_table_are_current() -> None:
    """If this fails, run `python -m tools.architecture`."""
    assert architecture.outdated() == {}


def test_modules_named_on_the_page_exist() -> None:
    """Paths in backticks are relative to the package, or to the repository."""
    page = architecture.PAGE.read_text(encoding="utf-8")
    roots = (REPOSITORY / "src" / "icechunk_async", REPOSITORY)
    missing = [
        name for name in _MODULE.findall(page) if not any((root / name).exists() for root in roots)
    ]
    assert missing == []
