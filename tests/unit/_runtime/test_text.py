"""Text of others that is shown on a terminal."""

from __future__ import annotations

import pytest

from icechunk_async._runtime.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Größe 数 🌍", "Größe 数 🌍"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J", "\\x9b2J"),
        ("a\rb\nc", "a\\rb\\nc"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\0", "\\x00"),
    ],
)
def test_characters_that_could_do_harm_are_escaped(text: str, shown: str) -> None:
    """Those that move the cursor, colour or reorder; others stay."""
    assert printable(text) == shown


def test_some_characters_can_be_kept() -> None:
    """The lines of a message, for example."""
    assert printable("a\nb\r\x1b", keep="\n") == "a\nb\\r\\x1b"
