"""History as a dimension: which versions, what they have of an array, and what reading costs."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr.api.asynchronous as za

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async.config import HttpStore, RepositoryConfig, VirtualChunkContainer
from icechunk_async.engine.versions.timeline import Choice, choose
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    NodeNotFoundError,
    NotFoundError,
    VirtualChunkError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.repo_info import SnapshotInfo
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from icechunk_async.xarray import to_icechunk
from tests.helpers import cancelled_when, memory_url, objects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from icechunk_async import Session
    from icechunk_async.storage import Storage

DAY_US = 86_400_000_000
BEGAN = datetime(2024, 1, 1, tzinfo=UTC)
OWN = ["known_at", "committed_at", "snapshot_id", "exists", "height"]
BEGAN_US = clock.to_us(BEGAN)


class Hands(clock.SystemClock):
    """A clock that a test sets."""

    now = BEGAN_US

    def now_us(self) -> int:
        """Return the time that was set."""
        return self.now


@contextmanager
def at(*, days: float) -> Iterator[None]:
    """Let it be some days after the beginning of 2024."""
    hands = Hands()
    hands.now = BEGAN_US + int(days * DAY_US)
    with clock.use_clock(hands):
        yield


@pytest.fixture(params=[1, 2], ids=["spec1", "spec2"])
async def repository(request: pytest.FixtureRequest) -> AsyncIterator[Repository]:
    """Make an empty repository."""
    async with AsyncExitStack() as stack:
        with at(days=-19_710):
            made = await stack.enter_async_context(
                Repository.create(memory_url(), spec_version=request.param)
            )
        yield made


async def create(
    repository: Repository, values: Any, name: str = "a", *, day: float = 0, **options: Any
) -> str:
    """Commit an array, in place of one that is there."""
    values = np.asarray(values)
    options = {"chunks": (4,) * values.ndim, "fill_value": 0, **options}
    with at(days=day):
        session = await repository.writable_session("main")
        array = await za.create_array(
            session.store,
            name=name,
            shape=values.shape,
            dtype=options.pop("dtype", values.dtype),
            overwrite=True,
            **options,
        )
        await array.setitem(..., values)
        return str(await session.commit("created"))


async def change(
    repository: Repository, where: Any, values: Any, name: str = "a", *, day: float = 0
) -> str:
    """Write a part of an array, and commit."""
    with at(days=day):
        session = await repository.writable_session("main")
        array = await za.open_array(store=session.store, path=name)
        await array.setitem(where, values)
        return str(await session.commit("changed"))


async def resize(repository: Repository, shape: tuple[int, ...], name: str = "a") -> None:
    """Give an array another shape, and commit."""
    session = await repository.writable_session("main")
    await (await za.open_array(store=session.store, path=name)).resize(shape)
    await session.commit("resized")


async def delete(repository: Repository, name: str = "a") -> None:
    """Delete an array, and commit."""
    session = await repository.writable_session("main")
    await session.store.delete_dir(name)
    await session.commit("deleted")


async def load(repository: Repository, path: str = "a", **choice: Any) -> xr.DataArray:
    """Return the values of a cube."""
    dataset = await repository.cube(path, **choice)
    return (await dataset.load_async())[path.rpartition("/")[2]]


async def read(session: Session, path: str) -> npt.NDArray[Any]:
    """Return the values of an array as a session reads them."""
    array = await za.open_array(store=session.store, path=path, mode="r")
    return np.asarray(await array.getitem(...))


@pytest.mark.parametrize(
    ("repository", "shards"), [(1, None), (2, (20, 20))], indirect=["repository"]
)
async def test_two_hundred_commits_equal_the_stack_of_their_checkouts(
    repository: Repository, shards: tuple[int, int] | None
) -> None:
    """Each touches one part in 36 of the array; chunks in objects, and in manifests."""
    chance = np.random.default_rng(1)
    await create(repository, chance.random((60, 60)), chunks=(10, 10), shards=shards)
    for _ in range(199):
        row, column = (10 * chance.integers(0, 6, 2)).tolist()
        box = slice(row, row + 10), slice(column, column + 10)
        values = np.full((10, 10), 7.0) if chance.random() < 0.3 else chance.random((10, 10))
        await change(repository, box, values)
    found = await load(repository)
    assert found.shape == (200, 60, 60)
    for row, snapshot in zip(found.values, found.snapshot_id.values.tolist(), strict=True):
        expected = await read(await repository.readonly_session(snapshot_id=snapshot), "a")
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("versions", [120, pytest.param(1000, marks=pytest.mark.thorough)])
async def test_many_versions_cost_one_read_for_each_different_chunk(versions: int) -> None:
    """And one request for each snapshot and manifest, and one for the refs."""
    url, chance = memory_url(), np.random.default_rng(2)
    async with Repository.create(url) as repository:
        await create(repository, chance.random((100, 100)), chunks=(10, 20))
        for number in range(versions - 1):
            place = number % 10 * 10, chance.integers(0, 5) * 20
            box = slice(place[0], place[0] + 10), slice(int(place[1]), int(place[1]) + 20)
            await change(repository, box, chance.random((10, 20)))
    async with open_storage(url) as storage:
        counted = LatencyStorage(storage, seconds=0)
        async with Repository.open(counted) as repository:
            counted.forget()
            dataset = await repository.cube("a")
            assert len(counted.log) <= versions + 3
            counted.forget()
            assert (await dataset.load_async()).a.shape == (versions, 100, 100)
            keys = [key for _, key in counted.log]
            chunks = [key for key in keys if key.startswith("chunks/")]
            assert len(set(chunks)) == 50 + versions - 1
            assert len(chunks) <= 1.05 * len(set(chunks))
            assert len(keys) - len(chunks) <= versions  # manifests


async def test_a_part_costs_the_chunks_of_that_part() -> None:
    """In space and in time."""
    url, chance = memory_url(), np.random.default_rng(3)
    async with Repository.create(url) as repository:
        await create(repository, chance.random(1000), chunks=(100,))
        for number in range(20):
            start = number % 10 * 100
            await change(repository, slice(start, start + 100), chance.random(100))
    async with open_storage(url) as storage:
        counted = LatencyStorage(storage, seconds=0)
        async with Repository.open(counted) as repository:
            dataset = await repository.cube("a")
            counted.forget()
            await dataset.isel(dim_0=slice(310, 390)).load_async()
            chunks = [key for _, key in counted.log if key.startswith("chunks/")]
            assert len(chunks) == len(set(chunks)) == 3
            counted.forget()
            await dataset.isel(known_at=[4, 5]).load_async()
            chunks = [key for _, key in counted.log if key.startswith("chunks/")]
            assert len(chunks) == len(set(chunks)) == 11


@pytest.mark.parametrize("seed", range(8))
async def test_random_histories_equal_the_stack_of_their_checkouts(
    repository: Repository, seed: int
) -> None:
    """Resized, created later, deleted, replaced, with other chunks and types, moved, shifted."""
    story = _Story(repository, random.Random(seed))
    for _ in range(20):
        await story.step()
    found = await load(repository, story.path)
    expected, names = story.stack(found.shape[1:])
    assert found.snapshot_id.values.tolist() == names
    np.testing.assert_array_equal(found.values, expected.astype(found.dtype))
    chance = np.random.default_rng(seed)
    lazy = (await repository.cube(story.path))[story.path.rpartition("/")[2]]
    for _ in range(10):
        key = _random_key(lazy.dims, lazy.shape, chance)
        part = await lazy.isel(key).load_async()
        np.testing.assert_array_equal(part.values, found.isel(key).values)


def _random_key(
    dimensions: tuple[Any, ...], shape: tuple[int, ...], chance: np.random.Generator
) -> dict[Any, Any]:
    key: dict[Any, Any] = {}
    for name, size in zip(dimensions, shape, strict=True):
        start, stop = sorted(chance.integers(0, size + 1, 2).tolist())
        kinds: list[Any] = [
            slice(start, stop, int(chance.integers(1, 4))),
            slice(None, None, -1),
            int(chance.integers(0, size)),
            chance.integers(0, size, 3),
            chance.random(size) < 0.4,
        ]
        key[name] = kinds[int(chance.integers(0, len(kinds)))]
    return key


class _Story:
    """Random commits of one array, and what each left."""

    def __init__(self, repository: Repository, chance: random.Random) -> None:
        self.repository = repository
        self.chance = chance
        self.path = "a"
        self.exists = False
        self.fill: Any = None
        self.states: list[tuple[str, npt.NDArray[Any] | None]] = []

    async def step(self) -> None:
        session = await self.repository.writable_session("main")
        steps: list[Any] = [
            self.create,
            self.write,
            self.write,
            self.write,
            self.resize,
            self.attributes,
        ]
        steps += [self.delete] if self.chance.random() < 0.3 else []
        if self.repository.spec_version > 1 and self.exists:
            steps += [self.move, self.shift]
        step: Any = self.chance.choice(steps if self.exists else [self.create, self.other])
        made: str | None = await step(session)
        if made is None:
            made = str(await session.commit(step.__name__, allow_empty=True))
        now = await self.repository.readonly_session("main")
        self.states.append((made, await read(now, self.path) if self.exists else None))

    async def create(self, session: Session) -> None:
        shape = (self.chance.randint(1, 9), self.chance.randint(1, 9))
        sharded = self.chance.random() < 0.3
        array = await za.create_array(
            session.store,
            name=self.path,
            shape=shape,
            chunks=(2, 2) if sharded else (self.chance.randint(1, 4), 3),
            shards=(4, 4) if sharded else None,
            dtype=self.chance.choice(["f4", "f8", "i2"]),
            fill_value=self.chance.choice([0, 3]),
            overwrite=True,
        )
        self.exists, self.fill = True, array.metadata.fill_value
        await array.setitem((slice(0, 4), slice(0, 4)), self.chance.randint(1, 99))

    async def other(self, session: Session) -> None:
        await za.create_array(session.store, name="b", shape=(1,), dtype="i4", overwrite=True)

    async def write(self, session: Session) -> None:
        array = await za.open_array(store=session.store, path=self.path)
        place = tuple(
            slice(start := self.chance.randrange(size), start + self.chance.randint(1, 5))
            for size in array.shape
        )
        await array.setitem(place, self.chance.randint(1, 99))

    async def resize(self, session: Session) -> None:
        array = await za.open_array(store=session.store, path=self.path)
        await array.resize((self.chance.randint(1, 9), self.chance.randint(1, 9)))

    async def attributes(self, session: Session) -> None:
        array = await za.open_array(store=session.store, path=self.path)
        await array.update_attributes({"n": self.chance.randint(0, 9)})

    async def delete(self, session: Session) -> None:
        await session.store.delete_dir(self.path)
        self.exists = False

    async def move(self, _: Session) -> str:
        session = await self.repository.rearrange_session("main")
        target = "a2" if self.path == "a" else "a"
        await session.move(f"/{self.path}", f"/{target}")
        self.path = target
        return str(await session.commit("moved"))

    async def shift(self, session: Session) -> None:
        await session.shift_array(f"/{self.path}", (self.chance.choice([-1, 1]), 0))
        await za.create_group(store=session.store, path="g", overwrite=True)

    def stack(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], list[str]]:
        """Return the values that a cube of this shape has, and the snapshots."""
        first = next(row for row, (_, it) in enumerate(self.states) if it is not None)
        states = self.states[first:]
        there = [it for _, it in states if it is not None]
        kinds = {it.dtype for it in there}
        missing = np.nan if any(it.kind == "f" for it in kinds) else self.fill
        found = np.full((len(states), *shape), missing, np.result_type(*kinds))
        for row, (_, values) in zip(found, states, strict=True):
            if values is not None:
                row[tuple(map(slice, values.shape))] = values
        return found, [name for name, _ in states]


async def test_cells_that_a_version_does_not_have_are_missing(repository: Repository) -> None:
    """Smaller arrays, and none; not those before the first that has it."""
    await create(repository, [9], "b")
    await create(repository, [1.0, 2.0])
    await resize(repository, (3,))
    await delete(repository)
    found = await load(repository)
    np.testing.assert_array_equal(found.values, [[1, 2, np.nan], [1, 2, 0], [np.nan] * 3])
    assert found.exists.values.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("values", "options", "missing"),
    [
        ([1, 2], {"dtype": "i4", "fill_value": 5}, 5),
        ([1, 2], {"dtype": "i4", "attributes": {"_FillValue": -1}}, np.nan),
        ([True, False], {"fill_value": False}, False),
        (["x", "yy"], {"dtype": str, "fill_value": ""}, ""),
        (np.array([1, 2], "M8[s]"), {}, np.datetime64("NaT", "s")),
        ([1.5, 2.5], {"fill_value": 7.0}, np.nan),
    ],
)
async def test_missing_cells_are_masked_where_that_is_possible(
    repository: Repository, values: Any, options: dict[str, Any], missing: Any
) -> None:
    """Otherwise they are the fill value."""
    await create(repository, values, **options)
    await delete(repository)
    found = (await load(repository)).values
    np.testing.assert_array_equal(found[0], np.asarray(values))
    np.testing.assert_array_equal(found[1], np.array([missing] * 2, found.dtype))


async def test_the_value_of_missing_cells_can_be_given(repository: Repository) -> None:
    """If the data type has it."""
    await create(repository, np.array([1, 2], "u1"))
    await delete(repository)
    assert (await load(repository, missing=255)).values.tolist() == [[1, 2], [255, 255]]
    for wrong in (256, "x", [1, 2, 3]):
        with pytest.raises(InvalidInputError, match="missing="):
            await load(repository, missing=wrong)


async def test_moves_and_replacements_are_followed() -> None:
    """By the id of the node, and where that is not there, by its path."""
    async with Repository.create(memory_url()) as repository:
        await create(repository, [1, 1], "old")
        await create(repository, [2, 2, 2], "old")  # another node at the same path
        session = await repository.rearrange_session("main")
        await session.move("/old", "/new")
        await session.commit("moved")
        await create(repository, [9, 9], "old")  # not the array that is asked about
        await change(repository, 0, 3, "new")
        found = await load(repository, "new", missing=0)
        assert found.values.tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2], [2, 2, 2], [3, 2, 2]]


@pytest.mark.parametrize("spec", [1, 2])
async def test_inline_and_virtual_chunks_are_read(spec: int) -> None:
    """Each once; a source that changed is an error, not other values."""
    prefix = "https://example.org/data/"
    config = RepositoryConfig(
        virtual_chunk_containers=(VirtualChunkContainer(prefix, HttpStore()),)
    )
    async with open_storage(memory_url()) as bucket:
        counted = LatencyStorage(bucket, seconds=0)
        await bucket.put("f", b"abcdefgh")
        access: Any = {prefix: counted}
        async with Repository.create(
            memory_url(), spec_version=spec, config=config, authorize_virtual_chunk_access=access
        ) as repository:
            await create(repository, np.zeros(6, "u1"), chunks=(2,), compressors=None, filters=None)
            session = await repository.writable_session("main")
            written = (await bucket.get("f")).version.token
            session.store.set_virtual_ref(
                "a/c/1", f"{prefix}f", offset=2, length=2, checksum=written
            )
            await session.commit("virtual")
            await change(repository, slice(4, 6), [8, 9])
            found = await load(repository)
            assert found.values.tolist()[1:] == [[0, 0, 99, 100, 0, 0], [0, 0, 99, 100, 8, 9]]
            assert counted.requests["get"] == 1
            await bucket.put("f", b"ABCDEFGH")
            with pytest.raises(VirtualChunkError):
                await load(repository)


async def test_what_expiry_left_is_stacked(repository: Repository) -> None:
    """Also after the files of what expired were deleted."""
    for day in range(5):
        if day == 0:
            await create(repository, [0.0] * 8, day=day)
        else:
            await change(repository, day, float(day), day=day)
    await repository.expire_snapshots(clock.from_us(BEGAN_US + 3 * DAY_US))
    await repository.garbage_collect(datetime.now(UTC))
    found = await load(repository)
    np.testing.assert_array_equal(found.values[:, :5], [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]])


async def test_few_chunks_are_read_at_a_time_and_a_cancelled_read_ends(tmp_path: Path) -> None:
    """Sixteen; none is under way when the cancellation arrives."""
    async with Repository.create(tmp_path / "r") as repository:
        await create(repository, np.random.default_rng(0).random((100, 100)), chunks=(100, 1))
    async with open_storage(str(tmp_path / "r")) as storage:
        held = _Holding(storage)
        async with Repository.open(held) as repository:
            dataset = await repository.cube("a")
            held.released.clear()
            await cancelled_when(dataset.load_async(), lambda: held.running == 16)
            assert (held.running, held.most) == (0, 16)
            held.released.set()
            await (await repository.cube("a")).load_async()
            assert held.most == 16


class _Holding(WrappedStorage):
    """Holds reads of chunks until they are released."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.running = self.most = 0
        self.released = asyncio.Event()
        self.released.set()

    async def before(self, operation: str, key: str) -> None:
        if not key.startswith("chunks/"):
            return
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.released.wait()
        finally:
            self.running -= 1


