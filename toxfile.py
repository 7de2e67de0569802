"""Say what tox is doing while environments run side by side, and what was not run.

tox shows the output of an environment when it ends, so that a parallel run would be silent for
minutes. tox imports this file by its name.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from configparser import ConfigParser
from typing import TYPE_CHECKING, Final

from tox.plugin import impl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tox.config.sets import ConfigSet
    from tox.execute import Outcome
    from tox.session.state import State
    from tox.tox_env.api import ToxEnv

_EVERY_SECONDS: Final = 60.0


class _Watch:
    """When each environment of a parallel run started and ended."""

    def __init__(self, planned: Sequence[str], others: Sequence[str]) -> None:
        self._planned = planned
        self._others = others
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}
        self._phases: dict[str, str] = {}
        self._ended: dict[str, tuple[bool, float]] = {}

    def begin(self) -> None:
        """Print a line every minute until the process ends, and a summary then."""
        self._say(f"Running {len(self._planned)} environments: {', '.join(self._planned)}")
        # At exit, since no hook of tox is called once all environments have ended.
        atexit.register(self._summarize)
        threading.Thread(target=self._repeat, daemon=True).start()

    def enter(self, name: str, phase: str) -> None:
        """Note what an environment does now."""
        with self._lock:
            self._began.setdefault(name, time.monotonic())
            is_new = self._phases.get(name) != phase
            self._phases[name] = phase
        if is_new:
            self._say(f"{name}: {phase}")

    def end(self, name: str, *, passed: bool) -> None:
        """Note the end of an environment."""
        with self._lock:
            seconds = time.monotonic() - self._began.pop(name, time.monotonic())
            self._ended[name] = passed, seconds
        self._say(f"{name}: {'passed' if passed else 'FAILED'} after {seconds / 60:.1f} minutes")

    def _repeat(self) -> None:
        while True:
            time.sleep(_EVERY_SECONDS)
            now = time.monotonic()
            with self._lock:
                lines = [
                    f"{name} ({self._phases[name]}, {(now - began) / 60:.0f} min)"
                    for name, began in self._began.items()
                ]
                left = len(self._planned) - len(self._ended) - len(lines)
            self._say(f"running: {', '.join(lines) or 'nothing'}; {max(left, 0)} more to come")

    def _summarize(self) -> None:
        rows = sorted(self._ended.items(), key=lambda row: -row[1][1])
        lines = [
            f"  {name:<22} {'passed' if passed else 'FAILED'} {seconds / 60:6.1f} min"
            for name, (passed, seconds) in rows
        ]
        missing = [name for name in self._planned if name not in self._ended]
        lines += [f"  {name:<22} did not finish" for name in missing]
        self._say("\n".join(["Environments:", *lines]))
        self._say(f"Not run, only by hand: {', '.join(self._others)}")

    @staticmethod
    def _say(text: str) -> None:
        # tox replaces sys.stderr in the threads that run environments.
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.__stderr__, flush=True)


_watch: _Watch | None = None


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Watch parallel runs."""
    global _watch  # noqa: PLW0603 -- hooks have no object of their own
    if state.conf.options.command not in {"run-parallel", "p"} or _watch is not None:
        return
    # tox's own list has what runs by default; what is only run by hand stands in the file alone.
    parser = ConfigParser(interpolation=None)
    parser.read(core_conf["tox_root"] / "tox.ini", encoding="utf-8")
    asked = state.conf.options.env
    planned = list(state.conf.core["env_list"] if asked.is_default_list else asked)
    known = [name.removeprefix("testenv:") for name in parser if name.startswith("testenv:")]
    _watch = _Watch(planned, sorted(set(known) - set(planned)))
    _watch.begin()


@impl
def tox_on_install(tox_env: ToxEnv, arguments: object, section: str, of_type: str) -> None:
    """Note that packages are being installed."""
    del arguments, section, of_type
    # The environment that builds the package is tox's own, and none of those that were planned.
    if _watch is not None and not tox_env.conf.name.startswith("."):
        _watch.enter(tox_env.conf.name, "installing packages (a minute at most)")


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    """Note that the commands start."""
    if _watch is not None:
        commands = "; ".join(" ".join(it.args[:4]) for it in tox_env.conf["commands"])
        _watch.enter(tox_env.conf.name, f"running {commands}")


@impl
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[Outcome]) -> None:
    """Note that the commands ended."""
    del outcomes
    if _watch is not None:
        _watch.end(tox_env.conf.name, passed=exit_code == 0)
