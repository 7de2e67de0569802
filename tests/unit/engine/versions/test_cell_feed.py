"""The change feed of cells: applied to the values of one snapshot it gives the other."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous as za

from icechunk_async import Repository
from icechunk_async.config import HttpStore, RepositoryConfig, VirtualChunkContainer
from icechunk_async.errors import FormatError, InvalidInputError, NotFoundError
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.versions import CellChanges, ChunkChanges, NodeChange
from icechunk_async.zarr import values as values_module
from tests.helpers import NO_ARRAY_DOCUMENTS, memory_url, objects, set_document
from tests.unit.engine.versions.test_values import change, commit, make

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async import Session, SnapshotId
    from icechunk_async.format.ids import NodeId

SEEDS = range(1000 if os.environ.get("EXAMPLES") == "all" else 8)


async def cells(repository: Repository, *refs: Any, **options: Any) -> list[Any]:
    """Return the whole feed between two refs, at the level of cells."""
    return [it async for it in repository.changes(*refs, level="cell", **options)]


def only_cells(changes: list[Any]) -> list[CellChanges]:
    """Return the parts of a feed that are not about nodes."""
    assert not any(isinstance(it, ChunkChanges) for it in changes)
    return [it for it in changes if isinstance(it, CellChanges)]


@dataclass
class Known:
    """An array as somebody knows it who reads nothing but a feed."""

    path: str
    values: npt.NDArray[Any]
    fill: Any


async def state(repository: Repository, ref: SnapshotId) -> dict[NodeId, Known]:
    """Return all arrays of a snapshot."""
    session = await repository.readonly_session(snapshot_id=ref)
    found: dict[NodeId, Known] = {}
    for node in session.workspace.tree.nodes():
        if node.array is not None:
            array = await za.open_array(store=session.store, path=node.path.strip("/"), mode="r")
            data = np.asarray(await array.getitem(...))
            found[node.id] = Known(node.path, data, array.metadata.fill_value)
    return found


def apply(arrays: dict[NodeId, Known], changes: list[Any]) -> None:
    """Change arrays as a feed says, which tells their values before, too."""
    for it in changes:
        if isinstance(it, CellChanges):
            known, at = arrays[it.node_id], tuple(it.indices.T)
            assert known.path == it.path
            np.testing.assert_array_equal(known.values[at], it.before)
            known.values[at] = it.after
            assert not np.array_equal(it.before, it.after, equal_nan=it.after.dtype.kind == "f")
        elif it.is_array:
            _apply_to_node(arrays, it)


def _apply_to_node(arrays: dict[NodeId, Known], change: NodeChange) -> None:
    if change.kind == "deleted":
        del arrays[change.node_id]
    elif change.kind == "moved":
        arrays[change.node_id].path = change.path
    else:
        document = json.loads(change.after or b"")
        shape, fill = tuple(document["shape"]), document["fill_value"]
        grown = np.full(shape, fill, document["data_type"])
        if change.kind == "updated":
            old = arrays[change.node_id].values
            both = tuple(slice(0, min(sizes)) for sizes in zip(old.shape, shape, strict=True))
            grown[both] = old[both]
        arrays[change.node_id] = Known(change.path, grown, fill)


class Changes:
    """Random changes of arrays that hold numbers."""

    def __init__(self, seed: int) -> None:
        """Draw them from a seed."""
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)

    async def commit(self, repository: Repository) -> None:
        """Make a commit of a few changes, or of a move."""
        if self.chance.random() < 0.15 and repository.spec_version > 1:
            await self.move(repository)
            return
        session = await repository.writable_session("main")
        for _ in range(self.chance.randint(1, 3)):
            await self.change(session)
        await session.commit("random", allow_empty=True)

    async def move(self, repository: Repository) -> None:
        """Give an array another name."""
        session = await repository.rearrange_session("main")
        names = [it.path for it in session.workspace.tree.nodes() if it.array is not None]
        if names:
            await session.move(self.chance.choice(names), f"/m{self.chance.randint(0, 10**9)}")
            await session.commit("moved")
        else:
            session.discard_changes()

    async def change(self, session: Session) -> None:
        """Create, write, resize, shift or delete one array."""
        names = [it.path for it in session.workspace.tree.nodes() if it.array is not None]
        what = self.chance.choice(["create", *["write", "resize"] * 3, "shift", "delete", "same"])
        if what == "create" or not names:
            rank = self.chance.randint(1, 2)
            shape = [self.chance.randint(1, 9) for _ in range(rank)]
            name = f"a{self.chance.randint(0, 3)}"
            options = {"shards": (4,) * rank} if self.chance.random() < 0.3 else {}
            fill = self.chance.choice([0, 1])
            data = self.rng.integers(0, 3, shape).astype("i4")
            chunks = (2,) * rank if options else (3,) * rank
            await make(session, data, name=name, chunks=chunks, fill_value=fill, **options)
            return
        path = self.chance.choice(names)
        if what == "delete":
            await session.store.delete_dir(path.strip("/"))
            return
        array = await za.open_array(store=session.store, path=path.strip("/"))
        if what == "resize":
            await array.resize(tuple(self.chance.randint(1, 12) for _ in array.shape))
        elif what == "shift":
            await session.shift_array(path, [self.chance.choice([-1, 1])] * array.ndim)
        else:
            box = tuple(
                slice(*sorted((self.chance.randint(0, size), self.chance.randint(0, size))))
                for size in array.shape
            )
            there = np.asarray(await array.getitem(box))
            given = there if what == "same" else self.rng.integers(0, 3, there.shape)
            await array.setitem(box, given.astype("i4"))


@pytest.mark.parametrize("seed", SEEDS)
async def test_applying_the_cells_of_two_snapshots_to_one_gives_the_other(seed: int) -> None:
    """In either direction: arrays that come, go, move, grow over their edge, shrink and shift."""
    story = Changes(seed)
    async with Repository.create(
        memory_url(), spec_version=1 + seed % 2, sums=bool(seed % 3)
    ) as repository:
        for _ in range(6):
            await story.commit(repository)
        if seed % 4 == 0:
            gone = [it async for it in repository.ancestry()][2]
            await repository.expire_snapshots(gone.written_at)
        ends = [it.id async for it in repository.ancestry()]
        for number in range(3):
            one, other = random.Random(seed + number).choices(ends, k=2)
            size = random.Random(number).choice([1, 5, 1000])
            arrays = await state(repository, one)
            changes = await cells(repository, one, other, batch_size=size)
            assert {it.snapshot_id for it in changes} <= {other}
            assert all(0 < len(it) <= size for it in only_cells(changes))
            apply(arrays, changes)
            _assert_same(arrays, await state(repository, other))
        line = ends[::-1]
        arrays = await state(repository, line[0])
        apply(arrays, await cells(repository, line[0], line[-1], net=False))
        _assert_same(arrays, await state(repository, line[-1]))


def _assert_same(found: dict[NodeId, Known], wanted: dict[NodeId, Known]) -> None:
    assert {it: known.path for it, known in found.items()} == {
        it: known.path for it, known in wanted.items()
    }
    for node_id, known in wanted.items():
        np.testing.assert_array_equal(found[node_id].values, known.values)


async def test_a_new_array_gives_what_is_not_its_fill_value() -> None:
    """Before, all of it was the fill value; what nobody wrote is not listed, nor read."""
    async with open_storage(memory_url()) as bucket:
        storage = LatencyStorage(bucket, seconds=0)
        async with Repository.create(storage) as repository:
            session = await repository.writable_session("main")
            array = await make(session, np.zeros(10**5), chunks=(10,))
            await array.setitem(slice(500, 503), [0.0, 7.0, 8.0])
            empty = await repository.lookup_branch("main")
            await session.commit("new")
            storage.requests.clear()
            _, node, found = await cells(repository, empty)
            assert (node.kind, node.path) == ("created", "/a")
            assert (found.path, found.indices.tolist()) == ("/a", [[501], [502]])
            assert (found.before.tolist(), found.after.tolist()) == ([0, 0], [7, 8])
            assert found.node_id == node.node_id
            assert storage.requests.total() < 10


async def test_cells_that_come_to_light_are_listed() -> None:
    """An array that grows shows what its last chunk holds behind the former end."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.arange(1, 7), chunks=(4,))
        for length in (5, 8):
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a")
            await array.resize((length,))
            await session.commit(f"{length} long")
        node, found = await cells(repository, "main~1")
        assert node.kind == "updated"
        assert (found.indices.tolist(), found.after.tolist()) == ([[5]], [6])
        assert [it.kind for it in await cells(repository, "main~2", "main~1")] == ["updated"]
        await change(repository, 7, 9)  # in the chunk that was not full
        (found,) = only_cells(await cells(repository, "main~2"))
        assert (found.indices.tolist(), found.after.tolist()) == ([[5], [7]], [6, 9])


