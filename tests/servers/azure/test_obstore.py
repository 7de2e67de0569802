"""The Rust client's backend keeps the promises of the contract on Azurite."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from tests.servers.azure.conftest import options, service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.azure.azurite_server import Azurite


class TestObstore(StorageConformance):
    """Each test has a prefix in a separate container."""

    many_keys = 2500  # five pages; Azurite takes its time for each key

    deviations: ClassVar = dict.fromkeys(
        (
            "test_awkward_keys_name_different_objects",
            "test_keys_are_listed_in_the_order_of_their_bytes",
            "test_a_listing_can_be_continued_after_every_key",
        ),
        "one of the suite's keys holds a backslash, which Azure takes for a slash, so that two "
        "keys would be one object; the backend refuses it",
    )

    @pytest.fixture
    async def storage(self, azurite: Azurite, container: str) -> AsyncIterator[Storage]:
        """Open an empty prefix."""
        url = f"obstore+az://{container}/{uuid4()}"
        # On a busy machine Azurite is silent for a minute while it deletes many blobs.
        given = {**options(azurite.endpoint), "timeout_seconds": 250}
        async with open_storage(url, **given) as storage:
            yield storage

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Lease the blob: without the lease nobody deletes it."""
        container, _, prefix = storage.description.url.partition("://")[2].partition("/")
        endpoint = str(storage.description.options["endpoint_url"])
        return _leased(endpoint, container, f"{prefix}/{key}")


@asynccontextmanager
async def _leased(endpoint: str, container: str, name: str) -> AsyncIterator[None]:
    async with service(endpoint) as client:
        lease = await client.get_blob_client(container, name).acquire_lease()
        yield
        await lease.release()
