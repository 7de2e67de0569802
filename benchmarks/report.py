"""Results for people: a table for the terminal, one for the documentation, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from benchmarks.results import BUSY, lines, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.results import Line, Result

__all__ = ["draw", "print_table"]

_COLOURS: Final = {"won": "green", "level": "yellow", "lost": "red"}


def print_table(results: Iterable[Result]) -> None:
    """Print wins and losses alike."""
    table = Table(
        title="Medians; ratios above 1: the peer takes more; CPU: of processor time",
        title_justify="left",
    )
    for heading in ("workload", "ours", "peer", "theirs", "ratio", "CPU", "target", "verdict"):
        right = heading in {"ours", "theirs", "ratio", "CPU", "target"}
        table.add_column(heading, justify="right" if right else "left", no_wrap=right)
    last = ""
    for line in lines(results):
        first = line.result.key != last
        last = line.result.key
        if first:
            table.add_section()
        table.add_row(
            _titled(line.result) if first else "",
            shown(line.ours, line.result.metric) if first else "",
            line.peer,
            shown(line.theirs, line.result.metric),
            f"{line.ratio:.2f}",
            "" if line.cpu_ratio is None else f"{line.cpu_ratio:.2f}",
            _target(line),
            _verdict(line),
        )
    Console(width=150).print(table)


def _titled(result: Result) -> str:
    metric = "" if result.metric == "seconds" else f": {result.metric}"
    busy = f" [dim](busy machine: {result.busy:.0%})[/]" if result.busy > BUSY else ""
    return f"{result.workload}{metric}{busy}"


def _target(line: Line) -> str:
    if line.target is not None:
        return f"{line.target:.3g}"
    limit = line.result.limit
    return "" if limit is None else f"ours at most {shown(limit, line.result.metric)}"


def _verdict(line: Line) -> str:
    if line.peer == "floor":
        return f"[dim]{line.result.floor}[/]"
    limit = line.result.limit
    is_over = limit is not None and line.ours > limit
    missed = ", target missed" if line.is_met is False or is_over else ""
    return f"[{_COLOURS[line.verdict]}]{line.verdict}[/]{missed}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the ratios to the official engine, one bar a workload, on a logarithmic axis."""
    import matplotlib as mpl  # noqa: PLC0415 -- only where a picture is drawn

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    chosen = [line for line in lines(results) if line.peer == "official"][::-1]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.26 * len(chosen)), layout="constrained")
    colours = {"won": "#2a9d8f", "level": "#e9c46a", "lost": "#d1495b"}
    axes.barh(
        range(len(chosen)),
        [line.ratio - 1 for line in chosen],
        left=1,
        color=[colours[line.verdict] for line in chosen],
    )
    for place, line in enumerate(chosen):
        if line.target is not None:
            axes.plot([line.target] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
        side = {"ha": "left", "x": 4} if line.ratio >= 1 else {"ha": "right", "x": -4}
        axes.annotate(
            f"{line.ratio:.2g}x" if line.ratio < 10 else f"{line.ratio:.0f}x",
            (line.ratio, place),
            xytext=(side["x"], 0),
            textcoords="offset points",
            ha=side["ha"],
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(chosen)))
    axes.set_yticklabels(
        [
            line.result.workload
            + ("" if line.result.metric == "seconds" else f" ({line.result.metric})")
            for line in chosen
        ],
        fontsize=7,
    )
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times what we take, by the official engine; black marks are targets")
    axes.margins(x=0.12, y=0.01)
    figure.savefig(path, dpi=130)
    plt.close(figure)
