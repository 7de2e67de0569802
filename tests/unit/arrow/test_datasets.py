"""Arrays as a dataset of pyarrow: rows, filters, fragments, and what is read for them."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import random
import threading
import traceback
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
import xarray
import zarr

from icechunk_async import arrow
from icechunk_async.arrow import rows
from icechunk_async.arrow.table import Cells
from icechunk_async.errors import IcechunkError, InvalidInputError, NodeNotFoundError, NotFoundError
from icechunk_async.sync import InvalidInputError as InputErrorOfSync
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from icechunk_async.sync.store import IcechunkStore
from icechunk_async.sync.xarray import open_dataset, to_icechunk
from tests.unit.arrow.queries import (
    keep_only,
    make_weather,
    objects_of,
    random_condition,
    sorted_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from icechunk_async.arrow.table import TableShape

ROUNDS = int(os.environ.get("HISTORY_SEEDS", "1")) * 40


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The weather, without statistics."""
    return make_weather(tmp_path_factory.mktemp("weather"))


def _create(folder: Path, dataset: xarray.Dataset, **encoding: Any) -> Repository:
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repository = Repository.create(local_filesystem_storage(str(folder)), config)
    session = repository.writable_session("main")
    to_icechunk(dataset, session, encoding=encoding)
    session.commit("Dataset")
    return repository


def _frame(repository: Repository) -> pa.Table:
    frame = open_dataset(repository.readonly_session("main")).to_dataframe().reset_index()
    return pa.Table.from_pandas(frame, preserve_index=False)


def test_columns_are_the_dimensions_the_coordinates_and_the_arrays(repository: Repository) -> None:
    """Unsigned numbers keep their type."""
    schema = arrow.dataset(repository).schema
    assert schema == pa.schema(
        [
            ("time", pa.timestamp("us")),
            ("lat", pa.float64()),
            ("lon", pa.float64()),
            ("station", pa.int32()),
            ("quality", pa.uint8()),
            ("t", pa.float32()),
        ]
    )


def test_rows_are_the_cells(repository: Repository) -> None:
    """As xarray's data frame has them."""
    found = arrow.dataset(repository).to_table()
    expected: Any = _frame(repository).select(found.schema.names)
    assert sorted_rows(found) == sorted_rows(expected.cast(found.schema))


def _check_random_filters(dataset: arrow.ArrayDataset, seed: int) -> None:
    table = dataset.to_table()
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        condition = random_condition(rng, table)
        names = table.schema.names
        columns = rng.sample(names, rng.randint(1, len(names)))
        expected = ds.dataset(table).to_table(filter=condition, columns=columns)
        found = dataset.to_table(filter=condition, columns=columns)
        assert found.schema == expected.schema
        assert sorted_rows(found) == sorted_rows(expected), str(condition)
        assert dataset.count_rows(condition) == len(expected), str(condition)


def test_random_filters_keep_the_rows_that_arrow_keeps_of_all_rows(repository: Repository) -> None:
    """With nulls, and with NaN in their place."""
    _check_random_filters(arrow.dataset(repository), seed=1)
    _check_random_filters(arrow.dataset(repository, nan_as_null=False), seed=2)


def test_statistics_change_no_answer_however_many_are_lost(tmp_path: Path) -> None:
    """All of them, and every second object."""
    repository = make_weather(tmp_path)
    repository.analyze()
    dataset = arrow.dataset(repository)
    _check_random_filters(dataset, seed=3)
    _check_random_filters(arrow.dataset(repository, nan_as_null=False), seed=4)
    objects = sorted(it for it in (tmp_path / "statistics").rglob("*") if it.is_file())
    assert objects
    for lost in objects[::2]:
        lost.unlink()
    _check_random_filters(arrow.dataset(repository), seed=5)


def test_comparisons_with_nan_lose_no_rows(tmp_path: Path) -> None:
    """None of them is true, so that the opposite of each is, whatever statistics say."""
    data = xarray.Dataset({"t": ("x", np.arange(20.0))}, {"x": np.linspace(0, 1, 20)})
    repository = _create(tmp_path, data, t={"chunks": (5,)})
    repository.analyze()
    dataset = arrow.dataset(repository)
    for name in ("t", "x"):
        column = pc.field(name)
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq):
            assert dataset.count_rows(filter=~compare(column, np.nan)) == 20, (name, compare)
            assert dataset.count_rows(filter=compare(column, np.nan)) == 0, (name, compare)


