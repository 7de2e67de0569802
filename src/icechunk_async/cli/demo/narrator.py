"""Telling the story of a demonstration on a console."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

__all__ = ["Narrator"]


class Narrator:
    """Prints numbered chapters, sentences, documents and a progress bar."""

    def __init__(self, console: Console) -> None:
        """Print to ``console``."""
        self._console = console
        self._chapters = 0

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._chapters += 1
        self._console.print()
        self._console.print(Text(f"{self._chapters}. {title}", "bold cyan"))

    def say(self, sentence: str) -> None:
        """Print a sentence or several."""
        self._console.print(Text(sentence))

    def command(self, line: str) -> None:
        """Print a command on a line of its own, never folded, so that it can be copied."""
        self._console.print(Text(f"  {line}", "green"), soft_wrap=True)

    def show[D](self, render: Callable[[D, Console], None], document: D) -> None:
        """Print what a command would print."""
        render(document, self._console)

    @contextmanager
    def progress(self, what: str, total: int) -> Generator[Callable[[int], None]]:
        """Show a bar for the length of the block; call what is answered to move it on."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)
