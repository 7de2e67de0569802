"""The GCS backend keeps every promise of the contract, on our server of the JSON API."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import anyio.to_thread
import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from tests.servers.gcs.running import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.gcs.running import RunningServer


class _OnServer(StorageConformance):
    __test__ = False

    many_keys: ClassVar[int] = 1_100  # eleven pages of the server
    page_keys: ClassVar[int] = 100

    _server: RunningServer

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Put the object under a hold."""
        bucket, _, prefix = storage.description.url.removeprefix("gs://").partition("/")
        name = f"{prefix.removesuffix('/')}/{key}".removeprefix("/")
        return _holding(self._server, bucket, name)


class TestBucket(_OnServer):
    """Objects at the root of a bucket."""

    __test__ = True

    @pytest.fixture
    async def storage(self, server: RunningServer, bucket: str) -> AsyncIterator[Storage]:
        """Open a separate bucket."""
        self._server = server
        async with open_storage(
            f"gs://{bucket}", endpoint_url=server.url, allow_http=True, token=ANONYMOUS
        ) as storage:
            yield storage


class TestPrefix(_OnServer):
    """Objects below a prefix that URLs could spoil, beside others that must not be seen."""

    __test__ = True

    deviations: ClassVar[dict[str, str]] = {
        "test_a_key_of_the_greatest_length_is_a_key": (
            "names in Cloud Storage have at most 1024 bytes, the prefix included"
        )
    }

    @pytest.fixture
    async def storage(self, server: RunningServer, bucket: str) -> AsyncIterator[Storage]:
        """Open a prefix between other objects."""
        self._server = server
        options = {"endpoint_url": server.url, "allow_http": True, "token": ANONYMOUS}
        async with open_storage(f"gs://{bucket}", **options) as root:
            for key in ("a", "some/pre fix%2F", "some/pre fix%2F0/a", "some/pre fix%2F.b", "z"):
                await root.put(key, b"not ours")
        async with open_storage(f"gs://{bucket}/some/pre fix%2F/", **options) as storage:
            yield storage


@asynccontextmanager
async def _holding(server: RunningServer, bucket: str, name: str) -> AsyncIterator[None]:
    def hold(*, held: bool) -> None:
        server.hold(bucket, name, held=held)

    await anyio.to_thread.run_sync(lambda: hold(held=True))
    yield
    await anyio.to_thread.run_sync(lambda: hold(held=False))
