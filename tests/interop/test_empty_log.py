"""A ``repo`` file with an empty operations log: both engines read it, and this one continues."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async._runtime.clock import from_us
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.repo_info import encode_repo_info
from tests.helpers import make_array, read, write
from tests.interop.files import Files
from tests.interop.test_collected import read_official, write_official
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path


async def emptied(root: Path, *, continued: bool) -> None:
    """Make a repository of one commit without a log; one that continues in a backup if told so."""
    async with Repository.create(root) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "a", (4,), (1,))
        await write(session, "a/c/0", b"\x01")
        await session.commit("one")
    info = Files(root).info
    assert info is not None
    before = info.updates[1].backup_path if continued else None
    info = replace(info, updates=(), before_updates=before)
    (root / "repo").write_bytes(pack(encode_repo_info(info), FileType.REPO_INFO, 2))


@pytest.mark.parametrize("continued", [False, True], ids=["alone", "continued"])
async def test_the_official_engine_agrees_on_a_repository_with_an_empty_log(
    tmp_path: Path, *, continued: bool
) -> None:
    """It reads the file, and continues the log that this engine started."""
    root = tmp_path / "repo"
    await emptied(root, continued=continued)
    official = open_official(root)
    assert await read_official(official.readonly_session("main").store, "a/c/0") == b"\x01"
    assert len(list(official.ops_log())) == continued
    async with Repository.open(root) as repository:
        assert await repository.inspect_repo_info() == official.inspect_repo_info()
        session = await repository.writable_session("main")
        await write(session, "a/c/1", b"\x02")
        await session.commit("two")
    official = open_official(root)
    theirs = official.writable_session("main")
    await write_official(theirs.store, "a/c/2", b"\x03")
    theirs.commit("three")
    async with Repository.open(root) as repository:
        reader = await repository.readonly_session("main")
        assert [await read(reader, f"a/c/{it}") for it in range(3)] == [b"\x01", b"\x02", b"\x03"]
        ours = [it async for it in repository.ops_log()]
        shown = await repository.inspect_repo_info()
    log = list(official.ops_log())
    assert len(log) == 2 + continued
    assert [(it.updated_at, it.backup_path) for it in log] == [
        (from_us(it.updated_at), it.backup_path) for it in ours
    ]
    assert shown == official.inspect_repo_info()