async def test_days_have_the_state_at_their_end(repository: Repository) -> None:
    """Days without a commit have that of the day before."""
    await create(repository, [0], day=0.5)
    await change(repository, 0, 1, day=0.75)
    await change(repository, 0, 2, day=3)
    await change(repository, 0, 3, day=3.999)
    found = await load(repository, along="days")
    assert found.values[:, 0].tolist() == [1, 1, 1, 3]
    ends = np.datetime64("2024-01-02", "us") + np.arange(4) * np.timedelta64(1, "D")
    np.testing.assert_array_equal(found.known_at.values, ends - np.timedelta64(1, "us"))
    # Nothing of a day is known before it is over.
    assert found.sel(known_at="2024-01-04T12:00", method="ffill").item() == 1
    assert found.sel(known_at="2024-01-04").values.tolist() == [[3]]
    assert (await load(repository, along="days", every=2)).values[:, 0].tolist() == [1, 3]
    assert (await load(repository, along="days", limit=2)).values[:, 0].tolist() == [1, 3]


@pytest.mark.parametrize("along", ["commits", "days"])
def test_times_ascend_whatever_clocks_said(along: Any) -> None:
    """In the order of the ancestry: a commit was not known before its parent."""
    times = [2 * DAY_US + 5, DAY_US, 2 * DAY_US + 5, 4 * DAY_US]
    infos = [SnapshotInfo(SnapshotId.random(), None, time, "") for time in times]
    chosen, known = choose(infos, Choice(along))
    if along == "commits":
        assert chosen == infos
        assert (known - 2 * DAY_US).tolist() == [5, 6, 7, 2 * DAY_US]
    else:
        assert chosen == [infos[2], infos[2], infos[3]]
        assert known.tolist() == [3 * DAY_US - 1, 4 * DAY_US - 1, 5 * DAY_US - 1]


