"""Count, time and trace the requests to a storage."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import IcechunkError
from icechunk_async.storage.policies.wrapping import PassingStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from types import TracebackType

    from opentelemetry.trace import Span

    from icechunk_async.storage.protocol import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = [
    "Observations",
    "Observed",
    "OperationCounts",
    "RequestEnd",
    "RequestHook",
    "RequestTracer",
]

_BUCKETS: Final = 40
"""Powers of two of microseconds; the last one begins at six days."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How one request ended."""

    operation: str
    """Name of the method of the storage."""
    key: str
    """The key, target, or prefix; for deletions empty."""
    seconds: float
    """From the call to the answer; of a listing, what was spent waiting for entries."""
    bytes_in: int
    bytes_out: int
    error: BaseException | None
    """The exception, also a cancellation; None if it succeeded."""


class RequestHook(Protocol):
    """A listener to each request as it happens, such as a tracer.

    Both methods are called on the thread of the request and must not block. Exceptions they raise
    are counted and dropped.
    """

    def on_start(self, operation: str, key: str, /) -> object:
        """Return something that `on_end` of the same request is given, such as a span."""
        ...

    def on_end(self, started: Any, end: RequestEnd, /) -> None:
        """Handle the end of a request whose start was handled."""
        ...


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """Counts and latencies of one operation; plain data."""

    requests: int
    """Those that ended."""
    bytes_in: int
    bytes_out: int
    seconds: float
    """Of all of them together; more than the time that passed where they overlap."""
    slowest_seconds: float
    errors: Mapping[str, int]
    """By ``kind`` of the error, or the class name of an error from elsewhere."""
    histogram: Sequence[int]
    """Requests that took less than ``2 ** i`` microseconds, and not less than half of that."""

    def quantile(self, share: float) -> float:
        """Return an upper bound of the ``share`` quantile in seconds, within a factor of two.

        Args:
            share: such as 0.95.
        """
        wanted = share * self.requests
        for power, count in enumerate(self.histogram):
            wanted -= count
            if wanted <= 0 < self.requests:
                return min(2.0**power / 1e6, self.slowest_seconds)
        return 0.0


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    errors: Counter[str] = field(default_factory=Counter[str])
    histogram: list[int] = field(default_factory=lambda: [0] * _BUCKETS)


class Observations:
    """The counts of one or more `Observed` storages; usable from any thread."""

    def __init__(self, hooks: Iterable[RequestHook] = ()) -> None:
        """Start empty; call ``hooks`` for every request."""
        self.hooks = tuple(hooks)
        self._lock = threading.Lock()  # held over no await
        self._tallies: dict[str, _Tally] = {}
        self._failed_hooks = 0

    @property
    def failed_hooks(self) -> int:
        """How often a hook raised."""
        return self._failed_hooks

    def snapshot(self) -> dict[str, OperationCounts]:
        """Return the counts so far, by operation; operations never used are missing."""
        with self._lock:
            return {
                operation: OperationCounts(
                    tally.requests,
                    tally.bytes_in,
                    tally.bytes_out,
                    tally.seconds,
                    tally.slowest,
                    dict(tally.errors),
                    tuple(tally.histogram),
                )
                for operation, tally in sorted(self._tallies.items())
            }

    def start(self, operation: str, key: str) -> list[tuple[RequestHook, object]]:
        """Call the hooks at the start of a request."""
        started: list[tuple[RequestHook, object]] = []
        for hook in self.hooks:
            try:
                started.append((hook, hook.on_start(operation, key)))
            except Exception:  # noqa: BLE001 -- a tracer's trouble is not the request's
                self._hook_failed()
        return started

    def end(self, started: list[tuple[RequestHook, object]], end: RequestEnd) -> None:
        """Count a request, and call the hooks that saw its start."""
        # 5 microseconds have three bits and go to bucket 3: less than ``2 ** 3``, and not less than
        # half of it.
        bucket = min(int(end.seconds * 1e6).bit_length(), _BUCKETS - 1)
        with self._lock:
            tally = self._tallies.get(end.operation)
            if tally is None:
                tally = self._tallies[end.operation] = _Tally()
            tally.requests += 1
            tally.bytes_in += end.bytes_in
            tally.bytes_out += end.bytes_out
            tally.seconds += end.seconds
            tally.slowest = max(tally.slowest, end.seconds)
            tally.histogram[bucket] += 1
            if end.error is not None:
                tally.errors[_kind(end.error)] += 1
        # Only those whose start succeeded: the others have nothing to end.
        for hook, token in started:
            try:
                hook.on_end(token, end)
            except Exception:  # noqa: BLE001 -- a tracer's trouble is not the request's
                self._hook_failed()

    def _hook_failed(self) -> None:
        with self._lock:
            self._failed_hooks += 1