async def test_values_before_count_where_an_array_means_something_else() -> None:
    """Another fill value and data type: every cell is compared; text in place of numbers is new."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        array = await make(session, np.zeros(6, "i4"))
        await array.setitem(slice(0, 2), [5, 6])
        await session.commit("numbers")
        for name in ("float64", "string"):
            session = await repository.writable_session("main")
            node = session.workspace.node("/a")
            assert node is not None
            document = json.loads(node.user_data)
            fill: Any = {"float64": 1.0, "string": ""}[name]
            document |= {"data_type": name, "fill_value": fill}
            if name == "string":
                document["codecs"] = [{"name": "vlen-utf8"}]
            session.workspace.set_node("/a", json.dumps(document).encode(), node.array)
            changed = await za.open_array(store=session.store, path="a")
            written: Any = {"float64": [5.0] * 4, "string": ["", "x", "", "y"]}[name]
            await changed.setitem(slice(0, 4), np.array(written, changed.dtype))
            await session.commit(name)
        (found,) = only_cells(await cells(repository, "main~2", "main~1"))
        assert found.indices.ravel().tolist() == [1, 2, 3, 4, 5]
        assert found.before.tolist() == [6, 0, 0, 0, 0]
        assert found.after.tolist() == [5, 5, 5, 1, 1]
        (found,) = only_cells(await cells(repository, "main~1"))
        assert found.indices.ravel().tolist() == [1, 3]
        assert (found.before.tolist(), found.after.tolist()) == (["", ""], ["x", "y"])


@pytest.mark.parametrize("spec", [1, 2])
async def test_virtual_and_inline_chunks_are_compared(spec: int) -> None:
    """By their values, wherever these are; each is read once."""
    prefix = "https://example.org/data/"
    config = RepositoryConfig(
        virtual_chunk_containers=(VirtualChunkContainer(prefix, HttpStore()),)
    )
    async with open_storage(memory_url()) as bucket:
        counted = LatencyStorage(bucket, seconds=0)
        await bucket.put("f", bytes([1, 2, 3, 4, 1, 2, 9, 4]))
        access: Any = {prefix: counted}
        async with Repository.create(
            memory_url(), spec_version=spec, config=config, authorize_virtual_chunk_access=access
        ) as repository:
            session = await repository.writable_session("main")
            await make(session, np.zeros(8, "u1"), compressors=None)
            session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=0, length=4)
            await session.commit("virtual")
            session = await repository.writable_session("main")
            array = await za.open_array(store=session.store, path="a")
            session.store.set_virtual_ref("a/c/0", f"{prefix}f", offset=4, length=4)
            await array.setitem(7, 5)
            await session.commit("virtual and inline")
            found = only_cells(await cells(repository, "main~1"))
            assert [it.indices.ravel().tolist() for it in found] == [[2, 7]]
            assert (found[0].before.tolist(), found[0].after.tolist()) == ([3, 0], [9, 5])
            assert counted.requests["get"] <= 2


async def test_batches_of_cells_are_full_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the last one of an array have the size asked for, across chunks."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(100, "i4"), chunks=(7,))
        await change(repository, slice(0, 95), 1)
        sizes = [len(it) for it in only_cells(await cells(repository, "main~1", batch_size=30))]
        assert sizes == [30, 30, 30, 5]
        asked: list[int] = []
        compare = values_module._compared

        async def counted(pair: Any, box: Any) -> Any:
            asked.append(pair.at_a_time)
            return await compare(pair, box)

        monkeypatch.setattr(values_module, "_compared", counted)
        await cells(repository, "main~1")
        monkeypatch.setattr(values_module, "_MEMORY_BYTES", 3 * 7 * (4 + 4 + 8 + 1))
        await cells(repository, "main~1")
        assert set(asked) == {16, 3}


async def test_each_commit_tells_its_cells() -> None:
    """Without ``net`` also what a later commit took back."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(4))
        first, back = [await change(repository, 2, it) for it in (5.0, 0.0)]
        assert await cells(repository, "main~2") == []
        one, other = only_cells(await cells(repository, "main~2", net=False))
        assert [str(it.snapshot_id) for it in (one, other)] == [first, back]
        assert (one.after.tolist(), other.before.tolist()) == ([5.0], [5.0])


