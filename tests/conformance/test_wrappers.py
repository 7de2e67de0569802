"""Every policy keeps the promises of a storage, alone and in the stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.engine.policies import policies_of
from icechunk_async.format.config import (
    StorageConcurrencySettings,
    StorageSettings,
)
from icechunk_async.format.layout import is_written_once
from icechunk_async.storage import Storage, open_storage
from icechunk_async.storage.policies.coalesce import Coalescing
from icechunk_async.storage.policies.hedge import Hedged, HedgePolicy
from icechunk_async.storage.policies.limit import Budget, Limited
from icechunk_async.storage.policies.observe import Observed
from icechunk_async.storage.policies.retry import Retrying
from icechunk_async.storage.policies.stack import with_policies
from icechunk_async.storage.policies.values import CoalescePolicy, RetryPolicy
from icechunk_async.storage.policies.wrapping import PassingStorage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _Wrapped(StorageConformance):
    """A policy around memory."""

    many_keys = 1_000  # memory answers them in one page, as it would more
    page_keys = 200

    def wrap(self, plain: Storage) -> Storage:
        """Put the policy around ``plain``."""
        raise NotImplementedError

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(memory_url()) as plain:
            yield self.wrap(plain)


@pytest.mark.thorough
class TestPassing(_Wrapped):
    """The base of the others, which changes nothing."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        return PassingStorage(plain)


class TestLimited(_Wrapped):
    """A budget of four requests at a time."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        return Limited(plain, Budget(4))


class TestRetrying(_Wrapped):
    """A third of the requests are turned away, and tried again at once."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        busy = FaultyStorage(plain, FaultRates(refusals=0.3), seed=1)
        return Retrying(busy, RetryPolicy(max_tries=30, initial_seconds=0))


class TestCoalescing(_Wrapped):
    """Parts of a few bytes, so that nearly every range is split, and small gaps."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        late = LatencyStorage(plain, seconds=0)  # so that parts and joined reads overlap
        return Coalescing(late, CoalescePolicy(gap_bytes=2, part_bytes=5, max_parts=7))


class TestHedged(_Wrapped):
    """Every read that takes longer than the fastest is sent twice."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        late = LatencyStorage(plain, seconds=0, jitter_seconds=0.001)
        policy = HedgePolicy(quantile=0.01, max_share=1.0, min_reads=1)
        return Hedged(late, lambda _: True, policy)


@pytest.mark.thorough
class TestObserved(_Wrapped):
    """Everything is counted."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        return Observed(plain)


class TestStack(_Wrapped):
    """All policies of an opened repository, and those that a user may add."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        service = LatencyStorage(plain, seconds=0)
        concurrency = StorageConcurrencySettings(
            ideal_concurrent_request_size=64, max_concurrent_requests_for_object=4
        )
        return with_policies(
            Observed(service),
            Budget(4),
            policies_of(StorageSettings(concurrency=concurrency), HedgePolicy(after_seconds=0)),
            immutable=is_written_once,
        )


@pytest.mark.thorough
class TestLatency(_Wrapped):
    """Each request takes a turn of the event loop."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        return LatencyStorage(plain, seconds=0)


@pytest.mark.thorough
class TestFaultless(_Wrapped):
    """The storage that fails on purpose, while it does not."""

    def wrap(self, plain: Storage) -> Storage:
        """Wrap."""
        return FaultyStorage(plain, FaultRates(), seed=0)
