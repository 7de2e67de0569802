"""Moves, forks, rewritten manifests and shrunk grids: what the official engine leaves to us."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository
from icechunk_async.engine.commit.conflicts import (
    BasicConflictSolver,
    ConflictDetector,
    ConflictKind,
)
from icechunk_async.errors import NodeNotFoundError, RebaseFailedError, SessionStateError
from tests.interop.comparing import ENGINES, views_agree
from tests.interop.edits import (
    apply,
    attributes,
    delete_node,
    group,
    write,
)
from tests.interop.files import Files
from tests.interop.steps import BASE, COMMITTED, amend, commit
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from pathlib import Path

    from zarr.abc.store import Store


SPECS = pytest.mark.parametrize("spec", [1, 2])


async def test_moves_of_the_official_engine_are_read_and_not_rebased_over(tmp_path: Path) -> None:
    """Moved nodes read at their new paths. Older sessions refuse to rebase, even forced."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 2)
    base = await commit(ENGINES["ours"], root, [*BASE, group("g-x"), group("g.y")])
    async with Repository.open(root) as held:
        begun = await held.writable_session("main")
        await apply(begun.store, [write("g/a", [0, 0], [1, 1], 9)])
        moving = open_official(root).rearrange_session("main")
        moving.move("/g", "/h/g")
        moving.move("/h/g/b", "/renamed")
        moved = moving.commit("moved")
        for solver in (ConflictDetector(), BasicConflictSolver()):
            with pytest.raises(RebaseFailedError) as raised:
                await begun.rebase(solver)
            conflicts: Any = raised.value.context["conflicts"]
            kinds = [it.kind for it in conflicts]
            assert kinds == [ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED]
            assert str(begun.snapshot_id) == base
        with pytest.raises(NodeNotFoundError):
            (await held.readonly_session("main")).workspace.array("/g/a")
    seen = await views_agree(root, 2, everything=True)
    assert {"h/g/a", "renamed"} <= set(seen.arrays[moved])
    assert set(dict(seen.diffs[base, moved].moves)) >= {"/g", "/g/a"}
    with pytest.raises(SessionStateError, match="moved"):
        await amend(ENGINES["ours"], root, [group("x")])
    edits = [write("h/g/a", [0, 0], [8, 8], 11), attributes("renamed", new=True), group("g")]
    await commit(ENGINES["ours"], root, edits)
    await commit(ENGINES["theirs"], root, [delete_node("h")])
    await views_agree(root, 2, everything=True)


async def test_moves_of_several_commits_are_listed_in_order(tmp_path: Path) -> None:
    """A diff over nodes moved, changed and moved again lists each move and the current paths."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, 2)
    start = await commit(ENGINES["ours"], root, BASE)
    for source, target in (("/g/a", "/h/a"), ("/h", "/k"), ("/k/a", "/g/a"), ("/g", "/k/g")):
        moving = open_official(root).rearrange_session("main")
        moving.move(source, target)
        moving.commit(f"{source} to {target}")
    end = await commit(ENGINES["ours"], root, [write("k/g/a", [0, 0], [2, 2], 5), group("h")])
    seen = await views_agree(root, 2, everything=True)
    assert "k/g/a" in seen.arrays[end]
    async with ENGINES["ours"].open(root) as ours, ENGINES["theirs"].open(root) as theirs:
        diff = await ours.diff(start, end)
        reference = await theirs.diff(start, end)
    assert diff.chunks == reference.chunks == {"/k/g/a": [(0, 0)]}
    made = [("/g/a", "/h/a"), ("/h/a", "/k/a"), ("/k/a", "/g/a"), ("/g/a", "/k/g/a")]
    assert [move for move in diff.moves if move in made] == made
    assert [move for move in reference.moves if move in made] == made[::-1]


@SPECS
async def test_merged_forks_of_the_official_engine_read_as_one_commit(
    spec: int, tmp_path: Path
) -> None:
    """Work done in forks and merged is one commit to us; anonymous snapshots stay unknown."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    await commit(ENGINES["ours"], root, BASE)
    session = open_official(root).writable_session("main")
    await apply(session.store, [attributes("g", before="forks")])
    forks = [session.fork(), session.fork()]
    for index, fork in enumerate(forks):
        await apply(fork.store, [write("g/b", [index * 5], [index * 5 + 5], 20 + index)])
    session.merge(*forks)
    tip = session.commit("merged")
    seen = await views_agree(root, spec, everything=True)
    assert len(seen.ancestries[tip]) == 3
    parent = seen.ancestries[tip][1].id
    assert seen.diffs[parent, tip].chunks == {"/g/b": [(0,), (1,)]}
    await commit(ENGINES["ours"], root, COMMITTED)
    await views_agree(root, spec, everything=True)