def test_packed_values_are_compared_as_they_are_shown(tmp_path: Path) -> None:
    """A negative scale turns the bounds of stored numbers round."""
    random_ = np.random.default_rng(3)
    values = random_.normal(280, 20, (40, 30))
    values[random_.random(values.shape) < 0.1] = np.nan
    values[:10] += 100
    dataset = xarray.Dataset({"t": (("y", "x"), values)})
    encoding = {
        "dtype": "int16",
        "scale_factor": -0.01,
        "add_offset": 300.0,
        "_FillValue": -32768,
        "chunks": (10, 10),
    }
    repository = _create(tmp_path, dataset, t=encoding)
    repository.analyze()
    found = arrow.dataset(repository)
    assert found.schema.field("x").type == pa.int64()
    _check_random_filters(found, seed=6)
    expected = ds.dataset(_frame(repository)).count_rows(filter=pc.field("t") > 350)
    assert found.count_rows(pc.field("t") > 350) == expected > 0


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array(["a", "bc", "ü", ""] * 3, dtype=object), pa.string()),
        (np.array([True, False, True, True] * 3), pa.bool_()),
        (np.array([2**64 - 1, 0, 5, 7] * 3, "u8"), pa.uint64()),
        (np.array([1.5, -0.0, np.inf, -np.inf] * 3, "f2"), pa.float32()),
        (np.array(["2020-01-01", "NaT", "1500-06-01", "2262-01-01"] * 3, "M8[s]"), None),
        (np.array([1, -1, 5, 7] * 3, "m8[h]"), pa.duration("us")),
    ],
    ids=["text", "bool", "uint64", "float16", "times", "durations"],
)
def test_values_of_any_type_can_be_filtered(
    tmp_path: Path, values: np.ndarray[Any, Any], kind: pa.DataType | None
) -> None:
    """With statistics where values have an order."""
    dataset = xarray.Dataset({"v": (("x",), values)})
    if values.dtype.kind == "M":
        dataset["v"].encoding["units"] = "days since 1970-01-01"
        dataset["v"].encoding["calendar"] = "proleptic_gregorian"
    repository = _create(tmp_path, dataset, v={"chunks": (5,)})
    repository.analyze()
    found = arrow.dataset(repository)
    if kind is not None:
        assert found.schema.field("v").type == kind
    _check_random_filters(found, seed=8)


@pytest.mark.parametrize("analyzed", [False, True])
def test_truth_values_of_which_some_are_missing_stay_truth_values(
    tmp_path: Path, *, analyzed: bool
) -> None:
    """Though NumPy has no missing truth value, and xarray decodes them to objects."""
    data = xarray.Dataset({"a": ("x", np.array([True, False, True, False, True]))})
    repository = _create(tmp_path, data, a={"chunks": (2,), "_FillValue": True})
    if analyzed:
        repository.analyze()
    dataset = arrow.dataset(repository)
    assert dataset.schema.field("a").type == pa.bool_()
    if open_dataset(repository.readonly_session("main"))["a"].dtype == bool:
        pytest.skip("this version of xarray stores integers, and decodes no value as missing")
    assert dataset.to_table()["a"].to_pylist() == [None, False, None, False, None]
    assert dataset.to_table(filter=~pc.field("a"))["a"].to_pylist() == [False, False]
    assert dataset.count_rows(pc.field("a").is_null()) == 3


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    """Nor any fragment."""
    dataset = xarray.Dataset({"v": (("x", "y"), np.zeros((0, 3)))}, {"x": np.zeros(0)})
    found = arrow.dataset(_create(tmp_path, dataset))
    assert found.count_rows() == 0
    assert found.to_table(filter=(pc.field("x") > 1) & (pc.field("v") > 1)).num_rows == 0
    assert list(found.get_fragments()) == []


def test_a_folder_whose_name_has_a_bar_is_opened(tmp_path: Path) -> None:
    """Only ``|icechunk:`` makes a URL of several steps."""
    folder = tmp_path / "a|b"
    _create(folder, xarray.Dataset({"v": ("x", np.arange(3))}))
    assert arrow.dataset(str(folder)).count_rows() == 3


