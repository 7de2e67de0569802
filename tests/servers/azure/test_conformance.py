"""The Azure backend keeps the promises of the contract on Azurite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_azure import reading
from tests.servers.azure.conftest import options, service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.azure.azurite_server import Azurite

BACKSLASH: Final = (
    "one of the suite's keys holds a backslash, which Azure takes for a slash, so that two keys "
    "would be one object; the backend refuses it. test_azure.py runs the promise without it"
)
WITH_BACKSLASH: Final = (
    "test_awkward_keys_name_different_objects",
    "test_keys_are_listed_in_the_order_of_their_bytes",
    "test_a_listing_can_be_continued_after_every_key",
)


class TestAzure(StorageConformance):
    """Each test has a separate container."""

    many_keys = 1_100  # three pages; Azurite takes its time for each key
    page_keys = 50

    @pytest.fixture(autouse=True)
    def _small_pages(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ask for fewer keys a page, so that tests of paging need fewer; but in one of them."""
        if request.function.__name__ != "test_many_keys_are_listed_once_and_in_order":
            monkeypatch.setattr(reading, "PAGE_ENTRIES", self.page_keys)

    deviations: ClassVar = dict.fromkeys(WITH_BACKSLASH, BACKSLASH)

    @pytest.fixture
    async def storage(self, azurite: Azurite, container: str) -> AsyncIterator[Storage]:
        """Open the container."""
        async with open_storage(f"az://{container}", **options(azurite.endpoint)) as storage:
            yield storage

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Lease the blob: without the lease nobody deletes it."""
        endpoint = str(storage.description.options["endpoint_url"])
        container = storage.description.url.removeprefix("az://")
        return _leased(endpoint, container, key)


@asynccontextmanager
async def _leased(endpoint: str, container: str, key: str) -> AsyncIterator[None]:
    async with service(endpoint) as client:
        lease = await client.get_blob_client(container, key).acquire_lease()
        yield
        await lease.release()
