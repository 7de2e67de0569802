"""Write results into `benchmarks/results` and the documentation.

`python -m benchmarks.docs [RESULTS ...]` merges the files, of which later ones win, into
`latest.json`, draws the picture, and replaces the tables between the markers of `README.md` beside
it and of the summary in `docs/explanation/performance.md`. The tables also show the ratios that
earlier runs found on other machines.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.reasons import REASONS
from benchmarks.report import draw, draw_growth
from benchmarks.results import BUSY, OURS, ZARR_ALONE, Result, lines, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    type Document = tuple[dict[str, str], list[Result]]
    """A machine, and what was measured on it."""

__all__ = ["elsewhere_text", "load", "machine_text", "ratios", "summary", "tables"]

_FOLDER: Final = Path(__file__).parent / "results"
PAGE: Final = _FOLDER / "README.md"
SUMMARY: Final = Path(__file__).parents[1] / "docs" / "explanation" / "performance.md"
RESULTS: Final = _FOLDER / "latest.json"
ELSEWHERE: Final = sorted(_FOLDER.glob("elsewhere-*.json"))
"""Results of other machines, which show how far ratios vary."""
_BEGIN, _END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
_SUMMARY_BEGIN, _SUMMARY_END = "<!-- summary: begin -->\n", "<!-- summary: end -->\n"
_SUMMARIZED: Final = {
    "store: get a local chunk of 10 KB, 1 at a time": "Read a 10 KB chunk, local disk",
    "store: get a local chunk of 1 MB, 1 at a time": "Read a 1 MB chunk, local disk",
    "store: list_prefix over 10,000 nodes": "List 10,000 nodes",
    "zarr: read 5,000 chunks of 10 KB, default pipeline": (
        "Read an array of 5,000 chunks of 10 KB through Zarr"
    ),
    "zarr: read 256 chunks of 1 MB, default pipeline": (
        "Read an array of 256 chunks of 1 MB through Zarr"
    ),
    "zarr: write 10,000 chunks of 10 KB, default pipeline": (
        "Write an array of 10,000 chunks of 10 KB through Zarr"
    ),
    "zarr: write 1,000 chunks of 1 MB, default pipeline": (
        "Write an array of 1,000 chunks of 1 MB through Zarr"
    ),
    "S3: GET 1 MB through zarr, 16 at a time": "Read 1 MB from S3 nearby",
    "S3: GET 1 MB through zarr over TLS, 16 at a time": "Read 1 MB from S3 nearby, over TLS",
    "S3: PUT 1 MB through zarr, 16 at a time": "Write 1 MB to S3 nearby",
    "S3 20 ms away: commit one chunk, format 2": "Commit one chunk to S3, 20 ms away",
    "S3 20 ms away: open cold and read a chunk, format 2": (
        "Open and read a first chunk from S3, 20 ms away"
    ),
    "S3 20 ms away: create a repository, format 2": "Create a repository on S3, 20 ms away",
    "local: change a chunk and commit, format 2": "Change a chunk and commit, local disk",
    "set 1,000,000 virtual references and commit, format 2": (
        "Set a million virtual references and commit"
    ),
    "open cold and read a chunk, 10,000,000 references by us, format 2": (
        "Open and read a chunk among ten million references"
    ),
    "16 writers of one branch, S3 50 to 300 ms away, format 2": (
        "16 writers commit to one branch, S3 far away"
    ),
    "collect garbage: 200 snapshots, half of 100,000 chunks": (
        "Collect garbage: half of 100,000 chunks"
    ),
    "import Repository, after zarr": "Import the library, after zarr",
}
"""The workloads of the summary, and what they are called there."""
_OFFICIAL: Final = "official"


def tables(results: list[Result], elsewhere: Mapping[str, Sequence[float]]) -> str:
    """Return a table for each operation; ``elsewhere`` has ratios by the keys of results."""
    found = []
    for (operation, about), group in groupby(results, key=lambda it: (it.operation, it.about)):
        heads = "| Workload | Ours | Official | Ratio | CPU | Elsewhere | Target | Others |\n"
        rule = "| --- | --: | --: | --: | --: | --: | --: | --- |\n"
        own = list(group)
        rows = "".join(_row(each, elsewhere.get(each.key, ())) for each in own)
        why = (
            f"\nWhat bounds it: {REASONS[operation].strip()}\n"
            if any(map(_falls_short, own))
            else ""
        )
        found.append(f"### {operation}\n\n{about}\n\n{heads}{rule}{rows}{why}")
    return "\n".join(found)


def summary(results: list[Result], elsewhere: Mapping[str, Sequence[float]]) -> str:
    """Return the table of the summary: typical operations, ours and the official engine's."""
    timed = {each.workload: each for each in results if each.metric == "seconds"}
    rows = [
        "| Operation | Ours | Official | Ratio | Elsewhere |",
        "| --- | --: | --: | --: | --: |",
    ]
    for workload, name in _SUMMARIZED.items():
        result = timed[workload]
        official = next(it for it in lines([result]) if it.peer == _OFFICIAL)
        ratio = _factor(official.ratio)
        if official.verdict == "lost":
            ratio = f"**{ratio}**"
        found = " to ".join(dict.fromkeys(map(_factor, _ends(elsewhere.get(result.key, ())))))
        times = f"{shown(official.ours, 'seconds')} | {shown(official.theirs, 'seconds')}"
        rows.append(f"| {name} | {times} | {ratio} | {found} |")
    return "\n".join([*rows, ""])