async def test_versions_are_chosen(repository: Repository) -> None:
    """By refs, times, and numbers."""
    ids = [await create(repository, [0], day=0)]
    ids += [await change(repository, 0, day, day=day) for day in range(1, 9)]

    async def chosen(**choice: Any) -> list[int]:
        values: list[int] = (await load(repository, **choice)).values[:, 0].tolist()
        return values

    assert await chosen(ref="main~2") == list(range(7))
    assert await chosen(since=ids[3]) == list(range(3, 9))
    assert await chosen(since="main~1") == [7, 8]
    assert await chosen(since=clock.from_us(BEGAN_US + 4 * DAY_US)) == [4, 5, 6, 7, 8]
    assert await chosen(until=clock.from_us(BEGAN_US + 4 * DAY_US), since=ids[2]) == [2, 3, 4]
    assert await chosen(every=3) == [2, 5, 8]
    assert await chosen(every=3, limit=2) == [5, 8]
    assert await chosen(limit=1) == [8]


async def test_a_bad_choice_is_one_sentence(repository: Repository) -> None:
    """It says what was asked for, and what to do."""
    await create(repository, [0], "g/a", day=0)
    await create(repository, [0], "a", day=1)
    first = (await repository.cube("a")).snapshot_id.values[0].item()
    for choice, error, words in (
        ({"along": "years"}, InvalidInputError, "along='days'"),
        ({"every": 0}, InvalidInputError, "every must be at least 1"),
        ({"limit": True}, InvalidInputError, "limit must be at least 1"),
        ({"ref": "mainn"}, NotFoundError, "'main' meant"),
        ({"ref": "main~1", "since": first}, InvalidInputError, "since="),
        ({"since": datetime.now(UTC)}, InvalidInputError, "No commit"),
        ({"since": first, "until": BEGAN, "along": "days"}, InvalidInputError, "No commit"),
        ({"chunks": {"time": 1}}, InvalidInputError, r"\['time'\].*known_at"),
    ):
        with pytest.raises(error, match=words):
            await repository.cube("a", **choice)
    with pytest.raises(NodeNotFoundError, match="of 'main'"):
        await repository.cube("b")
    with pytest.raises(NodeNotFoundError, match=r"group.*/g/a"):
        await repository.cube("g")
    with pytest.raises(InvalidInputError, match=r"\.\."):
        await repository.cube("../a")