async def test_arguments_that_cannot_be_are_refused_in_one_sentence() -> None:
    """Before anything is read."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(4))
        with pytest.raises(InvalidInputError, match="level must be 'chunk' or 'cell'; it is 'row'"):
            [it async for it in repository.changes("main~1", level="row")]  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="at least 1 cell; it is 0"):
            await cells(repository, "main~1", batch_size=0)
        with pytest.raises(NotFoundError, match="nothing"):
            await cells(repository, "nothing")


async def test_a_damaged_chunk_is_a_format_error() -> None:
    """It is read, so it is found."""
    url = memory_url()
    async with Repository.create(url) as repository:
        await commit(repository, np.random.default_rng(0).random(400), chunks=(400,))
        await change(repository, ..., 1.0)
    async with open_storage(url) as storage:
        chunks = [it for it in await objects(storage) if it.startswith("chunks/")]
        for key in chunks:
            await storage.put(key, b"damaged")
    async with Repository.open(url) as repository:
        with pytest.raises(FormatError):
            await cells(repository, "main~1")


@pytest.mark.parametrize("broken", NO_ARRAY_DOCUMENTS, ids=range(len(NO_ARRAY_DOCUMENTS)))
async def test_a_damaged_document_is_a_format_error(broken: bytes | dict[str, Any]) -> None:
    """On the side before the change as well as on that after it."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(4, "i4"))
        session = await repository.writable_session("main")
        set_document(session, "/a", broken)
        await session.commit("damaged")
        for refs in (("main~1", "main"), ("main", "main~1")):
            with pytest.raises(FormatError):
                await cells(repository, *refs)


