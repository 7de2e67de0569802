"""A bar on standard error while a long command runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from icechunk_async.cli.console import make_console

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.progress import TaskID

    from icechunk_async.repository.progress import Progress, ProgressCallback

__all__ = ["showing_progress"]


@contextmanager
def showing_progress() -> Generator[ProgressCallback]:
    """Show a bar for each phase, where standard error is a terminal; it goes when the block ends.

    Yields:
        What to report progress to.
    """
    from rich.progress import (  # noqa: PLC0415  # slow to import
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415  # slow to import

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: Progress) -> None:
            task = tasks.get(progress.phase)
            if task is None:
                task = tasks[progress.phase] = bars.add_task(progress.phase, total=None)
            bars.update(task, completed=progress.done, total=progress.total)

        yield show
