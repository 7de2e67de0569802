"""How far a long operation has come, for a progress bar or a log."""

from __future__ import annotations

from collections.abc import Callable

from icechunk_async._runtime.dataclasses import dataclass

__all__ = ["Progress", "ProgressCallback", "no_progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One report."""

    phase: str
    """A few words about the work; the same for the length of the phase."""
    done: int
    """Pieces of work that are done; never decreases within a phase."""
    total: int | None = None
    """All pieces of the phase that are known so far; None if unknown."""


type ProgressCallback = Callable[[Progress], None]
"""Called on the event loop, so it must be quick. What it raises ends the operation."""


def no_progress(progress: Progress) -> None:
    """Take a report, and do nothing with it."""
    del progress
