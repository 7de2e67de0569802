"""Contests: the same work by several contenders, taking turns.

Other load on the machine affects all contenders alike when they take turns. So ratios of medians
hold where seconds do not. Each turn starts with another contender, because the order may matter:
the contender after a copy of 256 MB took a tenth longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.machine import busy_elsewhere, find_memory
from benchmarks.results import OURS, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_benchmark.fixture import BenchmarkFixture

    type Work = Callable[..., object]

__all__ = ["FLOOR", "Contest"]

_NO_MORE: Final = object()

FLOOR: Final = "floor"
_ROOT: Final = Path(__file__).parents[1]
_CHILD_SECONDS: Final = 1200
_BUDGET_SECONDS: Final = 60
"""No turn begins later than this, once each has had one."""


class Contest:
    """Runs the contenders of one test and keeps what was found."""

    def __init__(self, document: str, size: str, benchmark: Callable[[], BenchmarkFixture]) -> None:
        """Measure as ``size`` says: ``quick`` looks once, ``full`` measures.

        Args:
            document: says which operation in its first line, and how it is measured below.
            size: how large.
            benchmark: answers pytest-benchmark's fixture.
        """
        first, _, about = document.partition("\n")
        self._operation = first.rstrip(".")
        self._about = about.strip()
        self._benchmark = benchmark
        self.size = size
        self.results: list[Result] = []

    @property
    def is_quick(self) -> bool:
        """Whether this is only a look whether all still works."""
        return self.size == "quick"

    def pick[T](self, quick: T, full: T) -> T:
        """Return the value for the size of this run."""
        return quick if self.is_quick else full

    def race(
        self,
        workload: str,
        contenders: Mapping[str, Work],
        *,
        operations: int = 1,
        rounds: int = 7,
        warmup_rounds: int = 1,
        setup: Callable[[str], object] | None = None,
        finds_memory: int = 0,
        metric: str = "seconds",
        targets: Mapping[str, float] | None = None,
        floor: str = "",
        note: str = "",
    ) -> None:
        """Time contenders in this process, in turns; pytest-benchmark drives ours.

        Args:
            workload: what is done, as users would say it.
            contenders: by name; one call is one round of all ``operations``. ``ours`` is us,
                ``floor`` what no implementation can beat.
            operations: number of operations in a round; figures are of one.
            rounds: number of turns of each contender, within a minute or so.
            warmup_rounds: number of turns before, which do not count.
            setup: makes the argument of a contender, before each turn and not timed.
            finds_memory: number of quarters of a gigabyte that `find_memory` finds before each
                turn, not timed.
            metric: ``seconds``, or ``cpu seconds`` of this process.
            targets: by peer, how many times as much it should take.
            floor: description of the floor.
            note: a remark for readers of the figures.
        """
        seconds_of: dict[str, list[float]] = defaultdict(list)
        cpu_of: dict[str, list[float]] = defaultdict(list)
        busy = self._look()
        make = setup or _nothing
        turn = 0
        behind: list[str] = []
        deadline = time.monotonic() + _BUDGET_SECONDS

        # What a turn is: pytest-benchmark calls `before` (those ahead of ours), then ours, then
        # `teardown` (those behind). Its own clock sees ours alone; `timed` has all, by one clock.
        def timed(name: str, argument: object) -> None:
            if argument is _NO_MORE:
                return
            arguments = () if setup is None else (argument,)
            if finds_memory and not self.is_quick:
                find_memory(finds_memory)
            cpu = time.process_time()
            began = time.perf_counter()
            contenders[name](*arguments)
            seconds = time.perf_counter() - began
            cpu = time.process_time() - cpu
            # Turns of warming up fill caches of the system and of the processes, and are the same
            # for all.
            if turn > skipped:
                seconds_of[name].append(seconds / operations)
                cpu_of[name].append(cpu / operations)

        def those(names: Iterable[str]) -> None:
            for name in names:
                timed(name, make(name))

        def before() -> tuple[tuple[object], dict[str, object]]:
            nonlocal turn, behind
            turn += 1
            behind = []
            # pytest-benchmark cannot be told to stop: the turns that are left do nothing.
            if seconds_of[OURS] and time.monotonic() > deadline:
                return (_NO_MORE,), {}
            ahead, behind = _around_ours(list(contenders), turn)
            those(ahead)
            return (make(OURS),), {}

        benchmark = self._benchmark()
        skipped = self.pick(0, warmup_rounds)
        benchmark.group = workload
        benchmark.pedantic(
            lambda argument: timed(OURS, argument),
            setup=before,
            teardown=lambda _: those(behind),
            rounds=self.pick(1, rounds),
            warmup_rounds=skipped,
        )
        samples, cpu_samples = (cpu_of, {}) if metric == "cpu seconds" else (seconds_of, cpu_of)
        self.add(
            workload,
            {name: samples[name] for name in contenders},
            metric=metric,
            cpu=cpu_samples,
            targets=targets,
            floor=floor,
            note=note,
            busy=max(busy, self._look()),
        )

    def children(
        self,
        workload: str,
        contenders: Callable[[], Mapping[str, tuple[str, Mapping[str, object]]]],
        *,
        metrics: Mapping[str, Mapping[str, float]],
        limits: Mapping[str, float] | None = None,
        rounds: int = 3,
        environment: Mapping[str, str] | None = None,
        floor: str = "",
        note: str = "",
    ) -> dict[str, dict[str, list[float]]]:
        """Measure each contender in separate processes, in turns.

        Args:
            workload: what is done.
            contenders: what runs in each turn, by name, ``module:function`` and its keyword
                arguments; the function returns figures by the name of the metric.
            metrics: those to keep, each with its targets by peer.
            limits: by metric, what ours may be at most.
            rounds: how often each has its turn, within a minute or so.
            environment: variables of the processes, besides ours.
            floor: what the floor is.
            note: what a reader of the figures has to know.

        Returns: all figures by contender and name.
        """
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        busy = self._look()
        deadline = time.monotonic() + _BUDGET_SECONDS
        for turn in range(1 if self.is_quick else rounds):
            if turn and time.monotonic() > deadline:
                break
            for name, (function, arguments) in contenders().items():
                for metric, figure in self.call(function, arguments, environment).items():
                    found[name][metric].append(figure)
        for metric, targets in metrics.items():
            self.add(
                workload,
                {name: figures[metric] for name, figures in found.items() if metric in figures},
                metric=metric,
                cpu={name: it["cpu seconds"] for name, it in found.items()}
                if metric == "seconds"
                else {},
                targets=targets,
                limit=(limits or {}).get(metric),
                floor=floor,
                note=note,
                busy=max(busy, self._look()),
            )
        return found

    def call(
        self,
        function: str,
        arguments: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Call ``module:function`` in a separate process, or in this one for a quick run."""
        # A process for each would take most of a quick run, whose figures nobody looks at.
        if self.is_quick and not environment:
            module, _, name = function.partition(":")
            figures: dict[str, float] = getattr(import_module(module), name)(**arguments)
            return figures
        return _run_child(function, arguments, environment)

    def add(
        self,
        workload: str,
        samples: dict[str, list[float]],
        *,
        metric: str,
        cpu: dict[str, list[float]] | None = None,
        targets: Mapping[str, float] | None = None,
        limit: float | None = None,
        floor: str = "",
        note: str = "",
        busy: float = 0.0,
    ) -> None:
        """Keep what was measured elsewhere."""
        self.results.append(
            Result(
                operation=self._operation,
                about=self._about,
                workload=workload,
                metric=metric,
                samples=samples,
                cpu=cpu or {},
                targets=dict(targets or {}),
                limit=limit,
                floor=floor,
                note=note,
                size=self.size,
                busy=round(busy, 2),
                taken=datetime.now(UTC).isoformat(timespec="seconds"),
            )
        )

    def _look(self) -> float:
        return 0.0 if self.is_quick else busy_elsewhere()


def _nothing(_: str) -> None:
    """Return None, the argument of contenders that need no setup."""


def _around_ours(names: list[str], turn: int) -> tuple[list[str], list[str]]:
    """Return the contenders before ours in a turn, and those after it."""
    # ours, a, b: turn 1 is a, b, ours; turn 2 is b, ours, a; turn 3 is ours, a, b
    first = turn % len(names)
    row = names[first:] + names[:first]
    ours = row.index(OURS)
    return row[:ours], row[ours + 1 :]


def _run_child(
    function: str, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Call ``module:function`` in a separate process and return its figures."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", function, json.dumps(dict(arguments))],
        cwd=_ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        timeout=_CHILD_SECONDS,
        check=False,
    )
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"{function} {dict(arguments)} ended with {done.returncode}")
    # The last line: engines and drivers may print before it.
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: float(value) for name, value in figures.items()}
