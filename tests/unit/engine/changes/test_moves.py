"""Sessions that move nodes, and what becomes of their moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.engine.changes.moves import Moves
from icechunk_async.engine.commit.conflicts import (
    BasicConflictSolver,
    ConflictDetector,
    ConflictKind,
)
from icechunk_async.errors import (
    ConflictError,
    IcechunkError,
    InvalidInputError,
    InvalidMoveError,
    NodeExistsError,
    NodeNotFoundError,
    NothingToCommitError,
    ReadOnlyError,
    RebaseFailedError,
    SessionStateError,
    UnsupportedBySpecError,
)
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import NodeId
from icechunk_async.format.repo_info import decode_repo_info, encode_repo_info
from icechunk_async.format.snapshot import Node, Nodes
from icechunk_async.session import SessionMode
from tests.helpers import group_document, make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from icechunk_async import Session

    type Edit = Callable[[Session], Awaitable[None]]

DETECT = ConflictDetector()
MOVES = ConflictKind.MOVE_OPERATION_CANNOT_BE_REBASED


@pytest.fixture
async def tree() -> AsyncIterator[Repository]:
    """Groups ``/``, ``g``, ``g/sub`` and ``h``, arrays ``a-b``, ``g/a`` and ``g/sub/b``."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for path in ("", "g/", "g/sub/", "h/"):
            await write(session, f"{path}zarr.json", group_document())
        for number, path in enumerate(("a-b", "g/a", "g/sub/b")):
            await make_array(session, path, (4,), (1,))
            await write(session, f"{path}/c/0", bytes([number]))
        await session.commit("tree")
        yield repository


async def _moving(repository: Repository, *moves: tuple[str, str]) -> Session:
    session = await repository.rearrange_session("main")
    for move in moves:
        await session.move(*move)
    return session


async def _nodes(session: Session) -> list[str]:
    return sorted(
        [f"/{key[:-9].rstrip('/')}" async for key in session.store.list() if key[-4:] == "json"]
    )


async def test_a_subtree_moves_at_once_and_stays_itself(tree: Repository) -> None:
    """The session sees the new places; ids, documents and chunks are those from before."""
    before = await tree.readonly_session("main")
    ids = [await before.get_node_id(path) for path in ("/g", "/g/a", "/g/sub", "/g/sub/b")]
    session = await _moving(tree, ("/g", "h/new"))
    assert session.mode is SessionMode.REARRANGE
    assert not session.read_only
    for seen in (session, tree):
        if isinstance(seen, Repository):
            await session.commit("moved")
            seen = await seen.readonly_session("main")  # noqa: PLW2901
        assert await _nodes(seen) == [
            *("/", "/a-b", "/h", "/h/new", "/h/new/a", "/h/new/sub", "/h/new/sub/b")
        ]
        paths = ("/h/new", "/h/new/a", "/h/new/sub", "/h/new/sub/b")
        assert [await seen.get_node_id(path) for path in paths] == ids
        assert await read(seen, "h/new/sub/b/c/0") == b"\x02"
        assert await read(seen, "g/sub/b/c/0") is None
        assert [name async for name in seen.store.list_dir("h/new")] == ["zarr.json", "a", "sub"]
        assert [name async for name in seen.store.list_dir("g")] == []
    assert await _nodes(before) == [*("/", "/a-b", "/g", "/g/a", "/g/sub", "/g/sub/b", "/h")]


async def test_chain_of_moves_is_logged_as_one(tree: Repository) -> None:
    """Status, log and diff name the first place and the last, ordered by segments of the last."""
    start = (await tree.readonly_session("main")).snapshot_id
    session = await _moving(
        tree, ("/g", "/x"), ("/x/sub", "/h/sub"), ("/a-b", "/g"), ("/x", "/a-b"), ("/h", "/a-b/h")
    )
    moves = (
        ("/g", "/a-b"),
        ("/g/a", "/a-b/a"),
        ("/h", "/a-b/h"),
        ("/g/sub", "/a-b/h/sub"),
        ("/g/sub/b", "/a-b/h/sub/b"),
        ("/a-b", "/g"),
    )
    assert session.status().moved_nodes == moves
    assert replace(session.status(), moved_nodes=()).is_empty()
    end = await session.commit("moved")
    diff = await tree.diff(from_snapshot_id=start, to_snapshot_id=end)
    assert diff.moved_nodes == moves
    assert await read(session, "a-b/h/sub/b/c/0") == b"\x02"
    assert await read(session, "g/c/0") == b"\x00"


