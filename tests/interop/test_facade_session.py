"""The facade's sessions do what the official ones do, script by script."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from tests.interop.scripts import same

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
repository = icechunk.Repository.create(
    icechunk.local_filesystem_storage(place), spec_version=SPEC
)
with repository.transaction("main", message="begin") as store:
    root = zarr.group(store)
    root.create_array("a", shape=(4, 6), chunks=(2, 3), dtype="i4")[:2] = 1
    root.create_array("g/b", shape=(6,), chunks=(2,), dtype="i4")[:] = 1
"""


@pytest.fixture(params=[1, 2])
def spec(request: pytest.FixtureRequest) -> int:
    """A version of the format."""
    return int(request.param)


def _same(script: str, tmp_path: Path, spec: int = 2) -> None:
    same(_BEGIN.replace("SPEC", str(spec)) + inspect.cleandoc(script), tmp_path)


def test_a_session_has_the_same_properties_before_and_after_a_commit(
    tmp_path: Path, spec: int
) -> None:
    """The session's properties agree before and after."""
    script = """
    session = repository.writable_session("main")
    show(session.mode, session.read_only, session.branch, session.has_uncommitted_changes)
    attempt(lambda: session.commit("nothing"))
    group = zarr.open_group(session.store)
    group["a"][2:, 3:] = 2
    group.create_group("new").attrs["x"] = 1
    del group["g"]
    show(session.has_uncommitted_changes, session.status(), session.snapshot_id)
    tip = session.commit("changes", {"by": "me"})
    show(type(tip).__name__, session.snapshot_id == tip, repository.lookup_branch("main") == tip)
    show(session.mode, session.read_only, session.branch, session.has_uncommitted_changes)
    show(session.status())
    attempt(lambda: session.commit("again"))
    attempt(lambda: session.discard_changes())
    show(zarr.open_array(session.store, path="a", mode="r")[:])
    session = repository.writable_session("main")
    show(session.commit("empty", allow_empty=True) == repository.lookup_branch("main"))
    show(list(repository.ancestry(branch="main")))
    """
    _same(script, tmp_path, spec)


def test_discarding_returns_a_session_to_its_base(tmp_path: Path, spec: int) -> None:
    """The session returns to its base and still works."""
    script = """
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][:] = 9
    session.discard_changes()
    show(session.has_uncommitted_changes, session.status())
    show(zarr.open_array(session.store, path="a")[:])
    """
    _same(script, tmp_path, spec)


def test_amending_replaces_the_tip_and_flushing_moves_no_branch(tmp_path: Path) -> None:
    """In place of the tip; on no branch."""
    script = """
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][2:] = 2
    amended = session.amend("amended", metadata={"k": 1})
    show(amended == repository.lookup_branch("main"), session.read_only)
    show(list(repository.ancestry(branch="main")))
    session = repository.writable_session("main")
    attempt(lambda: session.amend("nothing"))
    zarr.open_group(session.store)["a"][2:] = 3
    flushed = session.flush("flushed", metadata={"k": 2})
    show(session.read_only, session.snapshot_id == flushed)
    show(repository.lookup_branch("main") == amended)
    show(zarr.open_array(repository.readonly_session(snapshot_id=flushed).store, path="a")[:])
    repository.create_branch("adopted", flushed)
    show([info.message for info in repository.ancestry(branch="adopted")])

    async def awaited():
        session = await repository.writable_session_async("main")
        (await zarr.api.asynchronous.open_group(session.store, mode="r+"))
        zarr.open_group(session.store)["a"][0] = 4
        show(await session.amend_async("again") == await repository.lookup_branch_async("main"))
        session = await repository.writable_session_async("main")
        zarr.open_group(session.store)["a"][0] = 5
        show(await session.flush_async("aside") == session.snapshot_id)

    asyncio.run(awaited())
    """
    _same(script, tmp_path)


def test_amending_needs_the_newer_format(tmp_path: Path) -> None:
    """Both raise an error in format 1 and keep the changes."""
    script = """
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][2:] = 2
    attempt(lambda: session.amend("amended"))
    show(session.has_uncommitted_changes)
    """
    _same(script, tmp_path, 1)


