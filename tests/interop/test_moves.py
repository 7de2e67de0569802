"""Moving nodes: both engines do, refuse and record the same, and read each other's moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.errors import IcechunkError
from tests.interop.answers import Policy
from tests.interop.comparing import ENGINES, check_garbage, other, views_agree
from tests.interop.edits import apply, array, attributes, contents, delete_node, group, write
from tests.interop.files import Files
from tests.interop.hierarchies import Hierarchy, seeded
from tests.interop.ours import our_solver
from tests.interop.ours import touched as our_touched
from tests.interop.theirs import icechunk, open_official, their_solver
from tests.interop.theirs import touched as their_touched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.interop.answers import Touched
    from tests.interop.edits import Edit

    type Script = Sequence[tuple[str, str]]


FIRST = pytest.mark.parametrize("first", list(ENGINES))

BASE = [
    group(""),
    group("g"),
    group("g/sub"),
    group("h"),
    array("a-b", [8], [2]),
    write("a-b", [0], [8], 1),
    array("g/a", [8, 8], [2, 2]),
    write("g/a", [0, 0], [5, 5], 2),
    array("g/sub/b", [20], [5]),
    write("g/sub/b", [0], [20], 3),
]
_KINDS = {
    "move-into-self-or-descendant": "invalid-move",
    "move-destination-parent-missing": "invalid-move",
    "move-destination-parent-not-group": "invalid-move",
    "move-wont-overwrite": "node-exists",
    "invalid-path": "invalid-input",
    "no-changes-to-commit": "nothing-to-commit",
    "rearrange-session-only": "session-state",
}


class _Moving:
    """A rearrange session of either engine, in plain words."""

    def __init__(self, name: str, session: Any) -> None:
        self.name, self.session = name, session

    @classmethod
    async def begin(cls, name: str, root: Path) -> _Moving:
        """Open a repository anew, as the next process would."""
        if name == "theirs":
            return cls(name, open_official(root).rearrange_session("main"))
        return cls(name, await (await _opened(root)).rearrange_session("main"))

    async def attempt(self, call: str, *args: Any, **options: Any) -> str:
        """Return the kind of the error in our terms, or an empty string."""
        call = f"{call}_async" if self.name == "theirs" else call
        try:
            await getattr(self.session, call)(*args, **options)
        except (IcechunkError, icechunk.IcechunkError) as error:
            kind = str(error.kind).rpartition(".")[2].replace("_", "-").lower()
            return _KINDS.get(kind, kind)
        return ""

    def status(self) -> Touched:
        touched = their_touched if self.name == "theirs" else our_touched
        return touched(self.session.status())

    async def keys(self) -> list[str]:
        return sorted(await contents(self.session.store))


_OPEN: dict[str, Repository] = {}


async def _opened(root: Path) -> Repository:
    return _OPEN[str(root)]


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[Path]:
    """A repository with the base, which our engine keeps open."""
    root = tmp_path / "repo"
    await _build(root)
    async with Repository.open(root) as repository:
        _OPEN[str(root)] = repository
        yield root
    del _OPEN[str(root)]


async def _build(root: Path, edits: Sequence[Edit] = BASE) -> None:
    await ENGINES["theirs"].create(root, 2)
    async with ENGINES["theirs"].open(root) as repo:
        work = await repo.work()
        await apply(work.store, edits)
        await work.commit("base")


SCRIPTS: dict[str, Script] = {
    "one array": [("/g/a", "/h/a")],
    "a group": [("/g", "/h/g")],
    "chains": [
        *(("/g", "/x"), ("/x/sub", "/h/sub"), ("/a-b", "/g"), ("/x", "/a-b")),
        *(("/h", "/a-b/h"), ("/g", "/a")),
    ],
    "round trip": [("/g", "/x"), ("/x/a", "/y"), ("/y", "/x/a"), ("/x", "/g")],
    "swap": [("/g", "/x"), ("/h", "/g"), ("/x", "/h"), ("/h/sub", "/g/sub")],
    "nonsense": [
        *(("/g", "/g"), ("/g", "/g/x"), ("/g", "/g/sub/x"), ("/", "/x"), ("/x", "/y")),
        *(("/a-b", "/h"), ("/a-b", "/"), ("/g", "/x/y"), ("/g", "/a-b/y"), ("/g/../h", "/y")),
        *(("/a-b", "/ab"), ("/a-b", "/abc"), ("/g/a", "/ab/x")),
    ],
    "order": [("/g/a", "/h/a"), ("/g/sub", "/h/a-b"), ("/a-b", "/h/a.b"), ("/g", "/h/a!")],
    "nothing": [],
}


@pytest.mark.parametrize("script", SCRIPTS)
async def test_same_moves_give_the_same_hierarchy(script: str, root: Path, tmp_path: Path) -> None:
    """Errors, what the session sees, status, log and the committed hierarchy."""
    twin = tmp_path / "twin"
    await _build(twin)
    ours, theirs = await _Moving.begin("ours", root), await _Moving.begin("theirs", twin)
    for move in SCRIPTS[script]:
        assert await ours.attempt("move", *move) == await theirs.attempt("move", *move), move
        assert ours.status() == theirs.status()
        assert await ours.keys() == await theirs.keys()
        assert ours.session.has_uncommitted_changes == theirs.session.has_uncommitted_changes
    results = [await it.attempt("commit", "moved") for it in (ours, theirs)]
    assert results[0] == results[1]
    seen = [await views_agree(it, 2, everything=True) for it in (root, twin)]
    tips = [it.branches["main"] for it in seen]
    assert seen[0].contents[tips[0]] == seen[1].contents[tips[1]]
    logs = [Files(where).log(tip) for where, tip in zip((root, twin), tips, strict=True)]
    moves = [[(it.source, it.target, it.is_array) for it in log.moves] for log in logs]
    assert moves[0] == moves[1]
    check_garbage(root)


@FIRST
async def test_one_engine_continues_what_the_other_moved(first: str, root: Path) -> None:
    """Edits and moves alternate. Node ids stay, and amending joins the same moves in both."""
    order = [first, other(first).name]
    ids: dict[str, str] = {}
    for number, name in enumerate(order * 2):
        moving = await _Moving.begin(name, root)
        places = [("/g", "/h/g"), ("/h", "/k"), ("/k/g/sub", "/sub"), ("/k", "/g")]
        assert await moving.attempt("move", *places[number]) == ""
        if number == 2:
            assert await moving.attempt("amend", "joined") == ""
        else:
            assert await moving.attempt("commit", "moved") == ""
        for engine in ENGINES.values():
            async with engine.open(root) as repo:
                work = await repo.work()
                paths = [key[:-10] for key in sorted(await contents(work.store)) if "zarr" in key]
                session: Any = work.session  # type: ignore[attr-defined]
                names = {
                    str(await _id(engine.name, session, f"/{path}")): path for path in paths if path
                }
                assert not ids or set(names) == set(ids)
                ids = names
        await views_agree(root, 2, everything=True)


async def _id(name: str, session: Any, path: str) -> str:
    if name == "theirs":
        return str(await session.get_node_id_async(path))
    return str(await session.get_node_id(path))


async def test_a_session_that_moves_refuses_to_write_in_both(root: Path) -> None:
    """Every edit through the store fails, in both with a session error."""
    for name in ENGINES:
        moving = await _Moving.begin(name, root)
        assert await moving.attempt("move", "/g", "/x") == ""
        for edit in (group("new"), write("x/a", [0, 0], [1, 1], 5), attributes("h", n=1)):
            with pytest.raises((IcechunkError, icechunk.IcechunkError)) as failure:
                await apply(moving.session.store, [edit])
            assert "ession" in type(failure.value).__name__
        with pytest.raises((IcechunkError, icechunk.IcechunkError)):
            await apply(moving.session.store, [delete_node("x")])
        assert moving.status().moves[0] == ("/g", "/x")


THEIRS: dict[str, list[Edit]] = {
    "chunks": [write("g/a", [0, 0], [8, 8], 9)],
    "attributes": [attributes("g/sub", n=1), attributes("g/a", n=1)],
    "new below": [group("g/fresh")],
    "elsewhere": [delete_node("a-b")],
    "target parent gone": [delete_node("h")],
    "target taken": [group("h/g")],
    "part gone": [delete_node("g/sub")],
    "source gone": [delete_node("g")],
    "source replaced": [delete_node("g"), group("g")],
}
_WE_REFUSE = {"target parent gone", "target taken", "source gone"}
_THEY_FAIL = {"source gone", "source replaced", "part gone"}


@pytest.mark.parametrize("theirs", THEIRS)
async def test_moves_over_newer_edits_end_the_same_but_for_named_cases(
    theirs: str, root: Path, tmp_path: Path
) -> None:
    """They end the same, but for three cases where the official engine does harm or gives up.

    It overwrites a new node at the target, moves into a group that is gone, and cannot finish
    the session where a part of the subtree is gone.
    """
    twin = tmp_path / "twin"
    await _build(twin)
    sides = {"ours": root, "theirs": twin}
    outcome = {}
    for name, where in sides.items():
        moving = await _Moving.begin(name, where)
        assert await moving.attempt("move", "/g", "/h/g") == ""
        async with ENGINES["theirs"].open(where) as repo:
            work = await repo.work()
            await apply(work.store, THEIRS[theirs])
            await work.commit("theirs")
        assert await moving.attempt("commit", "late") in {"conflict", "commit-conflict"}
        solver = our_solver(Policy()) if name == "ours" else their_solver(Policy())
        outcome[name] = await moving.attempt("commit", "again", rebase_with=solver)
    assert outcome["ours"] == ("rebase-failed" if theirs in _WE_REFUSE else "")
    assert outcome["theirs"] == ("node-not-found" if theirs in _THEY_FAIL else "")
    seen = await views_agree(root, 2, everything=True)
    if theirs not in _WE_REFUSE | _THEY_FAIL:
        twins = await views_agree(twin, 2, everything=True)
        tips = [it.contents[it.branches["main"]] for it in (seen, twins)]
        assert tips[0] == tips[1]


@FIRST
async def test_an_edit_does_not_follow_the_others_moves(first: str, root: Path) -> None:
    """Both engines refuse to rebase over a move of either."""
    async with ENGINES["ours"].open(root) as ours, ENGINES["theirs"].open(root) as theirs:
        works = [await ours.work(), await theirs.work()]
        for work in works:
            await apply(work.store, [write("a-b", [0], [2], 7)])
        moving = await _Moving.begin(first, root)
        await moving.attempt("move", "/g", "/x")
        assert await moving.attempt("commit", "moved") == ""
        for work in works:
            assert [it.kind.name for it in await work.rebase(Policy())] == [
                "MOVE_OPERATION_CANNOT_BE_REBASED"
            ]
        begun = await _Moving.begin(other(first).name, root)
    again = await _Moving.begin(first, root)
    await begun.attempt("move", "/x", "/y")
    await again.attempt("move", "/h", "/z")
    assert await again.attempt("commit", "first") == ""
    solver = (our_solver if begun.name == "ours" else their_solver)(Policy())
    assert await begun.attempt("rebase", solver) == "rebase-failed"


async def test_the_official_flag_stops_our_moves(root: Path) -> None:
    """A flag that the official engine switched off holds for us, even in an open session."""
    begun = await _Moving.begin("ours", root)
    await begun.session.move("/g", "/x")
    official = open_official(root)
    official.set_feature_flag("move_node", setting=False)
    with pytest.raises(IcechunkError, match="move_node"):
        await _Moving.begin("ours", root)
    with pytest.raises(IcechunkError, match="move_node"):
        await begun.session.commit("moved")
    official.set_feature_flag("move_node", setting=None)
    await begun.session.commit("moved")
    await views_agree(root, 2)


def _moves(hierarchy: Hierarchy, seed: int, count: int) -> Script:
    """Return random moves, some of which are possible."""
    random = seeded(seed)
    paths = ["", *sorted(hierarchy.groups | hierarchy.arrays.keys())]
    names = ["a", "a-b", "moved", "größe", "0"]
    moves: list[tuple[str, str]] = []
    for _ in range(count):
        source = random.choice(paths)
        parent = random.choice(paths)
        target = f"{parent}/{random.choice(names)}".strip("/")
        moves.append((f"/{source}", f"/{target}"))
        paths.append(target)
    return moves


@given(seed=st.integers(0, 2**32), sessions=st.lists(st.booleans(), min_size=2, max_size=4))
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_random_sessions_of_edits_and_moves(
    seed: int, sessions: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both engines in step: the same answers to every move, the same hierarchy at each commit."""
    base = tmp_path_factory.mktemp("random")
    roots = {name: base / name for name in ENGINES}
    for root in roots.values():
        await ENGINES["theirs"].create(root, 2)
    hierarchy = Hierarchy(seeded(seed))
    steps = [True, *sessions]
    for number, editing in enumerate(steps):
        for root in roots.values():
            _OPEN.pop(str(root), None)
        if editing:
            edits = [group(""), *hierarchy.edits(8)] if number == 0 else hierarchy.edits(4)
            for name, root in roots.items():
                async with ENGINES[name].open(root) as repo:
                    work = await repo.work()
                    await apply(work.store, edits)
                    await work.commit("edits", empty=True)
        else:
            async with Repository.open(roots["ours"]) as repository:
                _OPEN[str(roots["ours"])] = repository
                both = [await _Moving.begin(name, root) for name, root in roots.items()]
                for move in _moves(hierarchy, seed + number, 8):
                    if _hides(hierarchy, move[1]):
                        continue
                    answers = [await it.attempt("move", *move) for it in both]
                    assert answers[0] == answers[1], move
                    if not answers[0]:
                        _follow(hierarchy, *move)
                assert both[0].status() == both[1].status()
                answers = [await it.attempt("commit", "moves", allow_empty=True) for it in both]
                assert answers == ["", ""]
        seen = [await views_agree(root, 2) for root in roots.values()]
        ours, theirs = (it.contents[it.branches["main"]] for it in seen)
        assert ours == theirs


def _hides(hierarchy: Hierarchy, target: str) -> bool:
    """Return whether the official engine would lose nodes below a path where none is."""
    paths = hierarchy.groups | hierarchy.arrays.keys()
    return target[1:] not in paths and any(it.startswith(f"{target[1:]}/") for it in paths)


def _follow(hierarchy: Hierarchy, source: str, target: str) -> None:
    """Move in the model of the hierarchy, so that later edits are valid."""
    old, new = source[1:], target[1:]

    def place(path: str) -> str:
        inside = path == old or path.startswith(f"{old}/")
        return new + path[len(old) :] if inside else path

    hierarchy.groups = {place(path) for path in hierarchy.groups}
    hierarchy.arrays = {place(path): model for path, model in hierarchy.arrays.items()}