def _kind(error: BaseException) -> str:
    return error.kind if isinstance(error, IcechunkError) else type(error).__name__


class _Request:
    """One request under observation, for the length of a ``with`` block."""

    __slots__ = (
        "_began",
        "_key",
        "_observations",
        "_operation",
        "_started",
        "bytes_in",
        "bytes_out",
        "waited",
    )

    def __init__(
        self, observations: Observations, operation: str, key: str, bytes_out: int = 0
    ) -> None:
        self._observations = observations
        self._operation = operation
        self._key = key
        self.bytes_in = 0
        self.bytes_out = bytes_out
        self.waited: float | None = None

    def __enter__(self) -> Self:
        observations = self._observations
        # Hooks first, so that their time is not counted as the request's.
        self._started = observations.start(self._operation, self._key) if observations.hooks else []
        self._began = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = perf_counter() - self._began if self.waited is None else self.waited
        if isinstance(error, GeneratorExit):  # a listing that was left half-way
            error = None
        end = RequestEnd(self._operation, self._key, seconds, self.bytes_in, self.bytes_out, error)
        self._observations.end(self._started, end)


class Observed(PassingStorage):
    """A storage whose requests are counted and timed.

    Contracts are those of `Storage`. Its position decides what it counts: around a backend each try
    of a request, around retries the time until they succeed.
    """

    def __init__(self, storage: Storage, observations: Observations | None = None) -> None:
        """Wrap ``storage``; several wrappers may share ``observations``."""
        super().__init__(storage)
        self.observations = observations or Observations()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        with _Request(self.observations, "get", key) as request:
            retrieved = await self.wrapped.get(key, byte_range)
            request.bytes_in = _size(retrieved.data)
        return retrieved

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        with _Request(self.observations, "get_if_changed", key) as request:
            retrieved = await self.wrapped.get_if_changed(key, version)
            if retrieved is not None:
                request.bytes_in = _size(retrieved.data)
        return retrieved

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        with _Request(self.observations, "put", key, _size(data)):
            return await self.wrapped.put(key, data, if_version=if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; a failed key does not count as an error, since nothing is raised."""
        with _Request(self.observations, "delete", ""):
            return await self.wrapped.delete(keys)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; a listing is one request, however many pages it takes."""
        entries = self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        with _Request(self.observations, "list_prefix", prefix) as request:
            request.waited = 0.0
            async with closing(entries):
                while True:
                    began = perf_counter()
                    try:
                        entry = await anext(entries)
                    except StopAsyncIteration:
                        return
                    finally:
                        # Time of the caller between two entries is not the storage's.
                        request.waited += perf_counter() - began
                    yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        with _Request(self.observations, "copy", target):
            return await self.wrapped.copy(source, target, if_version=if_version)

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        with _Request(self.observations, "sync", ""):
            await self.wrapped.sync()


def _size(data: Data) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)


class RequestTracer:
    """A hook that makes each request a client span below the caller's, and counts it."""

    def on_start(self, operation: str, key: str, /) -> Span:
        """Begin a span."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an optional package

        return telemetry.tracer().start_span(
            f"icechunk.storage.{operation}",
            kind=SpanKind.CLIENT,
            attributes={"icechunk.key": key},
        )

    def on_end(self, started: Span, end: RequestEnd, /) -> None:
        """End the span, and count the request."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 - an optional package

        failed = "" if end.error is None else type(end.error).__name__
        if end.error is not None:
            started.set_attribute("error.type", failed)
            started.set_status(StatusCode.ERROR, str(end.error))
        started.set_attribute("icechunk.bytes_in", end.bytes_in)
        started.set_attribute("icechunk.bytes_out", end.bytes_out)
        started.end()
        operation = end.operation
        outcome = {"error.type": failed} if failed else {}
        telemetry.add("storage.requests", 1, operation=operation, **outcome)
        telemetry.record("storage.duration", end.seconds, operation=operation, **outcome)
        if end.bytes_in:
            telemetry.add("storage.bytes", end.bytes_in, operation=operation, direction="in")
        if end.bytes_out:
            telemetry.add("storage.bytes", end.bytes_out, operation=operation, direction="out")
