"""The S3 backend keeps every promise of the contract on servers of two code bases."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.conformance import StorageConformance
from icechunk_async_s3 import changing, reading

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
            monkeypatch.setattr(reading, "PAGE_KEYS", self.page_keys)
            monkeypatch.setattr(changing, "KEYS_A_DELETION", self.page_keys)

    def undeletable(self, storage: Storage, key: str) -> AbstractAsyncContextManager[None]:
        """Let the answer of the server say that one key was not deleted."""
        return _keeping(cast("Any", storage), key)


@asynccontextmanager
async def _keeping(storage: Any, key: str) -> AsyncIterator[None]:
    events = (await (await storage._connections.here()).wiring.stock.client()).meta.events

    def leave_out(params: dict[str, Any], **_: object) -> None:
        objects = params["Delete"]["Objects"]
        params["Delete"]["Objects"] = [it for it in objects if it["Key"] != key]

    def say_so(parsed: dict[str, Any], **_: object) -> None:
        parsed["Errors"] = [{"Key": key, "Code": "AccessDenied", "Message": "on purpose"}]

    events.register("before-parameter-build.s3.DeleteObjects", leave_out)
    events.register("after-call.s3.DeleteObjects", say_so)
    yield
    events.unregister("before-parameter-build.s3.DeleteObjects", leave_out)
    events.unregister("after-call.s3.DeleteObjects", say_so)


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