async def test_moves_are_ordered_by_segments(tree: Repository) -> None:
    """Descendants come right after their node, though a hyphen sorts before a slash."""
    session = await _moving(tree, ("/a-b", "/h/a-b"), ("/g", "/h/a"))
    assert session.status().moved_nodes == (
        ("/g", "/h/a"),
        ("/g/a", "/h/a/a"),
        ("/g/sub", "/h/a/sub"),
        ("/g/sub/b", "/h/a/sub/b"),
        ("/a-b", "/h/a-b"),
    )


_SEGMENTS = ("a", "a-b", "b")
_PATHS = [f"/{'/'.join(parts)}" for size in (1, 2, 3) for parts in product(_SEGMENTS, repeat=size)]


@given(
    st.sets(st.sampled_from(_PATHS)),
    st.lists(st.tuples(st.sampled_from(_PATHS), st.sampled_from(_PATHS)), max_size=30),
)
def test_moves_do_what_renaming_keys_does(paths: set[str], attempts: list[tuple[str, str]]) -> None:
    """With or without the groups above a node; what was refused changes nothing."""
    many = [f"/m{number}" for number in range(20)]
    nodes = [Node(NodeId.random(), path, path.encode()) for path in ("/", *paths, *many)]
    base = Nodes(nodes)
    model = {node.path: node.id for node in nodes}
    places = dict(model)
    moves, done = Moves(), Moves()
    earlier, seen = Moves(), base.paths
    for source, target in [*((path, f"/n{path[1:]}") for path in many), *attempts]:
        inside = {path for path in places if path == source or path.startswith(f"{source}/")}
        renamed = {target + path[len(source) :]: places[path] for path in inside}
        rest = {path: it for path, it in places.items() if path not in inside}
        parent = target.rpartition("/")[0] or "/"
        allowed = (
            source in places
            and not f"{target}/".startswith(f"{source}/")
            and not rest.keys() & renamed.keys()
            and target not in places
            and parent in places
        )
        try:
            moves.add(base, source, target)
        except IcechunkError:
            assert not allowed
        else:
            assert allowed
            places = rest | renamed
            assert earlier.paths(base) == seen
            earlier, seen = done, done.paths(base)
            done = done.copy()
            done.add(base, source, target)
        assert moves == done
        assert moves.paths(base) == sorted(places)
        below = [path for path in sorted(places) if path.startswith(f"{target}/")]
        assert moves.paths(base, target) == below
        for path in {*places, source, target}:
            node = moves.find(base, path)
            assert (None if node is None else (node.path, node.id)) == (
                (path, places[path]) if path in places else None
            )
    whence = {it: path for path, it in model.items()}
    assert {(it.source, it.target, it.node_id) for it in moves.net()} == {
        (whence[it], path, it) for path, it in places.items() if whence[it] != path
    }
    assert moves.replay(base) == moves


async def test_detached_work_can_be_moves(tree: Repository) -> None:
    """A flushed snapshot records them as a commit does."""
    session = await _moving(tree, ("/g", "/x"))
    start = session.snapshot_id
    end = await session.flush("detached")
    assert await tree.lookup_branch("main") == start
    diff = await tree.diff(from_snapshot_id=start, to_snapshot_id=end)
    assert diff.moved_nodes[0] == ("/g", "/x")
    reading = await tree.readonly_session(snapshot_id=end)
    assert await read(reading, "x/a/c/0") == b"\x01"


async def test_a_round_trip_is_a_change_without_moves(tree: Repository) -> None:
    """A node that is back at its old path has not moved. The session can still be committed."""
    session = await _moving(tree, ("/g", "/x"), ("/x", "/g"))
    assert session.status().is_empty()
    assert session.has_uncommitted_changes
    before = await _nodes(session)
    await session.commit("there and back")
    assert await _nodes(session) == before


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ("/g", "/g", InvalidMoveError),
        ("/g", "/g/sub/deeper", InvalidMoveError),
        ("/", "/x", InvalidMoveError),
        ("/x", "/y", NodeNotFoundError),
        ("/a-b", "/h", NodeExistsError),
        ("/a-b", "/", NodeExistsError),
        ("/g", "/x/y", InvalidMoveError),
        ("/g", "/a-b/y", InvalidMoveError),
        ("/g/../h", "/y", InvalidInputError),
        ("/g", "/y//z", InvalidInputError),
    ],
)
async def test_a_move_that_makes_no_sense_changes_nothing(
    tree: Repository, source: str, target: str, error: type[IcechunkError]
) -> None:
    """It is refused by name, and the session is as before."""
    session = await _moving(tree)
    with pytest.raises(error):
        await session.move(source, target)
    assert not session.has_uncommitted_changes
    assert session.status().is_empty()
    with pytest.raises(NothingToCommitError):
        await session.commit("nothing")


