"""The official engine and this library take turns on one container."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from icechunk_async import Repository
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.commit.conflicts import ConflictDetector
from tests.helpers import make_array, read, write
from tests.servers.azure.azurite_server import ACCOUNT, KEY
from tests.servers.azure.conftest import options

# Read by the engine when it is imported.
os.environ.setdefault("ICECHUNK_LOG", "error")
os.environ.setdefault("ICECHUNK_NO_LOGS", "1")

if TYPE_CHECKING:
    import icechunk

    from tests.servers.azure.azurite_server import Azurite

_ROUNDS = 3
_WRITERS = 4


@pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
def spec(request: pytest.FixtureRequest) -> int:
    """Return the version of the format."""
    version: int = request.param
    return version


@pytest.fixture
def prefix() -> str:
    """Return a place in the container; the engine creates none at its root."""
    return f"repositories/{uuid4()}"


@pytest.fixture
def theirs(azurite: Azurite, container: str, prefix: str) -> icechunk.Storage:
    """Return the place as the official engine is told of it."""
    import icechunk

    return icechunk.azure_storage(
        account=ACCOUNT,
        container=container,
        prefix=prefix,
        access_key=KEY,
        config={"azure_storage_endpoint": azurite.endpoint, "azure_allow_http": "true"},
    )


@pytest.fixture
def ours(azurite: Azurite, container: str, prefix: str) -> dict[str, Any]:
    """Return the same place as this library is told of it."""
    return {
        "location": f"az://{container}/{prefix}",
        "storage_options": options(azurite.endpoint),
    }


async def test_both_continue_what_the_other_wrote(
    theirs: icechunk.Storage, ours: dict[str, Any], spec: int
) -> None:
    """Created here, committed to in turn, read whole by both."""
    import icechunk

    async with Repository.create(**ours, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2 * _ROUNDS,), (1,))
        await session.commit("array")
        for number in range(_ROUNDS):
            other = await asyncio.to_thread(icechunk.Repository.open, theirs)
            writer: Any = await asyncio.to_thread(other.writable_session, "main")
            await write(writer, f"a/c/{2 * number}", b"theirs %d" % number * 100)
            await asyncio.to_thread(writer.commit, f"theirs {number}")
            mine = await repository.writable_session("main")
            assert await read(mine, f"a/c/{2 * number}") == b"theirs %d" % number * 100
            await write(mine, f"a/c/{2 * number + 1}", b"ours %d" % number * 100)
            await mine.commit(f"ours {number}")
        reader: Any = await asyncio.to_thread(other.readonly_session, "main")
        for number in range(_ROUNDS):
            assert await read(reader, f"a/c/{2 * number + 1}") == b"ours %d" % number * 100


async def test_what_they_create_is_opened_here(
    theirs: icechunk.Storage, ours: dict[str, Any], spec: int
) -> None:
    """The other way round."""
    import icechunk

    other = await asyncio.to_thread(icechunk.Repository.create, theirs, spec_version=spec)
    writer: Any = await asyncio.to_thread(other.writable_session, "main")
    await make_array(writer, "a", (1,), (1,))
    await write(writer, "a/c/0", b"theirs" * 100)
    landed = await asyncio.to_thread(writer.commit, "theirs")
    async with Repository.open(**ours) as repository:
        assert repository.spec_version == spec
        assert str(await repository.lookup_branch("main")) == landed
        assert await read(await repository.readonly_session("main"), "a/c/0") == b"theirs" * 100


async def test_racing_commits_of_both_are_all_kept(
    theirs: icechunk.Storage, ours: dict[str, Any], spec: int
) -> None:
    """Each refuses to overwrite the other, and tries again."""
    import icechunk

    async with Repository.create(**ours, spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (2 * _WRITERS,), (1,))
        await session.commit("array")
        other = await asyncio.to_thread(icechunk.Repository.open, theirs)

        async def commit(chunk: int) -> None:
            if chunk % 2:
                mine = await repository.writable_session("main")
                await write(mine, f"a/c/{chunk}", b"%d" % chunk * 600)
                await mine.commit(f"{chunk}", rebase_with=ConflictDetector())
            else:
                writer: Any = await asyncio.to_thread(other.writable_session, "main")
                await write(writer, f"a/c/{chunk}", b"%d" % chunk * 600)
                solver = icechunk.ConflictDetector()
                await asyncio.to_thread(writer.commit, f"{chunk}", rebase_with=solver)

        await bounded_map(commit, range(2 * _WRITERS), limit=2 * _WRITERS)
        infos = [info async for info in repository.ancestry(branch="main")]
        expected = sorted(str(chunk) for chunk in range(2 * _WRITERS))
        assert sorted(info.message for info in infos[:-2]) == expected
        reader = await repository.readonly_session("main")
        for chunk in range(2 * _WRITERS):
            assert await read(reader, f"a/c/{chunk}") == b"%d" % chunk * 600
