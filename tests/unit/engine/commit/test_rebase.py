"""Conflicts with newer commits, and commits that replay themselves on top of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.engine.commit.conflicts import (
    BasicConflictSolver,
    Clash,
    Conflict,
    ConflictDetector,
    ConflictKind,
    Resolution,
    VersionSelection,
)
from icechunk_async.errors import ConflictError, InvalidInputError, RebaseFailedError
from tests.helpers import array_document, group_document, make_array, read, write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from icechunk_async import Repository, Session

    type Edit = Callable[[Session], Awaitable[None]]


def _set(chunk: int, value: bytes = b"\x42") -> Edit:
    return lambda session: write(session, f"a/c/{chunk}", value)


def _delete(path: str) -> Edit:
    return lambda session: session.store.delete(f"{path}/zarr.json")


def _describe(text: str, path: str = "a") -> Edit:
    document = array_document((10,), (1,), attributes={"note": text})
    return lambda session: write(session, f"{path}/zarr.json", document)


def _group(path: str, text: str = "") -> Edit:
    return lambda session: write(session, f"{path}/zarr.json", group_document(note=text))


def _array(path: str) -> Edit:
    return lambda session: make_array(session, path, (1,), (1,))


async def _clash(repository: Repository, ours: Edit, theirs: Edit) -> Session:
    """Begin a session with one edit, while another edit is committed."""
    session = await repository.writable_session("main")
    other = await repository.writable_session("main")
    await ours(session)
    await theirs(other)
    await other.commit("theirs")
    return session


CLASHES = {
    ConflictKind.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE: (_group("n"), _array("n"), "/n"),
    ConflictKind.NEW_NODE_IN_INVALID_GROUP: (_array("n/below"), _array("n"), "/n"),
    ConflictKind.ZARR_METADATA_DOUBLE_UPDATE: (_describe("ours"), _describe("theirs"), "/a"),
    ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY: (_describe("ours"), _delete("a"), "/a"),
    ConflictKind.ZARR_METADATA_UPDATE_OF_DELETED_GROUP: (_group("g", "x"), _delete("g"), "/g"),
    ConflictKind.CHUNK_DOUBLE_UPDATE: (_set(3, b"\x33"), _set(3, b"\x44"), "/a"),
    ConflictKind.CHUNKS_UPDATED_IN_DELETED_ARRAY: (_set(3), _delete("a"), "/a"),
    ConflictKind.CHUNKS_UPDATED_IN_UPDATED_ARRAY: (_set(3), _describe("theirs"), "/a"),
    ConflictKind.DELETE_OF_UPDATED_ARRAY: (_delete("a"), _set(3), "/a"),
    ConflictKind.DELETE_OF_UPDATED_GROUP: (_delete("g"), _group("g", "theirs"), "/g"),
}


@pytest.fixture
async def with_group(filled: Repository) -> Repository:
    """Add a group ``g``."""
    session = await filled.writable_session("main")
    await _group("g")(session)
    await session.commit("group")
    return filled


@pytest.mark.parametrize("kind", CLASHES, ids=lambda kind: kind.name.lower())
async def test_each_kind_of_conflict_is_detected(
    with_group: Repository, kind: ConflictKind
) -> None:
    """The detector names kind and path, publishes nothing and keeps the changes."""
    ours, theirs, path = CLASHES[kind]
    session = await _clash(with_group, ours, theirs)
    tip = await with_group.lookup_branch("main")
    with pytest.raises(RebaseFailedError, match="clash with commit") as caught:
        await session.commit("ours", rebase_with=ConflictDetector())
    conflicts = caught.value.context["conflicts"]
    assert isinstance(conflicts, list)
    assert [(conflict.kind, conflict.path) for conflict in conflicts] == [(kind, path)]
    assert caught.value.context["snapshot_id"] == str(tip)
    assert await with_group.lookup_branch("main") == tip
    assert session.has_uncommitted_changes


@pytest.mark.parametrize("kind", CLASHES, ids=lambda kind: kind.name.lower())
async def test_the_stock_solver_decides_what_the_official_one_decides(
    with_group: Repository, kind: ConflictKind
) -> None:
    """Chunk conflicts and deletions of what was updated; nothing else."""
    ours, theirs, _ = CLASHES[kind]
    session = await _clash(with_group, ours, theirs)
    solvable = kind in {
        ConflictKind.CHUNK_DOUBLE_UPDATE,
        ConflictKind.DELETE_OF_UPDATED_ARRAY,
        ConflictKind.DELETE_OF_UPDATED_GROUP,
    }
    if not solvable:
        with pytest.raises(RebaseFailedError):
            await session.commit("ours", rebase_with=BasicConflictSolver())
        return
    await session.commit("ours", rebase_with=BasicConflictSolver())
    reader = await with_group.readonly_session("main")
    match kind:
        case ConflictKind.CHUNK_DOUBLE_UPDATE:
            assert await read(reader, "a/c/3") == b"\x33"
        case ConflictKind.DELETE_OF_UPDATED_ARRAY:
            assert await read(reader, "a/zarr.json") is None
        case _:
            assert await read(reader, "g/zarr.json") is None


@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        (
            ConflictKind.CHUNK_DOUBLE_UPDATE,
            BasicConflictSolver(on_chunk_conflict=VersionSelection.FAIL),
        ),
        (
            ConflictKind.DELETE_OF_UPDATED_ARRAY,
            BasicConflictSolver(fail_on_delete_of_updated_array=True),
        ),
        (
            ConflictKind.DELETE_OF_UPDATED_GROUP,
            BasicConflictSolver(fail_on_delete_of_updated_group=True),
        ),
    ],
)
async def test_the_stock_solver_can_be_told_to_fail(
    with_group: Repository, kind: ConflictKind, solver: BasicConflictSolver
) -> None:
    """Each of its policies has a strict setting."""
    ours, theirs, _ = CLASHES[kind]
    session = await _clash(with_group, ours, theirs)
    with pytest.raises(RebaseFailedError):
        await session.commit("ours", rebase_with=solver)


async def test_their_chunk_stays_if_the_solver_says_so(filled: Repository) -> None:
    """Our clashing chunk is dropped. Our other chunks are committed."""
    session = await _clash(filled, _set(3, b"\x33"), _set(3, b"\x44"))
    await _set(4, b"\x55")(session)
    solver = BasicConflictSolver(on_chunk_conflict=VersionSelection.USE_THEIRS)
    await session.commit("ours", rebase_with=solver)
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/3") == b"\x44"
    assert await read(reader, "a/c/4") == b"\x55"


class _Yielding:
    """A user's solver: looks at both sides and lets the newer commit win."""

    def __init__(self) -> None:
        self.seen: list[tuple[ConflictKind, str]] = []

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        self.seen += [(conflict.kind, conflict.path) for conflict in clash.conflicts]
        assert clash.base.id != clash.theirs.id
        assert clash.theirs_log.id == clash.theirs.id
        assert clash.ours.id == clash.base.id
        return [Resolution.THEIRS] * len(clash.conflicts)


