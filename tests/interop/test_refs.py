"""Branches, tags and tombstones, time travel, status, flags and metadata of the repository."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import ConflictDetector
from icechunk_async.errors import (
    AlreadyExistsError,
    ConflictError,
    FeatureDisabledError,
    IcechunkError,
    InvalidRefNameError,
    NotFoundError,
    RepositoryReadOnlyError,
    TagDeletedError,
)
from tests.interop.comparing import ENGINES, other, views_agree
from tests.interop.edits import apply, group
from tests.interop.files import Files
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.answers import Engine


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))
NAMES = ("a", "a.b", "A-b_c.9", "0", "main2")
ODD_NAMES = ("", "a/b", ".", "..", "größe", "with space", "🧊", "ref.json", "x" * 300)
REFUSED = (IcechunkError, icechunk.IcechunkError)


async def with_commits(root: Path, spec: int, engine: Engine, count: int = 3) -> list[str]:
    """Create a repository with some commits on main; answer all snapshots, oldest first."""
    await engine.create(root, spec)
    async with engine.open(root) as repo:
        for turn in range(count):
            work = await repo.work()
            await apply(work.store, [group(f"g{turn}")])
            await work.commit(f"commit {turn}")
        tip = (await repo.branches())["main"]
        return [commit.id for commit in await repo.ancestry(tip)][::-1]


@SPECS
@FIRST
async def test_refs_of_one_engine_are_those_of_the_other(
    spec: int, first: str, tmp_path: Path
) -> None:
    """Branches and tags are created, moved and deleted by turns; both list the same."""
    root, names = tmp_path / "repo", NAMES if spec == 1 else NAMES + ODD_NAMES
    ids = await with_commits(root, spec, ENGINES[first])
    for index, name in enumerate(names):
        # An empty name is a mistake, which we do not make, and read.
        engine = (ENGINES[first], other(first))[index % 2] if name else ENGINES["theirs"]
        async with engine.open(root) as repo:
            await repo.create_branch(name, ids[index % 3])
            await repo.create_tag(name, ids[-1 - index % 3])
    seen = await views_agree(root, spec)
    assert seen.branches == {
        "main": ids[-1],
        **{name: ids[index % 3] for index, name in enumerate(names)},
    }
    assert seen.tags == {name: ids[-1 - index % 3] for index, name in enumerate(names)}
    for index, name in enumerate(names):
        engine = (other(first), ENGINES[first])[index % 2]  # not the one that made it
        async with engine.open(root) as repo:
            if index % 3 == 0:
                await repo.delete_branch(name)
                await repo.delete_tag(name)
            else:
                await repo.reset_branch(name, ids[-1], ids[index % 3])
    seen = await views_agree(root, spec)
    kept = [name for index, name in enumerate(names) if index % 3]
    assert seen.branches == dict.fromkeys(["main", *kept], ids[-1])
    assert sorted(seen.tags) == sorted(kept)


@SPECS
@FIRST
async def test_a_deleted_tags_name_is_never_used_again(
    spec: int, first: str, tmp_path: Path
) -> None:
    """A tombstone of one engine is respected by both, also for another snapshot."""
    root = tmp_path / "repo"
    ids = await with_commits(root, spec, ENGINES[first])
    async with ENGINES[first].open(root) as repo:
        await repo.create_tag("v1", ids[1])
        await repo.delete_tag("v1")
    for engine in ENGINES.values():
        async with engine.open(root) as repo:
            for snapshot in ids[1:]:
                with pytest.raises(REFUSED) as raised:
                    await repo.create_tag("v1", snapshot)
                assert engine.name != "ours" or isinstance(raised.value, TagDeletedError)
            with pytest.raises(REFUSED):
                await repo.delete_tag("v1")
            assert await repo.tags() == {}
    if spec == 2:
        info = open_official(root).inspect_repo_info()
        assert info["deleted_tags"] == ["v1"] == sorted(_info(root).deleted_tags)
    else:
        tombstone = root / "refs/tag.v1/ref.json.deleted"
        assert tombstone.read_bytes() == b""
        assert (root / "refs/tag.v1/ref.json").exists()


@SPECS
@FIRST
async def test_both_refuse_the_same_ref_operations(spec: int, first: str, tmp_path: Path) -> None:
    """Duplicates, missing names and snapshots, main's deletion and lost races are refused."""
    root = tmp_path / "repo"
    ids = await with_commits(root, spec, ENGINES[first])
    unknown = "0" * 20
    async with other(first).open(root) as repo:
        await repo.create_branch("b", ids[1])
        await repo.create_tag("t", ids[1])
    before = Files(root).names()
    for engine in ENGINES.values():
        async with engine.open(root) as repo:
            attempts: list[tuple[Any, type[Exception]]] = [
                (repo.create_branch("b", ids[2]), AlreadyExistsError),
                (repo.create_branch("main", ids[2]), AlreadyExistsError),
                (repo.create_branch("new", unknown), NotFoundError),
                (repo.create_tag("t", ids[2]), AlreadyExistsError),
                (repo.create_tag("new", unknown), NotFoundError),
                (repo.delete_branch("main"), InvalidRefNameError),
                (repo.delete_branch("none"), NotFoundError),
                (repo.delete_tag("none"), NotFoundError),
                (repo.reset_branch("none", ids[2]), NotFoundError),
                (repo.reset_branch("b", unknown), NotFoundError),
                (repo.reset_branch("b", ids[2], ids[0]), ConflictError),
            ]
            for attempt, ours in attempts:
                with pytest.raises(REFUSED) as raised:
                    await attempt
                assert engine.name != "ours" or isinstance(raised.value, ours)
    # A refused change may leave a backup; everything else is unchanged.
    assert [it for it in Files(root).names() if not it.startswith("overwritten/")] == [
        it for it in before if not it.startswith("overwritten/")
    ]
    seen = await views_agree(root, spec)
    assert seen.branches == {"main": ids[-1], "b": ids[1]}
    assert seen.tags == {"t": ids[1]}


