"""The memory backend keeps every promise of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_memory import forget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage


class TestMemory(StorageConformance):
    """Objects in this process."""

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Storage]:
        """Open a name that nobody else uses."""
        url = f"memory://{uuid4()}"
        async with open_storage(url) as storage:
            yield storage
        forget(url)
