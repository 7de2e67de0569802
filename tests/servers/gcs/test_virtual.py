"""Virtual chunks in buckets of Cloud Storage: who asks, and by which ETag they are guarded."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime, timedelta
from hashlib import md5
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import (
    GcsAnonymous,
    GcsBearerToken,
    GcsRefreshable,
    GcsServiceAccountFile,
    GcsServiceAccountKey,
)
from icechunk_async.errors import (
    InvalidInputError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config import GcsStore, VirtualChunkContainer
from icechunk_async.storage import open_storage
from icechunk_async_gcs.reading import etag_of
from tests.helpers import make_array, memory_url, read
from tests.servers.gcs.running import ANONYMOUS
from tests.servers.gcs.scripted import scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async import Session
    from icechunk_async.credentials import Credential
    from tests.servers.gcs.scripted import Scripted

BODY = bytes(range(200))
PREFIX = "gs://bucket/dir/"
MD5 = md5(BODY, usedforsecurity=False).hexdigest()


@pytest.fixture
async def script() -> AsyncIterator[Scripted]:
    """Run the server within the test, with one object."""
    async with scripted() as script:
        async with open_storage(
            "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
        ) as storage:
            await storage.put("dir/f.nc", BODY)
        yield script


async def session_with(script: Scripted, credential: Credential) -> AsyncIterator[Session]:
    """Return a session that reads the bucket; the reader says where the server is."""
    container = VirtualChunkContainer(PREFIX, GcsStore())
    access = {**await credential.storage_options(), "endpoint_url": script.url, "allow_http": True}
    async with Repository.create(
        memory_url(),
        config=RepositoryConfig(virtual_chunk_containers=(container,)),
        authorize_virtual_chunk_access={PREFIX: access},
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (10,), (1,))
        session.store.set_virtual_ref("a/c/0", f"{PREFIX}f.nc", offset=10, length=20)
        yield session


async def test_tokens_are_sent_and_asked_for_again(script: Scripted) -> None:
    """Fixed tokens never change. A function is called again if its token is refused or expires."""
    later = datetime.now(UTC) + timedelta(hours=1)
    script.server._tokens = {"one": "valid", "two": "valid"}
    answers = ["one", "two"]

    def ask() -> GcsBearerToken:
        return GcsBearerToken(answers.pop(0), later)

    async for session in session_with(script, GcsBearerToken("one", later)):
        assert await read(session, "a/c/0") == BODY[10:30]
    async for session in session_with(script, GcsRefreshable(ask)):
        assert await read(session, "a/c/0") == BODY[10:30]
        script.server._tokens["one"] = "expired"
        assert await read(session, "a/c/0") == BODY[10:30]
    assert answers == []
    initial = GcsBearerToken("two", later)
    async for session in session_with(script, GcsRefreshable(ask, initial)):
        assert await read(session, "a/c/0") == BODY[10:30]
    script.server._tokens["two"] = "denied"
    async for session in session_with(script, initial):
        with pytest.raises(VirtualAccessError, match=r"gs://bucket/dir/f\.nc") as caught:
            await read(session, "a/c/0")
        assert caught.value.context["location"] == f"{PREFIX}f.nc"


async def test_keys_of_service_accounts_reach_the_driver(script: Scripted, tmp_path: Any) -> None:
    """Which says what is wrong with them."""
    for credential in (
        GcsServiceAccountKey('{"type": "service_account"}'),
        GcsServiceAccountFile(tmp_path / "missing.json"),
    ):
        with pytest.raises(InvalidInputError, match=r"holds no credentials|path of no file"):
            async for _ in session_with(script, credential):
                pass


async def test_the_etag_is_that_of_other_programs(script: Scripted) -> None:
    """The MD5, as the XML API tells it; a generation, as ours; nothing else."""
    async for session in session_with(script, GcsAnonymous()):
        async with open_storage(
            "gs://bucket", endpoint_url=script.url, allow_http=True, token=ANONYMOUS
        ) as storage:
            generation = (await storage.get("dir/f.nc")).version.token
        for at, etag in enumerate((MD5, f'"{MD5}"', generation)):
            session.store.set_virtual_ref(
                f"a/c/{at}", f"{PREFIX}f.nc", offset=0, length=5, checksum=etag
            )
            assert await read(session, f"a/c/{at}") == BODY[:5]
        session.store.set_virtual_ref(
            "a/c/3", f"{PREFIX}f.nc", offset=0, length=5, checksum=MD5[::-1]
        )
        with pytest.raises(VirtualSourceChangedError, match=MD5):
            await read(session, "a/c/3")


def test_an_etag_is_told_for_every_object() -> None:
    """Composed objects have no MD5."""
    digest = b64encode(bytes.fromhex(MD5)).decode()
    assert etag_of({"X-Goog-Hash": f"crc32c=AAAAAA==,md5={digest}", "ETag": "x"}) == MD5
    assert etag_of({"x-goog-hash": f"md5={digest}"}) == MD5
    assert etag_of({"X-Goog-Hash": "crc32c=AAAAAA==", "ETag": "CJ/x="}) == "CJ/x="
    assert etag_of({}) is None
