"""Amending, detached snapshots, configuration, moves, forks and diffs across the engines."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.errors import (
    InvalidInputError,
    SessionStateError,
    UnsupportedBySpecError,
)
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES, other, views_agree
from tests.interop.edits import (
    apply,
    array,
    contents,
    delete_chunk,
    delete_node,
    group,
    resize,
    write,
)
from tests.interop.files import Files
from tests.interop.steps import AMENDED, BASE, COMMITTED, amend, commit
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.answers import Touched


pytestmark = pytest.mark.sampled

SPECS = pytest.mark.parametrize("spec", [1, 2])
FIRST = pytest.mark.parametrize("first", list(ENGINES))


@FIRST
@pytest.mark.parametrize("second", list(ENGINES))
async def test_amending_merges_logs_as_the_official_engine_does(
    first: str, second: str, tmp_path: Path
) -> None:
    """The merged log is the official engine's, whichever engine committed or amends."""
    root, reference = tmp_path / "repo", tmp_path / "reference"
    await ENGINES["theirs"].create(root, 2)
    base = await commit(ENGINES["theirs"], root, BASE)
    shutil.copytree(root, reference)
    tips = {}
    for where, committer, amender in (
        (root, ENGINES[first], ENGINES[second]),
        (reference, ENGINES["theirs"], ENGINES["theirs"]),
    ):
        replaced = await commit(committer, where, COMMITTED)
        tips[where] = await amend(amender, where, AMENDED)
        seen = await views_agree(where, 2, everything=True)
        assert [it.id for it in seen.ancestries[tips[where]]][1] == base
        assert seen.operations[0].kind == "CommitAmended"
        assert seen.operations[0].detail["previous_snap_id"] == replaced
    merged, wanted = (Files(where).log(tip) for where, tip in tips.items())
    for name in ("new", "deleted", "updated"):
        for kind in ("groups", "arrays"):
            lists = [len(getattr(log, f"{name}_{kind}")) for log in (merged, wanted)]
            assert lists[0] == lists[1], f"{name}_{kind}"
    diffs = []
    for where, tip in tips.items():
        async with ENGINES["ours"].open(where) as repo:
            diffs.append(await repo.diff(base, tip))
    assert diffs[0] == diffs[1]
    assert diffs[0].chunks["/h/new"] == [(0,), (1,), (2,)]


@FIRST
async def test_an_amended_tip_can_still_be_read_by_the_other(first: str, tmp_path: Path) -> None:
    """The replaced snapshot stays known, as an orphan that the branch no longer holds."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, 2)
    replaced = await commit(ENGINES[first], root, BASE)
    async with ENGINES[first].open(root) as repo:
        wanted = await contents(await repo.reading(replaced))
    tip = await amend(ENGINES[first], root, COMMITTED)
    async with other(first).open(root) as repo:
        assert await contents(await repo.reading(replaced)) == wanted
        assert (await repo.branches())["main"] == tip
        assert replaced not in {it.id for it in await repo.ancestry(tip)}
        await repo.create_branch("rescued", replaced)
    await views_agree(root, 2, expected={replaced: wanted}, everything=True)


@SPECS
async def test_amending_the_first_snapshot_is_refused(spec: int, tmp_path: Path) -> None:
    """Neither engine amends the initial snapshot, nor anything in a repository of spec 1."""
    root = tmp_path / "repo"
    await ENGINES["theirs"].create(root, spec)
    for engine, refusal in (
        (ENGINES["ours"], UnsupportedBySpecError if spec == 1 else SessionStateError),
        (ENGINES["theirs"], icechunk.IcechunkError),
    ):
        with pytest.raises(refusal):
            await amend(engine, root, [group("a")])
    seen = await views_agree(root, spec)
    assert len(seen.ancestries[seen.branches["main"]]) == 1


@SPECS
@FIRST
async def test_a_detached_snapshot_of_one_is_adopted_by_the_other(
    spec: int, first: str, tmp_path: Path
) -> None:
    """Flushed work is read by id, made a branch and a tag, and continued by the other engine."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec)
    base = await commit(ENGINES[first], root, BASE)
    async with ENGINES[first].open(root) as repo:
        work = await repo.work()
        await apply(work.store, COMMITTED)
        detached = await work.flush("detached")
        wanted = await contents(await repo.reading(detached))
    async with other(first).open(root) as repo:
        assert (await repo.branches())["main"] == base
        assert await contents(await repo.reading(detached)) == wanted
        await repo.create_branch("adopted", detached)
        await repo.create_tag("named", detached)
        work = await repo.work("adopted")
        await apply(work.store, [delete_node("h")])
        tip = await work.commit("on top")
    seen = await views_agree(root, spec, expected={detached: wanted}, everything=True)
    assert [it.id for it in seen.ancestries[tip]][:3] == [tip, detached, base]
    if spec == 2:
        assert "NewDetachedSnapshot" in {it.kind for it in seen.operations}


