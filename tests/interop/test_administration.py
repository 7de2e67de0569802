"""Metadata, status, flags, inspection and rewriting of manifests beside the official engine."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository
from icechunk_async.config import ManifestConfig, ManifestSplittingConfig, RepositoryConfig
from icechunk_async.errors import (
    FeatureDisabledError,
    IcechunkError,
    RepositoryReadOnlyError,
    SessionStateError,
    UnsupportedBySpecError,
)
from icechunk_async.repository import RepoAvailability, RepoStatus
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import Edit, apply, array, attributes, group
from tests.interop.files import FOLDERS, Files
from tests.interop.hierarchies import JSON_KINDS, SOURCE_FILES
from tests.interop.ours import our_config
from tests.interop.steps import HISTORY, history
from tests.interop.theirs import icechunk, open_official, their_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.edits import Sources


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))
MOMENT = datetime(2021, 2, 3, 4, 5, 6, 7000, tzinfo=UTC)
THREES = Settings(splits=((("AnyArray", ""), ((None, 3),)),))


async def pair(tmp_path: Path, first: str, spec: int = 2) -> tuple[Path, Path]:
    """Make a repository and a copy of it."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await history(ENGINES[first], ours, spec, HISTORY, Settings(inline=16))
    shutil.copytree(ours, theirs)
    return ours, theirs


def same_administration(ours: Path, theirs: Path) -> None:
    """Both repositories have the same metadata, status, flags and kinds of operations."""
    mine, wanted = Files(ours).info, Files(theirs).info
    assert mine is not None
    assert wanted is not None
    assert mine.raw_metadata == wanted.raw_metadata
    assert (mine.status.availability, mine.status.reason) == (
        wanted.status.availability,
        wanted.status.reason,
    )
    assert mine.enabled_flags == wanted.enabled_flags
    assert mine.disabled_flags == wanted.disabled_flags
    assert [type(it.detail) for it in mine.updates] == [type(it.detail) for it in wanted.updates]


@FIRST
async def test_metadata_is_stored_as_the_official_engine_stores_it(
    first: str, tmp_path: Path
) -> None:
    """Replacing and merging give the same bytes, answers and operations log."""
    ours, theirs = await pair(tmp_path, first)
    official = open_official(theirs)
    async with Repository.open(ours) as repository:
        assert await repository.get_metadata() == {}
        steps: list[dict[str, Any]] = [
            {**JSON_KINDS, "b": {"c": 1, "a": [2]}},
            {"b": {"z": None}, "ä": "ö", "A": 1.5},
            {},
        ]
        await repository.set_metadata({"lost": True})
        official.set_metadata({"lost": True})
        for number, step in enumerate(steps):
            if number == 0:
                await repository.set_metadata(step)
                official.set_metadata(step)
            else:
                merged = await repository.update_metadata(step)
                assert merged == official.update_metadata(step)
            same_administration(ours, theirs)
            assert await repository.get_metadata() == official.get_metadata()
            assert open_official(ours).get_metadata() == official.get_metadata()
    await views_agree(ours, 2)


@FIRST
async def test_the_status_binds_both_engines(first: str, tmp_path: Path) -> None:
    """Either engine sets it, both honour it, and both set it back."""
    ours, theirs = await pair(tmp_path, first)
    official = open_official(theirs)
    read_only = icechunk.RepoAvailability.read_only
    official.set_status(icechunk.RepoStatus(read_only, MOMENT, "moving house"))
    async with Repository.open(ours) as repository:
        await repository.set_status(RepoStatus(RepoAvailability.READ_ONLY, MOMENT, "moving house"))
        same_administration(ours, theirs)
        assert await repository.get_status() == RepoStatus(
            RepoAvailability.READ_ONLY, MOMENT, "moving house"
        )
        told = open_official(ours).get_status()
        assert (told.availability, told.set_at) == (read_only, MOMENT)
        assert told.limited_availability_reason == "moving house"
        with pytest.raises(icechunk.IcechunkError, match="moving house"):
            open_official(ours).writable_session("main")
        tip = await repository.lookup_branch("main")
        refused: list[Callable[[], Any]] = [
            lambda: repository.writable_session("main"),
            lambda: repository.create_branch("new", tip),
            lambda: repository.create_tag("new", tip),
            lambda: repository.delete_tag("t"),
            lambda: repository.set_metadata({}),
            lambda: repository.update_metadata({}),
            lambda: repository.set_feature_flag("move_node", True),  # noqa: FBT003
            lambda: repository.rewrite_manifests("new", branch="main"),
            repository.save_config,
        ]
        before = Files(ours).names()
        for refuse in refused:
            with pytest.raises(RepositoryReadOnlyError, match="moving house"):
                await refuse()
        assert Files(ours).names() == before
        await repository.set_status(RepoStatus(RepoAvailability.ONLINE))
        official.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
        same_administration(ours, theirs)
        set_at = (await repository.get_status()).set_at
        assert set_at is not None
        assert abs((datetime.now(UTC) - set_at).total_seconds()) < 60
        await repository.create_branch("new", tip)
    await views_agree(ours, 2)
    async with Repository.open(theirs) as repository:
        assert (await repository.get_status()).availability is RepoAvailability.ONLINE


