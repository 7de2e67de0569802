"""Compare, merge, follow and stack versions.

Repositories on the local disk, opened anew in each turn unless said otherwise. The official engine
has a difference of a snapshot and one of its ancestors. It has no merge, no watching and no
cubes: beside ours stands what its users do instead. Ours is synced to the disk when a commit
returns; the official engine's is not.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import icechunk
import numpy as np
import pytest
import zarr

from benchmarks.contest import FLOOR
from benchmarks.floors import sync_a_file
from benchmarks.long_history import KEY, make_history
from benchmarks.one_chunk import ENGINES, commits, copy_for_each
from benchmarks.peers import PREFIX, chunked, create, numbers, open_repository
from icechunk_async import Repository
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.versions import ChunkChanges

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from benchmarks.contest import Contest
    from icechunk_async.storage import Storage

    type Numbers = npt.NDArray[np.float64]

MILLION = 1_000_000
DIFFERENCES = ("a commit and the one before it, one change", "two branches, one change each")
CHANGED = {"main": 7, "other": 9}
"""By branch, the one chunk that differs from their common ancestor."""
CHUNK_BYTES = 8_000
"""Of a merge."""
MISSED = 10
ROWS = 10
"""Chunks along each axis of the array of a cube."""
SIDE = 20
"""Cells of a chunk along each axis, there."""
READS_A_CHUNK = 1.05
COMPARE = "net diff of a commit and the one before it"
COMPARE_BRANCHES = "net diff of two branches"
MERGE = "merge a changed chunk"
TOLD = "be told of a commit"
REQUESTS = {COMPARE: 7, COMPARE_BRANCHES: 6, MERGE: 15, TOLD: 1}


@pytest.mark.parametrize("between", DIFFERENCES)
def test_net_diff(contest: Contest, tmp_path: Path, between: str) -> None:
    """Find one change among a million references in one manifest; of two branches, one each."""
    number = contest.pick(MILLION // 1000, MILLION)
    directory = str(tmp_path / "repository")
    base = _make_references(contest, directory, str(tmp_path / "source"), number)
    start, end = (base, "main") if between == DIFFERENCES[0] else ("other", "main")
    # Two branches: chunk 7 was changed on one and chunk 9 on the other, and both differ.
    expected = [[CHANGED["main"]]] if start == base else [[7], [9]]

    def ours() -> None:
        found = list(open_repository("ours", directory).changes(start, end))
        assert [type(it) for it in found] == [ChunkChanges]
        assert found[0].coords.tolist() == expected

    def touched(engine: str) -> None:
        repository = open_repository(engine, directory)
        found = repository.diff(from_snapshot_id=base, to_branch="main")
        assert list(map(list, found.updated_chunks["/a"])) == expected

    def compare_all() -> None:
        repository = open_repository("official", directory)
        named = {"snapshot_id": base} if start == base else {"branch": start}
        stores = [repository.readonly_session(**it).store for it in (named, {"branch": end})]
        assert _compare(*stores).tolist() == expected

    if start == base:
        peers = {
            "official": lambda: touched("official"),
            "ours, diff": lambda: touched("ours"),
            "official, all references": compare_all,
        }
        note = "diff says what was touched; without references, and not whether it is different"
    else:
        with pytest.raises(icechunk.IcechunkError):
            open_repository("official", directory).diff(from_branch="other", to_branch="main")
        peers = {"official": compare_all}
        note = (
            "the official engine refuses to compare branches, so it lists both, and NumPy compares"
        )
    contest.race(
        f"net diff of {between} among {number:,} references",
        {"ours": ours, **peers},
        note=note,
    )


def _make_references(contest: Contest, directory: str, source: str, number: int) -> str:
    """Make an array of references, and two branches of one change each; return their base."""
    prepared = {"engine": "ours", "directory": directory, "source": source, "count": number}
    contest.call("benchmarks.references:prepare", {**prepared, "spec": 2})
    repository = open_repository("ours", directory)
    base: str = repository.lookup_branch("main")
    repository.create_branch("other", base)
    for branch, chunk in CHANGED.items():
        session = repository.writable_session(branch)
        session.store.set_virtual_ref(f"a/c/{chunk}", f"{PREFIX}new", offset=1, length=2)
        session.commit("one chunk")
    return base


def _compare(one: Any, other: Any) -> npt.NDArray[np.uint32]:
    """Return the chunks whose references differ: list all of both."""

    async def columns(store: Any) -> tuple[Any, Any, list[str]]:
        batches = [it async for it in store.array_chunk_iterator("a")]
        places = [np.concatenate([it[column] for it in batches]) for column in (3, 4)]
        paths = [path for it in batches for path in it[2]]
        return np.concatenate([it[0] for it in batches]), np.stack(places, 1), paths

    coords, places, paths = asyncio.run(columns(one))
    others = asyncio.run(columns(other))
    assert np.array_equal(coords, others[0])
    moved = (places != others[1]).any(axis=1)
    moved |= np.fromiter(map(str.__ne__, paths, others[2]), bool, len(paths))
    found: npt.NDArray[np.uint32] = coords[moved]
    return found


def test_merge(contest: Contest, tmp_path: Path) -> None:
    """Bring changed chunks of one branch, 8 KB each, into another, which has changed as well."""
    changed = contest.pick(10, 1_000)
    values = numbers(changed, CHUNK_BYTES)
    _make_branches(tmp_path / "made", values)
    copy_for_each(tmp_path / "made")
    # A branch for each turn: a merge that is done leaves nothing to merge again.
    names = (f"into-{number}" for number in count())

    def setup(name: str) -> str:
        branch = next(names)
        if name != FLOOR:
            repository = open_repository(name, str(tmp_path / name))
            repository.create_branch(branch, repository.lookup_branch("main"))
        return branch

    def ours(branch: str) -> None:
        report = open_repository("ours", str(tmp_path / "ours")).merge("work", into=branch)
        assert report.snapshot_id is not None

    def official(branch: str) -> None:
        session = open_repository("official", str(tmp_path / "official")).writable_session(branch)
        zarr.open_array(session.store, path="a")[: len(values)] = values
        session.commit("written again")

    contest.race(
        f"merge {changed:,} changed chunks",
        {"ours": ours, "official": official, FLOOR: lambda _: sync_a_file(tmp_path)},
        setup=setup,
        floor="write a small file and sync it",
        note="the official engine has no merge: it writes the chunks again, from memory",
    )
    # Half of the array comes from the branch, and the last cell from main: neither undid the other.
    expected = np.concatenate([values, np.zeros(len(values))])
    expected[-1] = 1
    for name in ENGINES:
        repository = open_repository(name, str(tmp_path / name))
        branch = min(it for it in repository.list_branches() if it.startswith("into-"))
        store = repository.readonly_session(branch).store
        np.testing.assert_array_equal(zarr.open_array(store, path="a", mode="r")[:], expected)


def _make_branches(made: Path, values: Numbers) -> None:
    """Make an array of zeros; half of it is changed on one branch, its last chunk on main."""
    repository = create("ours", str(made), inline=0)
    session = repository.writable_session("main")
    chunked(session.store, 2 * len(values) * 8 // CHUNK_BYTES, CHUNK_BYTES)
    repository.create_branch("work", session.commit("made"))
    for branch, place, some in (("work", slice(len(values)), values), ("main", -1, 1)):
        session = repository.writable_session(branch)
        zarr.open_array(session.store, path="a")[place] = some
        session.commit("changed")


def test_watch(contest: Contest, tmp_path: Path) -> None:
    """Be told of a commit, in a repository that is open, and was asked before."""
    number = make_history(tmp_path, contest.pick(200, 5_000))
    commit = commits(tmp_path, KEY, 10)
    repository = open_repository("official", str(tmp_path / "official"))
    last = repository.lookup_branch("main")

    def walk(_: object) -> None:
        nonlocal last
        new: list[str] = []
        for info in repository.ancestry(branch="main"):
            # The walk ends at what is known, so that it costs as little as a user can make it.
            if info.id == last:
                break
            new.append(info.id)
        (last,) = new

    with asyncio.Runner() as runner:
        watching = _watch(tmp_path / "ours", last)
        contest.race(
            f"be told of a commit, {number:,} snapshots",
            {"ours": lambda _: runner.run(_next(watching)), "official": walk},
            setup=lambda name: commit[name](),
            rounds=9,
            note="the official engine has no watch: it walks from the tip to the last one known",
        )
        runner.run(watching.aclose())


async def _watch(directory: Path, since: str) -> AsyncGenerator[str]:
    async with Repository.open(directory) as repository:
        async for info in repository.watch("main", since=since):
            yield str(info.id)


async def _next(watching: AsyncGenerator[str]) -> str:
    return await anext(watching)


def test_watch_again(contest: Contest, tmp_path: Path) -> None:
    """Open a repository, and continue after the last commit that was seen."""
    number = make_history(tmp_path, contest.pick(200, 5_000))
    made = tmp_path / "made"
    line = [it.id for it in open_repository("official", str(made)).ancestry(branch="main")]
    # Oldest first, as watch gives them.
    missed = [line[place] for place in range(MISSED)][::-1]

    async def follow() -> list[str]:
        found: list[str] = []
        watching = _watch(made, line[MISSED])
        async for snapshot_id in watching:
            found.append(snapshot_id)
            if len(found) == MISSED:
                break
        await watching.aclose()
        return found

    def ours() -> None:
        assert asyncio.run(follow()) == missed

    def official() -> None:
        found: list[str] = []
        for info in open_repository("official", str(made)).ancestry(branch="main"):
            if info.id == line[MISSED]:
                break
            found.append(info.id)
        assert found[::-1] == missed

    contest.race(
        f"open and find {MISSED} new commits, {number:,} snapshots",
        {"ours": ours, "official": official, FLOOR: (made / "repo").read_bytes},
        rounds=9,
        floor="read the file of the repository's state",
    )


def test_cube(contest: Contest, tmp_path: Path) -> None:
    """Read all versions of an array, of which each commit changes one of 100 chunks of 3 KB."""
    versions = contest.pick(20, 200)
    directory = str(tmp_path / "made")
    ids = _make_versions(create("ours", directory, inline=0), versions)

    def cube() -> Numbers:
        found: Numbers = open_repository("ours", directory).cube("a").a.values
        return found

    def stack(engine: str) -> Numbers:
        repository = open_repository(engine, directory)
        stores = [repository.readonly_session(snapshot_id=it).store for it in ids]
        arrays = [zarr.open_array(it, path="a", mode="r")[:] for it in stores]
        return np.stack([np.asarray(it) for it in arrays])

    contenders: dict[str, Callable[[], Numbers]] = {
        "ours": cube,
        "official": lambda: stack("official"),
        "ours, checkouts": lambda: stack("ours"),
    }
    expected = stack("official")
    for work in contenders.values():
        np.testing.assert_array_equal(work(), expected)
    contest.race(
        f"cube of {versions} versions",
        contenders,
        rounds=5,
        note="the official engine has no cube: its values are those of a stack of checkouts",
    )


def _make_versions(repository: Any, versions: int) -> list[str]:
    """Commit versions of an array, each with one other chunk; return their ids."""
    random = np.random.default_rng(0)
    ids = list[str]()
    for number in range(versions):
        session = repository.writable_session("main")
        if number == 0:
            zarr.create_array(
                session.store,
                name="a",
                data=random.random((ROWS * SIDE, ROWS * SIDE)),
                chunks=(SIDE, SIDE),
                compressors=None,
            )
        else:
            # Seven and a hundred have no common divisor: a chunk comes again only after all others.
            box = [slice(it * SIDE, it * SIDE + SIDE) for it in divmod(number * 7 % ROWS**2, ROWS)]
            zarr.open_array(session.store, path="a")[*box] = random.random((SIDE, SIDE))
        ids.append(session.commit(f"version {number}"))
    return ids


def test_reads_of_a_cube(contest: Contest, tmp_path: Path) -> None:
    """Each different chunk is read once; by checkouts, once for each of them."""
    versions = contest.pick(20, 200)
    # All chunks of the first version, and one for each that follows.
    different = ROWS**2 + versions - 1
    ids = _make_versions(create("ours", str(tmp_path / "made"), inline=0), versions)
    ours = asyncio.run(_count_reads(tmp_path / "made"))
    checkouts = asyncio.run(_count_reads(tmp_path / "made", ids))
    assert different <= ours <= READS_A_CHUNK * different
    assert checkouts == versions * ROWS**2
    contest.add(
        f"cube of {versions} versions, of {different:,} different chunks",
        {"ours": [float(ours)], "ours, checkouts": [float(checkouts)]},
        metric="reads of chunks",
        limit=READS_A_CHUNK * different,
    )


async def _count_reads(directory: Path, ids: Sequence[str] | None = None) -> int:
    """Return the requests for chunks of a cube; of checkouts if their ids are given."""
    async with open_storage(directory) as plain:
        storage = LatencyStorage(plain, seconds=0)
        if ids is None:
            async with Repository.open(storage) as repository:
                await (await repository.cube("a")).load_async()
        for snapshot_id in ids or ():
            async with Repository.open(storage) as repository:
                store = (await repository.readonly_session(snapshot_id=snapshot_id)).store
                array = await zarr.api.asynchronous.open_array(store=store, path="a", mode="r")
                await array.getitem(slice(None))
        return sum(key.startswith("chunks/") for _, key in storage.log)


@pytest.mark.parametrize("operation", list(REQUESTS))
def test_requests(contest: Contest, operation: str) -> None:
    """In a repository that was just opened, but for what follows it; none is for a chunk."""
    found = asyncio.run(_requests(operation))
    assert found == REQUESTS[operation]
    contest.add(operation, {"ours": [float(found)]}, metric="requests")


async def _requests(operation: str) -> int:
    """Return how many requests an operation makes on two branches of an array of ten chunks."""
    async with open_storage(f"memory://{uuid4().hex}") as plain:
        await _make_small(plain)
        storage = LatencyStorage(plain, seconds=0)
        async with Repository.open(storage) as repository:
            storage.forget()
            if operation == MERGE:
                await repository.merge("work", into="main")
            elif operation == TOLD:
                watching = aiter(repository.watch("main", since="main~1"))
                await anext(watching)
                await _change(plain, "main", 1000)
                storage.forget()
                await anext(watching)
            else:
                start = "main~1" if operation == COMPARE else "work"
                found = [it async for it in repository.changes(start, "main")]
                assert len(found) == 1
        assert not any(key.startswith("chunks/") for _, key in storage.log)
        return storage.requests.total()


async def _make_small(storage: Storage) -> None:
    async with Repository.create(storage) as repository:
        session = await repository.writable_session("main")
        await zarr.api.asynchronous.create_array(
            session.store, name="a", data=np.arange(10_000), chunks=(1000,), compressors=None
        )
        await repository.create_branch("work", await session.commit("made"))
    await _change(storage, "main", 0)
    await _change(storage, "work", 5000)


async def _change(storage: Storage, branch: str, place: int) -> None:
    async with Repository.open(storage) as repository:
        session = await repository.writable_session(branch)
        array = await zarr.api.asynchronous.open_array(store=session.store, path="a")
        await array.setitem(place, 1)
        await session.commit("changed")
