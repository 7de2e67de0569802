"""The tree of errors."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from icechunk_async import errors
from icechunk_async.errors import IcechunkError

CLASSES = sorted(
    (
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, IcechunkError)
    ),
    key=lambda cls: cls.__name__,
)
REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_prints_its_message_and_pickles(cls: type[IcechunkError]) -> None:
    """This includes subclasses of KeyError and ImportError, and the data and notes of errors."""
    error = cls("what was asked, what was found, what to do", key="k", number=3)
    assert str(error) == "what was asked, what was found, what to do"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.context == {"key": "k", "number": 3}


def test_every_error_has_a_kind_of_its_own() -> None:
    """Stable, lower case, with hyphens."""
    kinds = [cls.kind for cls in CLASSES]
    assert len(set(kinds)) == len(kinds)
    assert all(re.fullmatch(r"[a-z][a-z-]*", kind) for kind in kinds)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Names, in the docstring's drawing, and their parents."""
    assert errors.__doc__ is not None
    lines = re.findall(r"^    ([│├└─ ]*)(\w+Error)", errors.__doc__, re.MULTILINE)
    stack: list[str] = []
    drawn: dict[str, str | None] = {}
    for indent, name in lines:
        depth = len(indent) // 4
        stack[depth:] = [name]
        drawn[name] = stack[depth - 1] if depth else None
    actual = {
        cls.__name__: None if cls is IcechunkError else cls.__bases__[0].__name__ for cls in CLASSES
    }
    assert drawn == actual


def test_the_reference_has_a_heading_for_every_kind() -> None:
    """With cause and cure; and for nothing else."""
    text = REFERENCE.read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## `([a-z-]+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert set(sections) == {cls.kind for cls in CLASSES}
    for cls in CLASSES:
        body = sections[cls.kind]
        assert f"`{cls.__name__}`" in body, cls.kind
        assert "**Cause.**" in body, cls.kind
        assert "**Cure.**" in body, cls.kind