@FIRST
async def test_feature_flags_are_stored_as_the_official_engine_stores_them(
    first: str, tmp_path: Path
) -> None:
    """Switched on, off and back, in the same lists and with the same entries in the log."""
    ours, theirs = await pair(tmp_path, first)
    official = open_official(theirs)
    steps = [
        ("move_node", None),
        ("create_tag", False),
        ("delete_tag", False),
        ("move_node", False),
        ("create_tag", True),
        ("move_node", True),
        ("create_tag", None),
    ]
    async with Repository.open(ours) as repository:
        for name, setting in steps:
            await repository.set_feature_flag(name, setting)
            official.set_feature_flag(name, setting)
            same_administration(ours, theirs)
            for mine, wanted in (
                (await repository.feature_flags(), official.feature_flags()),
                (await repository.enabled_feature_flags(), official.enabled_feature_flags()),
                (await repository.disabled_feature_flags(), official.disabled_feature_flags()),
            ):
                names = ("id", "name", "default_enabled", "setting", "enabled")
                shown = [[getattr(it, key) for key in names] for it in mine]
                # The official engine answers some of them in no order.
                assert shown == sorted([getattr(it, key) for key in names] for it in wanted)
        with pytest.raises(FeatureDisabledError, match="delete_tag"):
            await repository.delete_tag("t")
    with pytest.raises(icechunk.IcechunkError, match="delete_tag"):
        open_official(ours).delete_tag("t")
    await views_agree(ours, 2)


@SPECS
@FIRST
async def test_files_are_shown_as_the_official_engine_shows_them(
    spec: int, first: str, tmp_path: Path, sources: Sources
) -> None:
    """Every snapshot, manifest and log, and the repo info, key by key."""
    root = tmp_path / "repo"
    settings = Settings(inline=16, source=sources.directory, compress_from=2, splits=THREES.splits)
    if spec == 1:
        settings = Settings(inline=16, source=sources.directory, splits=THREES.splits)
    engine = ENGINES[first]
    ids = await history(engine, root, spec, HISTORY, settings)
    async with engine.open(root, sources.directory) as repo:
        work = await repo.work()
        virtual = {"coords": [[0], [2], [3]], "file": SOURCE_FILES[0], "offsets": [1, 2, 3]}
        edits = [array("v", [8], [1], "u1", plain=True), group("x")]
        await apply(work.store, [*edits, Edit("virtual", "v", {**virtual, "length": 1})], sources)
        await work.commit("base of virtual chunks")
        if spec == 2:
            work = await repo.work()
            await apply(work.store, [attributes("x", n=1)])
            await work.amend("amended")
            work = await repo.work()
            await apply(work.store, [attributes("x", n=2)])
            await work.flush("detached")
        await repo.create_branch("short", ids[1])
        await repo.delete_branch("short")
    official = open_official(root)
    if spec == 2:
        official.set_metadata({"k": [1]})
        official.set_feature_flag("move_node", setting=None)
        read_only = icechunk.RepoAvailability.read_only
        for status in (read_only, icechunk.RepoAvailability.online):
            official.set_status(icechunk.RepoStatus(status, MOMENT, "why"))
        moving = official.rearrange_session("main")
        moving.move("/x", "/y")
        moving.commit("moved")
    await shown_alike(root, spec)
    moment = datetime.now(UTC)
    async with engine.open(root) as repo:
        work = await repo.work()
        await apply(work.store, [group("last")])
        last = await work.commit("after all that expires")
    official.expire_snapshots(older_than=moment)
    collect(root, dry_run=False)
    composite = await shown_alike(root, spec)
    assert (last in composite) == (spec == 2)
    if composite:
        pruned = composite[last]["merged_pruned_ancestor_tx_logs"]
        (root / "transactions" / pruned[1]).unlink()
        composite = await shown_alike(root, spec)
        assert composite[last]["missing_tx_logs"] == [pruned[1]]


