"""Forks and merging in both engines: the same work merged alike, and where we know better."""

from __future__ import annotations

import inspect
import pickle
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.errors import MergeFailedError, SessionStateError
from tests.interop.comparing import ENGINES, check_garbage, collect, views_agree
from tests.interop.edits import (
    Edit,
    apply,
    array,
    attributes,
    contents,
    delete_chunk,
    delete_node,
    group,
    resize,
    write,
)
from tests.interop.files import FOLDERS, Files
from tests.interop.steps import make_base
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.interop.answers import Engine


SPECS = pytest.mark.parametrize("spec", [1, 2])
REFUSALS = (MergeFailedError, SessionStateError, icechunk.SessionStateError)

BASE = (
    group("g"),
    group("g/sub"),
    array("a", [20], [2]),
    write("a", [0], [20], 1),
    array("b", [8, 8], [2, 2]),
    write("b", [0, 0], [8, 8], 2),
)


def session_of(work: object) -> Any:
    """Return the engine's own session."""
    return getattr(work, "session")  # noqa: B009 - of either engine


async def fork(work: object) -> Any:
    """Return a fork of a session of either engine."""
    made: Any = session_of(work).fork()
    return await made if inspect.isawaitable(made) else made


async def merge(work: object, *forks: Any) -> None:
    """Merge forks in either engine."""
    session = session_of(work)
    method: Any = getattr(session, "merge_async", session.merge)
    await method(*forks)


async def travel(made: Any, edits: Sequence[Edit]) -> Any:
    """Send a fork away, edit there, and bring it back."""
    away = pickle.loads(pickle.dumps(made))
    if hasattr(away, "attached"):
        async with away.attached():
            await apply(away.store, edits)
    else:
        await apply(away.store, edits)
    return pickle.loads(pickle.dumps(away))


@dataclass(frozen=True)
class Row:
    """The edits of two forks, or of a session and its fork."""

    first: Sequence[Edit]
    second: Sequence[Edit]
    merges: bool = True
    """Whether the official engine lets them go together."""
    differs: str = ""
    """Why our answer is another one."""


_SMALL = array("n", [4], [2])
_ANEW = (array("a", [4], [2], overwrite=True), write("a", [0], [4], 9))

ROWS = {
    "other_chunks": Row([write("a", [0], [10], 10)], [write("a", [10], [20], 11)]),
    "same_chunks": Row([write("a", [0], [12], 10)], [write("a", [8], [20], 11)]),
    "deleted_and_written": Row([delete_chunk("a", 1)], [write("a", [2], [4], 11)]),
    "written_and_deleted": Row([write("a", [2], [4], 11)], [delete_chunk("a", 1)]),
    "new_here_and_there": Row([group("m"), group("m/x")], [_SMALL, write("n", [0], [4], 3)]),
    "same_group": Row([group("n")], [group("n")], merges=False),
    "same_array": Row([_SMALL], [_SMALL], merges=False),
    "group_and_array": Row(
        [group("n")], [_SMALL], differs="two nodes would have one path, and be listed twice"
    ),
    "below_an_array": Row(
        [_SMALL],
        [Edit("orphan", "n/x", {"attributes": {}})],
        differs="a node would lie within an array, which a rebase refuses as well",
    ),
    "attributes_here_and_there": Row([attributes("a", x=1)], [attributes("g", x=1)]),
    "same_attributes": Row([attributes("a", x=1)], [attributes("a", x=1)]),
    "other_attributes": Row([attributes("a", x=1)], [attributes("a", x=2)], merges=False),
    "other_group_attributes": Row([attributes("g", x=1)], [attributes("g", x=2)], merges=False),
    "attributes_and_chunks": Row([attributes("a", x=1)], [write("a", [0], [4], 12)]),
    "both_delete_an_array": Row([delete_node("a")], [delete_node("a")]),
    "both_delete_a_group": Row([delete_node("g")], [delete_node("g/sub")]),
    "deleted_and_chunks": Row([delete_node("a")], [write("a", [0], [4], 12)], merges=False),
    "chunks_and_deleted": Row([write("a", [0], [4], 12)], [delete_node("a")], merges=False),
    "deleted_and_attributes": Row([delete_node("a")], [attributes("a", x=1)], merges=False),
    "group_deleted_and_attributes": Row([attributes("g", x=1)], [delete_node("g")], merges=False),
    "child_of_a_deleted_group": Row([delete_node("g")], [group("g/sub/new")]),
    "anew_and_chunks": Row(_ANEW, [write("a", [0], [4], 12)], merges=False),
    "anew_and_deleted": Row(_ANEW, [delete_node("a")], merges=False),
    "both_anew": Row(_ANEW, _ANEW, merges=False),
    "grown_and_chunks": Row(
        [resize("a", 30), write("a", [20], [30], 3)], [write("a", [0], [4], 12)]
    ),
    "shrunk_and_chunks": Row([resize("a", 10)], [write("a", [0], [4], 12)]),
    "shrunk_alike": Row([resize("a", 10)], [resize("a", 10)]),
    "shrunk_and_chunks_outside": Row([resize("a", 10)], [write("a", [14], [18], 12)]),
}


@pytest.fixture
async def base(spec: int, tmp_path: Path) -> Path:
    """Return a repository with the common base."""
    return await make_base(tmp_path / "base", spec, BASE)


async def work_together(
    engine: Engine, root: Path, row: Row, *, by_session: bool
) -> dict[str, bytes] | None:
    """Let two do their work, merge and commit it; None if it does not go together."""
    async with engine.open(root) as repo:
        work = await repo.work()
        forks = [await fork(work) for _ in range(2)]
        if by_session:
            await apply(work.store, row.first)
        else:
            forks[0] = await travel(forks[0], row.first)
        forks[1] = await travel(forks[1], row.second)
        try:
            await merge(work, *forks[by_session:])
        except REFUSALS:
            return None
        if row.differs:
            return {}  # with damage that cannot be compared
        # The official engine lists chunks outside of a smaller grid.
        seen = await contents(work.store, ghosts=engine.name == "theirs")
        await work.commit("merged")
    return seen