@SPECS
async def test_manifests_rewritten_by_the_official_engine_read_and_go_on(
    spec: int, tmp_path: Path
) -> None:
    """A rewrite under another splitting changes no value; our next commit keeps its cells."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    before = await commit(ENGINES["ours"], root, BASE)
    sizes = {
        icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): 2}
    }
    splitting = icechunk.ManifestSplittingConfig.from_dict(sizes)
    config = icechunk.RepositoryConfig(manifest=icechunk.ManifestConfig(splitting=splitting))
    storage = icechunk.local_filesystem_storage(str(root))
    official = icechunk.Repository.open(storage, config=config)
    official.save_config()
    after = official.rewrite_manifests("rewritten", branch="main")
    seen = await views_agree(root, spec, everything=True)
    assert seen.contents[before] == seen.contents[after]
    assert "splitting_config" in seen.ancestries[after][0].metadata
    tip = await commit(ENGINES["ours"], root, [write("g/a", [0, 0], [2, 2], 8)])
    await views_agree(root, spec, everything=True)
    nodes = Files(root).snapshot(tip).nodes
    data = nodes["/g/a"].array
    assert data is not None
    assert sorted(ref.extents for ref in data.manifests) == [
        ((a, a + 2), (b, b + 2)) for a in (0, 2) for b in (0, 2)
    ]


async def set_length(store: Store, key: str, length: int) -> None:
    """Give an array of one axis another length by its document alone, touching no chunk."""
    prototype = default_buffer_prototype()
    found = await store.get(key, prototype)
    assert found is not None
    document = {**json.loads(found.to_bytes()), "shape": [length]}
    await store.set(key, prototype.buffer.from_bytes(json.dumps(document).encode()))


@SPECS
async def test_chunks_cut_off_by_a_commit_never_come_back(spec: int, tmp_path: Path) -> None:
    """After a commit between shrinking and growing, both engines have lost the chunks."""
    root = tmp_path / "repo"
    await ENGINES["ours"].create(root, spec)
    await commit(ENGINES["ours"], root, BASE)
    engines = (*ENGINES.values(), *ENGINES.values())
    for engine, length in zip(engines, (12, 20, 8, 20), strict=True):
        async with engine.open(root) as repo:
            work = await repo.work()
            await set_length(work.store, "g/b/zarr.json", length)
            tip = await work.commit("resized")
        seen = await views_agree(root, spec)
    chunks = [key for key in seen.contents[tip] if key.startswith("g/b/c")]
    assert chunks == ["g/b/c/0", "g/b/c/1"]


@SPECS
async def test_within_a_session_only_we_forget_what_was_cut_off(spec: int, tmp_path: Path) -> None:
    """Shrunk and grown by documents in one session: ours holds fill values, theirs old chunks."""
    kept = {}
    for name, engine in ENGINES.items():
        root = tmp_path / name
        await engine.create(root, spec)
        await commit(engine, root, BASE)
        async with engine.open(root) as repo:
            work = await repo.work()
            for length in (8, 20):
                await set_length(work.store, "g/b/zarr.json", length)
            tip = await work.commit("resized")
        seen = await views_agree(root, spec)
        kept[name] = sum(key.startswith("g/b/c") for key in seen.contents[tip])
    assert kept == {"ours": 2, "theirs": 4}
