"""Results for people: a table for the terminal, and pictures."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from benchmarks.results import BUSY, OURS, lines, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.results import Line, Result

__all__ = ["draw", "draw_growth", "grown", "print_table"]

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
        # Bars begin at 1, where both take the same, and go to the left where we lost.
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


_AMOUNT: Final = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.,])\d+(?![\w.,])")
"""A whole number that stands alone, as a size does."""


def grown(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return workloads that were measured at three sizes or more, by name and size.

    They are named alike but for one number, which becomes *n*.
    """
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.metric != "seconds" or not {OURS, "official"} <= result.samples.keys():
            continue
        # Each number of a name may be the one that grows; names with fewer than three sizes are
        # dropped.
        for amount in _AMOUNT.finditer(result.workload):
            name = f"{result.workload[: amount.start()]}n{result.workload[amount.end() :]}"
            found.setdefault(name, {})[int(amount[0].replace(",", ""))] = result
    return {name: dict(sorted(sizes.items())) for name, sizes in found.items() if len(sizes) > 2}


def draw_growth(results: Sequence[Result], path: Path) -> None:
    """Draw time against size, one small picture a workload, ours and the official engine's."""
    import matplotlib as mpl  # noqa: PLC0415 -- only where a picture is drawn

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    found = grown(results)
    columns = 3
    rows = max(1, -(-len(found) // columns))
    figure, places = plt.subplots(
        rows, columns, figsize=(11, 2.6 * rows), layout="constrained", squeeze=False
    )
    colours = {OURS: "#2a9d8f", "official": "#d1495b"}
    for axes in places.flat[len(found) :]:
        axes.set_axis_off()
    for axes, (name, sizes) in zip(places.flat, found.items(), strict=False):
        for contender, colour in colours.items():
            milliseconds = [it.median(contender) * 1000 for it in sizes.values()]
            axes.plot(list(sizes), milliseconds, "o-", color=colour, label=contender)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title("\n".join(textwrap.wrap(name, 44)), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_xlabel("n", fontsize=7)
        axes.set_ylabel("milliseconds", fontsize=7)
        axes.grid(visible=True, alpha=0.3)
    if found:
        places.flat[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)
