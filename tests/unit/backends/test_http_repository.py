"""A repository that somebody else wrote, read from a web server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from icechunk_async import Repository
from icechunk_async.errors import IcechunkError, RepositoryNotFoundError, UnsafeStorageError
from tests.helpers import array_document, group_document, read, write
from tests.unit.backends.loopback import serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.backends.loopback import Handler


@pytest.mark.parametrize("spec_version", [1, 2])
async def test_a_repository_is_read_from_a_web_server(tmp_path: Path, spec_version: int) -> None:
    """Arrays, a branch and a tag by name, the ancestry; spec 1 alone needs listings for refs."""
    async with Repository.create(tmp_path / "repo", spec_version=spec_version) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await write(session, "a/zarr.json", array_document((4,), (2,)))
        await write(session, "a/c/1", b"x" * 2)
        snapshot = await session.commit("written")
        await repository.create_tag("v1", snapshot)

    async with serving(_files(tmp_path)) as url, Repository.open(f"{url}/repo") as repository:
        for where in ({"branch": "main"}, {"tag": "v1"}, {"snapshot_id": snapshot}):
            session = await repository.readonly_session(**where)
            assert await read(session, "a/c/1") == b"xx"
            assert await read(session, "a/c/0") is None
        if spec_version == 2:
            assert set(await repository.list_branches()) == {"main"}
            assert set(await repository.list_tags()) == {"v1"}
        else:
            with pytest.raises(UnsafeStorageError, match="cannot list"):
                await repository.list_branches()
        with pytest.raises(IcechunkError):
            await repository.writable_session("main")
        with pytest.raises(UnsafeStorageError):
            await repository.create_branch("new", snapshot)


async def test_an_empty_server_holds_no_repository(tmp_path: Path) -> None:
    """The server's answers to what does not exist are understood."""
    async with serving(_files(tmp_path)) as url:
        with pytest.raises(RepositoryNotFoundError):
            async with Repository.open(f"{url}/nothing"):
                pass


def _files(folder: Path) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        path = folder / request.path.lstrip("/")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    return answer