async def shown_alike(root: Path, spec: int) -> dict[str, Any]:
    """Compare what is shown of every file; answer the logs that several were joined to."""
    files = Files(root)
    official = open_official(root)
    composite: dict[str, Any] = {}
    async with Repository.open(root) as repository:
        if spec == 2:
            assert await repository.inspect_repo_info() == official.inspect_repo_info()
        for snapshot in sorted(files.ids("snapshots")):
            assert await repository.inspect_snapshot(snapshot) == official.inspect_snapshot(
                snapshot
            )
            mine = await repository.list_manifest_files(snapshot)
            assert [(str(it.id), it.size_bytes, it.num_chunk_refs) for it in mine] == [
                (it.id, it.size_bytes, it.num_chunk_refs)
                for it in official.list_manifest_files(snapshot)
            ]
        for manifest in sorted(files.ids("manifests")):
            shown = await repository.inspect_manifest(manifest)
            assert shown == official.inspect_manifest(manifest)
        for snapshot in sorted(files.ids("transactions")):
            shown = await repository.inspect_transaction_log(snapshot)
            assert shown == official.inspect_transaction_log(snapshot)
            if "synthetic_composite" in shown:
                composite[snapshot] = shown["synthetic_composite"]
    return composite


@pytest.mark.parametrize("stamp", [b"a-b-1.2", b"nodash", b"", b"-x", b"x-", b"\xff-1", b" a-1 "])
async def test_odd_writers_are_shown_alike(stamp: bytes, tmp_path: Path) -> None:
    """The header's name of the writer may be any bytes."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 2)
    (snapshot,) = Files(root).ids("snapshots")
    path = root / "snapshots" / snapshot
    data = path.read_bytes()
    path.write_bytes(data[:12] + stamp.ljust(24) + data[36:])
    await shown_alike(root, 2)


@pytest.mark.sampled
@SPECS
@FIRST
@pytest.mark.parametrize("method", ["new_commit", "amend"])
async def test_manifests_are_rewritten_as_the_official_engine_rewrites_them(
    spec: int, first: str, method: Any, tmp_path: Path
) -> None:
    """The same arrays in the same parts, the same properties and log, and nothing else changes."""
    ours, theirs = await pair(tmp_path, first, spec)
    before = await views_agree(ours, spec)
    properties: dict[str, Any] = {"by": "hand", "__icechunk": {"more": 1}}
    official = open_official(theirs).reopen(config=their_config(THREES))
    async with Repository.open(ours, config=our_config(THREES)) as repository:
        if (spec, method) == (1, "amend"):
            with pytest.raises(UnsupportedBySpecError, match="migrate"):
                await repository.rewrite_manifests("x", branch="main", commit_method=method)
            return
        mine = str(
            await repository.rewrite_manifests(
                "split", branch="main", metadata=properties, commit_method=method
            )
        )
        wanted = official.rewrite_manifests(
            "split", branch="main", metadata=properties, commit_method=method
        )
        shown = await repository.inspect_snapshot(mine)
        assert _described(shown) == _described(official.inspect_snapshot(wanted))
        log = await repository.inspect_transaction_log(mine)
        assert _without_header(log) == _without_header(official.inspect_transaction_log(wanted))
        async with repository.reopen(our_config(Settings(inline=16))) as plain:
            again = await plain.rewrite_manifests("again", branch="main")
            assert _parts(await plain.inspect_snapshot(again)) == _parts(shown)
    seen = await views_agree(ours, spec)
    tip = seen.branches["main"]
    assert seen.contents[tip] == before.contents[before.branches["main"]]
    if spec == 2:
        same_tail = [it.kind for it in seen.operations][1:3]
        assert same_tail[0] == ("NewCommit" if method == "new_commit" else "CommitAmended")
    check_garbage(ours)


def _parts(shown: Any) -> dict[str, list[Any]]:
    """Return the boxes of each array's manifests."""
    return {
        node["path"]: sorted(ref["extents"] for ref in node.get("manifest_refs", ()))
        for node in shown["nodes"]
    }


