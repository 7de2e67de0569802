"""The same expression on the official package and on the facade, and what both answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import icechunk_async.sync as facade
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PACKAGES", "alike", "both", "failing_alike", "in_their_words"]

PACKAGES: Sequence[Any] = (icechunk, facade)


def in_their_words(text: str) -> str:
    """Return a display with the official module name, and with times in one notation."""
    text = text.replace("icechunk_async.sync", "icechunk")
    text = text.replace("=icechunk.ChecksumAlgorithm.", "=").replace(
        ": icechunk.ChecksumAlgorithm.", ": "
    )
    text = re.sub(r"Some\((\{[^}]*\})\)", r"\1", text)
    return re.sub(r"datetime\.datetime\(([^)]*)\)|\d{4}-\d\d-\d\dT[\d:.+]*", "<time>", text)


def both(make: Callable[[Any], object]) -> tuple[Any, Any]:
    """Return the values of an expression with the official package and with ours."""
    theirs, ours = (make(package) for package in PACKAGES)
    return theirs, ours


def alike(make: Callable[[Any], object]) -> Any:
    """Compare the displays of what both packages make; answer ours."""
    theirs, ours = both(make)
    assert in_their_words(repr(ours)) == in_their_words(repr(theirs))
    assert in_their_words(str(ours)) == in_their_words(str(theirs))
    return ours


def failing_alike(make: Callable[[Any], object]) -> str:
    """Make sure that both packages refuse with the same built-in class; answer our message."""
    raised: list[Exception] = []
    for package in PACKAGES:
        try:
            made = make(package)
        except Exception as error:  # noqa: BLE001 - which one is the question
            raised.append(error)
        else:
            raise AssertionError(f"{package.__name__} made {made!r}")
    theirs, ours = raised
    built_in = next(cls for cls in type(theirs).__mro__ if cls.__module__ == "builtins")
    official = [cls.__name__ for cls in type(theirs).__mro__ if cls.__module__ == "icechunk"]
    assert isinstance(ours, built_in)
    found = [cls.__name__ for cls in type(ours).__mro__]
    assert set(official) <= set(found), (official, found)
    return str(ours)
