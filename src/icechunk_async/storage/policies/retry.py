"""Retries, only where a repeated request can help and cannot do harm.

A request that the store refused without changing anything is repeated after a pause. A write whose
reply was lost may have landed, and may still land, even after a later write: it is repeated only if
all writes of its key write the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Literal

import anyio

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.concurrency import closing
from icechunk_async.errors import (
    IcechunkError,
    NameResolutionError,
    OutcomeUnknownError,
    StorageUnavailableError,
)
from icechunk_async.storage.policies.values import RetryPolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.storage.protocol import CommonPrefix, DeleteFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from icechunk_async.storage.protocol import (
        Data,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )

__all__ = ["Retrying"]

_log = logging.getLogger(__name__)
_NAME_RESOLUTION_TRIES: Final = 3
"""A resolver may fail once; a name that does not exist will not appear soon."""


class _Tries:
    """The tries of one operation, from its first failure on."""

    def __init__(self, policy: RetryPolicy, began: float) -> None:
        self._policy = policy
        self._began = began
        self._failures = 0

    def succeed(self) -> None:
        """Count from zero again, because a listing made progress."""
        self._failures = 0

    async def pause(self, error: IcechunkError) -> bool:
        """Pause after a failure; return False at once if that was the last try.

        Cancellation: no effect; it ends the pause at once.
        """
        policy = self._policy
        self._failures += 1
        tries = policy.max_tries
        if isinstance(error, NameResolutionError):
            tries = min(tries, _NAME_RESOLUTION_TRIES)
        # The power is bounded, or very many tries would overflow a float.
        limit = min(policy.max_seconds, policy.initial_seconds * 2.0 ** min(self._failures - 1, 60))
        asked = _retry_after(error)
        # Later than the store asked, at random: it told all clients the same.
        pause = asked + clock.uniform() * limit
        late = _now() - self._began + pause
        # A store that asks for hours is not waited for, nor asked again too early: the caller is
        # told.
        if self._failures >= tries or asked > policy.max_seconds:
            return False
        if policy.total_seconds is not None and late > policy.total_seconds:
            return False
        telemetry.add("storage.retries", 1, reason=error.kind)
        _log.debug("trying again in %.2f s after: %s", pause, error)
        await anyio.sleep(pause)
        return True

    def last(self, error: IcechunkError) -> IcechunkError:
        """Return the error to raise after the last try, with the number of tries if several."""
        if self._failures <= 1:
            return error
        seconds = _now() - self._began
        context = {**error.context, "tries": self._failures, "seconds": round(seconds, 3)}
        final = type(error)(
            f"{error.message} It was tried {self._failures} times within {seconds:.1f} s.",
            **context,
        )
        final.__cause__ = error
        return final


class Retrying(PassingStorage):
    """A storage that repeats requests after transient failures.

    ``StorageUnavailableError`` and its subclasses are retried (``NameResolutionError`` three times
    at most), after the pause in ``retry_after_seconds`` if the store asks for one. They promise
    that nothing changed, so conditional writes are safe to repeat too. Listings continue after the
    last entry that was returned, deletions with the remaining keys.

    ``OutcomeUnknownError`` promises nothing. Only an unconditional ``put`` or a deletion of keys
    that ``immutable`` accepts is repeated; if its outcome is never learned, the error is raised.

    Every other error is raised at once, because a repeated request would fail in the same way. The
    error after the last try says how often and for how long the request was tried, and has
    ``tries`` in its context. ``asyncio.timeout`` around a call ends a pause at once.
    """

    def __init__(
        self,
        storage: Storage,
        policy: RetryPolicy | None = None,
        *,
        immutable: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Wrap ``storage``.

        Args:
            storage: whose failures are tried again.
            policy: how often and when; the official engine's default if None.
            immutable: returns whether a key is only ever written with the same bytes, and not
                written again once deleted.
        """
        super().__init__(storage)
        self._policy = policy or RetryPolicy()
        self._immutable = immutable

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        # As `_try`, without a function for each read: most succeed at once.
        began = _now()
        try:
            return await self.wrapped.get(key, byte_range)
        except StorageUnavailableError as error:
            failure = error
        return await self._again(lambda: self.wrapped.get(key, byte_range), failure, began)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await self._try(lambda: self.wrapped.get_if_changed(key, version))

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""

        def write() -> Awaitable[Version]:
            return self.wrapped.put(key, data, if_version=if_version)

        began = _now()
        try:
            return await write()
        except StorageUnavailableError as error:
            failure: IcechunkError = error
        except OutcomeUnknownError as error:
            if if_version is not None or not self._immutable(key):
                raise
            failure = error
        return await self._again(
            write, failure, began, repeatable=if_version is None and self._immutable(key)
        )

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects, repeating the keys that failed."""
        left = list(keys)
        tries = _Tries(self._policy, _now())
        settled: list[DeleteFailure] = []
        while True:
            try:
                failures = await self.wrapped.delete(left)
            except StorageUnavailableError as error:
                failures = [DeleteFailure(key, error) for key in left]
            # Other failures are final; they are returned with those that run out of tries.
            settled += [failure for failure in failures if not self._passes(failure)]
            passing = [failure for failure in failures if self._passes(failure)]
            if not passing:
                return settled
            left = [failure.key for failure in passing]
            # One pause for all that is left: the longest that the store asked for.
            if not await tries.pause(max(passing, key=lambda it: _retry_after(it.error)).error):
                return settled + [DeleteFailure(it.key, tries.last(it.error)) for it in passing]

    def _passes(self, failure: DeleteFailure) -> bool:
        if isinstance(failure.error, OutcomeUnknownError):
            return self._immutable(failure.key)
        return isinstance(failure.error, StorageUnavailableError)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; after a failure, those that come after the last one seen."""
        tries = _Tries(self._policy, _now())
        while True:
            entries = self.wrapped.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
            async with closing(entries):
                while True:
                    try:
                        entry = await anext(entries)
                    except StopAsyncIteration:
                        return
                    except StorageUnavailableError as error:
                        failure = error
                        break
                    # A listing starts anew behind this entry, without what the caller has already.
                    start_after = entry.prefix if isinstance(entry, CommonPrefix) else entry.key
                    tries.succeed()
                    yield entry
            if not await tries.pause(failure):
                raise tries.last(failure)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage; never again if the outcome is unknown.

        The source may have changed since, so a repeated copy could be another one.
        """
        return await self._try(lambda: self.wrapped.copy(source, target, if_version=if_version))

    async def sync(self) -> None:
        """Return when all that was written will survive a power cut."""
        await self._try(self.wrapped.sync)

    async def _try[T](self, call: Callable[[], Awaitable[T]]) -> T:
        began = _now()
        try:
            return await call()
        except StorageUnavailableError as error:
            failure = error
        return await self._again(call, failure, began)

    async def _again[T](
        self,
        call: Callable[[], Awaitable[T]],
        failure: IcechunkError,
        began: float,
        *,
        repeatable: bool = False,
    ) -> T:
        """Retry after the first failure."""
        tries = _Tries(self._policy, began)
        unknown = failure if isinstance(failure, OutcomeUnknownError) else None
        while await tries.pause(failure):
            try:
                return await call()
            except StorageUnavailableError as error:
                failure = error
            except OutcomeUnknownError as error:
                if not repeatable:
                    raise
                failure = unknown = error
            except IcechunkError as error:
                if unknown is None:
                    raise
                raise _still_unknown(unknown, error) from error
        last = tries.last(failure)
        if unknown is None or failure is unknown:
            raise last
        # This try changed nothing, but an earlier one may have landed.
        raise _still_unknown(unknown, last) from last


def _now() -> float:
    return asyncio.get_running_loop().time()


def _retry_after(error: IcechunkError) -> float:
    asked = error.context.get("retry_after_seconds")
    return max(0.0, float(asked)) if isinstance(asked, (int, float)) else 0.0


def _still_unknown(unknown: OutcomeUnknownError, error: IcechunkError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{unknown.message} Trying again did not tell: {error.message}", **unknown.context
    )
