"""Copies between storages of one service: no byte of a chunk passes through this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, override

import pytest

from icechunk_async import Repository
from icechunk_async.errors import PermissionDeniedError
from icechunk_async.storage import open_storage
from tests.helpers import memory_url
from tests.unit.engine.upkeep.copying.copy_tools import Counting, stored
from tests.unit.engine.upkeep.upkeep_tools import commit, littered, read_all

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.storage import Storage


class Served(Counting):
    """A storage of a service that copies, except for keys that it refuses."""

    refused: str | None = None

    def copies_from(self, source: Storage) -> bool:
        """Return whether the other one is of the service."""
        return isinstance(source, Counting)

    async def copy_from(self, source: Any, key: str) -> None:
        """Copy behind the backs of both counters."""
        await self.before("copy_from", key)
        if self.refused is not None and key.startswith(self.refused):
            raise PermissionDeniedError("the other bucket may not be read")
        await self.wrapped.put(key, (await source.wrapped.get(key)).data)

    @override
    def __repr__(self) -> str:
        """Show nothing."""
        return "Served()"


@pytest.mark.parametrize("part", [False, True])
async def test_no_chunk_passes_through_if_the_service_copies(*, part: bool) -> None:
    """Whole copies, parts and updates; only references are read and written."""
    url, _ = await littered(2)
    async with open_storage(url) as here, open_storage(memory_url()) as there:
        source, destination = Counting(here), Served(there)
        async with Repository.open(source) as repository:
            for number in range(2):
                source.requests.clear()
                destination.requests.clear()
                report = await repository.copy_to(destination, refs=["main"] if part else None)
                assert not [it for it in source.requests if it[0] == "get" and "chunks/" in it[1]]
                written = {key for operation, key in destination.requests if operation == "put"}
                assert written == {"repo", "copies/state.json"}
                assert report.objects_by_service == report.objects_copied - 1 > number
                await commit(repository, 60, "later")
            await repository.copy_to(destination)
        assert await stored(there) == await stored(here) or part
        assert (await read_all(there)) == await read_all(here)


async def test_what_the_service_refuses_is_read_and_written() -> None:
    """All of it, or some; after ten refusals the service is not asked any more."""
    url, _ = await littered(2)
    for refused, most in (("chunks/", 10), ("", 10 + 32)):
        async with open_storage(url) as here, open_storage(memory_url()) as there:
            source, destination = Counting(here), Served(there)
            destination.refused = refused
            async with Repository.open(source) as repository:
                report = await repository.copy_to(destination)
            assert await stored(there) == await stored(here)
            assert report.bytes_copied > 0
            asked = [key for operation, key in destination.requests if operation == "copy_from"]
            assert len([key for key in asked if key.startswith(refused)]) <= most


async def test_files_of_one_machine_are_copied_by_the_kernel(tmp_path: Path) -> None:
    """They are separate files: to change one does not change the other."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        await repository.copy_to(tmp_path / "origin")
    async with Repository.open(tmp_path / "origin") as repository:
        report = await repository.copy_to(tmp_path / "copy")
        assert report.objects_by_service == report.objects_copied - 1
        assert report.bytes_copied == (tmp_path / "copy" / "repo").stat().st_size
    for path in (tmp_path / "copy" / "chunks").iterdir():
        theirs = tmp_path / "origin" / "chunks" / path.name
        assert path.read_bytes() == theirs.read_bytes()
        assert not path.samefile(theirs)
    assert await read_all((tmp_path / "copy").as_uri()) == await read_all(url)


async def test_storages_of_two_services_are_read_and_written(tmp_path: Path) -> None:
    """A local disk does not copy from memory."""
    url, _ = await littered(2)
    async with Repository.open(url) as repository:
        report = await repository.copy_to(tmp_path / "copy")
    assert report.objects_by_service == 0
