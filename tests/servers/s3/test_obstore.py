"""The Rust client's backend keeps every promise of the contract on a server of S3's protocol."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import obstore
import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.s3.running import Server


class TestObstore(StorageConformance):
    """Each test has a separate bucket, with a prefix that a URL would have to escape."""

    many_keys = 1_100  # two pages; the server takes its time for each key

    @pytest.fixture
    async def storage(self, ministack_server: Server) -> AsyncIterator[Storage]:
        """Open an empty prefix."""
        bucket = await asyncio.to_thread(ministack_server.bucket)
        url = f"obstore+s3://{bucket}/{uuid4()}/a%20b c"
        async with open_storage(url, **ministack_server.options()) as storage:
            yield storage

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the client refuse whatever holds one key."""
        del storage
        return _refusing_to_delete(key)


@asynccontextmanager
async def _refusing_to_delete(key: str) -> AsyncIterator[None]:
    delete = obstore.delete_async

    async def refuse(client: Any, paths: str | Sequence[str]) -> None:
        named = [paths] if isinstance(paths, str) else paths
        if any(path.endswith(key) for path in named):
            raise PermissionError(key)
        await delete(client, paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "delete_async", refuse)
        yield
