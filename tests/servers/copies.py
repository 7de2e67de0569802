"""Copies of repositories from one bucket or container to another, the same for every service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async import Repository
from tests.helpers import make_array, read, write

if TYPE_CHECKING:
    from icechunk_async import RepositoryConfig

__all__ = ["check_copy_by_the_service", "check_shallow_copy"]


async def check_copy_by_the_service(first: str, second: str, options: dict[str, Any]) -> None:
    """Copy from one place to another, then to another prefix there; no chunk passes through here.

    Args:
        first: URL of a bucket or container.
        second: another one.
        options: those of both.
    """
    async with Repository.create(
        f"{first}/a b", storage_options=options, probe=False
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        for number in range(4):
            await write(session, f"a/c/{number}", bytes(1000))
        tip = await session.commit("four chunks")
        report = await repository.copy_to(f"{second}/é", storage_options=options)
        assert report.objects_by_service == report.objects_copied - 1
    async with Repository.open(f"{second}/é", storage_options=options) as copy:
        assert (await copy.check_references()).is_whole
        assert await copy.lookup_branch("main") == tip
        report = await copy.copy_to(f"{second}/again", storage_options=options)
        assert report.objects_by_service == report.objects_copied - 1


async def check_shallow_copy(first: str, second: str, options: dict[str, Any]) -> RepositoryConfig:
    """Read a chunk through a shallow copy, whose reader brings the options of the origin.

    Returns:
        The configuration of the copy.
    """
    async with Repository.create(
        f"{first}/a b", storage_options=options, probe=False
    ) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/1", b"x" * 1000)
        await session.commit("a chunk")
        report = await repository.copy_to(f"{second}/x", storage_options=options, shallow=True)
    assert report.origin_prefix == f"{first}/a b/"
    access = {report.origin_prefix: options}
    async with Repository.open(
        f"{second}/x", storage_options=options, authorize_virtual_chunk_access=access
    ) as copy:
        session = await copy.readonly_session("main")
        assert await read(session, "a/c/1") == b"x" * 1000
        return copy.config