def test_a_path_is_opened(tmp_path: Path) -> None:
    """A `Path`, as `Repository.open` takes it."""
    _create(tmp_path, xarray.Dataset({"v": ("x", np.arange(3))}))
    assert arrow.dataset(tmp_path).count_rows() == 3


def test_an_array_without_dimensions_is_one_row(tmp_path: Path) -> None:
    """Which a filter can drop."""
    found = arrow.dataset(_create(tmp_path, xarray.Dataset({"v": ((), 4.5)})))
    assert found.to_table().to_pylist() == [{"v": 4.5}]
    assert found.count_rows(pc.field("v") > 5) == 0


def test_a_filter_on_coordinates_reads_only_the_chunks_with_matching_cells(tmp_path: Path) -> None:
    """The other chunks do not even exist."""
    repository = make_weather(tmp_path)
    axes = {f"/{name}" for name in ("time", "lat", "lon")}
    kept = set.union(*(objects_of(repository, it) for it in axes))
    # The first 9 days, and latitudes above 20, are in two by one rows of chunks.
    kept |= objects_of(repository, "/t", lambda it: it[0] < 2 and it[1] == 0)
    keep_only(tmp_path, kept)
    early = pc.field("time") < pa.scalar(np.datetime64("2020-01-10", "us").item())
    found = arrow.dataset(repository).to_table(["t"], filter=early & (pc.field("lat") > 20))
    assert found.num_rows == 9 * 4 * 8
    with pytest.raises(Exception, match=r"missing|damaged|not found"):
        arrow.dataset(repository).to_table(["t"])


def test_a_filter_on_values_reads_only_chunks_whose_statistics_allow_it(tmp_path: Path) -> None:
    """The other chunks do not even exist."""
    repository = make_weather(tmp_path)
    repository.analyze()
    rows = arrow.dataset(repository).to_table().to_pylist()
    dataset = open_dataset(repository.readonly_session("main"))
    high = float(np.sort(dataset["t"].values[~np.isnan(dataset["t"].values)])[-3])
    place = np.argwhere(dataset["t"].values >= high) // (7, 4, 3)
    kept = objects_of(repository, "/t", lambda it: it in place.tolist())
    assert len(kept) <= 3
    for name in ("time", "lat", "lon"):
        kept |= objects_of(repository, f"/{name}")
    keep_only(tmp_path, kept)
    planned = arrow.dataset(repository).planned(pc.field("t") >= high)
    assert (planned.chunks, planned.all_chunks) == (len(np.unique(place, axis=0)), 36)
    found = arrow.dataset(repository).to_table(["lat", "t"], filter=pc.field("t") >= high)
    expected = [it for it in rows if it["t"] is not None and it["t"] >= high]
    key = operator.itemgetter("t")
    shown = [{"lat": it["lat"], "t": it["t"]} for it in expected]
    assert sorted(found.to_pylist(), key=key) == sorted(shown, key=key)


def test_chunks_and_rows_are_counted_before_any_is_read(tmp_path: Path) -> None:
    """For the filter of the dataset together with that of a scan; also where nothing is left."""
    repository = make_weather(tmp_path)
    axes = {f"/{name}" for name in ("time", "lat", "lon")}
    keep_only(tmp_path, set.union(*(objects_of(repository, it) for it in axes)))
    dataset = arrow.dataset(repository)
    assert dataset.planned() == arrow.PlannedRows(36, 36, 24 * 72, 24 * 72)
    north = dataset.filter(pc.field("lat") > 20)
    assert north.planned() == arrow.PlannedRows(12, 36, 24 * 4 * 8, 24 * 72)
    early = pc.field("time") < pa.scalar(np.datetime64("2020-01-10", "us").item())
    planned = north.planned(early)
    assert planned == arrow.PlannedRows(6, 36, 9 * 4 * 8, 24 * 72)
    assert "6 of 36 chunks" in str(planned)
    assert dataset.planned(pc.field("lon") < 0) == arrow.PlannedRows(0, 36, 0, 24 * 72)
    with pytest.raises(InvalidInputError, match="nothing"):
        dataset.planned(pc.field("nothing") > 0)