async def test_a_grid_that_is_not_regular_is_refused_by_name() -> None:
    """With the level that works."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        with zarr.config.set({"array.rectilinear_chunks": True}):
            await za.create_array(session.store, name="a", shape=(6,), chunks=[[2, 4]], dtype="i4")
            await session.commit("begin")
            await change(repository, 3, 1)
        with pytest.raises(InvalidInputError, match=r"'/a' cannot be compared.*level='chunk'"):
            await cells(repository, "main~1")


async def test_the_cells_of_a_conflict_are_those_in_which_both_sides_differ() -> None:
    """Also where the branch moved the array, and after the merge was continued elsewhere."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(12, "i4"))
        await repository.create_branch("side", await repository.lookup_branch("main"))
        for branch, values in (("main", [1, 2, 3, 9]), ("side", [1, 5, 3, 9])):
            session = await repository.writable_session(branch)
            array = await za.open_array(store=session.store, path="a")
            await array.setitem(slice(4, 8), values)
            await array.setitem(0 if branch == "main" else 11, 7)
            await array.update_attributes({"of": branch})
            await session.commit(branch)
        session = await repository.rearrange_session("main")
        await session.move("/a", "/b")
        await session.commit("moved")
        pending = await repository.begin_merge("side")
        chunk, document = sorted(pending.conflicts, key=lambda it: not it.coords)
        resumed = await repository.resume_merge(await pending.to_bytes())
        for merge in (pending, resumed):
            (found,) = [it async for it in merge.cells(chunk)]
            assert found.indices.tolist() == [[5]]
            assert (found.before.tolist(), found.after.tolist()) == ([2], [5])
        with pytest.raises(InvalidInputError, match="not a conflict about chunks"):
            [it async for it in pending.cells(document)]
        pending.keep_branch()


async def test_cells_of_a_conflict_need_the_array_on_both_sides() -> None:
    """With chunks that mean the same."""
    async with Repository.create(memory_url()) as repository:
        await commit(repository, np.zeros(4, "i4"))
        await repository.create_branch("side", await repository.lookup_branch("main"))
        await change(repository, 1, 5)
        session = await repository.writable_session("side")
        node = session.workspace.node("/a")
        assert node is not None
        document = json.dumps({**json.loads(node.user_data), "fill_value": 3}).encode()
        session.workspace.set_node("/a", document, node.array)
        await session.commit("another fill value")
        pending = await repository.begin_merge("side")
        (conflict,) = pending.conflicts
        with pytest.raises(InvalidInputError, match="'/a' cannot be compared"):
            [it async for it in pending.cells(conflict)]
        pending.session.discard_changes()
