from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from icechunk_async.storage import Storage, open_storage
from icechunk_async.testing.conformance import StorageConformance


class TestSqlite(StorageConformance):
    many_keys = 3_000  # instead of 10,000: each is a transaction, which waits for the disk
    page_keys = 200  # instead of 1,000: a table has no pages

    @pytest_asyncio.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Storage]:
        async with open_storage(f"sqlite://{tmp_path}/objects.db") as storage:
            yield storage
