"""Others in the same bucket: obstore's client, and the official engine, which takes turns with us.

Both use the XML API. They reach the server through the key of a service account, which may name
another host and switch authentication off.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
import pytest
import zarr
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import gather
from icechunk_async.conflicts import ConflictDetector
from icechunk_async.errors import PreconditionFailedError
from icechunk_async.storage import ABSENT, ByteRange, ObjectInfo, open_storage
from tests.helpers import array_document, read, write
from tests.servers.gcs.running import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import Storage
    from tests.servers.gcs.running import RunningServer


def _key(server: RunningServer) -> str:
    names = ("client_email", "private_key", "private_key_id")
    return json.dumps(
        {"gcs_base_url": server.url, "disable_oauth": True, **dict.fromkeys(names, "")}
    )


@pytest.fixture
def store(server: RunningServer, bucket: str) -> GCSStore:
    """Open the bucket with obstore."""
    return GCSStore(
        bucket,
        config={"service_account_key": _key(server)},
        client_options={"allow_http": True},
    )


@pytest.fixture
async def storage(server: RunningServer, bucket: str) -> AsyncIterator[Storage]:
    """Open the bucket with the backend."""
    async with open_storage(
        f"gs://{bucket}", endpoint_url=server.url, allow_http=True, token=ANONYMOUS
    ) as storage:
        yield storage


async def test_each_reads_what_the_other_wrote(store: GCSStore, storage: Storage) -> None:
    """Objects of all sizes, names that URLs could spoil, ranges, listings, deletions."""
    bodies = {"a/b c+é%2F": b"0123456789", "empty": b"", "large": bytes(range(256)) * 50_000}
    for key, body in bodies.items():
        await obstore.put_async(store, f"theirs/{key}", body)
        await storage.put(f"ours/{key}", body)
    for key, body in bodies.items():
        assert (await storage.get(f"theirs/{key}")).data == body
        found = await obstore.get_async(store, f"ours/{key}")
        assert bytes(await found.bytes_async()) == body
    part = await obstore.get_range_async(store, "ours/large", start=1000, end=1010)
    assert bytes(part) == bodies["large"][1000:1010]
    assert (await storage.get("theirs/large", ByteRange(1000, 1010))).data == bytes(part)
    names = [f"{who}/{key}" for who in ("ours", "theirs") for key in sorted(bodies)]
    ours = [entry.key async for entry in storage.list_prefix() if isinstance(entry, ObjectInfo)]
    theirs = [item["path"] async for page in obstore.list(store) for item in page]
    assert ours == sorted(theirs) == names
    await obstore.delete_async(store, names[:3])
    assert await storage.delete(names[3:]) == []
    assert [page async for page in obstore.list(store)] == []


async def test_conditions_hold_between_both(store: GCSStore, storage: Storage) -> None:
    """A generation that one of them saw is a condition for the other."""
    created = await obstore.put_async(store, "key", b"theirs", mode="create")
    with pytest.raises(PreconditionFailedError):
        await storage.put("key", b"ours", if_version=ABSENT)
    found = await storage.get("key")
    assert found.version.token == created["version"]
    updated = await storage.put("key", b"ours", if_version=found.version)
    with pytest.raises(AlreadyExistsError):
        await obstore.put_async(store, "key", b"theirs", mode="create")
    with pytest.raises(PreconditionError):
        await obstore.put_async(store, "key", b"theirs", mode={"version": found.version.token})
    await obstore.put_async(store, "key", b"theirs again", mode={"version": updated.token})
    with pytest.raises(PreconditionFailedError):
        await storage.put("key", b"ours", if_version=updated)


def _official(server: RunningServer, bucket: str) -> Any:
    import icechunk

    return icechunk.gcs_storage(
        bucket=bucket,
        prefix="repository",
        service_account_key=_key(server),
        config={"allow_http": "true"},
    )


@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("created_by", ["us", "them"])
async def test_the_official_engine_takes_turns_with_us(
    server: RunningServer, bucket: str, spec: int, created_by: str
) -> None:
    """Each opens what the other created, reads what it committed, and commits on top."""
    import icechunk

    url = f"gs://{bucket}/repository"
    options = {"endpoint_url": server.url, "allow_http": True, "token": ANONYMOUS}

    def theirs(value: int, *, create: bool) -> list[int]:
        storage = _official(server, bucket)
        if create:
            repository = icechunk.Repository.create(storage, spec_version=spec)
        else:
            repository = icechunk.Repository.open(storage)
        session = repository.writable_session("main")
        shape: dict[str, Any] = {"shape": (4,), "chunks": (2,), "dtype": "uint8"}
        if create:
            array: Any = zarr.create_array(
                session.store, name="a", fill_value=0, compressors=None, **shape
            )
        else:
            array = zarr.open_array(session.store, path="a", mode="r+")
        before: list[int] = np.asarray(array[:]).tolist()
        array[value % 4] = value
        session.commit(f"theirs {value}")
        return before

    async def ours(value: int, *, create: bool) -> list[int]:
        opening = (
            Repository.create(url, spec_version=spec, storage_options=options)
            if create
            else Repository.open(url, storage_options=options)
        )
        async with opening as repository:
            session = await repository.writable_session("main")
            if create:
                await write(session, "a/zarr.json", array_document((4,), (2,)))
            chunks = [bytearray(await read(session, f"a/c/{n}") or b"\0\0") for n in range(2)]
            before = [*chunks[0], *chunks[1]]
            chunks[value % 4 // 2][value % 2] = value
            await write(session, f"a/c/{value % 4 // 2}", bytes(chunks[value % 4 // 2]))
            await session.commit(f"ours {value}")
            return before

    expected = [0, 0, 0, 0]
    for value in range(1, 7):
        create = value == 1
        if (value % 2 == 1) == (created_by == "us"):
            before = await ours(value, create=create)
        else:
            before = await asyncio.to_thread(theirs, value, create=create)
        assert before == expected
        expected[value % 4] = value


@pytest.mark.parametrize("spec", [1, 2])
async def test_commits_of_both_at_once_all_land(
    server: RunningServer, bucket: str, spec: int
) -> None:
    """Neither engine overwrites the other's commits. Each rebases."""
    import icechunk

    url = f"gs://{bucket}/repository"
    options = {"endpoint_url": server.url, "allow_http": True, "token": ANONYMOUS}
    async with Repository.create(url, spec_version=spec, storage_options=options) as repository:
        session = await repository.writable_session("main")
        await write(session, "a/zarr.json", array_document((12,), (1,)))
        await session.commit("array")

        async def ours(chunk: int) -> None:
            session = await repository.writable_session("main")
            await write(session, f"a/c/{chunk}", b"%c" % (chunk + 1))
            await session.commit(f"ours {chunk}", rebase_with=ConflictDetector(), rebase_tries=100)

        def theirs(chunk: int) -> None:
            other = icechunk.Repository.open(_official(server, bucket))
            session = other.writable_session("main")
            zarr.open_array(session.store, path="a", mode="r+")[chunk] = chunk + 1
            session.commit(
                f"theirs {chunk}", rebase_with=icechunk.ConflictDetector(), rebase_tries=100
            )

        async def all_of_ours() -> None:
            await gather(*(ours(chunk) for chunk in range(6)))

        async def all_of_theirs() -> None:
            await gather(*(asyncio.to_thread(theirs, chunk) for chunk in range(6, 12)))

        await gather(all_of_ours(), all_of_theirs())
        reader = await repository.readonly_session("main")
        assert [await read(reader, f"a/c/{n}") for n in range(12)] == [
            b"%c" % (n + 1) for n in range(12)
        ]
        messages = [info.message async for info in repository.ancestry(branch="main")]
        assert len(messages) == 14
