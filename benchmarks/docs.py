"""Puts results into the documentation: ``python -m benchmarks.docs [RESULTS ...]``.

Of several files the later ones count where they say more. Keeps the JSON beside the page, draws the
picture, and replaces the tables between the page's markers. Nothing in them is written by hand, so
they say what was measured last.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path
from typing import Final

from benchmarks.reasons import REASONS
from benchmarks.report import draw
from benchmarks.results import BUSY, OURS, ZARR_ALONE, Result, lines, shown

__all__ = ["machine_text", "tables"]

_FOLDER: Final = Path(__file__).parents[1] / "docs" / "explanation"
PAGE: Final = _FOLDER / "performance.md"
RESULTS: Final = _FOLDER / "performance.json"
_BEGIN, _END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
_OFFICIAL: Final = "official"


def tables(results: list[Result]) -> str:
    """Answer a table for each operation."""
    found = []
    for (operation, about), group in groupby(results, key=lambda it: (it.operation, it.about)):
        heads = "| Workload | Ours | Official | Ratio | CPU | Target | Others |\n"
        rule = "| --- | --: | --: | --: | --: | --: | --- |\n"
        own = list(group)
        rows = "".join(map(_row, own))
        why = (
            f"\nWhat bounds it: {REASONS[operation].strip()}\n"
            if any(map(_falls_short, own))
            else ""
        )
        found.append(f"### {operation}\n\n{about}\n\n{heads}{rule}{rows}{why}")
    return "\n".join(found)


def _falls_short(result: Result) -> bool:
    """Tell whether a target is missed, or the official engine ahead."""
    if result.limit is not None and result.median(OURS) > result.limit:
        return True
    ahead = any(it.peer == _OFFICIAL and it.verdict == "lost" for it in lines([result]))
    return ahead or any(it.is_met is False for it in lines([result]))


def _row(result: Result) -> str:
    found = {line.peer: line for line in lines([result])}
    official = found.pop(_OFFICIAL, None)
    target = ""
    if result.limit is not None:
        reached = "reached" if result.median(OURS) <= result.limit else "missed"
        target = f"at most {shown(result.limit, result.metric)}, {reached}"
    others = ", ".join(_other(line.peer, line.ratio, result) for line in found.values())
    metric = "" if result.metric == "seconds" else f": {result.metric}"
    busy = " \\*" if result.busy > BUSY else ""
    cells = [f"{result.workload}{metric}{busy}", shown(result.median(OURS), result.metric)]
    if official is None:
        cells += ["", "", ""]
    else:
        mark = "**" if official.verdict == "lost" else ""
        cells += [
            shown(official.theirs, result.metric),
            f"{mark}{_factor(official.ratio)}{' lost' if mark else ''}{mark}",
            "" if official.cpu_ratio is None else _factor(official.cpu_ratio),
        ]
        if official.target is not None:
            reached = "reached" if official.is_met else "missed"
            target = f"{official.target:.3g}, {reached}"
            if ZARR_ALONE in found and official.is_met is False:
                bound = official.theirs / found[ZARR_ALONE].theirs
                if bound < official.target:
                    target += f"; a store of no cost: {_factor(bound)}"
    return "| " + " | ".join([*cells, target, others]) + " |\n"


def _other(peer: str, ratio: float, result: Result) -> str:
    return f"{result.floor if peer == 'floor' else peer} {_factor(ratio)}"


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def machine_text(machine: dict[str, str], results: list[Result]) -> str:
    """Answer where and when it was measured, and what else the machine did."""
    days = sorted({it.taken[:10] for it in results})
    busy = sum(it.busy > BUSY for it in results)
    packages = ", ".join(
        f"{name} {version}"
        for name, version in machine.items()
        if name not in {"processor", "system", "python"}
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Measured {when} on {machine['processor']}, {machine['system']}, Python "
        f"{machine['python']}, {packages}. Rows marked \\* ({busy} of {len(results)}) were "
        "measured while others used the machine: only ratios mean something there, and small "
        "differences do not.\n"
    )


def main(sources: list[Path]) -> None:
    """Refresh page, JSON and picture."""
    documents = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    machine: dict[str, str] = documents[-1]["machine"]
    processors = [document["machine"]["processor"].split(" or ") for document in documents]
    machine["processor"] = " or ".join(dict.fromkeys(chain.from_iterable(processors)))
    merged = {key: each for document in documents for key, each in document["results"].items()}
    results = sorted((Result(**each) for each in merged.values()), key=lambda it: it.operation)
    document = {"machine": machine, "results": {it.key: asdict(it) for it in results}}
    RESULTS.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(results, RESULTS.with_suffix(".png"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    body = f"{machine_text(machine, results)}\n{tables(results)}\n"
    PAGE.write_text(f"{before}{_BEGIN}\n{body}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [RESULTS])
