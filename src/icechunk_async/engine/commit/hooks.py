"""Hooks after commit: functions that are told of what this process published.

They run after the publication, so nothing that they do undoes it: errors are logged and kept.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map, error_of_others
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import SnapshotInfo

__all__ = ["CommitEvent", "HookFailure", "Hooks"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 8
_MOST_FAILURES: Final = 100
_MOST_TEXT: Final = 2_000
# The caller of the commit waits for them, and holds no turn of a writer meanwhile.
SECONDS: Final = 30.0
"""Time for each hook."""
MOST_DEEP: Final = 8
"""A hook may commit, which calls hooks again; this is the deepest level that is called."""
# A context variable, because tasks inherit it: what a hook commits counts as deeper also if the
# hook starts tasks for it.
_depth: ContextVar[int] = ContextVar("icechunk_async_hooks", default=0)


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """A branch that this process moved, for hooks after commit."""

    kind: Literal["commit", "amend", "reset"]
    """``commit``: the snapshot follows the tip, or took the place of commits that were squashed;
    ``amend``: it took the place of the tip; ``reset``: the branch was moved to an older or other
    snapshot."""
    branch: str
    snapshot: SnapshotInfo
    """The tip of the branch: id, parent, time, message and properties."""
    previous_id: SnapshotId | None
    """The tip before; None after `compact`, `rewrite_manifests`, and a reset without
    ``from_snapshot_id``, which do not tell."""


@dataclass(frozen=True, slots=True)
class HookFailure:
    """A hook that did not do its work after a commit that was published."""

    hook: str
    """The name of the function."""
    event: CommitEvent
    error: str
    failed_at: datetime
    """Aware, UTC."""


class Hooks:
    """The hooks of one open repository, and their last failures."""

    def __init__(self, functions: Iterable[Any]) -> None:
        """Take async functions.

        Raises:
            InvalidInputError: it is no list or other iterable, or one cannot be called.
        """
        try:
            self.functions = tuple(functions)
        except TypeError as error:
            raise _no_list(functions) from error
        for it in self.functions:
            if not callable(it):
                raise InvalidInputError(
                    f"{it!r:.80} is no hook: after_commit takes async functions of a CommitEvent."
                )
        self.failures: deque[HookFailure] = deque(maxlen=_MOST_FAILURES)

    async def run(self, event: CommitEvent) -> None:
        """Call every hook, several at a time, each for at most 30 s; none raises.

        Hooks that commit are told of that, too, at most eight levels deep; calls that are left out
        are kept as failures.

        Cancellation: hooks that still run are cancelled.
        """
        depth = _depth.get()

        async def call(function: Callable[[CommitEvent], Any]) -> None:
            # A hook that commits on every event would otherwise never end.
            if depth < MOST_DEEP:
                error = await _call(function, event)
            else:
                error = f"it was not called: hooks that commit called each other {depth} times"
            if error is not None:
                name = getattr(function, "__name__", type(function).__name__)
                _log.warning(
                    "the hook %s failed after snapshot %s was published: %s",
                    name,
                    event.snapshot.id,
                    error,
                )
                now = clock.from_us(clock.now_us())
                self.failures.append(HookFailure(name, event, error[:_MOST_TEXT], now))

        token = _depth.set(depth + 1)
        try:
            await bounded_map(call, self.functions, limit=_AT_ONCE)
        finally:
            _depth.reset(token)


def _no_list(given: object) -> InvalidInputError:
    return InvalidInputError(
        f"after_commit takes a list of functions of a CommitEvent, not {given!r:.80}. Write "
        "after_commit=[function], also for one."
    )


async def _call(function: Callable[[CommitEvent], Any], event: CommitEvent) -> str | None:
    """Call one hook; return its error, if it made one."""
    with anyio.move_on_after(SECONDS) as scope:
        try:
            found: object = function(event)
            if not inspect.isawaitable(found):
                return f"it is no async function: it returned {type(found).__name__}"
            await found
        except BaseException as error:  # noqa: BLE001 -- of code that is not ours; the commit stands
            return error_of_others(error)
    return f"it was stopped after {SECONDS:g} s" if scope.cancelled_caught else None
