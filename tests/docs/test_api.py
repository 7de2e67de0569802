"""The reference has a page for every public class, under the path that users import."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module

import griffe
import pytest

import icechunk_async
from icechunk_async import sync
from icechunk_async.storage.protocol import Version
from tests.docs.run_page import REPOSITORY

_PAGES = REPOSITORY / "docs" / "reference" / "api"
_OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
SHOWN = {
    path: page.name
    for page in _PAGES.glob("*.md")
    for path in _OBJECT.findall(page.read_text(encoding="utf-8"))
}


CLASSES = [name for name in icechunk_async.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", CLASSES)
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
        "gateway",
        "proposals",
        "versions",
        "results",
        "spark",
        "sync",
        "sync.versions",
        "sync.virtual",
        "tables",
        "tiledb",
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


@cache
def shown_package() -> griffe.Object | griffe.Alias:
    """Return the package as the reference shows it."""
    extensions = griffe.load_extensions(str(REPOSITORY / "tools" / "shared_text.py"))
    return griffe.load("icechunk_async", search_paths=[REPOSITORY / "src"], extensions=extensions)


@pytest.mark.parametrize("name", ["Repository", "Session"])
def test_methods_of_the_facade_show_the_text_that_they_share_with_native_ones(name: str) -> None:
    """The pages are made from the source, in which it stands only once."""
    shown = shown_package()[f"sync.{name.lower()}.{name}"]
    twins = {
        method: getattr(sync, name).__dict__[method]
        for method in vars(getattr(sync, name))
        if method.endswith("_async")
    }
    assert len(twins) > 5
    for method, twin in twins.items():
        text = inspect.cleandoc(getattr(twin, "__func__", twin).__doc__)
        assert shown.members[method].docstring.value == text, method
        assert shown.members[method].is_function, method


@pytest.mark.parametrize("name", ["Repository", "Session"])
def test_both_methods_of_a_pair_are_shown_with_what_they_return(name: str) -> None:
    """Also where the result of the native method is converted."""
    shown = shown_package()[f"sync.{name.lower()}.{name}"]
    methods = {it: made for it, made in vars(getattr(sync, name)).items() if callable(made)}
    pairs = {it for it, made in methods.items() if "__signature__" in vars(made)}
    assert pairs
    for it in (*pairs, *(f"{it}_async" for it in pairs if not it.endswith("_async"))):
        returned = inspect.signature(methods[it]).return_annotation
        assert str(shown.members[it].returns) == returned, it


@pytest.mark.parametrize("name", ["Repository", "Session"])
def test_methods_that_block_are_shown_as_those_that_are_awaited(name: str) -> None:
    """Also where only the latter is written out: pages show the blocking one of each pair."""
    shown = shown_package()[f"sync.{name.lower()}.{name}"].members
    pairs = [it.removesuffix("_async") for it in shown if it.endswith("_async")]
    assert len(pairs) > 5
    for it in pairs:
        assert shown[it].is_function, it
        assert "async" not in shown[it].labels, it
        assert shown[it].docstring.value == shown[f"{it}_async"].docstring.value, it
        assert "Coroutine" not in str(shown[it].returns), it


def test_code_in_docstrings_is_shown_without_a_second_colon() -> None:
    """Docstrings mark it as reStructuredText does; the pages are Markdown."""
    shown = shown_package()["repository.Repository"].docstring.value
    assert "for the length of a block:\n\n    " in shown
    for module in ("urls", "proposals", "tiledb", "sync.tiledb", "spark"):
        assert "::\n\n" in (import_module(f"icechunk_async.{module}").__doc__ or "")
        assert "::\n\n" not in shown_package()[module].docstring.value


def test_data_classes_show_their_parameters() -> None:
    """Also those whose methods are made when they are used: no source says what they take."""
    shown = shown_package()["storage.protocol.Version"]
    assert [it.name for it in shown.parameters] == ["self", *inspect.signature(Version).parameters]
    assert "dataclass" in shown.labels
