"""Checks: functions and commands that look at the merged state of a proposal.

All that a check does is a result; nothing that it raises ends the method that runs it.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import error_of_others
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.proposals.record import (
    MOST_DETAIL,
    CheckResult,
    Outcome,
    check_names,
)
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anyio.abc import Process

__all__ = ["Check", "as_checks", "run_check"]

# A character takes up to four bytes.
_TAIL_BYTES: Final = 4 * MOST_DETAIL


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a proposal: a function or a command, with a name and a time limit."""

    name: str
    """Names its result, 1 to 200 characters."""
    run: Callable[..., Any] | Sequence[str]
    """An async function of a session that reads the merged state, and of the proposal. It returns
    None if all is well, or a sentence that says what is not; an exception counts as a failure.

    Or a command, as a list of arguments; exit code 0 means that all is well. No shell reads it. Its
    environment has ``ICECHUNK_ASYNC_URL``, ``ICECHUNK_ASYNC_SNAPSHOT`` (the merged state),
    ``ICECHUNK_ASYNC_PROPOSAL``, ``ICECHUNK_ASYNC_BRANCH`` and ``ICECHUNK_ASYNC_SOURCE``. It finds
    credentials for itself."""
    timeout_seconds: float = 600.0
    """After this time it is cancelled, or killed with the processes that it started."""

    def __post_init__(self) -> None:
        """Validate the check."""
        check_names([self.name])
        _check_timeout(self.name, self.timeout_seconds)
        _check_runs(self.name, self.run)


def _check_timeout(name: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise InvalidInputError(
            f"The check {name!r} needs a finite time limit above 0 s, not {seconds!r}."
        )


def _check_runs(name: str, run: object) -> None:
    if callable(run):
        return
    if isinstance(run, str | bytes) or not isinstance(run, Sequence) or not run:
        raise InvalidInputError(
            f"The check {name!r} is {run!r:.80}; it must be an async function, or a command as a "
            "list of arguments, such as ['python', 'audit.py']."
        )
    arguments = cast("Sequence[object]", run)
    if not all(isinstance(it, str) and "\0" not in it for it in arguments):
        raise InvalidInputError(f"The command of the check {name!r} has to be all text.")


def as_checks(given: Iterable[Check | Callable[..., Any]]) -> list[Check]:
    """Return checks, with functions named after themselves.

    Raises:
        InvalidInputError: one is neither, has no name, or two have the same name.
    """
    found: list[Check] = []
    items: Iterable[object] = [given] if callable(given) or isinstance(given, Check) else given
    for it in items:
        if isinstance(it, Check):
            found.append(it)
            continue
        if not callable(it):
            raise InvalidInputError(
                f"{it!r:.80} is not a check: give async functions, or Check(name, ['command'])."
            )
        name = getattr(it, "__name__", "<nameless>")
        if name.startswith("<"):
            raise InvalidInputError(f"{it!r:.80} has no name: give Check('a name', function).")
        found.append(Check(name, it))
    names = [it.name for it in found]
    if len(check_names(names)) < len(names):
        twice = next(it for it in names if names.count(it) > 1)
        raise InvalidInputError(f"Two checks are called {twice!r}. Give each another name.")
    return found


async def run_check(
    check: Check, session: object, proposal: object, environment: Mapping[str, str]
) -> CheckResult:
    """Run one check; whatever it does, the result says so.

    A function gets the session and the proposal, a command the environment.
    """
    began = anyio.current_time()
    outcome: Outcome = "error"
    detail = ""
    with anyio.move_on_after(check.timeout_seconds) as scope:
        try:
            if callable(check.run):
                outcome, detail = await _call(check.run, session, proposal)
            else:
                outcome, detail = await _command(check.run, environment)
        # Raises the error again if it is this task that was cancelled, also by the time limit
        # above.
        except BaseException as error:  # noqa: BLE001 -- of code that is not ours: it is the result
            outcome, detail = "error", error_of_others(error)
    if scope.cancelled_caught:
        outcome = "timed out"
        detail = f"It was stopped after {check.timeout_seconds:g} s."
    seconds = anyio.current_time() - began
    # Surrogates, as in names of files that are no UTF-8, cannot be stored; the end is the telling
    # part.
    detail = detail.encode("utf-8", "backslashreplace").decode()[-MOST_DETAIL:]
    return CheckResult(check.name, outcome, detail, round(seconds, 6), clock.now_us())


async def _call(
    function: Callable[..., Any], session: object, proposal: object
) -> tuple[Outcome, str]:
    found: object = function(session, proposal)
    if not inspect.isawaitable(found):
        return "error", f"The check is no async function: it returned {type(found).__name__}."
    said: object = await found
    if said is None:
        return "passed", ""
    if isinstance(said, str):
        return "failed", said
    return "error", (
        f"The check returned {type(said).__name__}; it returns None if all is well, or a sentence "
        "that says what is not."
    )


async def _command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Outcome, str]:
    """Run a command to its end; return whether its exit code is 0, and the end of its output."""
    process = await anyio.open_process(
        list(arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # In one stream, so that what is kept of it is in the order in which it was said.
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,  # so that what it starts can be killed with it
    )
    tail, has_ended = b"", False
    try:
        assert process.stdout is not None  # asked for
        async for part in process.stdout:
            # A command may write without end. Its pipe is emptied all the same, or it would hang.
            tail = (tail + part)[-_TAIL_BYTES:]
        has_ended = True
        code = await process.wait()
    finally:
        await _end(process, has_ended=has_ended)
    said = tail.decode("utf-8", "replace").strip()
    if code == 0:
        return "passed", said
    return "failed", f"{said}\nExit code {code}.".lstrip()


async def _end(process: Process, *, has_ended: bool) -> None:
    """Kill a command that still runs, with the processes that it started; wait for it.

    As long as its output has not ended, processes that it started may run without it. They are the
    members of its group, whose number nobody else gets while there are any.
    """
    with anyio.CancelScope(shield=True):
        # Not after an end of both: by then another process may have the number.
        if process.returncode is None or not has_ended:
            try:
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            except ProcessLookupError:  # it ended just now
                pass
        await process.aclose()