def test_a_lost_race_is_told_and_rebased_alike(tmp_path: Path, spec: int) -> None:
    """With its data; and rebasing by hand and while committing."""
    script = """
    def race(path, value):
        sessions = [repository.writable_session("main") for _ in range(2)]
        for number, session in enumerate(sessions):
            zarr.open_group(session.store)[path][:2] = value + number
        return sessions

    first, second = race("a", 10)
    tip = first.commit("first")
    try:
        second.commit("second")
    except icechunk.ConflictError as error:
        show(error.expected_parent == second.snapshot_id, error.actual_parent == tip)
    show(second.has_uncommitted_changes, second.read_only)
    try:
        second.rebase(icechunk.ConflictDetector())
    except icechunk.RebaseFailedError as error:
        show(error.snapshot == tip, [
            (it.conflict_type, it.path, sorted(map(tuple, it.conflicted_chunks)))
            for it in error.conflicts
        ])
    theirs = icechunk.VersionSelection.UseTheirs
    second.rebase(icechunk.BasicConflictSolver(on_chunk_conflict=theirs))
    show(second.snapshot_id == tip, second.status())
    zarr.open_group(second.store)["g/b"][4] = 3
    second.commit("second")
    show(zarr.open_group(second.store, mode="r")["a"][:2])

    first, second = race("g/b", 20)
    first.commit("third")
    second.commit("fourth", rebase_with=icechunk.BasicConflictSolver())
    show(zarr.open_group(second.store, mode="r")["g/b"][:])
    first, second = race("g/b", 30)
    first.commit("fifth")
    fail = icechunk.BasicConflictSolver(on_chunk_conflict=icechunk.VersionSelection.Fail)
    attempt(lambda: second.commit("sixth", rebase_with=fail))
    attempt(lambda: second.commit("sixth", rebase_with=fail, rebase_tries=0))
    show([info.message for info in repository.ancestry(branch="main")])
    """
    _same(script, tmp_path, spec)


def test_a_session_is_itself_and_no_other(tmp_path: Path) -> None:
    """Its stores too, and what they say is their session."""
    script = """
    session, other = repository.writable_session("main"), repository.writable_session("main")
    show(session == session, session == other, session == 3, session.store == session.store)
    show(session.store.session == session, other.store == session.store)
    readonly = repository.readonly_session("main")
    copy = pickle.loads(pickle.dumps(readonly))
    show(copy == readonly, copy.store == readonly.store, copy.store == copy.store)
    """
    _same(script, tmp_path)


def test_what_only_reads_travels(tmp_path: Path, spec: int) -> None:
    """Sessions, stores, arrays; before and after they were used."""
    script = """
    session = repository.readonly_session("main")
    copy = pickle.loads(pickle.dumps(session))
    show(copy.snapshot_id, copy.read_only, copy.branch, copy.mode, copy.has_uncommitted_changes)
    show(zarr.open_array(copy.store, path="a", mode="r")[:])
    show(pickle.loads(pickle.dumps(copy)).snapshot_id == session.snapshot_id)
    store = pickle.loads(pickle.dumps(session.store))
    show(store.read_only, store.session.snapshot_id == session.snapshot_id)
    show(zarr.open_array(store, path="a", mode="r")[:])
    array = pickle.loads(pickle.dumps(zarr.open_array(session.store, path="a", mode="r")))
    show(array[:2])
    committed = repository.writable_session("main")
    zarr.open_group(committed.store)["a"][:] = 5
    attempt(lambda: pickle.dumps(committed))
    attempt(lambda: pickle.dumps(committed.store))
    committed.commit("five")
    show(zarr.open_array(pickle.loads(pickle.dumps(committed)).store, path="a", mode="r")[:])
    """
    _same(script, tmp_path, spec)


