"""What wraps a storage keeps its promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import Storage, open_storage
from icechunk_async.storage.limit import Budget, Limited
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async.testing.faults import FaultRates, FaultyStorage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class TestLimited(StorageConformance):
    """A budget of four requests at a time."""

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(memory_url()) as storage:
            yield Limited(storage, Budget(4))


class TestLatency(StorageConformance):
    """Each request takes a turn of the event loop."""

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(memory_url()) as storage:
            yield LatencyStorage(storage, seconds=0)


class TestFaultless(StorageConformance):
    """The storage that fails on purpose, while it does not."""

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open an empty storage."""
        async with open_storage(memory_url()) as storage:
            yield FaultyStorage(storage, FaultRates(), seed=0)