async def test_move_does_not_overwrite_nodes_below_a_free_path() -> None:
    """A group can be missing above nodes; a subtree that fits beside them may go there."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for path in ("", "g/", "g/a/", "t/a/", "h/", "h/b/"):
            await write(session, f"{path}zarr.json", group_document(at=path))
        await session.commit("with a missing group")
        session = await repository.rearrange_session("main")
        with pytest.raises(NodeExistsError, match="'/t/a'"):
            await session.move("/g", "/t")
        assert not session.has_uncommitted_changes
        await session.move("/h", "/t")
        assert await _nodes(session) == ["/", "/g", "/g/a", "/t", "/t/a", "/t/b"]
        assert await read(session, "t/a/zarr.json") == group_document(at="t/a/")


async def test_a_node_becomes_the_root_where_there_is_none() -> None:
    """The official engine does the same. Paths below the root keep one slash."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        for path in ("g/", "g/a/"):
            await write(session, f"{path}zarr.json", group_document())
        await session.commit("no root")
        session = await _moving(repository, ("/g", "/"))
        assert await _nodes(session) == ["/", "/a"]
        assert session.status().moved_nodes == (("/g", "/"), ("/g/a", "/a"))


async def test_rearrange_session_refuses_writes(tree: Repository) -> None:
    """Nodes and chunks are neither written nor deleted through its store."""
    session = await _moving(tree, ("/g", "/x"))
    store = session.store
    attempts: list[Callable[[], Awaitable[None]]] = [
        lambda: write(session, "new/zarr.json", group_document()),
        lambda: write(session, "x/a/c/1", b"\x09"),
        lambda: store.delete("x/a/c/0"),
        lambda: store.delete("x/zarr.json"),
        lambda: store.delete_dir("x"),
        store.clear,
    ]
    for attempt in attempts:
        with pytest.raises(SessionStateError, match="writable_session"):
            await attempt()
    with pytest.raises(SessionStateError, match="writable_session"):
        store.set_virtual_ref("x/a/c/1", "s3://b/k", offset=0, length=1, validate_container=False)
    assert session.status().moved_nodes[0] == ("/g", "/x")
    assert await read(session, "x/a/c/0") == b"\x01"


async def test_writable_session_refuses_moves(tree: Repository) -> None:
    """A writable session says where to go; one that only reads, or was committed, reads."""
    writable = await tree.writable_session("main")
    with pytest.raises(SessionStateError, match="rearrange_session"):
        await writable.move("/g", "/x")
    committed = await _moving(tree, ("/g", "/x"))
    await committed.commit("moved")
    for session in (await tree.readonly_session("main"), committed):
        with pytest.raises(ReadOnlyError):
            await session.move("/x", "/y")


async def test_spec_1_has_no_moves() -> None:
    """It says so and names the way out."""
    async with Repository.create(memory_url(), spec_version=1) as repository:
        with pytest.raises(UnsupportedBySpecError, match=r"upkeep\.upgrade"):
            await repository.rearrange_session("main")


async def test_discarded_moves_leave_the_base(tree: Repository) -> None:
    """Everything is back in its place, and can be moved anew."""
    session = await _moving(tree, ("/g", "/x"))
    session.discard_changes()
    assert not session.has_uncommitted_changes
    await session.move("/g", "/y")
    assert session.status().moved_nodes[0] == ("/g", "/y")


async def _swap(session: Session) -> None:
    await session.store.delete("h/zarr.json")
    await make_array(session, "h", (1,), (1,))


def _chunk(key: str) -> Edit:
    return lambda session: write(session, key, b"\x07")


def _document(path: str) -> Edit:
    return lambda session: write(session, f"{path}/zarr.json", group_document(new=True))


def _delete(path: str) -> Edit:
    return lambda session: session.store.delete(f"{path}/zarr.json")


def _conflicts(failure: RebaseFailedError) -> list[tuple[ConflictKind, str]]:
    found: Any = failure.context["conflicts"]
    return [(it.kind, it.path) for it in found]


