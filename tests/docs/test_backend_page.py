"""The page for authors of backends shows the very files that are tested."""

from __future__ import annotations

import pytest

from tests.docs.run_page import REPOSITORY, blocks

STRANGER = REPOSITORY / "tests" / "stranger"


@pytest.mark.parametrize(
    "file", ["src/icechunk_sqlite/__init__.py", "pyproject.toml", "test_conformance.py"]
)
def test_the_page_shows_the_file(file: str) -> None:
    """Byte for byte; after a change, copy the file into its block."""
    page = REPOSITORY / "docs" / "how-to" / "write-a-backend.md"
    shown = [text for _, _, text in blocks(page)]
    assert (STRANGER / file).read_text(encoding="utf-8") in shown
