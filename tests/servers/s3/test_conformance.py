"""The S3 backend keeps every promise of the contract on servers of two code bases."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_s3 import changing, listing
from icechunk_async_s3.signing import checksum_header
from icechunk_async_s3.transport import Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from icechunk_async.storage import Storage
    from tests.servers.s3.running import Server


class OnServer(StorageConformance):
    """The fixtures that both servers share."""

    many_keys = 1_100  # two pages; the server takes its time for each key
    page_keys = 100
    __test__ = False

    @pytest.fixture(autouse=True)
    def _small_pages(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ask for fewer keys a page, so that tests of paging need fewer; but in one of them."""
        if request.function.__name__ != "test_many_keys_are_listed_once_and_in_order":
            monkeypatch.setattr(listing, "PAGE_KEYS", self.page_keys)
            monkeypatch.setattr(changing, "KEYS_A_DELETION", self.page_keys)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the answer of the server say that one key was not deleted."""
        return _keeping(cast("Any", storage), key)


@asynccontextmanager
async def _keeping(storage: Any, key: str) -> AsyncIterator[None]:
    transport = storage._transport
    send = transport.send

    async def leave_out(method: str, full: str, **request: Any) -> Reply:
        if method != "POST":
            return cast("Reply", await send(method, full, **request))
        body = request["body"].replace(f"<Object><Key>{key}</Key></Object>".encode(), b"")
        name, value = checksum_header("crc32", body)
        headers = {**request["headers"], name: value}
        await send(method, full, **{**request, "body": body, "headers": headers})
        failed = (
            f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>on purpose</Message></Error>"
        )
        return Reply(200, {}, f"<DeleteResult>{failed}</DeleteResult>".encode())

    transport.send = leave_out
    yield
    transport.send = send


class TestMinistack(OnServer):
    """Each test has a separate bucket."""

    __test__ = True

    @pytest.fixture
    async def storage(self, ministack_server: Server) -> AsyncIterator[Storage]:
        """Open an empty bucket."""
        bucket = await asyncio.to_thread(ministack_server.bucket)
        async with open_storage(f"s3://{bucket}", **ministack_server.options()) as storage:
            yield storage


@pytest.mark.thorough
class TestMoto(OnServer):
    """A second code base."""

    __test__ = True
    deviations: ClassVar[Mapping[str, str]] = {
        "test_a_copy_of_another_version_is_refused": "moto ignores x-amz-copy-source-if-match"
    }

    @pytest.fixture
    async def storage(self, moto_server: Server) -> AsyncIterator[Storage]:
        """Open an empty bucket."""
        bucket = await asyncio.to_thread(moto_server.bucket)
        async with open_storage(f"s3://{bucket}", **moto_server.options()) as storage:
            yield storage
