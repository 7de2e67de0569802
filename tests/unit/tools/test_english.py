"""The lint of English finds tics where they are, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools import english

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGURATION = english.Configuration.load()

MODULE = '''
"""What this module is for."""

LIMIT = 3
"""Answer the limit."""


def function(name: str) -> str:
    """Return `so many` names.

    The rest is as
    it is.
    """
    # Whoever asks for it
    # goes on.
    answer = "so-many"
    return f"there is none {name}" + answer
'''


def _found(source: str, passages: Callable[..., object]) -> list[tuple[int, str]]:
    return sorted(
        found
        for passage in passages(source)  # type: ignore[attr-defined]
        for tic in CONFIGURATION.tics
        for found in tic.find(passage)
    )


def test_tics_are_found_in_docstrings_comments_and_messages() -> None:
    """Also across line breaks; names, code in backticks and plain data are left alone."""
    assert _found(MODULE, english.passages_of_python) == [
        (2, "What"),
        (5, "Answer"),
        (11, "as it is"),
        (14, "Whoever"),
        (15, "goes on"),
        (17, "is none"),
    ]


def test_code_and_link_targets_of_a_page_are_left_alone() -> None:
    """Fenced blocks, code in backticks and addresses are no prose."""
    page = "# Limits\n\n```python\n# likewise\n```\n\n`so many` [likewise](likewise.md)\n"
    assert _found(page, english.passages_of_markdown) == [(7, "likewise")]


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the limit.",
        "The server answers with an error.",
        "There are so many that reading them takes minutes.",
        "Check that the name exists and that it is valid.",
        "Wait for it, for at most a second.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    """Words of the tics in another sense are no tics."""
    assert _found(f'"""{sentence}"""', english.passages_of_python) == []


def test_a_finding_says_where_and_what_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command fails and prints the place, the words and a suggestion."""
    (tmp_path / "page.md").write_text("Fine.\n\nThis goes on.\n", encoding="utf-8")
    monkeypatch.setattr(english, "REPOSITORY", tmp_path)
    assert english.main(["page.md"]) == 1
    assert capsys.readouterr().out == ("page.md:3: 'goes on'; instead: continue, happen\n1 tics\n")
    assert english.main(["--counts", "page.md"]) == 1
    assert capsys.readouterr().out == "     1 .\n1 tics\n"


def test_paths_that_lint_checks_exist() -> None:
    """A folder that moves must not leave the list in `english.toml` behind."""
    for path in CONFIGURATION.clean:
        assert list(english.files([path], CONFIGURATION)), path
    assert Path("tools/english.py") in set(english.files(["tools"], CONFIGURATION))
