"""Commits that name their inputs land only if nobody else touched those since the session began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository, Session, Transaction
from icechunk_async.conflicts import BasicConflictSolver, ConflictDetector
from icechunk_async.engine.commit.inputs import first_touched
from icechunk_async.engine.history.diff import Diff
from icechunk_async.errors import ConflictError, InvalidInputError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from tests.helpers import array_document, group_document, make_array, memory_url, read, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def filled(spec: int) -> AsyncIterator[Repository]:
    """Return a repository with arrays `/in/a`, `/in/b` and `/out`, of which `out` was derived."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await write(session, "in/zarr.json", group_document())
        for path in ("in/a", "in/b", "out"):
            await make_array(session, path, (4,), (1,))
        await session.commit("filled")
        yield repository


async def begin(repository: Repository, key: str = "out/c/0") -> Session:
    """Begin a session that wrote a chunk."""
    session = await repository.writable_session("main")
    await write(session, key, b"\x07")
    return session


async def change(repository: Repository, key: str, data: bytes = b"\x09") -> str:
    """Commit one value as another writer."""
    session = await repository.writable_session("main")
    await write(session, key, data)
    return str(await session.commit(f"changed {key}"))


@pytest.mark.parametrize("path", ["in/a", "/in/a", "/in/a/", "in", "/"])
@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("in/a/c/3", b"\x09"),
        ("in/a/zarr.json", array_document((5,), (1,))),
    ],
)
async def test_commit_is_refused_if_an_input_was_touched(
    filled: Repository, path: str, key: str, data: bytes
) -> None:
    """Its chunks or its metadata; the path may be that of a group above. No change is lost."""
    session = await begin(filled)
    began = session.snapshot_id
    theirs = await change(filled, key, data)
    with pytest.raises(ConflictError, match="an input of this commit") as caught:
        await session.commit("derived", rebase_with=BasicConflictSolver(), unchanged=[path])
    assert caught.value.context["expected_parent"] == str(began)
    assert caught.value.context["actual_parent"] == theirs
    assert str(await filled.lookup_branch("main")) == theirs
    assert session.has_uncommitted_changes
    assert await read(session, "out/c/0") == b"\x07"


async def test_changes_that_replace_discarded_ones_are_made_on_the_newer_state(
    filled: Repository,
) -> None:
    """The changes of others before that were there to be read."""
    session = await begin(filled)
    await change(filled, "in/a/c/3")
    with pytest.raises(ConflictError, match="an input of this commit"):
        await session.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/a"])
    session.discard_changes()
    assert await read(session, "in/a/c/3") == b"\x09"
    await write(session, "out/c/0", b"\x08")
    await session.commit("derived anew", rebase_with=ConflictDetector(), unchanged=["in/a"])


async def test_commit_lands_if_others_touched_other_nodes_only(filled: Repository) -> None:
    """A sibling whose name begins alike is another node."""
    session = await begin(filled)
    await change(filled, "in/b/c/0")
    other = await filled.writable_session("main")
    await make_array(other, "in/ab", (1,), (1,))
    await other.commit("sibling")
    await session.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/a"])
    assert await read(await filled.readonly_session("main"), "out/c/0") == b"\x07"


async def test_without_inputs_what_others_read_does_not_matter(filled: Repository) -> None:
    """Write skew, which is what inputs are for."""
    one, two = await begin(filled, "in/a/c/0"), await begin(filled, "in/b/c/0")
    await one.commit("from b", rebase_with=ConflictDetector())
    await two.commit("from a", rebase_with=ConflictDetector())
    one, two = await begin(filled, "in/a/c/0"), await begin(filled, "in/b/c/0")
    await one.commit("from b", rebase_with=ConflictDetector(), unchanged=["in/b"])
    with pytest.raises(ConflictError, match="'/in/a', an input"):
        await two.commit("from a", rebase_with=ConflictDetector(), unchanged=["in/a"])


@pytest.mark.parametrize("gone", ["in/a/zarr.json", "in/zarr.json"])
async def test_a_deleted_input_was_touched(filled: Repository, gone: str) -> None:
    """By itself, or with the group above it."""
    session = await begin(filled)
    other = await filled.writable_session("main")
    await other.store.delete(gone)
    await other.commit("deleted")
    with pytest.raises(ConflictError, match="an input"):
        await session.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/a"])


async def test_an_input_that_appeared_was_touched(filled: Repository) -> None:
    """A commit may depend on its absence."""
    session = await begin(filled)
    other = await filled.writable_session("main")
    await make_array(other, "in/c", (1,), (1,))
    await other.commit("new")
    with pytest.raises(ConflictError, match="'/in/c', an input"):
        await session.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/c"])


@pytest.mark.parametrize("spec", [2], indirect=True)
@pytest.mark.parametrize(("source", "target"), [("in/a", "moved"), ("in", "moved")])
async def test_a_moved_input_is_a_conflict(filled: Repository, source: str, target: str) -> None:
    """By itself, or with the group above it; no rebase goes over moves in any case."""
    session = await begin(filled)
    other = await filled.rearrange_session("main")
    await other.move(source, target)
    await other.commit("moved")
    with pytest.raises(ConflictError):
        await session.commit("derived", rebase_with=BasicConflictSolver(), unchanged=["in/a"])


