"""Our migration from version 1 to 2 beside the official one."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from icechunk_async.storage import open_storage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.upkeep import upgrade
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import apply, attributes, group, write
from tests.interop.files import Files
from tests.interop.steps import BASE, COMMITTED, HISTORY, history
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Storage


GOLDEN = Path(__file__).parent / "golden"
pytestmark = pytest.mark.sampled

FIRST = pytest.mark.parametrize("first", list(ENGINES))
SETTINGS = Settings(inline=16, splits=((("AnyArray", ""), ((None, 3),)),))


def migrate_officially(root: Path, *, delete: bool = True) -> None:
    """Let the official engine migrate."""
    icechunk.upgrade_icechunk_repository(
        open_official(root), dry_run=False, delete_unused_v1_files=delete
    )


def info_of(root: Path) -> RepoInfo:
    """Return the repo info without the one time that depends on when the migration ran."""
    info = Files(root).info
    assert info is not None
    newest, *older = info.updates
    return replace(info, updates=(replace(newest, updated_at=0), *older))


async def old_repository(root: Path, first: str) -> None:
    """Make a repository with branches that share commits or do not, and all sorts of tags."""
    ids = await history(ENGINES[first], root, 1, HISTORY, SETTINGS)
    async with ENGINES[first].open(root) as repo:
        for branch in ("alias", "zz-side"):
            await repo.create_branch(branch, ids[1])
        work = await repo.work("zz-side")
        await apply(work.store, [attributes("ranks", n=1)])
        side = await work.commit("beside", {"x": {"y": [1, 2.5, None]}})
        await repo.reset_branch("alias", side)
        await repo.create_branch("passing", side)
        work = await repo.work("passing")
        await apply(work.store, [attributes("ranks", n=2)])
        lone = await work.commit("only a tag has this")
        work = await repo.work("passing")
        await apply(work.store, [attributes("ranks", n=3)])
        lost = await work.commit("only a deleted tag had this")
        await repo.create_tag("lone", lone)
        await repo.create_tag("lost", lost)
        await repo.delete_tag("lost")
        await repo.delete_branch("passing")


def same_files(ours: Path, theirs: Path) -> None:
    """Both directories hold the same files, but for what the repo info says about when."""
    assert Files(ours).names() == Files(theirs).names()
    for name in Files(ours).names():
        if name != "repo":
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    for it in fields(info_of(ours)):
        mine, wanted = (getattr(info_of(root), it.name) for root in (ours, theirs))
        assert mine == wanted, it.name


@pytest.mark.sampled
@FIRST
@pytest.mark.parametrize("delete", [True, False])
async def test_migration_is_the_official_one(first: str, tmp_path: Path, *, delete: bool) -> None:
    """Refs, ancestry, configuration and the made-up operations log are the same to the last."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await old_repository(ours, first)
    before = await views_agree(ours, 1, everything=True)
    shutil.copytree(ours, theirs)
    migrate_officially(theirs, delete=delete)
    await upgrade(ours, delete_unused_v1_files=delete)
    same_files(ours, theirs)
    after = await views_agree(ours, 2, everything=True)
    assert (after.branches, after.tags) == (before.branches, before.tags)
    assert (after.contents, after.ancestries) == (before.contents, before.ancestries)
    assert collect(ours, dry_run=True) == collect(theirs, dry_run=True)
    check_garbage(ours)
    collect(ours, dry_run=False)
    for engine in ENGINES.values():
        async with engine.open(ours) as repo:
            work = await repo.work()
            await apply(work.store, [write("time", [1], [9], 80, "<f8"), group(engine.name)])
            await work.commit("continues")
    await views_agree(ours, 2)


async def test_a_repository_of_the_oldest_release_is_migrated_whole(tmp_path: Path) -> None:
    """The first snapshot has a random id, the root another mark, and all of it is carried over."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for root in (ours, theirs):
        shutil.copytree(GOLDEN / "by-0.2.12", root)
    before = await views_agree(ours, 1, everything=True)
    migrate_officially(theirs)
    await upgrade(ours)
    same_files(ours, theirs)
    after = await views_agree(ours, 2, everything=True)
    assert after.contents == before.contents


async def test_an_official_migration_that_kept_files_is_tidied_up(tmp_path: Path) -> None:
    """Our call deletes what the official one kept, and leaves what it deletes itself."""
    root, tidy = tmp_path / "kept", tmp_path / "tidy"
    await old_repository(root, "theirs")
    shutil.copytree(root, tidy)
    migrate_officially(root, delete=False)
    migrate_officially(tidy)
    report = await upgrade(root)
    assert report.already_migrated
    same_files(root, tidy)


class _Killed(BaseException):
    """The process ends here."""


class _Dying(WrappedStorage):
    """Ends the process after one request that changes something."""

    def __init__(self, storage: Storage, at: int) -> None:
        super().__init__(storage)
        self._left = at

    async def after(self, operation: str, key: str) -> None:
        if operation in {"put", "delete"}:
            self._left -= 1
            if self._left < 0:
                raise _Killed


@pytest.mark.parametrize(
    "at", [at if at % 3 == 0 else pytest.param(at, marks=pytest.mark.thorough) for at in range(7)]
)
async def test_official_engine_reads_interrupted_migrations(at: int, tmp_path: Path) -> None:
    """Half-way it reads everything and refuses to write. After we finish it writes again."""
    root = tmp_path / "repo"
    ids = await history(ENGINES["theirs"], root, 1, (BASE, COMMITTED), SETTINGS)
    before = await views_agree(root, 1)
    async with open_storage(root) as storage:
        # repo info, main, b closed; repo info; main, others deleted
        with pytest.raises(_Killed) if at < 6 else nullcontext():
            await upgrade(_Dying(storage, at))
    half = await views_agree(root, 2)
    assert (half.branches, half.contents) == (before.branches, before.contents)
    if at < 3:
        with pytest.raises(icechunk.IcechunkError, match="upgrade again"):
            open_official(root).writable_session("main")
        with pytest.raises(icechunk.IcechunkError):
            open_official(root).create_tag("new", ids[0])
    report = await upgrade(root)
    assert report.resumed == (at < 3)
    after = await views_agree(root, 2)
    assert (after.branches, after.contents) == (before.branches, before.contents)
    async with ENGINES["theirs"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("more")])
        await work.commit("continues")
    await views_agree(root, 2)
    check_garbage(root)


async def test_an_official_handle_of_version_1_does_no_harm(tmp_path: Path) -> None:
    """While branches are closed, and after that, it cannot commit."""
    root = tmp_path / "repo"
    await history(ENGINES["theirs"], root, 1, HISTORY[:1], SETTINGS)
    async with ENGINES["theirs"].open(root) as repo:
        works = [await repo.work() for _ in range(2)]
        for work in works:
            await apply(work.store, [group("late")])
        async with open_storage(root) as storage:
            with pytest.raises(_Killed):
                await upgrade(_Dying(storage, 1))
        with pytest.raises(icechunk.IcechunkError):
            await works[0].commit("while it is closed")
        await upgrade(root)
        with pytest.raises(icechunk.IcechunkError):
            await works[1].commit("into the void")
    seen = await views_agree(root, 2)
    assert not (root / "refs/branch.main/ref.json").exists()
    assert seen.ancestries[seen.branches["main"]][0].message == "step 0"
