"""Trying what a storage promises, before anything depends on it.

A server may ignore the conditions of a write and answer as if it had honoured them; commits are
then lost without a word. A trial finds that out.
"""

from __future__ import annotations

import base64
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async import _clock
from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import (
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.storage._trials import (
    BrokenPromiseError,
    Trial,
    conditional_create,
    conditional_update,
    deletion,
    list_after_write,
    list_order,
    ranges,
    read_after_write,
    times,
)
from icechunk_async.storage.registry import open_storage
from icechunk_async.storage.retry import Retrying, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from icechunk_async.storage.protocol import Capabilities, Storage

__all__ = ["PROBE_PREFIX", "Finding", "ProbeResult", "Verdict", "probe_storage"]

_SECONDS: Final = 60.0
_CLEANUP_SECONDS: Final = 15.0
PROBE_PREFIX: Final = ".icechunk-probe-"
"""With what the keys of every trial begin."""
_RETRIES: Final = RetryPolicy(max_tries=5, initial_seconds=0.1, max_seconds=5.0)


class Verdict(StrEnum):
    """What a trial found out about a promise."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_PROMISED = "not promised"
    """The storage itself says that it does not make it; nothing was tried."""
    UNKNOWN = "unknown"
    """No answer told, or time ran out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, and what became of it."""

    promise: str
    needed: bool
    """Commits could be lost without it."""
    verdict: Verdict
    detail: str
    """A sentence: what was seen, or the storage's own reason."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The table of promises."""

    url: str
    findings: tuple[Finding, ...]
    seconds: float
    left_behind: tuple[str, ...] = ()
    """Keys of the trial that could not be removed."""

    @property
    def is_safe(self) -> bool:
        """Whether every promise that commits need was kept."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The promises that commits need and that were not kept."""
        return tuple(it for it in self.findings if it.needed and it.verdict is not Verdict.KEPT)

    def check(self) -> None:
        """Refuse a storage on which commits could be lost.

        Raises:
            UnsafeStorageError: it says which promises failed, how, and what to do.
        """
        if self.is_safe:
            return
        names = ", ".join(it.promise for it in self.problems)
        details = "; ".join(f"{it.promise}: {it.detail}" for it in self.problems)
        raise UnsafeStorageError(
            f"Commits could be lost on {self.url!r}, so nothing was created there: {names} "
            f"cannot be relied on ({details}). Use another service or backend. If one "
            "writer at a time is all there will ever be, create with probe=False to accept the "
            "risk.",
            url=self.url,
            broken=[it.promise for it in self.problems],
        )


@dataclass(frozen=True, slots=True)
class _Promise:
    name: str
    test: Callable[[Trial], Awaitable[str]]
    needed: bool = False
    also: str | None = None
    """A capability beside ``writable`` without which there is nothing to try."""


_PROMISES: Final = (
    _Promise("conditional create", conditional_create, needed=True, also="conditional_create"),
    _Promise("conditional update", conditional_update, needed=True, also="conditional_update"),
    _Promise("read after write", read_after_write, needed=True),
    _Promise("ranges", ranges),
    _Promise("list after write", list_after_write, also="listing"),
    _Promise("list order", list_order, also="listing"),
    _Promise("delete", deletion),
    _Promise("clock", times, also="listing"),
)


async def probe_storage(
    location: str | os.PathLike[str] | Storage,
    *,
    timeout_seconds: float = _SECONDS,
    **options: object,
) -> ProbeResult:
    """Try the promises of a storage, with objects of its own that it removes again.

    They are below a fresh prefix ``.icechunk-probe-<random>/``; nothing else is read or written.
    A race that a server loses only once in a thousand times may go unnoticed: a kept promise is
    evidence, a broken one is proof.

    Args:
        location: a path, a URL, or an open storage (which is left open).
        timeout_seconds: what was not found out by then is ``Verdict.UNKNOWN``.
        options: the backend's options, where ``location`` is a path or URL.

    Raises:
        StorageError: the storage cannot be used at all: denied, unreachable, no such bucket.
        InvalidInputError: the location or an option is wrong.

    Cancellation: the objects are removed first, for up to 15 seconds. Where that fails, or the
    process is killed, some of them stay.

    Cost: about 140 small requests, seven of them in a row and up to 48 at the same time; some
    backends need two for a write that is refused. Passing trouble is retried.
    """
    async with _opened(location, options) as storage:
        return await _probe(storage, timeout_seconds)


@asynccontextmanager
async def _opened(
    location: str | os.PathLike[str] | Storage, options: dict[str, object]
) -> AsyncGenerator[Storage]:
    if not isinstance(location, (str, os.PathLike)):
        yield location
        return
    async with open_storage(location, **options) as storage:
        yield storage


async def _probe(storage: Storage, timeout_seconds: float) -> ProbeResult:
    began = anyio.current_time()
    deadline = began + timeout_seconds
    random = base64.b32encode(_clock.random_bytes(10)).decode().lower()
    trial = Trial(Retrying(storage, _RETRIES), f"{PROBE_PREFIX}{random}/")
    capabilities = storage.capabilities

    async def find(promise: _Promise) -> Finding:
        return await _find(promise, trial, capabilities, deadline)

    try:
        findings = await bounded_map(find, _PROMISES, limit=len(_PROMISES))
        left = await _clean(trial)
    except BaseException as error:  # also where the cleaning itself was cancelled
        if left := await _clean(trial):
            error.add_note(f"Keys of the probe that may still be there: {', '.join(left)}")
        raise
    seconds = anyio.current_time() - began
    return ProbeResult(storage.description.url, tuple(findings), seconds, left)


async def _clean(trial: Trial) -> tuple[str, ...]:
    """Remove the objects of a trial; answer the keys that may still be there."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLEANUP_SECONDS):
        return await trial.clean()
    return trial.written


async def _find(
    promise: _Promise, trial: Trial, capabilities: Capabilities, deadline: float
) -> Finding:
    def answer(verdict: Verdict, detail: str) -> Finding:
        return Finding(promise.name, promise.needed, verdict, detail)

    for name in filter(None, ("writable", promise.also)):
        if not getattr(capabilities, name):
            reason = capabilities.reasons.get(name, "no reason given")
            return answer(Verdict.NOT_PROMISED, reason)
    try:
        with anyio.CancelScope(deadline=deadline):
            return answer(Verdict.KEPT, await promise.test(trial))
        return answer(Verdict.UNKNOWN, "time ran out")
    except BrokenPromiseError as broken:
        return answer(Verdict.BROKEN, str(broken))
    except OutcomeUnknownError as error:
        return answer(Verdict.UNKNOWN, f"no answer told ({error.message})")
    except (ObjectNotFoundError, PreconditionFailedError, UnsafeStorageError) as error:
        return answer(Verdict.BROKEN, f"it was refused without reason ({error.message})")
    except StorageError as error:
        if type(error) is not StorageError:
            raise  # about the storage as a whole: no access, no bucket, no connection
        return answer(Verdict.BROKEN, f"it failed ({error.message})")
