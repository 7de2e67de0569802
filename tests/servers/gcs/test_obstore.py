"""The Rust client's backend keeps the promises of the contract on our server of GCS's protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage
    from tests.servers.gcs.running import RunningServer


class TestObstore(StorageConformance):
    """Each test has a separate bucket."""

    many_keys = 1_100  # two pages

    @pytest.fixture
    async def storage(self, server: RunningServer, bucket: str) -> AsyncIterator[Storage]:
        """Open the bucket."""
        async with open_storage(
            f"obstore+gs://{bucket}",
            endpoint_url=server.url,
            allow_http=True,
            token="any",  # noqa: S106 - the client signs writes also where it is told not to
        ) as storage:
            yield storage