def test_forks_travel_and_are_merged(tmp_path: Path, spec: int) -> None:
    """Through stores as well, and through each other."""
    script = """
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][0, 0] = 100
    forks = [pickle.loads(pickle.dumps(session.fork())) for _ in range(3)]
    for number, fork in enumerate(forks):
        show(fork.branch, fork.read_only, fork.has_uncommitted_changes)
        zarr.open_group(fork.store)["g/b"][2 * number] = 7 + number
        show(zarr.open_group(fork.store)["a"][0, 0], fork.has_uncommitted_changes, fork.status())
    attempt(lambda: forks[0].commit("no"))
    back = [pickle.loads(pickle.dumps(fork)) for fork in forks]
    back[0].merge(back[1])
    session.merge(back[0], back[2])
    show(session.status())
    show(session.commit("forked") == repository.lookup_branch("main"))
    show(zarr.open_group(session.store, mode="r")["g/b"][:])

    session = repository.writable_session("main")
    store = pickle.loads(pickle.dumps(session.fork().store))
    show(type(store.session).__name__, store.read_only)
    zarr.open_group(store)["g/b"][0] = 50
    asyncio.run(session.merge_async(store.session))
    session.commit("through a store")
    show(zarr.open_group(session.store, mode="r")["g/b"][:])
    attempt(lambda: repository.readonly_session("main").fork())
    """
    _same(script, tmp_path, spec)


def test_nodes_move_alike_in_sessions_for_it(tmp_path: Path) -> None:
    """In sessions for it."""
    script = """
    session = repository.rearrange_session("main")
    show(session.mode, session.read_only, session.branch)
    before = session.get_node_id("/g/b")
    session.move("/g/b", "/moved")
    show(session.status(), session.get_node_id("/moved") == before)
    attempt(lambda: session.move("/nothing", "/there"))
    attempt(lambda: session.move("/moved", "/a"))
    session.commit("moved")
    show(sorted(zarr.open_group(session.store, mode="r").array_keys()))
    writable = repository.writable_session("main")
    attempt(lambda: writable.move("/a", "/c"))
    attempt(lambda: writable.get_node_id("/nothing"))
    show(list(repository.ancestry(branch="main"))[0].message)

    async def awaited():
        session = await repository.rearrange_session_async("main")
        await session.move_async("/a", "/renamed")
        show(len(await session.get_node_id_async("/renamed")))
        await session.commit_async("renamed")

    asyncio.run(awaited())
    show(sorted(zarr.open_group(repository.readonly_session("main").store, mode="r").array_keys()))
    """
    _same(script, tmp_path)


def test_whole_chunks_are_shifted_and_reindexed_alike(tmp_path: Path) -> None:
    """Whole chunks, without reading one."""
    script = """
    session = repository.writable_session("main")
    b = zarr.open_group(session.store)["g/b"]
    b[:] = np.arange(6)
    session.shift_array("/g/b", (1,))
    show(zarr.open_group(session.store)["g/b"][:])
    turn = lambda index: [2 - i for i in index]
    session.reindex_array("/g/b", turn, turn)
    show(zarr.open_group(session.store)["g/b"][:])
    session.commit("shifted")
    show(zarr.open_group(session.store, mode="r")["g/b"][:])
    """
    _same(script, tmp_path)


def test_chunks_exist_and_lie_in_the_same_places(tmp_path: Path, spec: int) -> None:
    """Which exist, and where they are."""
    script = """
    session = repository.writable_session("main")
    zarr.open_group(session.store)["a"][3, 5] = 1
    kinds = [session.chunk_type("/a", [i, j]) for i in range(2) for j in range(2)]
    show(kinds, session.chunk_type("/g/b", (0,)))
    attempt(lambda: session.chunk_type("/nothing", (0,)))
    show(session.all_virtual_chunk_locations())

    async def awaited():
        # The official engine lists some of them twice.
        show(sorted({it async for it in session.chunk_coordinates("/a", batch_size=1)}))
        show(await session.chunk_type_async("/a", (1, 0)))
        show(await session.all_virtual_chunk_locations_async())

    asyncio.run(awaited())
    """
    _same(script, tmp_path, spec)