@pytest.mark.sampled
@SPECS
@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("name", ROWS)
async def test_the_same_work_merges_alike(
    spec: int, name: str, base: Path, tmp_path: Path, *, by_session: bool
) -> None:
    """Two forks, or a session and its fork: refused by both, or with equal contents."""
    row = ROWS[name]
    shutil.copytree(base, tmp_path / "ours")
    shutil.copytree(base, tmp_path / "theirs")
    found = await work_together(ENGINES["ours"], tmp_path / "ours", row, by_session=by_session)
    wanted = await work_together(ENGINES["theirs"], tmp_path / "theirs", row, by_session=by_session)
    assert (wanted is not None) == row.merges
    if row.differs:
        assert found is None
        return
    assert found == wanted
    if found is None:
        return
    views = [await views_agree(tmp_path / it, spec) for it in ("ours", "theirs")]
    assert list(views[0].contents.values()) == list(views[1].contents.values())
    assert list(views[0].arrays.values()) == list(views[1].arrays.values())


@SPECS
@pytest.mark.parametrize("name", list(ENGINES))
async def test_forks_of_a_session_with_changes(spec: int, name: str, base: Path) -> None:
    """Forks see them, nobody else does, and what they stand on is garbage afterwards."""
    engine = ENGINES[name]
    before = Files(base).ids("snapshots")
    async with engine.open(base) as repo:
        tips = await repo.branches()
        work = await repo.work()
        await apply(work.store, [array("n", [400], [100], "<f8"), attributes("a", x=1)])
        await apply(work.store, [write("n", [0], [100], 5, "<f8")])
        one = await travel(await fork(work), [write("n", [100], [200], 6, "<f8")])
        two = await travel(await fork(work), [write("n", [200], [300], 7, "<f8")])
        inner = await travel(await fork(work), [])
        assert await repo.branches() == tips
        await merge(work, one, two, inner)
        await work.commit("merged")
    check_garbage(base)
    garbage = Files(base).garbage()
    unpublished = len(garbage["snapshots"])
    assert unpublished == (1 if name == "ours" else 3)  # once a state, not once a fork
    seen = await views_agree(base, spec, everything=True)
    collect(base, dry_run=False)
    assert Files(base).garbage() == {folder: set[str]() for folder in FOLDERS}
    assert len(Files(base).ids("snapshots") - before) == 1
    assert (await views_agree(base, spec, everything=True)).contents == seen.contents


KNOWN: dict[str, tuple[Sequence[Edit], Sequence[Edit]]] = {
    "changed_again": ([attributes("a", x=1)], [attributes("a", x=2)]),
    "deleted_again": ([_SMALL], [delete_node("n")]),
    "recreated": ([delete_node("a")], [array("a", [4], [2])]),
    "described": ([_SMALL], [attributes("n", x=2)]),
}


@SPECS
@pytest.mark.parametrize("name", KNOWN)
async def test_a_fork_may_change_what_its_session_made(spec: int, name: str, base: Path) -> None:
    """Merging equals a change by the session. The official engine refuses or drops the change."""
    assert spec in (1, 2)
    first, second = KNOWN[name]
    outcomes: list[dict[str, bytes] | None] = []
    for engine in ENGINES.values():
        async with engine.open(base) as repo:
            work, alone = await repo.work(), await repo.work()
            await apply(alone.store, [*first, *second])
            await apply(work.store, first)
            made = await travel(await fork(work), second)
            try:
                await merge(work, made)
            except REFUSALS:
                outcomes.append(None)
            else:
                outcomes.append(await contents(work.store))
            outcomes.append(await contents(alone.store))
    assert outcomes[0] == outcomes[1] == outcomes[3]
    assert outcomes[2] != outcomes[3]  # else tell the users of both that they agree now


@SPECS
@pytest.mark.parametrize("name", list(ENGINES))
async def test_forks_are_not_published(spec: int, name: str, base: Path) -> None:
    """Committing, amending, flushing and rebasing a fork is refused by both."""
    async with ENGINES[name].open(base) as repo:
        work = await repo.work()
        made = await fork(work)
        await apply(made.store, [group("n")])
        solver: Any = icechunk.ConflictDetector()
        for method, argument in (
            ("commit", "m"),
            ("amend", "m"),
            ("flush", "m"),
            ("rebase", solver),
        ):
            call = getattr(made, f"{method}_async", None) or getattr(made, method)
            with pytest.raises((SessionStateError, icechunk.IcechunkError)):
                await call(argument)
        with pytest.raises((SessionStateError, icechunk.SessionStateError)):
            await merge(made.store, session_of(work))
        reader = await repo.reading((await repo.branches())["main"])
        with pytest.raises((SessionStateError, icechunk.SessionStateError)):
            await fork(reader)
    assert spec in (1, 2)


@SPECS
async def test_forks_of_different_bases_are_refused_by_us(spec: int, base: Path) -> None:
    """Forks of another session or another base are merged by the official engine, not by us."""
    assert spec in (1, 2)
    for engine in ENGINES.values():
        async with engine.open(base) as repo:
            one, two = await repo.work(), await repo.work()
            made = await travel(await fork(two), [write("a", [0], [4], 5)])
            if engine.name == "ours":
                with pytest.raises(SessionStateError, match="another session"):
                    await merge(one, made)
            else:
                await merge(one, made)
                assert one.status().chunks
