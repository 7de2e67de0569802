"""Run short programs, each in an interpreter that has imported what they begin with.

Importing Zarr and this library takes most programs longer than the rest. A process imports them
once and starts nothing; each program is a fork of it, which runs as ``__main__`` and ends as an
interpreter does. Programs about importing, or that start processes by ``spawn``, are for
`subprocess`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from select import select
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["run_program"]

_REPOSITORY: Final = Path(__file__).parents[1]
_IMPORTS: Final = (
    "zarr",
    "icechunk_async.repository",
    "icechunk_async.session",
    "icechunk_async.sync.repository",
    "icechunk_async.sync.session",
    "icechunk_async.sync.store",
)


def run_program(
    script: str,
    *,
    name: str = "<string>",
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: tuple[str, ...] = (),
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed, and its exit code.

    Args:
        script: the program.
        name: of its file, as tracebacks show it.
        directory: where it runs; None: here.
        environment: its variables; None: those of this process.
        flags: of the interpreter.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: it did not end.
    """
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        asked = {
            "script": script,
            "name": name,
            "directory": str(directory or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "output": str(output),
            "errors": str(errors),
        }
        code = _ready(flags).run(asked, timeout)
        found = [it.read_text(encoding="utf-8") for it in (output, errors)]
    return subprocess.CompletedProcess([name], code, *found)


class _Ready:
    """A process that has imported all, and forks itself for each program."""

    def __init__(self, flags: tuple[str, ...]) -> None:
        # NumPy's threads for linear algebra would begin at its import: a fork must have none.
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-m", __name__],
            cwd=_REPOSITORY,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` does not see what a buffer holds
        )
        atexit.register(self._end)

    def run(self, asked: dict[str, Any], timeout: float) -> int:
        """Return the exit code of a program; negative: the signal that killed it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        # The id comes first, so that a program that does not end can be killed, and not the process
        # that is ready for the next one.
        pid = int(self._process.stdout.readline())
        if not select([self._process.stdout], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            self._process.stdout.readline()
            raise subprocess.TimeoutExpired(asked["name"], timeout)
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_ready = cache(_Ready)


def _next_program() -> dict[str, Any] | None:
    """Return a program that is asked for, in a new process; None in this one, at the end."""
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        # Before the first call into the library, which may start threads: of those a child has
        # none.
        pid = os.fork()
        if pid == 0:
            return asked
        print(pid, flush=True)  # noqa: T201
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201
    return None


def _become(asked: dict[str, Any]) -> dict[str, Any]:
    """Turn this process into one that was started for the program; return its namespace."""
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for descriptor, file in ((0, os.devnull), (1, asked["output"]), (2, asked["errors"])):
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        # The descriptors and not `sys.stdout`: what the program starts inherits them.
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [asked["name"]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    return main.__dict__


if __name__ == "__main__":
    for module in _IMPORTS:
        importlib.import_module(module)
    program = _next_program()
    if program is not None:
        names = _become(program)
        try:
            exec(compile(program["script"], program["name"], "exec"), names)  # noqa: S102
        except Exception as error:  # noqa: BLE001 -- shown as the interpreter does, from its frames on
            frames = error.__traceback__
            error.__traceback__ = frames and frames.tb_next
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