def _falls_short(result: Result) -> bool:
    """Return whether a target is missed, or the official engine ahead."""
    if result.limit is not None and result.median(OURS) > result.limit:
        return True
    ahead = any(it.peer == _OFFICIAL and it.verdict == "lost" for it in lines([result]))
    return ahead or any(it.is_met is False for it in lines([result]))


def _row(result: Result, elsewhere: Sequence[float]) -> str:
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
            # Where Zarr alone takes longer than the target allows, no store could meet it.
            if ZARR_ALONE in found and official.is_met is False:
                bound = official.theirs / found[ZARR_ALONE].theirs
                if bound < official.target:
                    target += f"; a store of no cost: {_factor(bound)}"
    cells.append(" to ".join(dict.fromkeys(_factor(it) for it in _ends(elsewhere))))
    return "| " + " | ".join([*cells, target, others]) + " |\n"


def _other(peer: str, ratio: float, result: Result) -> str:
    return f"{result.floor if peer == 'floor' else peer} {_factor(ratio)}"


def _ends(ratios: Sequence[float]) -> list[float]:
    return [min(ratios), max(ratios)] if ratios else []


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _when(results: list[Result]) -> str:
    days = sorted({it.taken[:10] for it in results})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def machine_text(machine: dict[str, str], results: list[Result]) -> str:
    """Return where and when it was measured, and what else the machine did."""
    busy = sum(it.busy > BUSY for it in results)
    packages = ", ".join(
        f"{name} {version}"
        for name, version in machine.items()
        if name not in {"processor", "system", "python"}
    )
    return (
        f"Measured {_when(results)} on {machine['processor']}, {machine['system']}, Python "
        f"{machine['python']}, {packages}. Rows marked \\* ({busy} of {len(results)}) were "
        "measured while others used the machine: only ratios mean something there, and small "
        "differences do not.\n"
    )


def elsewhere_text(documents: list[Document]) -> str:
    """Return where and when the column *Elsewhere* was measured."""
    runs = [f"{_when(results)} on {machine['processor']}" for machine, results in documents]
    return f"*Elsewhere* are the ratios measured {'; and '.join(runs)}.\n"


def load(path: Path) -> Document:
    """Return the machine of a JSON file, and what was measured on it."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["machine"], [Result(**each) for each in document["results"].values()]


def ratios(documents: list[Document]) -> dict[str, list[float]]:
    """Return the ratios to the official engine by the keys of results."""
    found: dict[str, list[float]] = {}
    for line in chain.from_iterable(lines(results) for _, results in documents):
        if line.peer == _OFFICIAL:
            found.setdefault(line.result.key, []).append(line.ratio)
    return found


def main(sources: list[Path]) -> None:
    """Refresh page, JSON and pictures."""
    documents = [load(source) for source in sources]
    machine = documents[-1][0]
    processors = [it["processor"].split(" or ") for it, _ in documents]
    machine["processor"] = " or ".join(dict.fromkeys(chain.from_iterable(processors)))
    # Later files win: a workload that was measured again replaces its row, and the others stay.
    merged = {each.key: each for _, found in documents for each in found}
    results = sorted(merged.values(), key=lambda it: it.operation)
    document = {"machine": machine, "results": {it.key: asdict(it) for it in results}}
    RESULTS.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(results, RESULTS.with_suffix(".png"))
    draw_growth(results, RESULTS.with_name("growth.png"))
    others = [load(path) for path in ELSEWHERE]
    about = f"{machine_text(machine, results)}\n{elsewhere_text(others)}"
    _replace(PAGE, _BEGIN, _END, f"{about}\n{tables(results, ratios(others))}")
    _replace(SUMMARY, _SUMMARY_BEGIN, _SUMMARY_END, summary(results, ratios(others)))


def _replace(page: Path, begin: str, end: str, body: str) -> None:
    """Replace what stands between two markers of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{body}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [RESULTS])
