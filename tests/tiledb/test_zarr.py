"""Dense arrays that TileDB-Py writes, read by Zarr from references to their tiles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr.api.asynchronous as zarr_async

from icechunk_async.errors import IcechunkError, InvalidInputError
from icechunk_async.tiledb import ingest_array, open_array, write_virtual_array
from tests.unit.tiledb.virtual_arrays import referring

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async import Repository

theirs: Any = pytest.importorskip(
    "tiledb", reason="TileDB-Py is not installed: see the dependency group tiledb"
)
pa = pytest.importorskip("pyarrow")
# TileDB-Py itself uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SHAPE = (7, 10, 6)


def _schema(order: str) -> Any:
    """Return a schema with uneven tiles, dimensions that do not begin at 0, and several types."""
    dims = [
        theirs.Dim("z", domain=(1, 7), tile=3, dtype="int32"),
        theirs.Dim("y", domain=(3, 12), tile=4, dtype="int32"),
        theirs.Dim("x", domain=(0, 5), tile=5, dtype="int32"),
    ]
    shuffled = theirs.FilterList([theirs.ByteShuffleFilter(), theirs.ZstdFilter()])
    delta = theirs.FilterList([theirs.DoubleDeltaFilter()])
    return theirs.ArraySchema(
        theirs.Domain(*dims),
        [
            theirs.Attr("t", dtype="float32", filters=shuffled),
            theirs.Attr("when", dtype="datetime64[s]", filters=delta),
            theirs.Attr("wet", dtype="bool"),
            theirs.Attr("pair", dtype="int16,int16"),
        ],
        cell_order=order,
        tile_order=order,
    )


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
    pair = rng.integers(0, 9, (*shape, 2)).astype("i2").view([("f0", "i2"), ("f1", "i2")])
    return {
        "t": rng.normal(size=shape).astype("f4"),
        "when": rng.integers(0, 10**9, shape).astype("M8[s]"),
        "wet": rng.random(shape) < 0.5,
        "pair": pair[..., 0],
    }


@pytest.mark.blocks_the_loop
@pytest.mark.parametrize("order", ["row-major", "col-major"])
async def test_zarr_reads_what_tiledb_reads(order: str, tmp_path: Path) -> None:
    """In both orders of tiles and cells; where fragments overlap, tiles are copied."""
    place = tmp_path / "grid"
    theirs.Array.create(str(place), _schema(order))
    rng = np.random.default_rng(1)
    with theirs.open(str(place), "w", timestamp=1_000) as array:
        array[:] = _values(rng, SHAPE)
        array.meta["title"] = "a grid"
        array.meta["limits"] = (1.5, float("nan"))
    with theirs.open(str(place), "w", timestamp=2_000) as array:
        array[2:4, 3:7, 0:5] = _values(rng, (2, 4, 5))
    async with referring(place) as repository:
        for end, copied in ((1_500, 0), (None, 4)):
            session = await repository.writable_session("main")
            async with open_array(place, end=end) as opened:
                found = await write_virtual_array(
                    session, opened, "grid", copy=end is None, overwrite=end is None
                )
            # 3 x 3 x 2 tiles of four attributes.
            assert (found.referenced, found.copied) == (72 - copied, copied)
            await session.commit(f"at {end}")
            with theirs.open(str(place), timestamp=end) as array:
                await _check(repository, array)


async def _check(repository: Repository, array: Any) -> None:
    expected = array[:]
    group = await zarr_async.open_group(
        (await repository.readonly_session("main")).store, path="grid", mode="r"
    )
    assert dict(group.attrs) == {"title": "a grid"}

    async def values(name: str) -> Any:
        found: Any = await group.getitem(name)
        return await found.getitem(...)

    np.testing.assert_array_equal(await values("t"), expected["t"])
    np.testing.assert_array_equal((await values("when")).view("M8[s]"), expected["when"])
    np.testing.assert_array_equal(await values("wet"), expected["wet"])
    both = np.stack([expected["pair"]["f0"], expected["pair"]["f1"]], axis=-1)
    np.testing.assert_array_equal(await values("pair"), both)
    np.testing.assert_array_equal(await values("y"), np.arange(3, 13))


async def test_moments_of_dimensions_are_coordinates_with_units(tmp_path: Path) -> None:
    """As numbers with the units of CF."""
    place = tmp_path / "series"
    days = np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-07", "D")
    dim = theirs.Dim("day", domain=days, tile=np.timedelta64(3, "D"), dtype="datetime64[D]")
    schema = theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("", dtype="f8")])
    theirs.Array.create(str(place), schema)
    with theirs.open(str(place), "w") as array:
        array[:] = np.arange(7.0)
    async with referring(place) as repository:
        session = await repository.writable_session("main")
        async with open_array(place) as opened:
            await write_virtual_array(session, opened, overwrite=True)
        await session.commit("a series")
        store = (await repository.readonly_session("main")).store
        found: Any = await zarr_async.open_array(store=store, path="day")
        assert found.attrs["units"] == "days since 1970-01-01"
        assert found.metadata.dimension_names == ("day",)
        values: Any = await found.getitem(...)
        np.testing.assert_array_equal(values.view("M8[D]"), np.arange(days[0], days[1] + 1))
        # TileDB allows one attribute without a name.
        series: Any = await zarr_async.open_array(store=store, path="values")
        np.testing.assert_array_equal(await series.getitem(...), np.arange(7.0))


async def test_attribute_that_is_new_since_the_last_write_is_ingested_once(tmp_path: Path) -> None:
    """Though no fragment has it: all of its cells have the fill value."""
    place = tmp_path / "series"
    dim = theirs.Dim("x", domain=(0, 5), tile=3, dtype="int32")
    schema = theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("old", dtype="f8")])
    theirs.Array.create(str(place), schema)
    with theirs.open(str(place), "w", timestamp=1_000) as array:
        array[:] = np.arange(6.0)
    async with referring(place) as repository:
        assert len(await ingest_array(repository, place, "series")) == 1
        evolution = theirs.ArraySchemaEvolution()
        evolution.add_attribute(theirs.Attr("new", dtype="i4", fill=7))
        evolution.array_evolve(str(place))
        (found,) = await ingest_array(repository, place, "series")
        assert (found.end, found.referenced) == (1_000, 2)
        assert await ingest_array(repository, place, "series") == ()
        assert await ingest_array(repository, place, "series", history=True) == ()
        store = (await repository.readonly_session("main")).store
        made: Any = await zarr_async.open_array(store=store, path="series/new")
        assert np.asarray(await made.getitem(...)).tolist() == [7] * 6


def _enumeration(name: str, values: Any, *, is_ordered: bool = False) -> Any:
    return theirs.Enumeration(name, is_ordered, values)


@pytest.mark.blocks_the_loop
async def test_enumerations_and_nulls_come_with_their_meaning(tmp_path: Path) -> None:
    """Words as flags of CF, other values as a list; null cells in a second array."""
    place = tmp_path / "grid"
    enumerations = [
        _enumeration("colors", np.array(["red", "green", "blue"])),
        _enumeration("sizes", np.array([1, 10, 100], "i8"), is_ordered=True),
        _enumeration("phrases", np.array(["two words", "one"])),
        theirs.Enumeration("later", ordered=False, dtype=np.dtype("U0")),  # no words yet
    ]
    attributes = [
        theirs.Attr("color", dtype="i1", enum_label="colors", nullable=True),
        theirs.Attr("size", dtype="u1", enum_label="sizes"),
        theirs.Attr("phrase", dtype="i4", enum_label="phrases"),
        theirs.Attr("word", dtype="i4", enum_label="later"),
    ]
    dim = theirs.Dim("x", domain=(0, 9), tile=5, dtype="int32")
    theirs.Array.create(
        str(place), theirs.ArraySchema(theirs.Domain(dim), attributes, enums=enumerations)
    )
    is_null = np.arange(10) % 4 == 0
    colors = pa.array((np.arange(10) % 3).astype("i1"), mask=is_null)
    with theirs.open(str(place), "w") as array:
        array[:] = {
            "color": colors,
            "size": (np.arange(10) % 3).astype("u1"),
            "phrase": (np.arange(10) % 2).astype("i4"),
            "word": np.zeros(10, "i4"),
        }
    async with referring(place) as repository, open_array(place) as native:
        session = await repository.writable_session("main")
        await write_virtual_array(session, native, "grid", validity=True)
        about: dict[str, Any] = {}
        for name in ("color", "size", "phrase", "word", "color_validity"):
            made: Any = await zarr_async.open_array(store=session.store, path=f"grid/{name}")
            about[name] = dict(made.attrs)
            values = await made.getitem(...)
            if name == "color_validity":
                np.testing.assert_array_equal(values, ~is_null)
            if name == "size":
                np.testing.assert_array_equal(values, np.arange(10) % 3)
    assert about["color"]["flag_values"] == [0, 1, 2]
    assert about["color"]["flag_meanings"] == "red green blue"
    assert about["color"]["ancillary_variables"] == "color_validity"
    assert about["color_validity"] == {"flag_values": [0, 1], "flag_meanings": "null valid"}
    assert about["size"] == {
        "tiledb_enumeration": {"name": "sizes", "is_ordered": True, "values": [1, 10, 100]}
    }
    assert about["phrase"]["tiledb_enumeration"]["values"] == ["two words", "one"]
    assert "flag_meanings" not in about["phrase"]
    assert about["word"]["tiledb_enumeration"]["values"] == []


@pytest.mark.blocks_the_loop
@pytest.mark.parametrize("order", ["row-major", "col-major"])
async def test_text_is_what_tiledb_reads_at_each_moment(order: str, tmp_path: Path) -> None:
    """Empty text is not the fill value, also in a chunk of nothing else; bytes are copied too."""
    place = tmp_path / "grid"
    dims = [theirs.Dim(name, domain=(1, 6), tile=4, dtype="int32") for name in ("y", "x")]
    attributes = [
        theirs.Attr("plain", dtype="U0"),
        theirs.Attr("filled", dtype="ascii", var=True, fill="-"),
        theirs.Attr("raw", dtype="S0"),
    ]
    theirs.Array.create(
        str(place),
        theirs.ArraySchema(theirs.Domain(*dims), attributes, cell_order=order, tile_order=order),
    )

    def written(count: int, values: list[str]) -> dict[str, Any]:
        cells = np.array([values[n % len(values)] for n in range(count)], object)
        plain = cells.reshape(-1, 2)
        ascii_only = np.array([it.encode("ascii", "replace") for it in plain.flat], object)
        ascii_only = ascii_only.reshape(plain.shape)
        return {"plain": plain, "filled": ascii_only, "raw": ascii_only}

    with theirs.open(str(place), "w", timestamp=1_000) as array:
        array[1:5, 5:7] = written(8, [""])
    with theirs.open(str(place), "w", timestamp=2_000) as array:
        array[2:4, 4:6] = written(4, ["é", "two\nlines", "日本"])
    names = ["plain", "filled", "raw"]
    async with referring(place) as repository:
        with pytest.raises(InvalidInputError, match=r"'raw'.*copied to an array of bytes"):
            await ingest_array(repository, place, "grid", attributes=["raw"])
        found = await ingest_array(
            repository, place, "grid", history=True, attributes=names, copy=True
        )
        assert [(it.end, it.referenced, it.copied) for it in found] == [(1000, 0, 3), (2000, 0, 6)]
        for it in found:
            store = (await repository.readonly_session(snapshot_id=it.snapshot_id)).store
            with theirs.open(str(place), timestamp=it.end) as array:
                expected = array[:]
            read: dict[str, Any] = {}
            for name in names:
                made: Any = await zarr_async.open_array(store=store, path=f"grid/{name}")
                read[name] = np.asarray(await made.getitem(...)).tolist()
            # NumPy drops the NUL at the end of what was never written, and so does TileDB-Py.
            shown = [[text.rstrip("\0") for text in row] for row in read["plain"]]
            assert shown == expected["plain"].tolist()
            assert read["filled"] == [[b.decode() for b in row] for row in expected["filled"]]
            assert (read["plain"][0][0], read["plain"][3][4]) == ("\0", "")
            assert read["raw"] == expected["raw"].tolist()
            assert (read["raw"][0][0], read["raw"][3][4]) == (b"\x80", b"")


@pytest.mark.blocks_the_loop
@pytest.mark.parametrize("order", ["row-major", "col-major"])
async def test_cells_of_any_length_are_what_tiledb_reads(order: str, tmp_path: Path) -> None:
    """Numbers, moments and bytes, of several fragments; and text of fixed length."""
    place = tmp_path / "grid"
    dims = [theirs.Dim(name, domain=(1, 6), tile=4, dtype="int32") for name in ("y", "x")]
    packed = theirs.FilterList([theirs.ZstdFilter()])
    attributes = [
        theirs.Attr("numbers", dtype="f8", var=True, filters=packed),
        theirs.Attr("short", dtype="u2", var=True),
        theirs.Attr("code", dtype="S3", filters=packed),
        theirs.Attr("letter", dtype="S1"),
    ]
    theirs.Array.create(
        str(place),
        theirs.ArraySchema(theirs.Domain(*dims), attributes, cell_order=order, tile_order=order),
    )
    rng = np.random.default_rng(3)

    def lists(shape: tuple[int, int], dtype: str) -> Any:
        found = np.empty(shape, object)
        for at in np.ndindex(shape):
            found[at] = rng.integers(0, 99, rng.integers(1, 5)).astype(dtype)
        return found

    for time_of, (low, high) in ((1_000, (1, 7)), (2_000, (3, 6))):
        shape = (high - low, high - low)
        codes = rng.integers(97, 122, (*shape, 3)).astype("u1").view("S3")[..., 0]
        with theirs.open(str(place), "w", timestamp=time_of) as array:
            array[low:high, low:high] = {
                "numbers": lists(shape, "f8"),
                "short": lists(shape, "u2"),
                "code": codes,
                "letter": codes.astype("S1"),
            }
    with theirs.open(str(place)) as array:
        expected = array[:]
    async with referring(place) as repository:
        (found,) = await ingest_array(repository, place, "grid", copy=True)
        assert (found.referenced, found.copied) == (0, 16)
        store = (await repository.readonly_session("main")).store
        for name, dtype in (("numbers", "<f8"), ("short", "<u2"), ("code", ""), ("letter", "")):
            made: Any = await zarr_async.open_array(store=store, path=f"grid/{name}")
            cells = np.asarray(await made.getitem(...))
            assert cells.shape == (6, 6)
            assert made.attrs.get("element_dtype", "") == dtype
            for cell, wanted in zip(cells.flat, expected[name].flat, strict=True):
                if dtype:
                    np.testing.assert_array_equal(np.frombuffer(cell, dtype), wanted)
                else:
                    assert cell == wanted


def _evolved(place: Path) -> None:
    """Write `a`, and later also `b`, which is new."""
    dim = theirs.Dim("x", domain=(0, 9), tile=10, dtype="int32")
    theirs.Array.create(
        str(place), theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("a", dtype="i4")])
    )
    with theirs.open(str(place), "w", timestamp=int(time.time() * 1000) + 5) as array:
        array[:] = np.arange(10, dtype="i4")
    evolution = theirs.ArraySchemaEvolution()
    evolution.add_attribute(theirs.Attr("b", dtype="f8"))
    evolution.timestamp(int(time.time() * 1000) + 20)
    evolution.array_evolve(str(place))
    with theirs.open(str(place), "w", timestamp=int(time.time() * 1000) + 50) as array:
        array[:] = {"a": np.arange(10, 20).astype("i4"), "b": np.ones(10)}


@pytest.mark.blocks_the_loop
async def test_history_has_the_attributes_of_each_moment(tmp_path: Path) -> None:
    """Those that are wanted and were there; moments without any of them are left out."""
    place = tmp_path / "grid"
    _evolved(place)

    async def arrays(repository: Repository, snapshot: Any, path: str) -> set[str]:
        session = await repository.readonly_session(snapshot_id=snapshot)
        group = await zarr_async.open_group(store=session.store, path=path, mode="r")
        return {name async for name, _ in group.arrays()}

    async with referring(place) as repository:
        for path, wanted, expected in (
            ("every", None, [{"a", "x"}, {"a", "b", "x"}]),
            ("both", ["b", "a"], [{"a", "x"}, {"a", "b", "x"}]),
            ("new", ["b"], [{"b", "x"}]),
        ):
            found = await ingest_array(repository, place, path, history=True, attributes=wanted)
            shown = [await arrays(repository, it.snapshot_id, path) for it in found]
            assert shown == expected
            again = await ingest_array(repository, place, path, history=True, attributes=wanted)
            assert again == ()
        with pytest.raises(InvalidInputError, match="no attribute 'c'"):
            await ingest_array(repository, place, "none", history=True, attributes=["a", "c"])


@pytest.mark.blocks_the_loop
async def test_snapshots_outlive_a_consolidation_and_not_a_vacuum(tmp_path: Path) -> None:
    """Which deletes what chunks refer to: reading them is an error, never other values."""
    place = tmp_path / "grid"
    dim = theirs.Dim("x", domain=(0, 9), tile=5, dtype="int32")
    schema = theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("a", dtype="i4")])
    theirs.Array.create(str(place), schema)
    for part in (slice(0, 5), slice(5, 10)):
        with theirs.open(str(place), "w") as array:
            array[part] = np.arange(part.start, part.stop, dtype="i4")
    async with referring(place) as repository:
        (found,) = await ingest_array(repository, place, "grid")
        assert found.referenced == 2
        session = await repository.readonly_session(snapshot_id=found.snapshot_id)
        made: Any = await zarr_async.open_array(store=session.store, path="grid/a")
        theirs.consolidate(str(place))
        np.testing.assert_array_equal(await made.getitem(...), np.arange(10))
        theirs.vacuum(str(place))
        with pytest.raises(IcechunkError, match="__fragments"):
            await made.getitem(...)
