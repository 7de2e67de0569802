"""Repositories of older releases read as those releases read them, and can be continued."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import zstandard

from icechunk_async.format.envelope import HEADER_BYTES
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import apply, array, attributes, group, write
from tests.interop.files import FOLDERS, Files
from tests.interop.theirs import icechunk, open_official

GOLDEN = Path(__file__).parent / "golden"
RELEASES = {"by-0.2.12": 1, "by-2.0.5": 2, "by-2.2.2": 2}
EACH = pytest.mark.parametrize("name", RELEASES)


@pytest.fixture
def root(name: str, tmp_path: Path) -> Path:
    """Return a copy that may be written to."""
    return Path(shutil.copytree(GOLDEN / name, tmp_path / "repo"))


def expected(name: str) -> Any:
    """Return the contents that the release reported for its repository."""
    return json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8"))


@EACH
async def test_golden_repository_reads_as_its_release_read_it(name: str, root: Path) -> None:
    """Refs, ancestry, properties and every value are those that the old release answered."""
    told = expected(name)
    seen = await views_agree(root, RELEASES[name], everything=True)
    assert (seen.branches, seen.tags) == (told["branches"], told["tags"])
    commits = {commit.id: commit for line in seen.ancestries.values() for commit in line}
    assert commits.keys() == told["snapshots"].keys()
    for snapshot, told_of in told["snapshots"].items():
        commit = commits[snapshot]
        assert (commit.parent, commit.message) == (told_of["parent"], told_of["message"])
        assert json.loads(commit.metadata) == told_of["metadata"]
        digests = {
            key: hashlib.sha256(value).hexdigest()[:16]
            for key, value in seen.contents[snapshot].items()
        }
        assert digests == told_of["contents"]


@EACH
async def test_golden_repository_has_its_oddities(name: str, root: Path) -> None:
    """Frames do not declare their size; the oldest has a first snapshot with a random id."""
    for path in (root / "snapshots").iterdir():
        frame = zstandard.get_frame_parameters(path.read_bytes()[HEADER_BYTES:])
        assert frame.content_size == zstandard.CONTENTSIZE_UNKNOWN
    seen = await views_agree(root, RELEASES[name])
    roots = {line[-1].id for line in seen.ancestries.values()}
    assert (roots == {str(INITIAL_SNAPSHOT_ID)}) == (name != "by-0.2.12")
    if RELEASES[name] == 2:
        assert "NewDetachedSnapshot" in {it.kind for it in seen.operations}
        info = Files(root).info
        assert info is not None
        assert "fork" in {it.message for it in info.snapshots.values()}
    assert len(roots) == 1


@EACH
async def test_both_engines_continue_golden_repositories(name: str, root: Path) -> None:
    """Commits, refs and, in spec 2, amendments on top of old files are seen by both engines."""
    spec = RELEASES[name]
    place = "moved/a" if spec == 2 else "g/a"
    for engine in (*ENGINES.values(), *ENGINES.values()):
        async with engine.open(root) as repo:
            work = await repo.work("side")
            await apply(work.store, [write("g/a", [0, 0], [3, 3], 5), group(f"by-{engine.name}")])
            tip = await work.commit("on the side")
            await repo.create_tag(f"t-{tip}", tip)
            work = await repo.work()
            await apply(
                work.store,
                [attributes(place, by=engine.name), array("new", [4], [2], overwrite=True)],
            )
            await apply(work.store, [write("new", [0], [4], 6), write(place, [0, 0], [2, 2], 7)])
            await work.commit("on main")
            if spec == 2:
                work = await repo.work()
                await apply(work.store, [write(place, [2, 0], [3, 4], 8)])
                await work.amend("amended")
        async with ENGINES["ours"].open(root) as repo:
            work = await repo.work()
            await apply(work.store, [write("new", [0], [4], None)])
            await work.commit("emptied")
    await views_agree(root, spec, everything=True)
    check_garbage(root)
    collect(root, dry_run=False)
    await views_agree(root, spec, everything=True)
    assert Files(root).missing() == {folder: set[str]() for folder in FOLDERS}


@pytest.mark.parametrize("name", ["by-0.2.12"])
async def test_the_oldest_is_read_after_migration(name: str, root: Path) -> None:
    """A migrated repository keeps its random first snapshot, and reads as before."""
    before = await views_agree(root, 1, everything=True)
    (root / "expected.json").unlink()
    icechunk.upgrade_icechunk_repository(open_official(root), dry_run=False)
    after = await views_agree(root, 2, everything=True)
    assert (after.branches, after.tags) == (before.branches, before.tags)
    assert (after.contents, after.ancestries) == (before.contents, before.ancestries)
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("new")])
        await work.commit("after migration")
    await views_agree(root, 2, everything=True)
    assert name in RELEASES
