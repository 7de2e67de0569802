"""Our engine reads and continues repositories after the official engine's maintenance."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.engine.commit.conflicts import ConflictKind
from icechunk_async.errors import FormatError, SnapshotNotFoundError
from icechunk_async.format.envelope import HEADER_BYTES
from icechunk_async.upkeep import upgrade
from tests.interop.answers import Policy, Settings
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import Edit, apply, array, attributes, delete_node, group, write
from tests.interop.files import FOLDERS, Files
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from tests.interop.answers import Engine


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))

STEPS: list[list[Edit]] = [
    [group("g"), array("g/a", [12], [2]), write("g/a", [0], [12], 1)],
    [array("big", [400], [200], "<f8"), write("big", [0], [400], 2, "<f8")],
    [write("g/a", [0], [4], 3), attributes("g", n=1)],
    [write("big", [0], [200], 4, "<f8"), group("late")],
    [write("g/a", [8], [12], 5), delete_node("late")],
    [group("last")],
]


async def build(
    root: Path, spec: int, engine: Engine, settings: Settings | None = None
) -> list[str]:
    """Create a repository with the steps as commits; answer all snapshots, oldest first."""
    await engine.create(root, spec, settings)
    async with engine.open(root) as repo:
        for number, edits in enumerate(STEPS):
            work = await repo.work()
            await apply(work.store, edits)
            await work.commit(f"step {number}", {"number": number})
        line = await repo.ancestry((await repo.branches())["main"])
    return [commit.id for commit in line][::-1]


async def written_at(root: Path, snapshot: str) -> datetime:
    """Return when a snapshot was made."""
    async with ENGINES["ours"].open(root) as repo:
        return (await repo.ancestry(snapshot))[0].written_at


async def expire(root: Path, before: str, **options: Any) -> set[str]:
    """Let the official engine expire what is older than a snapshot."""
    expired: set[str] = open_official(root).expire_snapshots(
        older_than=await written_at(root, before), **options
    )
    return expired


@pytest.mark.sampled
@SPECS
@FIRST
@pytest.mark.parametrize("collected", [False, True])
async def test_we_go_on_after_expiration(
    spec: int, first: str, tmp_path: Path, *, collected: bool
) -> None:
    """Ancestry, diffs over the gap, reading and committing agree after history was cut."""
    root = tmp_path / "repo"
    ids = await build(root, spec, ENGINES[first])
    before = await views_agree(root, spec, everything=True)
    async with ENGINES["ours"].open(root) as repo:
        whole = await repo.diff(ids[0], ids[-1])
        await repo.create_tag("old", ids[2])
    expired = await expire(root, ids[4])
    assert expired
    if collected:
        collect(root, dry_run=False)
        assert Files(root).garbage() == {folder: set[str]() for folder in FOLDERS}
    seen = await views_agree(root, spec, everything=True)
    line = [commit.id for commit in seen.ancestries[ids[-1]]]
    assert line == [ids[6], ids[5], ids[4], ids[0]]
    assert seen.contents[ids[-1]] == before.contents[ids[-1]]
    if spec == 2:  # the logs of what expired are remembered
        assert seen.diffs[ids[0], ids[-1]] == whole
        info = Files(root).info
        assert info is not None
        pruned = [it.pruned_ancestor_logs for it in info.snapshots.values()]
        assert max(map(len, pruned)) == 3
    for engine in ENGINES.values():
        async with engine.open(root) as repo:
            work = await repo.work()
            await apply(work.store, [write("g/a", [2], [10], 7), group(f"by-{engine.name}")])
            await work.commit("after")
        await views_agree(root, spec, everything=True)
    if spec == 2:
        async with ENGINES["ours"].open(root) as repo:
            work = await repo.work()
            await apply(work.store, [group("amended")])
            await work.amend("amended")
        await views_agree(root, spec, everything=True)
    check_garbage(root)


@FIRST
async def test_amending_keeps_the_pruned_logs(first: str, tmp_path: Path) -> None:
    """An amendment of the oldest survivor inherits the logs of what expired below it."""
    root = tmp_path / "repo"
    ids = await build(root, 2, ENGINES[first])
    await expire(root, ids[-1])
    async with ENGINES["ours"].open(root) as repo:
        whole = await repo.diff(ids[0], ids[-1])
        work = await repo.work()
        await apply(work.store, [group("more")])
        tip = await work.amend("amended")
    collect(root, dry_run=False)
    seen = await views_agree(root, 2, everything=True)
    amended = seen.diffs[ids[0], tip]
    assert amended.new_groups == whole.new_groups | {"/more"}
    assert amended.chunks == whole.chunks


@pytest.mark.parametrize("missing", [False, True])
async def test_rebase_looks_into_the_logs_of_what_expired(tmp_path: Path, *, missing: bool) -> None:
    """A move in an expired commit stops a rebase; if its log is lost, so does that."""
    root = tmp_path / "repo"
    await ENGINES["theirs"].create(root, 2)
    async with ENGINES["ours"].open(root) as ours, ENGINES["theirs"].open(root) as theirs:
        begun = {"ours": await ours.work(), "theirs": await theirs.work()}
        for name, work in begun.items():
            await apply(work.store, [Edit("orphan", f"fresh-{name}", {"attributes": {}})])
        work = await theirs.work()
        await apply(work.store, STEPS[0])
        start = await work.commit("first")
        moving = open_official(root).rearrange_session("main")
        moving.move("/g", "/moved")
        moved = moving.commit("moved")
        work = await ours.work()
        await apply(work.store, [write("moved/a", [0], [12], 9)])
        end = await work.commit("last")
        wanted = await ours.diff((await ours.ancestry(start))[1].id, end)
        assert {start, moved} <= await expire(root, end)
        collect(root, dry_run=False)
        seen = await views_agree(root, 2, everything=True)
        (pair,) = seen.diffs
        assert seen.diffs[pair] == wanted
        if not missing:
            for work in begun.values():
                clashes = await work.rebase(Policy("detector"))
                assert [it.kind for it in clashes] == [
                    ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED
                ]
            return
        (root / "transactions" / moved).unlink()
        for name, work in begun.items():
            with pytest.raises(FormatError if name == "ours" else icechunk.IcechunkError):
                await work.rebase(Policy("detector"))
        assert not (await views_agree(root, 2)).diffs[pair].moves  # a diff does without


@SPECS
async def test_expired_refs_are_gone_for_us_too(spec: int, tmp_path: Path) -> None:
    """Branches and tags that expired with their tips disappear; a deleted tag stays reserved."""
    root = tmp_path / "repo"
    ids = await build(root, spec, ENGINES["ours"])
    async with ENGINES["ours"].open(root) as repo:
        await repo.create_branch("old", ids[2])
        await repo.create_tag("t-old", ids[2])
        await repo.create_tag("t-new", ids[-1])
    await expire(root, ids[-1], delete_expired_branches=True, delete_expired_tags=True)
    collect(root, dry_run=False)
    seen = await views_agree(root, spec, everything=True)
    assert (sorted(seen.branches), sorted(seen.tags)) == (["main"], ["t-new"])
    async with ENGINES["ours"].open(root) as repo:
        with pytest.raises(SnapshotNotFoundError):
            await repo.reading(ids[2])
        with pytest.raises(Exception, match="never used again"):
            await repo.create_tag("t-old", ids[-1])


@SPECS
@FIRST
async def test_clean_repository_has_no_garbage(spec: int, first: str, tmp_path: Path) -> None:
    """The official dry run finds no garbage where every session wrote each chunk once."""
    root = tmp_path / "repo"
    await build(root, spec, ENGINES[first])
    assert check_garbage(root) == {**dict.fromkeys(FOLDERS, 0), "bytes": 0}
    names = Files(root).names()
    collect(root, dry_run=False)
    left = [name for name in Files(root).names() if not name.startswith("overwritten/")]
    assert left == [name for name in names if not name.startswith("overwritten/")]


@SPECS
@FIRST
async def test_known_garbage_is_counted_and_collected(
    spec: int, first: str, tmp_path: Path
) -> None:
    """Abandoned and overwritten chunks, detached and deleted work are what is collected."""
    root = tmp_path / "repo"
    await build(root, spec, ENGINES[first])
    async with ENGINES[first].open(root) as repo:
        abandoned = await repo.work()
        await apply(abandoned.store, [write("big", [0], [400], 60, "<f8")])  # 2 chunks
        twice = await repo.work()
        for seed in (61, 62, 63):  # 2 of these 3 are overwritten
            await apply(twice.store, [write("big", [0], [200], seed, "<f8")])
        tip = await twice.commit("twice")
        flushed = await repo.work()
        await apply(flushed.store, [write("big", [200], [400], 64, "<f8")])  # 1 chunk
        await flushed.flush("detached")
        await repo.create_branch("gone", tip)
        lost = await repo.work("gone")
        await apply(lost.store, [write("big", [200], [400], 65, "<f8")])  # 1 chunk
        await lost.commit("lost")
        await repo.delete_branch("gone")
    before = await views_agree(root, spec, everything=True)
    counted = check_garbage(root)
    del counted["bytes"]
    assert counted == {"snapshots": 2, "transactions": 2, "manifests": 2, "chunks": 6}
    collect(root, dry_run=False)
    assert Files(root).garbage() == {folder: set[str]() for folder in FOLDERS}
    after = await views_agree(root, spec, everything=True)
    assert (after.contents, after.ancestries) == (before.contents, before.ancestries)


@pytest.mark.sampled
@FIRST
@pytest.mark.parametrize("by", list(ENGINES))
@pytest.mark.parametrize("cleaned", [True, False])
async def test_a_migrated_repository_is_read_and_continued(
    first: str, by: str, tmp_path: Path, *, cleaned: bool
) -> None:
    """Old files under a new repo info read as before; new commits mix header versions."""
    root = tmp_path / "repo"
    settings = Settings(inline=16, splits=((("AnyArray", ""), ((None, 3),)),))
    ids = await build(root, 1, ENGINES[first], settings)
    async with ENGINES[first].open(root) as repo:
        await repo.create_branch("side", ids[2])
        await repo.create_tag("kept", ids[3])
        await repo.create_tag("dropped", ids[3])
        await repo.delete_tag("dropped")
    before = await views_agree(root, 1, everything=True)
    if by == "ours":
        await upgrade(root, delete_unused_v1_files=cleaned)
    else:
        icechunk.upgrade_icechunk_repository(
            open_official(root), dry_run=False, delete_unused_v1_files=cleaned
        )
    assert (root / "refs").exists() != cleaned or not any((root / "refs").rglob("ref.json"))
    after = await views_agree(root, 2, everything=True)
    assert (after.branches, after.tags) == (before.branches, before.tags)
    assert (after.contents, after.ancestries) == (before.contents, before.ancestries)
    assert after.diffs == before.diffs
    assert after.operations[0].kind == "RepoMigrated"
    for engine in (*ENGINES.values(), *ENGINES.values()):
        async with engine.open(root) as repo:
            work = await repo.work()
            await apply(work.store, [write("g/a", [1], [9], 80), attributes("g", by=engine.name)])
            await work.commit("mixed")
            work = await repo.work()
            await apply(work.store, [write("g/a", [11], [12], 81)])
            await work.amend("amended")
    await views_agree(root, 2, everything=True)
    versions = {
        path.read_bytes()[HEADER_BYTES - 3]
        for folder in ("snapshots", "manifests", "transactions")
        for path in (root / folder).iterdir()
    }
    assert versions == {1, 2}
    async with ENGINES["ours"].open(root) as repo:
        with pytest.raises(Exception, match="never used again"):
            await repo.create_tag("dropped", ids[0])
    check_garbage(root)
    collect(root, dry_run=False)
    await views_agree(root, 2, everything=True)


@FIRST
async def test_a_handle_from_before_the_migration_does_no_harm(first: str, tmp_path: Path) -> None:
    """A handle of spec 1 that outlives the migration cannot commit into the void."""
    root = tmp_path / "repo"
    await build(root, 1, ENGINES[first])
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("late")])
        icechunk.upgrade_icechunk_repository(open_official(root), dry_run=False)
        with pytest.raises(Exception, match="was migrated to format version 2"):
            await work.commit("into the void")
    assert not (root / "refs/branch.main/ref.json").exists()
    await views_agree(root, 2, everything=True)
