"""A storage that fails on purpose, in the same way for each seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageUnavailableError,
)
from icechunk_async.testing.wrapping import WrappedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.storage import Data, Expected, Storage, Version

__all__ = ["FaultRates", "FaultyStorage"]


@dataclass(frozen=True, slots=True)
class FaultRates:
    """The rate of each fault, from 0 to 1."""

    lost_replies: float = 0.0
    """A write is applied, and its reply is lost."""
    lost_requests: float = 0.0
    """A write is not applied, and its reply is lost."""
    late_writes: float = 0.0
    """The reply is lost, and the write is applied after later requests."""
    refusals: float = 0.0
    """Any request is turned away, as by a busy service; nothing changes."""
    delays: float = 0.0
    """A request waits for a random time below ``delay_seconds``."""
    delay_seconds: float = 0.05


class FaultyStorage(WrappedStorage):
    """Injects faults at random into requests for keys that ``affects`` accepts."""

    def __init__(
        self,
        storage: Storage,
        rates: FaultRates,
        *,
        seed: int,
        affects: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Wrap ``storage``; equal seeds and equal requests make equal faults."""
        super().__init__(storage)
        self._rates = rates
        self._random = random.Random(seed)  # noqa: S311 -- faults, not secrets
        self._affects = affects
        # With their conditions: a late write is refused if the object has changed by then, as a
        # service would.
        self._late: list[tuple[str, bytes, Expected]] = []

    def _happens(self, rate: float) -> bool:
        return self._random.random() < rate

    async def before(self, operation: str, key: str) -> None:
        """Delay, apply late writes, or refuse the request."""
        del operation
        if self._happens(self._rates.delays):
            await anyio.sleep(self._random.random() * self._rates.delay_seconds)
        else:
            # A turn for others, as a request to a service gives: a storage in memory never waits.
            await anyio.lowlevel.checkpoint()
        if self._late and self._happens(0.5):
            await self._carry_out_late()
        if self._affects(key) and self._happens(self._rates.refusals):
            raise StorageUnavailableError(f"{key!r}: the service is busy (on purpose)")

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object, or lose the request or the reply."""
        await self.before("put", key)
        if not self._affects(key):
            return await self.wrapped.put(key, data, if_version=if_version)
        unknown = OutcomeUnknownError(f"{key!r}: no answer came (on purpose)", key=key)
        if self._happens(self._rates.lost_requests):
            raise unknown
        if self._happens(self._rates.late_writes):
            self._late.append((key, bytes(data), if_version))
            raise unknown
        version = await self.wrapped.put(key, data, if_version=if_version)
        await anyio.lowlevel.checkpoint()  # a caller may be cancelled after the write landed
        if self._happens(self._rates.lost_replies):
            raise unknown
        return version

    async def settle(self) -> None:
        """Apply every write that is still in flight."""
        while self._late:
            await self._carry_out_late()

    async def _carry_out_late(self) -> None:
        key, data, if_version = self._late.pop(0)
        try:
            await self.wrapped.put(key, data, if_version=if_version)
        except PreconditionFailedError:
            pass
        except IcechunkError as error:
            raise AssertionError("the wrapped storage must not fail by itself") from error
