"""The promises of a storage as tests, for backends of this library and of anyone else.

A backend's author writes a subclass with one fixture::

    class TestShelf(StorageConformance):
        @pytest_asyncio.fixture
        async def storage(self) -> AsyncIterator[Storage]:
            async with open_storage(f"shelf://bucket/{uuid4()}") as storage:
                yield storage

The storage of each test must be empty and writable. `StorageConformance` describes what else a
subclass may set.
"""

from icechunk_async.testing.conformance import _setup as _setup
from icechunk_async.testing.conformance.suite import StorageConformance

__all__ = ["StorageConformance"]