@pytest.mark.parametrize("kind", CLASHES, ids=lambda kind: kind.name.lower())
async def test_custom_solver_can_choose_theirs(with_group: Repository, kind: ConflictKind) -> None:
    """Afterwards the clashing node is as the newer commit left it, and the rest is ours."""
    ours, theirs, path = CLASHES[kind]
    session = await _clash(with_group, ours, theirs)
    await _group("extra")(session)
    newer = await with_group.readonly_session("main")
    expected = await read(newer, f"{path[1:]}/zarr.json")
    solver = _Yielding()
    await session.commit("ours", rebase_with=solver)
    assert solver.seen == [(kind, path)]
    reader = await with_group.readonly_session("main")
    assert await read(reader, f"{path[1:]}/zarr.json") == expected
    for key in ("n/below/zarr.json", "a/c/3"):
        assert await read(reader, key) == await read(newer, key)
    assert await read(reader, "extra/zarr.json") is not None


class _Wrong:
    """A solver that returns too few resolutions."""

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        del clash
        return []


async def test_invalid_decisions_of_a_solver_are_an_error(filled: Repository) -> None:
    """Nothing is published."""
    session = await _clash(filled, _set(3), _set(3))
    with pytest.raises(InvalidInputError, match="0 resolutions for 1 conflicts"):
        await session.commit("ours", rebase_with=_Wrong())
    assert session.has_uncommitted_changes


async def test_disjoint_changes_are_replayed(filled: Repository) -> None:
    """Both commits' chunks are there, and the number of tries is recorded."""
    session = await _clash(filled, _set(5), _set(6))
    snapshot_id = await session.commit("ours", rebase_with=ConflictDetector())
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/5") == b"\x42"
    assert await read(reader, "a/c/6") == b"\x42"
    info = await filled.lookup_snapshot(snapshot_id)
    assert info.metadata["__icechunk"] == {"rebase_attempts": 1}
    messages = [info.message async for info in filled.ancestry(branch="main")]
    assert messages[:3] == ["ours", "theirs", "filled"]


async def test_both_deleting_a_node_is_no_conflict(filled: Repository) -> None:
    """It is gone either way."""
    session = await _clash(filled, _delete("a"), _delete("a"))
    await _group("extra")(session)
    snapshot_id = await session.commit("ours", rebase_with=ConflictDetector())
    log = await filled.engine.assets.transaction_log(snapshot_id)
    assert not log.deleted_arrays