@SPECS
@FIRST
async def test_pending_changes_look_the_same_in_both(spec: int, first: str, tmp_path: Path) -> None:
    """The status of a session with the same edits is equal, as is the diff of its commit."""
    root = tmp_path / "repo"
    await ENGINES[first].create(root, spec)
    await commit(ENGINES[first], root, BASE)
    edits = [
        *COMMITTED,
        *AMENDED[:4],
        resize("g/a", 4, 10),
        write("g/a", [0, 8], [4, 10], 9),
        resize("g/b", 20),
        delete_chunk("g/b", 3),
    ]
    statuses: list[Touched] = []
    for name, engine in ENGINES.items():
        shutil.copytree(root, copied := tmp_path / name)
        async with engine.open(copied) as repo:
            work = await repo.work()
            await apply(work.store, edits)
            statuses.append(work.status())
            start, end = work.snapshot, await work.commit("pending")
            assert await repo.diff(start, end) == statuses[-1]
        await views_agree(copied, spec)
    assert statuses[0] == statuses[1]


async def test_a_diff_over_a_recreated_array_lists_the_chunks_of_both(tmp_path: Path) -> None:
    """Where two arrays had one path, we list what was touched in either, and they in one."""
    root, engine = tmp_path / "repo", ENGINES["theirs"]
    await engine.create(root, 2)
    start = await commit(engine, root, BASE)
    await commit(engine, root, [write("g/b", [0], [10], 3)])
    recreated = [array("g/b", [9], [3], overwrite=True), write("g/b", [6], [9], 4)]
    end = await commit(engine, root, recreated)
    diffs: dict[str, Touched] = {}
    for name, one in ENGINES.items():
        async with one.open(root) as repo:
            diffs[name] = await repo.diff(start, end)
    assert diffs["ours"].chunks == {"/g/b": [(0,), (1,), (2,)]}
    assert diffs["theirs"].chunks["/g/b"] in ([(0,), (1,)], [(2,)])
    assert diffs["ours"].new_arrays == diffs["theirs"].new_arrays == {"/g/b"}


@SPECS
async def test_neither_engine_compares_with_a_snapshot_that_is_no_ancestor(
    spec: int, tmp_path: Path
) -> None:
    """The older snapshot must be an ancestor: not a sibling, nor the newer one."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    first = await commit(ENGINES["ours"], root, BASE)
    second = await commit(ENGINES["ours"], root, COMMITTED)
    async with ENGINES["ours"].open(root) as repo:
        await repo.create_branch("side", first)
        work = await repo.work("side")
        await apply(work.store, [group("elsewhere")])
        side = await work.commit("side")
        for pair in ((second, first), (second, side), (side, second)):
            with pytest.raises(InvalidInputError):
                await repo.diff(*pair)
    async with ENGINES["theirs"].open(root) as repo:
        for pair in ((second, first), (second, side), (side, second)):
            with pytest.raises(icechunk.IcechunkError):
                await repo.diff(*pair)


@SPECS
@FIRST
async def test_a_saved_configuration_rules_the_other_engine(
    spec: int, first: str, tmp_path: Path
) -> None:
    """Thresholds and splitting that one engine stored decide what the other writes."""
    root = tmp_path / "repo"
    settings = Settings(inline=8, splits=((("name_matches", "^a$"), ((0, 2),)),))
    await ENGINES[first].create(root, spec, settings)
    edits = [
        array("a", [8], [1], "u1", plain=True),
        write("a", [0], [8], 1, "u1"),
        array("b", [18], [9], "u1", plain=True),
        write("b", [0], [18], 1, "u1"),
    ]
    await commit(other(first), root, edits)
    files = Files(root)
    # Four of the array that is split. Ours lets the other one share one of them.
    assert len(files.ids("manifests")) == 4 + (first == "ours")
    assert len(files.ids("chunks")) == 2
    await views_agree(root, spec)
    if first == "theirs":
        async with Repository.open(root) as repository:
            changed = repository.config.__class__(inline_chunk_threshold_bytes=9)
        async with Repository.open(root, config=changed) as repository:
            await repository.save_config()
    else:
        storage = icechunk.local_filesystem_storage(str(root))
        changed = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=9)
        icechunk.Repository.open(storage, config=changed).save_config()
    await commit(ENGINES[first], root, [array("c", [9], [9], "u1", plain=True)])
    await commit(ENGINES[first], root, [write("c", [0], [9], 1, "u1")])
    assert len(files.ids("chunks")) == 2  # nine bytes are inline now
    assert len(open_official(root).config.manifest.splitting.split_sizes) == 1
    await views_agree(root, spec)
