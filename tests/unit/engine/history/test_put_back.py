"""A repository whose state somebody puts back by hand while a process has it open."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from icechunk_async import Repository
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.repo_info import decode_repo_info, encode_repo_info
from tests.helpers import make_array, read, write

if TYPE_CHECKING:
    from pathlib import Path


async def test_commits_go_on_where_an_older_state_without_a_log_was_put_back(
    tmp_path: Path,
) -> None:
    """A commit that took each look at it for another collection never ended."""
    async with Repository.create(tmp_path) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/0", b"\x01")
        await session.commit("one")
        state = tmp_path / "repo"
        info = decode_repo_info(unpack(state.read_bytes(), FileType.REPO_INFO))
        older = replace(info, updates=(), before_updates=info.updates[1].backup_path)
        state.write_bytes(pack(encode_repo_info(older), FileType.REPO_INFO, 2))
        session = await repository.writable_session("main")
        await write(session, "a/c/1", b"\x02")
        stored = len(list((tmp_path / "snapshots").iterdir()))
        async with asyncio.timeout(60):
            await session.commit("two")
        assert len(list((tmp_path / "snapshots").iterdir())) <= stored + 3
        reader = await repository.readonly_session("main")
        assert [await read(reader, f"a/c/{it}") for it in range(2)] == [b"\x01", b"\x02"]