@SPECS
@FIRST
async def test_both_travel_to_the_same_snapshot_in_time(
    spec: int, first: str, tmp_path: Path
) -> None:
    """The tip as of any time is the same snapshot. A time before the first one is an error."""
    root = tmp_path / "repo"
    ids = await with_commits(root, spec, ENGINES[first], 4)
    async with ENGINES["ours"].open(root) as ours, ENGINES["theirs"].open(root) as theirs:
        line = await ours.ancestry(ids[-1])
        for commit in line:
            for shift_us in (-1, 0, 1):
                moment = commit.written_at + timedelta(microseconds=shift_us)
                later = [it for it in line if it.written_at <= moment]
                if not later:
                    with pytest.raises(NotFoundError):
                        await ours.as_of("main", moment)
                    with pytest.raises(icechunk.IcechunkError):
                        await theirs.as_of("main", moment)
                    continue
                assert await ours.as_of("main", moment) == later[0].id
                assert await theirs.as_of("main", moment) == later[0].id


@FIRST
async def test_we_read_a_branch_as_it_was_before_it_was_reset(first: str, tmp_path: Path) -> None:
    """The log of either engine tells; the official engine reads what the branch has of it now."""
    root = tmp_path / "repo"
    ids = await with_commits(root, 2, ENGINES[first])
    async with ENGINES[first].open(root) as repo:
        moment = (await repo.ancestry(ids[3]))[0].written_at
        await repo.reset_branch("main", ids[1])
    found = {}
    for name, engine in ENGINES.items():
        async with engine.open(root) as repo:
            found[name] = await repo.as_of("main", moment)
    assert found == {"ours": ids[3], "theirs": ids[1]}


@FIRST
async def test_we_do_not_read_something_older_for_what_expired(first: str, tmp_path: Path) -> None:
    """The official engine reads the first snapshot, which the branch had left long before."""
    root = tmp_path / "repo"
    ids = await with_commits(root, 2, ENGINES[first])
    async with ENGINES[first].open(root) as repo:
        line = await repo.ancestry(ids[3])
    moment = line[1].written_at
    if first == "ours":
        async with Repository.open(root) as repository:
            await repository.expire_snapshots(line[0].written_at)
    else:
        await open_official(root).expire_snapshots_async(line[0].written_at)
    async with ENGINES["theirs"].open(root) as repo:
        assert await repo.as_of("main", moment) == ids[0]
    async with ENGINES["ours"].open(root) as repo:
        with pytest.raises(NotFoundError, match="dropped from the history"):
            await repo.as_of("main", moment)


async def test_spec_1_names_that_listings_mangle_are_refused(tmp_path: Path) -> None:
    """The official engine stores such branches and cannot list them; we refuse to make them."""
    root = tmp_path / "repo"
    ids = await with_commits(root, 1, ENGINES["theirs"])
    async with ENGINES["ours"].open(root) as repo:
        for name in ("größe", "a/b", "with space", "", ".", ".."):
            with pytest.raises(InvalidRefNameError):
                await repo.create_branch(name, ids[0])
            with pytest.raises(InvalidRefNameError):
                await repo.create_tag(name, ids[0])
        assert sorted(await repo.branches()) == ["main"]


