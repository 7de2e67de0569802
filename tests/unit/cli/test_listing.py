"""Tables that are printed without Rich: the lines are Rich's."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from icechunk_async.cli.console import Listing, cell, joined, make_console
from tests.helpers import examples

if TYPE_CHECKING:
    from icechunk_async.cli.console import Cell

COLUMNS = st.lists(
    st.sampled_from(["SNAPSHOT", "", "REFS", "MESSAGE", "A"]), min_size=1, max_size=5
)
TEXTS = st.text(st.characters(max_codepoint=0x17F) | st.sampled_from("ab \n日é🧊"), max_size=12)


def rich_lines(table: Listing) -> str:
    """Return the lines that Rich prints into a pipe."""
    console = Console(file=io.StringIO(), width=10_000, highlight=False, markup=False, emoji=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.data(), COLUMNS, st.booleans())
@examples(200)
def test_lines_are_those_of_rich(data: st.DataObject, columns: list[str], header: bool) -> None:  # noqa: FBT001
    """For any letters, lengths and newlines; tables that are not simple are left to it."""
    table = Listing(*columns, header=header)
    texts: list[str] = []
    for _ in range(data.draw(st.integers(0, 3))):
        row: list[Cell] = []
        for _ in columns:
            parts = data.draw(st.lists(TEXTS, min_size=1, max_size=2))
            texts += parts
            row.append(joined(", ", [cell(it, "green") for it in parts]))
        table.add_row(*row)
    lines = table.lines(10_000)
    if lines is None:
        assert not header or not "".join(texts).isascii() or not "".join([*columns, *texts]).strip()
    else:
        assert "".join(f"{line}\n" for line in lines) == rich_lines(table)


def test_a_table_without_a_letter_is_left_to_rich() -> None:
    """Which makes one column that is a space wide, and two that are not."""
    table = Listing("", header=False)
    table.add_row(cell(""))
    assert table.lines(100) is None


def test_a_table_that_is_too_wide_is_left_to_rich() -> None:
    """Which folds it."""
    table = Listing("SNAPSHOT", "MESSAGE")
    table.add_row(cell("a"), cell("x" * 90))
    assert table.lines(100) == ["SNAPSHOT  MESSAGE" + " " * 83, "a" + " " * 9 + "x" * 90]
    assert table.lines(99) is None


def test_rich_draws_progress_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The console of a pipe serves as one of Rich's."""
    with Progress(console=make_console()) as bar:
        bar.advance(bar.add_task("loading", total=1))
    assert "loading" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [{}, {"COLUMNS": "40"}, {"FORCE_COLOR": "1"}])
def test_a_pipe_prints_as_rich_does(
    asked: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the environment says that it is to be as narrow or colourful as a terminal."""
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    table = Listing("BRANCH", "MESSAGE")
    table.add_row(cell("main", "green"), cell("a message of some words that is long " * 2))
    make_console().print(table)
    make_console().print("There are no tags.")
    printed = capsys.readouterr().out
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if not asked:
        console.width = 10_000
    console.print(table)
    console.print("There are no tags.")
    assert printed == capsys.readouterr().out
    assert ("\x1b" in printed) is ("FORCE_COLOR" in asked)
    assert (printed.count("\n") > 3) is bool(asked)