async def test_recreating_what_we_deleted_is_no_conflict(filled: Repository) -> None:
    """A path that we freed ourselves may be used, whatever happened to the old node's group."""
    session = await filled.writable_session("main")
    await _delete("a")(session)
    await make_array(session, "a", (2,), (1,))
    other = await filled.writable_session("main")
    await _group("extra")(other)
    await other.commit("theirs")
    await session.commit("ours", rebase_with=ConflictDetector())
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/0") is None


async def test_a_failed_rebase_stands_on_the_last_commit_without_a_clash(
    filled: Repository,
) -> None:
    """Of three newer commits the second clashes: the session stands on the first."""
    session = await filled.writable_session("main")
    await _set(5)(session)
    ids = []
    for chunk in (7, 5, 8):
        other = await filled.writable_session("main")
        await _set(chunk, bytes([chunk]))(other)
        ids.append(await other.commit(f"chunk {chunk}"))
    with pytest.raises(RebaseFailedError) as caught:
        await session.rebase(ConflictDetector())
    assert caught.value.context["snapshot_id"] == str(ids[1])
    assert session.snapshot_id == ids[0]
    assert await read(session, "a/c/7") == b"\x07"
    assert await read(session, "a/c/5") == b"\x42"
    await session.rebase(BasicConflictSolver())
    assert session.snapshot_id == ids[2]


async def test_a_reset_branch_cannot_be_rebased_onto(filled: Repository) -> None:
    """The session's base is no longer part of it, and the error says so."""
    session = await filled.writable_session("main")
    await _set(5)(session)
    root = [info.id async for info in filled.ancestry(branch="main")][-1]
    await filled.reset_branch("main", root)
    with pytest.raises(ConflictError, match="no longer part of it"):
        await session.commit("ours", rebase_with=ConflictDetector())


async def test_rebase_tries_are_bounded(filled: Repository) -> None:
    """With no try left the race is lost, and nothing is published."""
    session = await _clash(filled, _set(5), _set(6))
    with pytest.raises(ConflictError, match="another writer was first"):
        await session.commit("ours", rebase_with=ConflictDetector(), rebase_tries=0)
    with pytest.raises(ConflictError, match="another writer was first"):
        await session.commit("ours", rebase_with=ConflictDetector(), timeout_seconds=0)
    await session.commit("ours", rebase_with=ConflictDetector())


async def test_manifests_made_before_a_discard_are_not_used_after_it(filled: Repository) -> None:
    """The manifests of a lost commit do not serve other changes, even of equally many chunks."""
    session = await _clash(filled, _set(5, b"\x05"), _set(6))
    with pytest.raises(ConflictError):
        await session.commit("lost")
    await session.rebase(ConflictDetector())
    other = await filled.writable_session("main")
    await _group("extra")(other)
    await other.commit("again")
    with pytest.raises(ConflictError):
        await session.commit("lost again")
    session.discard_changes()
    await _set(7, b"\x07")(session)
    await session.commit("ours", rebase_with=ConflictDetector())
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/5") is None
    assert await read(reader, "a/c/7") == b"\x07"


async def test_retry_stores_only_manifests_that_the_winner_affected(filled: Repository) -> None:
    """Manifests of arrays that the winner left alone are not written again."""
    session = await filled.writable_session("main")
    await make_array(session, "big", (4,), (1,))
    for chunk in range(4):
        await write(session, f"big/c/{chunk}", b"\x01")
    await _set(5)(session)
    other = await filled.writable_session("main")
    await _set(6)(other)
    publisher, log = session.publisher, session.workspace.changes.log
    await publisher.draft("not stored", None, None, log)
    first = await publisher.draft("first", None, None, log)
    await publisher.flusher.store(first[1])
    await other.commit("theirs")
    await session.rebase(ConflictDetector())
    _, again, _ = await session.publisher.draft("second", None, None, session.workspace.changes.log)
    assert len(first[1].manifests) == 1  # both arrays share it
    assert first[1].nodes["/big"].array == again.nodes["/big"].array
    (made,) = again.manifests  # only that of the array that both wrote to
    assert again.nodes["/a"].array is not None
    assert [ref.manifest_id for ref in again.nodes["/a"].array.manifests] == [made]


def test_a_conflict_prints_without_its_node_id() -> None:
    """People read paths."""
    assert repr(Conflict(ConflictKind.CHUNK_DOUBLE_UPDATE, "/a", ((1,),))) == (
        "Conflict(kind=<ConflictKind.CHUNK_DOUBLE_UPDATE: 6>, path='/a', coords=((1,),))"
    )