def _described(shown: Any) -> Any:
    # Small arrays share manifests with us, and not with the official engine.
    count = sum(it["num_chunk_refs"] for it in shown["manifests"])
    return shown["commit_message"], shown["metadata"], _parts(shown), count


def _without_header(shown: Any) -> Any:
    return {name: value for name, value in shown.items() if name != "header"}


async def test_rewriting_without_rules_records_the_default_ones(tmp_path: Path) -> None:
    """A first snapshot can be rewritten, but not amended by us; rules are recorded all the same."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await ENGINES["ours"].create(ours, 2)
    await ENGINES["theirs"].create(theirs, 2)
    wanted = open_official(theirs)
    async with Repository.open(ours) as repository:
        mine = await repository.rewrite_manifests("again", branch="main")
        shown = await repository.inspect_snapshot(mine)
        official = wanted.inspect_snapshot(wanted.rewrite_manifests("again", branch="main"))
        assert shown["metadata"] == official["metadata"]
        async with repository.reopen(
            RepositoryConfig(manifest=ManifestConfig(splitting=ManifestSplittingConfig()))
        ) as reopened:
            tip = await reopened.rewrite_manifests("again", branch="main", commit_method="amend")
            assert (await reopened.inspect_snapshot(tip))["metadata"] == official["metadata"]
    await views_agree(ours, 2)
    assert Files(ours).garbage().keys() == set(FOLDERS)


async def test_a_commit_that_moved_nodes_is_not_amended_by_either(tmp_path: Path) -> None:
    """A new commit on top of it works."""
    root = tmp_path / "repo"
    await history(ENGINES["ours"], root, 2, HISTORY[:1], Settings())
    official = open_official(root)
    moving = official.rearrange_session("main")
    moving.move("/empty", "/moved")
    moving.commit("moved")
    with pytest.raises(icechunk.SessionStateError):
        official.rewrite_manifests("x", branch="main", commit_method="amend")
    async with Repository.open(root) as repository:
        with pytest.raises(SessionStateError, match="moved nodes"):
            await repository.rewrite_manifests("x", branch="main", commit_method="amend")
        await repository.rewrite_manifests("x", branch="main")
    await views_agree(root, 2)


async def test_what_version_1_cannot_express_is_refused(tmp_path: Path) -> None:
    """Both engines refuse the same calls, and ours names migration."""
    root = tmp_path / "repo"
    await ENGINES["theirs"].create(root, 1)
    official = open_official(root)
    online = icechunk.RepoStatus(icechunk.RepoAvailability.online)
    async with Repository.open(root) as repository:
        calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (repository.get_metadata, official.get_metadata),
            (lambda: repository.set_metadata({}), lambda: official.set_metadata({})),
            (lambda: repository.update_metadata({}), lambda: official.update_metadata({})),
            (repository.get_status, official.get_status),
            (
                lambda: repository.set_status(RepoStatus(RepoAvailability.ONLINE)),
                lambda: official.set_status(online),
            ),
            (repository.feature_flags, official.feature_flags),
            (
                lambda: repository.set_feature_flag("none", None),
                lambda: official.set_feature_flag("none", None),
            ),
            (repository.inspect_repo_info, official.inspect_repo_info),
        ]
        for ours, theirs in calls:
            with pytest.raises(UnsupportedBySpecError, match="migrate") as caught:
                await ours()
            assert isinstance(caught.value, IcechunkError)
            with pytest.raises(icechunk.IcechunkError, match="version 2"):
                theirs()
    assert Files(root).info is None