def test_columns_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    """Not for counts or expressions of other columns either."""
    repository = make_weather(tmp_path)
    kept = set[str]()
    for name in ("time", "lat", "lon", "quality"):
        kept |= objects_of(repository, f"/{name}")
    keep_only(tmp_path, kept)
    dataset = arrow.dataset(repository)
    assert dataset.count_rows() == 24 * 9 * 8
    assert dataset.to_table(["quality"]).num_rows == 24 * 9 * 8
    assert dataset.to_table({"double": pc.field("lat") + pc.field("lon")}).num_rows == 24 * 9 * 8


def test_the_first_rows_read_no_later_chunk(tmp_path: Path) -> None:
    """One load of 16 MiB at most."""
    values = np.zeros((12, 1 << 20), "f8")
    dataset = xarray.Dataset({"v": (("x", "y"), values + np.arange(12)[:, None])})
    repository = _create(tmp_path, dataset, v={"chunks": (1, 1 << 20)})
    keep_only(tmp_path, objects_of(repository, "/v", lambda it: it[0] < 2))
    assert arrow.dataset(repository).head(5, ["v"]).num_rows == 5
    batches = arrow.dataset(repository).to_batches(["v"])
    assert next(batches).num_rows == 1 << 17


def test_one_part_is_read_ahead_once_the_first_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows of the second are in use, the third is read, and no other."""
    dataset = xarray.Dataset({"v": (("x", "y"), np.arange(120.0).reshape(12, 10))})
    repository = _create(tmp_path, dataset, v={"chunks": (1, 10)})
    monkeypatch.setattr(rows, "LOAD_BYTES", 2 * 80)
    loads: list[int] = []
    third = threading.Event()
    load = Cells.load

    def noted(shown: xarray.Dataset, shape: TableShape, places: Any, *more: Any) -> Cells:
        loads.append(int(places[0][0]))
        if len(loads) == 3:
            third.set()
        return load(shown, shape, places, *more)

    monkeypatch.setattr(Cells, "load", staticmethod(noted))
    batches: Any = arrow.dataset(repository).to_batches(["v"], batch_size=5)
    for _ in range(2):
        next(batches)
        assert loads == [0]
    next(batches)
    assert third.wait(60)
    batches.close()
    assert loads == [0, 1, 2]


def test_coordinates_of_several_dimensions_count_in_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a value for each row of a part, however few they are on average."""
    places = np.arange(64.0 * 64).reshape(64, 64)
    dataset = xarray.Dataset(
        {"v": (("t", "y", "x"), np.zeros((40, 64, 64), "u1"))},
        {"lat": (("y", "x"), places), "lon": (("y", "x"), -places), "t": np.arange(40.0)},
    )
    repository = _create(tmp_path, dataset, v={"chunks": (1, 8, 8)})
    monkeypatch.setattr(rows, "LOAD_BYTES", 1 << 14)
    sizes: list[int] = []
    load = Cells.load

    def noted(*given: Any) -> Cells:
        cells = load(*given)
        sizes.append(sum(it.nbytes for it in cells.values))
        return cells

    monkeypatch.setattr(Cells, "load", staticmethod(noted))
    found = arrow.dataset(repository).to_table(["t", "lat", "lon", "v"])
    assert found.num_rows == 40 * 64 * 64
    assert sorted(found["lat"].to_numpy()) == np.repeat(places.reshape(-1), 40).tolist()
    assert max(sizes) <= 1 << 13
    assert len(sizes) <= 40 * 64 // 2


def test_fragments_have_each_row_once_and_say_where_they_lie(repository: Repository) -> None:
    """A filter leaves out those that cannot match."""
    dataset = arrow.dataset(repository, fragment_bytes=2048)
    fragments = list(dataset.get_fragments())
    assert len(fragments) > 8
    rows: list[dict[str, Any]] = []
    for fragment in fragments:
        table = fragment.to_table()
        assert fragment.count_rows() == len(table)
        # Nothing lies outside of what a fragment says.
        assert ds.dataset(table).count_rows(filter=fragment.partition_expression) == len(table)
        rows += table.to_pylist()
    key = operator.itemgetter("time", "lat", "lon")
    assert sorted(rows, key=key) == sorted(dataset.to_table().to_pylist(), key=key)
    southern = list(dataset.get_fragments(pc.field("lat") < -80))
    assert 0 < len(southern) < len(fragments)


