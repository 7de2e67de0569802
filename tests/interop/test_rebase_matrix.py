"""Every kind of clash, replayed by both engines over each other's commits."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async.engine.commit.conflicts import ConflictKind
from icechunk_async.errors import ConflictError, FormatError
from tests.interop.answers import Policy
from tests.interop.clashes import BASE, ROWS
from tests.interop.comparing import ENGINES, other, views_agree
from tests.interop.edits import Edit, apply, attributes, contents, delete_node, group, write
from tests.interop.steps import make_base
from tests.interop.theirs import icechunk, open_official

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.interop.answers import Clash, Engine
    from tests.interop.clashes import Row


SPECS = pytest.mark.parametrize("spec", [1, 2])
POLICIES = (
    Policy("detector"),
    Policy(),
    Policy(chunks="theirs"),
    Policy(chunks="fail"),
    Policy(fail_array=True),
    Policy(fail_group=True),
)

type Outcome = tuple[list[Clash], bool, Mapping[str, bytes]]
"""Conflicts, whether the session stands on the newer commit, what the session sees."""


@pytest.fixture
async def base(spec: int, tmp_path: Path) -> Path:
    """Return a repository with the common base."""
    return await make_base(tmp_path / "base", spec, BASE)


async def replay(row: Row, root: Path, session_of: Engine, commit_of: Engine) -> list[Outcome]:
    """Begin one session for each policy, let the other commit, and rebase them all."""
    outcomes: list[Outcome] = []
    async with session_of.open(root) as repo:
        sessions = [await repo.work() for _ in POLICIES]
        for work in sessions:
            await apply(work.store, row.ours)
        async with commit_of.open(root) as newer:
            other = await newer.work()
            await apply(other.store, row.theirs)
            tip = await other.commit("newer")
        for policy, work in zip(POLICIES, sessions, strict=True):
            clashes = await work.rebase(policy)
            ghosts = session_of.name == "theirs"  # it lists chunks outside of a smaller grid
            seen = await contents(work.store, ghosts=ghosts)
            outcomes.append((clashes, work.snapshot == tip, seen))
        settled = [work for work in sessions if work.snapshot == tip]
        for work in settled[:1]:
            await work.commit("rebased", empty=True)
    return outcomes


@pytest.mark.sampled
@SPECS
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.stricter])
async def test_a_clash_ends_alike_in_both(spec: int, name: str, base: Path, tmp_path: Path) -> None:
    """Conflicts, coordinates and resulting contents are equal under every policy."""
    row = ROWS[name]
    ours, theirs = ENGINES["ours"], ENGINES["theirs"]
    shutil.copytree(base, tmp_path / "ours")
    shutil.copytree(base, tmp_path / "theirs")
    found = await replay(row, tmp_path / "ours", ours, theirs)
    wanted = await replay(row, tmp_path / "theirs", theirs, ours)
    for policy, mine, reference in zip(POLICIES, found, wanted, strict=True):
        assert mine[0] == reference[0], policy
        assert mine[1] == reference[1], policy
        assert sorted(mine[2]) == sorted(reference[2]), policy
        assert mine[2] == reference[2], policy
        assert mine[1] == (not mine[0]), policy
    assert [(it.kind, it.path) for it in found[0][0]] == list(row.found)
    assert found[1][1] == (row.solved or not row.found)
    views = [await views_agree(tmp_path / it, spec) for it in ("ours", "theirs")]
    assert list(views[0].contents.values()) == list(views[1].contents.values())
    assert list(views[0].arrays.values()) == list(views[1].arrays.values())


@SPECS
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.stricter])
async def test_two_nodes_never_share_a_path(spec: int, name: str, base: Path) -> None:
    """If both sides made a node at one path, no policy of ours keeps both."""
    row = ROWS[name]
    outcomes = await replay(row, base, ENGINES["ours"], ENGINES["theirs"])
    for clashes, moved, _ in outcomes:
        assert (ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE, row.found[0][1]) in [
            (it.kind, it.path) for it in clashes
        ]
        assert not moved
    assert [(it.kind, it.path) for it in outcomes[0][0]] == list(row.found)
    await views_agree(base, spec)


@SPECS
async def test_a_path_with_two_nodes_is_named_not_guessed(spec: int, base: Path) -> None:
    """The official solver writes one path twice. We refuse to read it, to list and to add."""
    row = ROWS["both_recreate"]
    async with ENGINES["theirs"].open(base) as repo:
        work = await repo.work()
        before = work.snapshot
        await apply(work.store, row.ours)
        newer = await repo.work()
        await apply(newer.store, row.theirs)
        await newer.commit("newer")
        assert await work.rebase(Policy()) == []
        damaged = await work.commit("damaged")
        keys = [key async for key in (await repo.reading(damaged)).list()]
        assert keys.count("g/b/zarr.json") == 2
    async with ENGINES["ours"].open(base) as repo:
        store = await repo.reading(damaged)
        assert await store.get("g/zarr.json", default_buffer_prototype()) is not None
        for key in ("g/b/zarr.json", "g/b/c/0/0"):
            with pytest.raises(FormatError, match="twice"):
                await store.get(key, default_buffer_prototype())
        with pytest.raises(FormatError, match="twice"):
            await contents(store)
        work = await repo.work()
        with pytest.raises(FormatError, match="twice"):
            await apply(work.store, [group("another")])
        assert "g/b/zarr.json" in await contents(await repo.reading(before))


@SPECS
async def test_a_failed_rebase_stands_on_the_last_commit_that_did_not_clash(
    spec: int, base: Path
) -> None:
    """Of three newer commits the second clashes: the session ends after the first."""
    newer: list[list[Edit]] = [
        [write("g/b", [10], [15], 20)],
        [write("g/b", [0], [5], 21)],
        [group("n")],
    ]
    for engine in ENGINES.values():
        shutil.copytree(base, root := base.with_name(engine.name))
        async with engine.open(root) as repo:
            work = await repo.work()
            await apply(work.store, [write("g/b", [0], [10], 22)])
            tips = []
            for edits in newer:
                other = await repo.work()
                await apply(other.store, edits)
                tips.append(await other.commit("newer"))
            clashes = await work.rebase(Policy("detector"))
            assert [(it.kind, it.coords) for it in clashes] == [
                (ConflictKind.CHUNK_DOUBLE_UPDATE, ((0,),))
            ]
            assert work.snapshot == tips[0]
            assert await work.rebase(Policy(chunks="theirs")) == []
            assert work.snapshot == tips[2]
            assert work.status().chunks == {"/g/b": [(1,)]}
            await work.commit("settled")
    views = [await views_agree(base.with_name(it), spec, everything=True) for it in ENGINES]
    assert next(iter(views[0].contents.values())) == next(iter(views[1].contents.values()))


def test_every_kind_of_clash_is_in_the_table() -> None:
    """Each kind occurs alone, except moves, which have a separate test."""
    alone = {row.found[0][0] for row in ROWS.values() if len(row.found) == 1}
    assert alone == set(ConflictKind) - {ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED}


@pytest.mark.parametrize("spec", [2])
@pytest.mark.parametrize("session_of", list(ENGINES))
@pytest.mark.parametrize(
    "ours",
    [
        [group("elsewhere")],
        [write("g/a", [0, 0], [2, 2], 5)],
        [attributes("g/a", x=1)],
        [delete_node("g/a")],
        [group("g/sub/below")],
    ],
    ids=["elsewhere", "chunks", "metadata", "deletion", "below"],
)
async def test_nothing_is_rebased_over_moves(
    spec: int, session_of: str, ours: list[Edit], base: Path
) -> None:
    """A newer commit with a move stops every policy, whatever the session did."""
    assert spec == 2
    async with ENGINES[session_of].open(base) as repo:
        sessions = [await repo.work() for _ in POLICIES]
        for work in sessions:
            await apply(work.store, ours)
        moving = open_official(base).rearrange_session("main")
        moving.move("/g/a", "/e/a")
        moving.commit("moved")
        for policy, work in zip(POLICIES, sessions, strict=True):
            clashes = await work.rebase(policy)
            assert [it.kind for it in clashes] == [ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED]
    await views_agree(base, spec, everything=True)


@SPECS
@pytest.mark.parametrize("session_of", list(ENGINES))
async def test_a_lost_race_is_a_conflict_and_loses_nothing(
    spec: int, session_of: str, base: Path
) -> None:
    """A commit on an old tip is refused by both, names both tips, and can be rebased."""
    async with ENGINES[session_of].open(base) as repo, other(session_of).open(base) as newer:
        late, first = await repo.work(), await newer.work()
        await apply(late.store, [group("late")])
        await apply(first.store, [write("g/b", [0], [5], 40)])
        start, tip = late.snapshot, await first.commit("first")
        with pytest.raises((ConflictError, icechunk.ConflictError)) as raised:
            await late.commit("late")
        error: Any = raised.value
        if session_of == "ours":
            found = (error.context["expected_parent"], error.context["actual_parent"])
        else:
            found = (error.expected_parent, error.actual_parent)
        assert found == (start, tip)
        assert (await newer.branches())["main"] == tip
        assert await late.rebase(Policy("detector")) == []
        last = await late.commit("late")
    seen = await views_agree(base, spec, everything=True)
    assert [it.id for it in seen.ancestries[last]][:3] == [last, tip, start]


@pytest.mark.parametrize("spec", [2])
@pytest.mark.parametrize("session_of", list(ENGINES))
async def test_an_amendment_that_lost_the_race_replaces_nothing(
    spec: int, session_of: str, base: Path
) -> None:
    """A tip that somebody committed upon meanwhile cannot be amended by either engine."""
    async with ENGINES[session_of].open(base) as repo, other(session_of).open(base) as newer:
        late, first = await repo.work(), await newer.work()
        await apply(late.store, [group("late")])
        await apply(first.store, [group("first")])
        tip = await first.commit("first")
        with pytest.raises((ConflictError, icechunk.ConflictError)):
            await late.amend("late")
    seen = await views_agree(base, spec, everything=True)
    assert seen.branches == {"main": tip}


@SPECS
async def test_commits_that_rebase_by_themselves_say_so_alike(spec: int, base: Path) -> None:
    """The number of attempts is recorded in the commit's properties in the same words."""
    for engine in ENGINES.values():
        shutil.copytree(base, root := base.with_name(engine.name))
        async with engine.open(root) as repo:
            late, later = await repo.work(), await repo.work()
            for index, work in enumerate((late, later)):
                await apply(work.store, [write("g/b", [5 * index], [5 * index + 5], 30)])
            await late.commit("late", rebasing=True)
            await later.commit("later", {"k": 1, "__icechunk": {"mine": 2}}, rebasing=True)
    views = [await views_agree(base.with_name(it), spec, everything=True) for it in ENGINES]
    notes = [[it.metadata for it in next(iter(view.ancestries.values()))] for view in views]
    assert notes[0] == notes[1]
    assert '"rebase_attempts": 1' in notes[0][0]