async def test_versions_that_cannot_be_stacked_are_refused_by_name(repository: Repository) -> None:
    """With what can be done."""
    first = await create(repository, [0])
    await create(repository, [[0]])
    with pytest.raises(InvalidInputError, match=f"2 axes, and 1 in snapshot {first}.*since="):
        await repository.cube("a")
    assert (await load(repository, since="main")).shape == (1, 1, 1)
    second = await create(repository, ["x"], dtype=str, fill_value="")
    await create(repository, [1])
    with pytest.raises(InvalidInputError, match=f"int64, and .* in snapshot {second}"):
        await repository.cube("a", since=second)
    await create(repository, [0], "known_at")
    with pytest.raises(InvalidInputError, match="'known_at'"):
        await repository.cube("known_at")


async def test_more_versions_than_fit_are_refused(repository: Repository) -> None:
    """One clock that was wrong makes many days."""
    await create(repository, [0], day=-19_700)
    await change(repository, 0, 1, day=86_900)
    with pytest.raises(InvalidInputError, match=r"106,611 versions.*limit="):
        await repository.cube("a", along="days")
    assert (await load(repository, along="days", limit=3)).values.tolist() == [[0], [0], [1]]


async def test_damaged_chunks_are_format_errors(repository: Repository) -> None:
    """Too short, and undecodable ones, by place."""
    await create(repository, np.random.default_rng(0).random(400), chunks=(400,))
    await change(repository, ..., 1.5)
    dataset = await repository.cube("a")
    for key, data in (await objects(repository.storage)).items():
        if key.startswith("chunks/"):
            await repository.storage.put(key, b"\0" * len(data))
    with pytest.raises(FormatError, match=r"\(0,\) of '/a' cannot be decoded"):
        await dataset.load_async()