@pytest.mark.parametrize(
    "theirs",
    [_chunk("g/a/c/3"), _document("g"), _document("g/added"), _delete("g/sub"), _delete("a-b")],
)
async def test_moves_follow_newer_commits(tree: Repository, theirs: Edit) -> None:
    """Changes that others committed in the subtree meanwhile move with it."""
    session = await _moving(tree, ("/g", "/x"), ("/x", "/h/x"))
    other = await tree.writable_session("main")
    await theirs(other)
    await other.commit("theirs")
    newer = await _nodes(other)
    with pytest.raises(ConflictError):
        await session.commit("late")
    await session.rebase(DETECT)
    wanted = {path.replace("/g", "/h/x", 1) if path.startswith("/g") else path for path in newer}
    assert await _nodes(session) == sorted(wanted)
    if await read(other, "g/a/c/3") is not None:
        assert await read(session, "h/x/a/c/3") == b"\x07"
    await session.commit("moved")


@pytest.mark.parametrize("theirs", [_delete("g"), _document("h/x"), _delete("h"), _swap])
@pytest.mark.parametrize("solver", [DETECT, BasicConflictSolver()])
async def test_a_move_that_a_newer_commit_prevents_is_a_conflict(
    tree: Repository,
    theirs: Edit,
    solver: ConflictDetector | BasicConflictSolver,
) -> None:
    """The source is gone, the target is taken, or no longer in a group: no solver helps."""
    session = await _moving(tree, ("/a-b", "/y"), ("/g", "/h/x"))
    base, moves = session.snapshot_id, session.status().moved_nodes
    other = await tree.writable_session("main")
    await theirs(other)
    tip = await other.commit("theirs")
    with pytest.raises(RebaseFailedError) as failure:
        await session.commit("moved", rebase_with=solver)
    assert _conflicts(failure.value) == [(MOVES, "/g")]
    assert (session.snapshot_id, session.status().moved_nodes) == (base, moves)
    assert await tree.lookup_branch("main") == tip


@pytest.mark.parametrize("ours", ["moves", "writes"])
async def test_nothing_is_rebased_over_moves(tree: Repository, ours: str) -> None:
    """Neither moves nor edits rebase over a commit that moved nodes. A round trip is not a move."""
    if ours == "moves":
        session = await _moving(tree, ("/a-b", "/y"))
    else:
        session = await tree.writable_session("main")
        await write(session, "a-b/c/2", b"\x08")
    await (await _moving(tree, ("/g", "/x"), ("/x", "/g"))).commit("round trip")
    await session.rebase(DETECT)
    await (await _moving(tree, ("/g", "/x"))).commit("moved")
    with pytest.raises(RebaseFailedError) as failure:
        await session.rebase(DETECT)
    assert _conflicts(failure.value) == [(MOVES, "/g")]


async def test_amending_joins_moves(tree: Repository) -> None:
    """One log for both: from the first place to the last; edits cannot join moves."""
    start = (await tree.readonly_session("main")).snapshot_id
    session = await tree.writable_session("main")
    await _document("g/fresh")(session)
    await session.commit("edit")
    await (await _moving(tree, ("/g", "/x"))).amend("moves over edits")
    tip = await (await _moving(tree, ("/x", "/z"), ("/z/a", "/a"))).amend("moves over moves")
    diff = await tree.diff(from_snapshot_id=start, to_snapshot_id=tip)
    assert diff.moved_nodes == (
        ("/g/a", "/a"),
        ("/g", "/z"),
        ("/g/fresh", "/z/fresh"),
        ("/g/sub", "/z/sub"),
        ("/g/sub/b", "/z/sub/b"),
    )
    assert diff.new_groups == {"/z/fresh"}
    edit = await tree.writable_session("main")
    await _document("z")(edit)
    with pytest.raises(SessionStateError, match="moved nodes"):
        await edit.amend("edits over moves")
    await (await _moving(tree)).amend("message only", allow_empty=True)


async def test_the_feature_flag_is_asked_at_the_beginning_and_at_the_commit(
    tree: Repository,
) -> None:
    """No session starts while the flag is off, and an open session publishes nothing."""
    session = await _moving(tree, ("/g", "/x"))
    await _set_flags(tree, (3,))
    with pytest.raises(IcechunkError, match="move_node"):
        await tree.rearrange_session("main")
    for publish in (session.commit, session.amend, session.flush):
        with pytest.raises(IcechunkError, match="move_node"):
            await publish("moved")
    await _set_flags(tree, ())
    assert await tree.lookup_branch("main") == session.snapshot_id
    await session.commit("moved")


async def _set_flags(repository: Repository, disabled: tuple[int, ...]) -> None:
    """Switch feature flags off, as another process would."""
    storage = repository.storage
    info = decode_repo_info(unpack((await storage.get("repo")).data, FileType.REPO_INFO))
    info = replace(info, disabled_flags=disabled)
    await storage.put("repo", pack(encode_repo_info(info), FileType.REPO_INFO, 2))
