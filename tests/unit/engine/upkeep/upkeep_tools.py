"""Histories with garbage in them, and looking whether all that is needed is there."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from icechunk_async import Repository
from icechunk_async.errors import ObjectNotFoundError
from tests.helpers import make_array, memory_url, objects, read, write

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["CHUNK", "commit", "folders", "littered", "now", "read_all"]

CHUNK = b"x" * 600
"""More than is stored inline."""


def now() -> datetime:
    """Return the time by the clock of the memory storage."""
    return datetime.now(UTC)


async def commit(
    repository: Repository, chunk: int, message: str, branch: str = "main"
) -> SnapshotId:
    """Write one chunk, creating the array if it does not exist, and commit it."""
    session = await repository.writable_session(branch)
    if await read(session, "a/zarr.json") is None:
        await make_array(session, "a", (1000,), (1,))
    await write(session, f"a/c/{chunk}", message.encode().ljust(len(CHUNK)))
    return await session.commit(message)


async def littered(spec: int) -> tuple[str, list[SnapshotId]]:
    """Create a repository with four commits, a branch ``side``, and garbage of every kind.

    Returns:
        Its URL, and the snapshots of ``main``, the first one first.
    """
    url = memory_url()
    async with Repository.create(url, spec_version=spec) as repository:
        for number in range(4):
            await commit(repository, number, f"commit {number}")
        line = [info.id async for info in repository.ancestry(branch="main")][::-1]
        await repository.create_branch("side", line[2])
        await commit(repository, 10, "on the side", "side")
        await repository.create_branch("lost", line[2])
        await commit(repository, 20, "lost", "lost")
        await commit(repository, 21, "lost as well", "lost")
        await repository.delete_branch("lost")
        abandoned = await repository.writable_session("main")
        await write(abandoned, "a/c/30", CHUNK)
        if spec == 2:
            detached = await repository.writable_session("main")
            await write(detached, "a/c/31", CHUNK)
            await detached.flush("detached")
    return url, line


async def read_all(storage: str | Storage) -> dict[str, dict[str, bytes | None]]:
    """Read every key of every snapshot that refs lead to, and every log that a diff needs."""
    found: dict[str, dict[str, bytes | None]] = {}
    async with Repository.open(storage) as repository:
        tips = {**await repository.branches(), **await repository.tags()}.values()
        for tip in tips:
            line = [info.id async for info in repository.ancestry(snapshot_id=tip)]
            if len(line) > 1:
                await repository.diff(from_snapshot_id=line[-1], to_snapshot_id=tip)
            for snapshot_id in line:
                if str(snapshot_id) not in found:
                    found[str(snapshot_id)] = await _read_snapshot(repository, snapshot_id)
    return found


async def _read_snapshot(
    repository: Repository, snapshot_id: SnapshotId
) -> dict[str, bytes | None]:
    session = await repository.readonly_session(snapshot_id=snapshot_id)
    try:
        return {key: await read(session, key) async for key in session.store.list()}
    except ObjectNotFoundError as error:
        raise AssertionError(f"snapshot {snapshot_id} lost something") from error


async def folders(storage: Storage) -> Counter[str]:
    """Count the objects of each folder."""
    return Counter(key.partition("/")[0] for key in await objects(storage))
