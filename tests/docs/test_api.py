"""The reference has a page for every public class, under the path that users import."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

import icechunk_async
from tests.docs.run_page import REPOSITORY

_PAGES = REPOSITORY / "docs" / "reference" / "api"
_OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
SHOWN = {
    path: page.name
    for page in _PAGES.glob("*.md")
    for path in _OBJECT.findall(page.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", icechunk_async.__all__)
def test_a_public_class_has_a_page(name: str) -> None:
    """Its only object is the class, by the path that users write."""
    page = SHOWN[f"icechunk_async.{name}"]
    assert [path for path, shown in SHOWN.items() if shown == page] == [f"icechunk_async.{name}"]


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "conflicts",
        "credentials",
        "spark",
        "sync",
        "tables",
        "upkeep",
        "virtual",
        "xarray",
    ],
)
def test_a_public_module_has_a_page(module: str) -> None:
    """All of its public names are shown there, or on pages of classes."""
    path = f"icechunk_async.{module}"
    assert path in SHOWN
    assert import_module(path).__all__


def test_every_object_exists() -> None:
    """Paths lead to modules, or to names in modules."""
    for path in SHOWN:
        owner, _, name = path.rpartition(".")
        if name not in dir(import_module(owner)):
            import_module(path)


def test_the_index_lists_every_page() -> None:
    """In the order of its tables."""
    index = (_PAGES / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in _PAGES.glob("*.md") if f"({page.name})" not in index]
    assert missing == ["index.md"]