async def test_mangled_spec_1_refs_are_reached_by_their_stored_names(tmp_path: Path) -> None:
    """A branch that the official engine stored under an escaped name is one we can commit to."""
    root, name, stored = tmp_path / "repo", "größe ~", "gr%C3%B6%C3%9Fe %7E"
    ids = await with_commits(root, 1, ENGINES["theirs"])
    async with ENGINES["theirs"].open(root) as repo:
        await repo.create_branch(name, ids[1])
        await repo.create_tag(name, ids[1])
    async with ENGINES["ours"].open(root) as repo:
        assert await repo.branches() == {"main": ids[-1], stored: ids[1]}
        assert await repo.tags() == {stored: ids[1]}
        work = await repo.work(stored)
        await apply(work.store, [group("ours")])
        tip = await work.commit("under its stored name")
    async with ENGINES["theirs"].open(root) as repo:
        work = await repo.work(name)
        assert work.snapshot == tip


async def test_a_read_only_repository_refuses_our_writes(tmp_path: Path) -> None:
    """The status that the official engine sets stops new sessions and open ones, until lifted."""
    root = tmp_path / "repo"
    ids = await with_commits(root, 2, ENGINES["ours"])
    official = open_official(root)
    read_only = icechunk.RepoStatus(
        icechunk.RepoAvailability.read_only, limited_availability_reason="maintenance window"
    )
    async with Repository.open(root) as held:
        begun = await held.writable_session("main")
        await apply(begun.store, [group("late")])
        official.set_status(read_only)
        with pytest.raises(RepositoryReadOnlyError, match="maintenance window"):
            await begun.commit("too late")
        with pytest.raises(RepositoryReadOnlyError):
            await held.create_tag("t", ids[0])
        async with Repository.open(root) as fresh:
            with pytest.raises(RepositoryReadOnlyError):
                await fresh.writable_session("main")
            with pytest.raises(RepositoryReadOnlyError):
                await fresh.save_config()
            assert (await fresh.lookup_branch("main")) == await held.lookup_branch("main")
        with pytest.raises(icechunk.IcechunkError):
            open_official(root).writable_session("main")
        official.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
        tip = await begun.commit("after all", rebase_with=ConflictDetector())
    seen = await views_agree(root, 2)
    assert seen.branches["main"] == str(tip)
    assert [it.kind for it in seen.operations[:3]] == [
        "NewCommit",
        "RepoStatusChanged",
        "RepoStatusChanged",
    ]


async def test_feature_flags_bind_us_and_survive_our_writes(tmp_path: Path) -> None:
    """Flags switched by the official engine forbid tags to us; our writes leave them as set."""
    root = tmp_path / "repo"
    ids = await with_commits(root, 2, ENGINES["ours"])
    async with ENGINES["ours"].open(root) as repo:
        await repo.create_tag("kept", ids[0])
    official = open_official(root)
    official.set_feature_flag("create_tag", setting=False)
    official.set_feature_flag("delete_tag", setting=False)
    official.set_feature_flag("move_node", setting=True)
    before = _info(root)
    assert (before.enabled_flags, before.disabled_flags) == ((3,), (4, 5))
    async with ENGINES["ours"].open(root) as repo:
        with pytest.raises(FeatureDisabledError):
            await repo.create_tag("new", ids[0])
        with pytest.raises(FeatureDisabledError):
            await repo.delete_tag("kept")
        await repo.create_branch("b", ids[0])
    after = _info(root)
    assert (after.enabled_flags, after.disabled_flags) == ((3,), (4, 5))
    flags = {flag.name: flag.setting for flag in open_official(root).feature_flags()}
    assert flags == {"create_tag": False, "delete_tag": False, "move_node": True}
    official.set_feature_flag("create_tag", setting=None)
    official.set_feature_flag("delete_tag", setting=None)
    async with ENGINES["ours"].open(root) as repo:
        await repo.create_tag("new", ids[0])
        await repo.delete_tag("kept")
    seen = await views_agree(root, 2)
    assert list(seen.tags) == ["new"]
    assert (_info(root).enabled_flags, _info(root).disabled_flags) == ((3,), ())


async def test_what_we_do_not_touch_is_carried_over_verbatim(tmp_path: Path) -> None:
    """Repository metadata, status and stored configuration survive our writes byte for byte."""
    root = tmp_path / "repo"
    storage = icechunk.local_filesystem_storage(str(root))
    config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=7)
    official = icechunk.Repository.create(storage, spec_version=2, config=config)
    official.set_metadata({"who": "us", "nested": {"z": [1, 2.5, None], "é": True}})
    online = icechunk.RepoStatus(
        icechunk.RepoAvailability.online, limited_availability_reason="why not"
    )
    official.set_status(online)
    before = _info(root)
    async with ENGINES["ours"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("a")])
        tip = await work.commit("ours")
        await repo.create_tag("t", tip)
        await repo.delete_tag("t")
    after = _info(root)
    assert after.raw_metadata == before.raw_metadata
    assert after.raw_config == before.raw_config
    assert after.status == before.status
    assert open_official(root).get_metadata() == official.get_metadata()
    await views_agree(root, 2)


def _info(root: Path) -> Any:
    info = Files(root).info
    assert info is not None
    return info