async def test_what_was_touched_before_a_rebase_of_ones_own_counts(filled: Repository) -> None:
    """The session began before it, and so did what was computed. A second try does not pass."""
    session = await begin(filled)
    await change(filled, "in/a/c/0")
    await session.rebase(ConflictDetector())
    for _ in range(2):
        with pytest.raises(ConflictError, match="an input"):
            await session.commit("derived", unchanged=["in/a"])
    await session.commit("derived all the same")


async def test_inputs_of_a_resumed_session_count_from_where_its_root_began(
    filled: Repository,
) -> None:
    """A driver that died had sent its forks out from that snapshot."""
    root = await (await filled.writable_session("main")).fork()
    await write(root, "out/c/0", b"\x07")
    await change(filled, "in/a/c/0")
    heir = await filled.writable_session("main")
    await heir.resume(root)
    with pytest.raises(ConflictError, match="an input"):
        await heir.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/a"])


async def test_inputs_that_expired_from_history_are_a_conflict(filled: Repository) -> None:
    """Nothing is assumed about changes that cannot be known."""
    session = await begin(filled)
    await change(filled, "in/b/c/0")
    first = [it.id async for it in filled.ancestry(branch="main")][-1]
    await session.rebase(ConflictDetector())
    await filled.reset_branch("main", first)
    other = await filled.writable_session("main")
    await write(other, "zarr.json", group_document())
    tip = await other.commit("another history")
    with pytest.raises(ConflictError):
        await session.commit("derived", rebase_with=ConflictDetector(), unchanged=["in/a"])
    assert await filled.lookup_branch("main") == tip


async def test_a_transaction_that_landed_is_found_before_inputs_are_refused(
    filled: Repository,
) -> None:
    """The commit that touched them may be an earlier try of this one."""
    once = Transaction("derive", 1)
    sessions = [await begin(filled, "in/a/c/0") for _ in range(2)]
    ids = [
        await it.commit("derived", rebase_with=ConflictDetector(), once=once, unchanged=["in/a"])
        for it in sessions
    ]
    assert ids[0] == ids[1]
    assert [it.already_committed for it in sessions] == [False, True]


async def test_a_path_that_cannot_be_one_is_refused_before_anything_is_published(
    filled: Repository,
) -> None:
    """And the session can be committed afterwards."""
    session = await begin(filled)
    with pytest.raises(InvalidInputError, match="node path"):
        await session.commit("derived", unchanged=["a/../b"])
    await session.commit("derived", unchanged=["out"])


async def derive_while_the_input_changes(repository: Repository) -> None:
    """Write in a block that another writer gets ahead of."""
    async with repository.transaction(
        "main", message="derived", rebase_with=ConflictDetector(), unchanged=["in/a"]
    ) as store:
        await write(store.session, "out/c/0", b"\x07")
        await change(repository, "in/a/c/0")


async def test_transaction_block_takes_inputs_and_a_name(filled: Repository) -> None:
    """As the commit at its end does."""
    once = Transaction("derive", 1)
    with pytest.raises(ConflictError, match="an input"):
        await derive_while_the_input_changes(filled)
    for expected in (False, True):
        async with filled.transaction("main", message="derived", once=once) as store:
            await write(store.session, "out/c/0", b"\x07")
        assert isinstance(store.session, Session)
        assert store.session.already_committed is expected


@pytest.mark.parametrize(("raced", "extra"), [(False, 0), (True, 1)])
async def test_inputs_cost_a_request_only_if_the_branch_moved(
    spec: int, *, raced: bool, extra: int
) -> None:
    """The rebase has read the logs; the history is read once more."""
    spent: list[int] = []
    for unchanged in ((), ("in",)):
        async with open_storage(memory_url()) as memory:
            storage = LatencyStorage(memory, seconds=0)
            async with Repository.create(storage, spec_version=spec) as repository:
                setup = await repository.writable_session("main")
                for path in ("in", "out", "other"):
                    await make_array(setup, path, (4,), (1,))
                await setup.commit("filled")
                session = await begin(repository)
                if raced:
                    await change(repository, "other/c/0")
                storage.forget()
                await session.commit("derived", rebase_with=ConflictDetector(), unchanged=unchanged)
                spent.append(storage.requests.total())
    assert spent[1] - spent[0] == extra


def test_nothing_is_touched_by_an_empty_diff() -> None:
    """And the first of several paths in their order is named."""
    assert first_touched(Diff(), ["/", "/a"]) is None
    diff = Diff(new_groups=frozenset({"/a/b"}), updated_arrays=frozenset({"/c"}))
    assert first_touched(diff, ["/d", "/c", "/a"]) == "/c"
    assert first_touched(diff, ["/a/b/c"]) is None
    assert first_touched(Diff(moved_nodes=(("/a", "/z"),)), ["/a/b/c"]) == "/a/b/c"
    assert first_touched(Diff(moved_nodes=(("/a", "/z"),)), ["/z/b"]) == "/z/b"
