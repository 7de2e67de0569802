"""The results of a contest: samples by contender, and the ratios of their medians."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OURS", "RESULTS", "ZARR_ALONE", "Line", "Result", "lines", "merge", "shown"]

RESULTS: Final = Path("build/benchmarks/results.json")
"""Where results go unless somebody says otherwise."""
OURS: Final = "ours"
ZARR_ALONE: Final = "zarr alone"
"""Zarr with a store that does nothing: with the same pipeline no store can be faster."""
BUSY: Final = 0.15
"""Others used more of the machine than this: take ratios, not values."""
_LEVEL: Final = 0.1


@dataclass(frozen=True, slots=True)
class Result:
    """One workload, one metric, everybody who took part."""

    operation: str
    workload: str
    metric: str
    """``seconds``, ``cpu seconds``, ``peak memory`` (bytes) or a word for what was counted."""
    samples: dict[str, list[float]]
    cpu: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Seconds of processor time of the same turns: what else the machine does changes them less."""
    targets: dict[str, float] = field(default_factory=dict[str, float])
    """By peer: how many times as much it should take as we do."""
    limit: float | None = None
    """The largest value that ours may have."""
    floor: str = ""
    """The description of the contender ``floor``."""
    note: str = ""
    about: str = ""
    """How the operation is measured."""
    size: str = "full"
    busy: float = 0.0
    taken: str = ""

    def median(self, contender: str) -> float:
        """Return the middle one of a contender's samples."""
        return statistics.median(self.samples[contender])

    @property
    def key(self) -> str:
        """The name of the result. A newer result with the same name replaces it."""
        return f"{self.operation} / {self.workload} / {self.metric}"


@dataclass(frozen=True, slots=True)
class Line:
    """A result as seen beside one peer."""

    result: Result
    peer: str
    ours: float
    theirs: float
    ratio: float
    """Above 1: the peer takes more."""
    cpu_ratio: float | None
    """The same of processor time."""
    target: float | None

    @property
    def verdict(self) -> str:
        """``won``, ``level`` (within a tenth) or ``lost``."""
        if self.ratio > 1 + _LEVEL:
            return "won"
        return "lost" if self.ratio < 1 / (1 + _LEVEL) else "level"

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached, where there is one."""
        return None if self.target is None else self.ratio >= self.target


def lines(results: Iterable[Result]) -> list[Line]:
    """Return a line for each peer of each result, the floor last."""
    found = []
    for result in results:
        ours = result.median(OURS)
        for peer in result.samples:
            if peer != OURS:
                theirs = result.median(peer)
                ratio = theirs / ours if ours else float("inf")
                target = result.targets.get(peer)
                cpu = _cpu_ratio(result, peer)
                found.append(Line(result, peer, ours, theirs, ratio, cpu, target))
    return found


def _cpu_ratio(result: Result, peer: str) -> float | None:
    ours, theirs = result.cpu.get(OURS), result.cpu.get(peer)
    if not ours or not theirs or not statistics.median(ours):
        return None
    return statistics.median(theirs) / statistics.median(ours)


def shown(value: float, metric: str) -> str:
    """Return a figure with a unit that fits it."""
    if metric.endswith("seconds"):
        for factor, unit in ((1, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {unit}"
        return f"{value * 1e6:.3g} µs"
    if metric.endswith(("memory", "bytes")):
        return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"
    return f"{value:g}"


def merge(path: Path, results: Iterable[Result], machine: dict[str, str]) -> list[Result]:
    """Replace older results of the same kind by new ones and return all."""
    kept: dict[str, dict[str, Any]] = {}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))["results"]
    kept |= {result.key: asdict(result) for result in results}
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "results": kept}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [Result(**each) for each in kept.values()]