@pytest.mark.parametrize("repository", [2], indirect=True)
@pytest.mark.parametrize("name", ["a", "x"])
@pytest.mark.parametrize(
    "broken",
    [
        b"{",
        b"[]",
        b"{}",
        b"[" * 100_000,
        {"shape": [3, 3]},
        {"node_type": "group"},
        {"attributes": [1]},
        {"dimension_names": 5},
    ],
    ids=range(8),
)
async def test_damaged_documents_are_format_errors(
    repository: Repository, broken: bytes | dict[str, Any], name: str
) -> None:
    """Of the array, and of a coordinate."""
    for each in ("x", "a"):
        await create(repository, [1.0, 2.0], each, dimension_names=("x",))
    session = await repository.writable_session("main")
    node = session.workspace.base.nodes[f"/{name}"]
    if isinstance(broken, dict):
        broken = json.dumps(json.loads(node.user_data) | broken).encode()
    session.workspace.set_node(node.path, broken, node.array)
    await session.commit("damaged")
    with pytest.raises(FormatError, match=f"/{name}"):
        await repository.cube("a")


async def test_impossible_times_are_format_errors(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would overflow what shows them."""
    await create(repository, [0])
    tip = await repository.lookup_branch("main")
    info = await repository.lookup_snapshot(tip)
    broken = type(info)(info.id, None, 1 << 63, info.message)

    async def ancestry(_: Any) -> AsyncIterator[Any]:
        yield broken

    monkeypatch.setattr(repository.engine.history, "ancestry", ancestry)
    with pytest.raises(FormatError, match="microseconds after 1970"):
        await repository.cube("a")


async def test_datasets_have_the_coordinates_beside_the_array(repository: Repository) -> None:
    """Decoded as xarray does, and as long as the largest version."""
    times = np.datetime64("2024-01-01", "ns") + np.arange(4) * np.timedelta64(1, "h")
    data = xr.Dataset(
        {"t": (("time", "x"), np.arange(8.0).reshape(4, 2), {"units": "K"})},
        {"time": times, "x": [10.0, 20.0], "height": 2.0, "name": ("x", ["a", "b"])},
    )
    data.t.encoding = {"scale_factor": 0.5, "dtype": "i2", "_FillValue": -1}
    session = await repository.writable_session("main")
    await to_icechunk(data.isel(time=slice(0, 2)), session)
    await session.commit("begin")
    session = await repository.writable_session("main")
    await to_icechunk(data.isel(time=slice(2, 4)), session, append_dim="time")
    await session.commit("appended")
    found = await load(repository, "t")
    assert found.dims == ("known_at", "time", "x")
    assert found.attrs["units"] == "K"
    xr.testing.assert_equal(found.isel(known_at=1).drop_vars(OWN), data.t.drop_vars("height"))
    assert found.height.item() == 2.0
    assert found.coords["name"].values.tolist() == ["a", "b"]
    assert np.isnan(found.values[0, 2:]).all()
    np.testing.assert_array_equal(found.values[0, :2], data.t.values[:2])


async def test_coordinates_that_changed_have_values_for_each_version(
    repository: Repository,
) -> None:
    """A window that rolls on: positions mean other times in each version."""
    for day in range(3):
        hours = np.arange(day, day + 4.0)
        await create(repository, hours, "time", dimension_names=("time",))
        await create(repository, hours * 10, "t", dimension_names=("time",))
    dataset = await (await repository.cube("t", every=2)).load_async()
    assert "time" not in dataset.coords
    assert dataset.time_as_known.dims == ("known_at", "time")
    assert dataset.time_as_known.values[:, 0].tolist() == [0, 1, 2]
