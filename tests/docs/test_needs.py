"""Each how-to names at its top all that it needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.docs.run_page import REPOSITORY, blocks

if TYPE_CHECKING:
    from pathlib import Path

HOW_TOS = sorted((REPOSITORY / "docs" / "how-to").glob("*.md"))
_BASE = {"anyio", "icechunk_async", "numpy", "zarr"}
"""Come with the library, or are it."""
_OURS = ("icechunk_async_", "iris_sample_data", "obspec_utils")
"""Backends in the wheel, and packages that others of the page bring."""
_MODULES = {"opentelemetry": "opentelemetry-sdk", "pytest_asyncio": "pytest-asyncio"}


@cache
def extras() -> dict[str, set[str]]:
    """Return the packages that each extra brings."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {
        extra: {re.split(r"[\[><=,; ]", it)[0] for it in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    found["sql"] |= found["arrow"]
    return found


def needs(page: Path) -> str:
    """Return the paragraph below the title."""
    match = re.match(r"# .+\n\n(\*\*Needs:\*\* [^\n]+)\n\n", page.read_text(encoding="utf-8"))
    assert match, f"{page.name} does not begin with its title and a line '**Needs:** ...'"
    return match[1]


def imported(page: Path) -> set[str]:
    """Return the packages of others that the page's blocks import."""
    names: set[str] = set()
    for _, language, text in blocks(page):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {it.name.partition(".")[0] for it in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return {it for it in names - sys.stdlib_module_names - _BASE if not it.startswith(_OURS)}


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda it: it.stem)
def test_a_how_to_names_what_it_needs_at_its_top(page: Path) -> None:
    """Packages that its blocks import, and extras that it mentions later, are in the first line."""
    first = needs(page)
    assert "pip install" in first
    named = set(re.findall(r"icechunk-async\[([a-z0-9,]+)\]", first))
    named = {extra for group in named for extra in group.split(",")}
    named |= set(re.findall(r"extras? `([a-z0-9]+)`", first))
    assert named <= set(extras())
    brought = set[str]().union(*(extras()[extra] for extra in named))
    missing = {
        it
        for it in imported(page)
        if _MODULES.get(it, it) not in brought and _MODULES.get(it, it) not in first
    }
    assert missing == set()
    text = page.read_text(encoding="utf-8")
    later = set(re.findall(r"icechunk-async\[([a-z0-9,]+)\]", text))
    later = {extra for group in later for extra in group.split(",")} - {"local"}
    assert later <= named


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda it: it.stem)
def test_a_how_to_has_blocks_that_run(page: Path) -> None:
    """Each can be tried; `test_pages` runs them."""
    assert any(language in {"python", "sh"} for _, language, _ in blocks(page))