def test_later_commits_do_not_change_a_dataset(tmp_path: Path) -> None:
    """And an older state can be asked for."""
    import zarr

    repository = make_weather(tmp_path)
    dataset = arrow.dataset(repository)
    before = dataset.to_table()
    session = repository.writable_session("main")
    array: Any = zarr.open_array(session.store, path="quality", mode="r+")
    array[:] = 0
    session.commit("Zeros")
    assert dataset.to_table().equals(before)
    assert not arrow.dataset(repository).to_table().equals(before)
    assert arrow.dataset(repository, ref="main~1").to_table().equals(before)


def test_datasets_and_fragments_pickle(repository: Repository) -> None:
    """With their filter."""
    dataset = arrow.dataset(repository, fragment_bytes=2048).filter(pc.field("lat") > 0)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.to_table().equals(dataset.to_table())
    assert copy.snapshot_id == dataset.snapshot_id
    fragment = pickle.loads(pickle.dumps(next(dataset.get_fragments())))
    assert fragment.to_table().num_rows > 0


def test_filters_of_a_dataset_add_up(repository: Repository) -> None:
    """Those of the dataset, and that of the scan."""
    north = arrow.dataset(repository).filter(pc.field("lat") > 0)
    assert north.count_rows() == 24 * 4 * 8
    assert north.filter(pc.field("lon") < 90).count_rows() == 24 * 4 * 2
    assert north.count_rows(pc.field("lon") < 90) == 24 * 4 * 2


@pytest.mark.parametrize("rows", [64, pytest.param(640, marks=pytest.mark.thorough)])
def test_memory_is_bounded_by_what_is_loaded_at_a_time(tmp_path: Path, rows: int) -> None:
    """128 MiB, or 1.25 GiB, pass through the memory of Arrow and of NumPy in parts."""
    values = np.random.default_rng(0).random((rows, 1 << 18))
    coords = {"x": np.arange(rows), "y": np.arange(1 << 18) / 2}
    dataset = xarray.Dataset({"v": (("x", "y"), values)}, coords)
    repository = _create(tmp_path, dataset, v={"chunks": (4, 1 << 16)})
    found = arrow.dataset(repository)
    most = total = 0
    tracemalloc.start()
    try:
        for batch in found.to_batches():
            total += batch.num_rows
            most = max(most, pa.total_allocated_bytes())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == values.size
    assert most < 24 << 20
    assert peak < 64 << 20


def test_parts_of_pyarrow_that_go_around_the_methods_find_no_rows(repository: Repository) -> None:
    """They raise, and neither return other rows nor end the process."""
    dataset: Any = arrow.dataset(repository)
    with pytest.raises(NotImplementedError, match="that cast"):
        ds.dataset([dataset]).to_table()
    with pytest.raises(NotImplementedError, match=r"to_reader\(\)"):
        dataset.sort_by("lat")
    with pytest.raises(NotImplementedError, match=r"to_reader\(\)"):
        dataset.join(dataset, "lat")


def test_programs_can_take_all_rows_as_a_stream(repository: Repository, tmp_path: Path) -> None:
    """By Arrow's interface of C, as `write_dataset` does."""
    dataset: Any = arrow.dataset(repository)
    assert sorted_rows(pa.table(dataset)) == sorted_rows(dataset.to_table())
    ds.write_dataset(dataset, tmp_path / "files", format="parquet")
    assert ds.dataset(tmp_path / "files").count_rows() == dataset.count_rows()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda it: it.to_table(["tt"]), "no column 'tt'.*time, lat, lon"),
        (lambda it: it.to_table(filter=pc.field("tt") > 1), "cannot be applied.*tt"),
        (lambda it: it.to_table(filter=pc.field("lat") == "x"), "cannot be applied"),
        (lambda it: it.to_table("lat"), "is the text 'lat'"),
    ],
    ids=["column", "filter", "literal", "text"],
)
def test_what_cannot_be_done_is_refused_with_advice(
    repository: Repository, ask: Callable[[arrow.ArrayDataset], Any], message: str
) -> None:
    """In one sentence, before anything is read."""
    with pytest.raises(InvalidInputError, match=message):
        ask(arrow.dataset(repository))


def test_errors_are_those_of_code_that_blocks(repository: Repository) -> None:
    """Of the dataset and of its parts: programs may know only the official names."""
    dataset = arrow.dataset(repository)
    for part in (dataset, next(iter(dataset.get_fragments()))):
        with pytest.raises(InputErrorOfSync):
            part.to_table(columns=["nothing"])
    with pytest.raises(InputErrorOfSync):
        dataset.planned(pc.field("nothing") > 0)


def test_damage_found_while_rows_are_read_shows_the_call_and_one_sentence(tmp_path: Path) -> None:
    """Neither the frames of xarray and Zarr, nor a chain of errors."""
    make_weather(tmp_path)
    dataset = arrow.dataset(tmp_path)
    for path in (tmp_path / "chunks").iterdir():
        path.unlink()
    with pytest.raises(IcechunkError, match="is missing") as caught:
        dataset.to_table()
    files = [it.filename for it in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("/xarray/" in it or "/zarr/" in it for it in files)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_unknown_arguments_of_scanners_are_refused(repository: Repository) -> None:
    """Those of pyarrow's scanners are taken."""
    dataset = arrow.dataset(repository)
    assert dataset.scanner(use_threads=False, batch_size=10).head(3).num_rows == 3
    with pytest.raises(NotImplementedError, match="cast"):
        dataset.replace_schema(dataset.schema)
    with pytest.raises(NotImplementedError, match="no particular order"):
        dataset.take([0])
    with pytest.raises(TypeError, match="no argument 'arrays'"):
        dataset.scanner(arrays=["t"])


def test_arguments_that_contradict_each_other_are_refused(repository: Repository) -> None:
    """And names that do not exist."""
    session = repository.readonly_session("main")
    assert arrow.dataset(session).snapshot_id == session.snapshot_id
    with pytest.raises(InvalidInputError, match="is of snapshot"):
        arrow.dataset(session, ref="main")
    with pytest.raises(InvalidInputError, match=r"can write.*Commit"):
        arrow.dataset(repository.writable_session("main"))
    with pytest.raises(InvalidInputError, match="go with a URL"):
        arrow.dataset(repository, storage_options={"a": 1})
    with pytest.raises(InvalidInputError, match="positive"):
        arrow.dataset(repository, batch_rows=0)
    with pytest.raises(InvalidInputError, match="names 'u', but the group has"):
        arrow.dataset(repository, arrays=["u"])
    with pytest.raises(InvalidInputError, match=r"arrays=\['t'\]"):
        arrow.dataset(repository, arrays="t")
    with pytest.raises(NodeNotFoundError, match="no group 'other'"):
        arrow.dataset(repository, "other")
    with pytest.raises(NotFoundError, match="'mani' is not a branch"):
        arrow.dataset(repository, ref="mani")


@pytest.mark.parametrize("lengths", [(2, 3), (2, 2)], ids=["two tables", "one table"])
def test_dimensions_do_not_depend_on_which_document_arrives_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
) -> None:
    """Rows are divided in one process, and read in others."""
    repository = Repository.create(local_filesystem_storage(str(tmp_path)))
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("a", shape=(2, 2), dtype="i4", dimension_names=["t", "x"])
    group.create_array("b", shape=lengths, dtype="i4", dimension_names=["x", "t"])
    session.commit("Two arrays")

    def found() -> list[list[str]]:
        named = [arrow.dataset(repository, arrays=[it]).schema.names for it in ("a", "b")]
        if lengths == (2, 2):
            named.append(arrow.dataset(repository).schema.names)
        return named

    expected = found()
    assert expected[0] == ["t", "x", "a"]
    own = IcechunkStore.get

    async def get(self: IcechunkStore, key: str, *args: Any, **options: Any) -> Any:
        # Documents are in memory, so that others arrive in the next turns of the loop.
        for _ in range(50 if key == "a/zarr.json" else 0):
            await asyncio.sleep(0)
        return await own(self, key, *args, **options)

    monkeypatch.setattr(IcechunkStore, "get", get)
    assert found() == expected
