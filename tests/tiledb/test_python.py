"""Arrays that TileDB-Py writes, in the types that its users see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.tiledb import open_array, open_group

if TYPE_CHECKING:
    from pathlib import Path

theirs: Any = pytest.importorskip(
    "tiledb", reason="TileDB-Py is not installed: see the dependency group tiledb"
)
pa: Any = pytest.importorskip("pyarrow", reason="scans are Arrow, which is not installed")
# TileDB-Py itself uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


async def test_dense_values_have_the_same_types(tmp_path: Path) -> None:
    """Moments, text and numbers, by slices of coordinates."""
    uri = str(tmp_path / "dense")
    dims = [
        theirs.Dim("y", domain=(1, 8), tile=3, dtype="int32"),
        theirs.Dim("x", domain=(-2, 3), tile=4, dtype="int32"),
    ]
    attrs = [
        theirs.Attr("t", dtype="float32", filters=theirs.FilterList([theirs.ZstdFilter()])),
        theirs.Attr("when", dtype="datetime64[ms]"),
        theirs.Attr("name", dtype="U0"),
    ]
    theirs.Array.create(uri, theirs.ArraySchema(theirs.Domain(*dims), attrs))
    rng = np.random.default_rng(1)
    with theirs.open(uri, "w") as array:
        array[:] = {
            "t": rng.normal(size=(8, 6)).astype("f4"),
            "when": rng.integers(0, 10**12, (8, 6)).astype("M8[ms]"),
            "name": np.array([[f"{y} {x} ä" for x in range(6)] for y in range(8)], "O"),
        }
    with theirs.open(uri) as array:
        expected = array[:]
    async with open_array(uri) as array:
        found = await array.read([slice(2, 7), slice(-1, 2)])
    assert found["t"].dtype == np.float32
    assert found["when"].dtype == np.dtype("M8[ms]")
    for name in ("t", "when", "name"):
        np.testing.assert_array_equal(found[name], expected[name][1:6, 1:4])


async def test_sparse_table_is_what_tiledb_returns_as_a_table(tmp_path: Path) -> None:
    """With nulls, enumerations and a filter."""
    uri = str(tmp_path / "sparse")
    dims = [
        theirs.Dim("id", domain=(0, 10_000), tile=100, dtype="int64"),
        theirs.Dim("sample", domain=(None, None), dtype="ascii"),
    ]
    attrs = [
        theirs.Attr("value", dtype="float64", nullable=True),
        theirs.Attr("kind", dtype="int8", enum_label="kinds"),
        theirs.Attr("note", dtype="ascii", var=True),
    ]
    schema = theirs.ArraySchema(
        theirs.Domain(*dims),
        attrs,
        enums=[theirs.Enumeration("kinds", ordered=False, values=["a", "bb", "ccc"])],
        sparse=True,
        capacity=50,
    )
    theirs.Array.create(uri, schema)
    rng = np.random.default_rng(2)
    ids = rng.permutation(10_000)[:400]
    samples = np.array([f"s{it % 7}" for it in ids], "S")
    with theirs.open(uri, "w") as array:
        array[ids, samples] = {
            "value": np.where(ids % 3 == 0, np.nan, ids / 2),
            "kind": (ids % 3).astype("i1"),
            "note": np.array([f"note {it % 5}" for it in ids], "O"),
        }
    with theirs.open(uri) as array:
        table = array.query(return_arrow=True).df[:]
    async with open_array(uri) as array:
        scan = await array.scan()
        found = await scan.to_table()
        some = await (await array.scan(["id", "kind"], [("id", "<", 500)])).to_table()
    names = found.column_names
    ours = found.to_pylist()
    assert sorted(map(repr, ours)) == sorted(map(repr, table.select(names).to_pylist()))
    assert some.column_names == ["id", "kind"]
    assert sorted(some.column("id").to_pylist()) == sorted(ids[ids < 500].tolist())
    assert set(some.column("kind").to_pylist()) == {"a", "bb", "ccc"}


async def test_groups_and_metadata_are_those_that_tiledb_wrote(tmp_path: Path) -> None:
    """Values of all types that its users can write."""
    root, inside = str(tmp_path / "group"), str(tmp_path / "group" / "array")
    theirs.Group.create(root)
    dim = theirs.Dim("x", domain=(0, 3), tile=2, dtype="int32")
    theirs.Array.create(inside, theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("a")]))
    values = {"text": "ä", "number": 5, "float": 2.5, "many": (1, 2, 3), "bytes": b"\x00\xff"}
    with theirs.open(inside, "w") as array:
        for key, value in values.items():
            array.meta[key] = value
    with theirs.Group(root, "w") as group:
        group.add("array", name="inside", relative=True)
        group.meta["about"] = "a group"
    async with open_group(root) as opened:
        assert set(opened.members) == {"inside"}
        assert (await opened.metadata())["about"].plain() == "a group"
        member = await opened.array("inside")
        found = {key: it.plain() for key, it in (await member.metadata()).items()}
    assert found == {**values, "many": [1, 2, 3]}


async def test_consolidated_metadata_is_seen_when_tiledb_sees_it(tmp_path: Path) -> None:
    """Before, after a consolidation, and after a vacuum, which takes the moments in between."""
    uri = str(tmp_path / "array")
    dim = theirs.Dim("x", domain=(0, 3), tile=2, dtype="int32")
    theirs.Array.create(uri, theirs.ArraySchema(theirs.Domain(dim), [theirs.Attr("a")]))
    for time in (10, 20, 30):
        with theirs.open(uri, "w", timestamp=time) as array:
            array.meta["last"], array.meta[f"at {time}"] = time, time
            if time == 20:
                del array.meta["at 10"]

    async def check() -> list[int]:
        sizes: list[int] = []
        for end in (5, 10, 20, 25, 30, 99):
            with theirs.open(uri, timestamp=end) as array:
                expected = dict(array.meta.items())
            async with open_array(uri, end=end) as array:
                assert {key: it.plain() for key, it in (await array.metadata()).items()} == expected
            sizes.append(len(expected))
        return sizes

    whole = await check()
    assert whole == [0, 2, 2, 2, 3, 3]
    mode = {"sm.consolidation.mode": "array_meta", "sm.vacuum.mode": "array_meta"}
    theirs.consolidate(uri, config=theirs.Config(mode))
    assert await check() == whole
    theirs.vacuum(uri, config=theirs.Config(mode))
    assert await check() == [0, 0, 0, 0, 3, 3]


async def test_filters_of_attributes_leave_out_tiles_and_no_row(tmp_path: Path) -> None:
    """By statistics of numbers, of floats with NaN, and of text that may be null."""
    uri, count = str(tmp_path / "sparse"), 400
    attrs = [
        theirs.Attr("number", dtype="int32"),
        theirs.Attr("float", dtype="float64"),
        theirs.Attr("text", dtype="ascii", var=True, nullable=True),
    ]
    dim = theirs.Dim("x", domain=(0, count), tile=50, dtype="int64")
    schema = theirs.ArraySchema(theirs.Domain(dim), attrs, sparse=True, capacity=20)
    theirs.Array.create(uri, schema)
    at = np.arange(count)
    texts = [None if it % 9 == 0 else f"{it // 40:02}" for it in range(count)]
    with theirs.open(uri, "w") as array:
        array[at] = {
            "number": (at * 7).astype("i4"),
            "float": np.where(at % 60 == 1, np.nan, at / 3),
            "text": pa.array(texts, pa.string()),
        }
    async with open_array(uri) as array:
        every: Any = await (await array.scan()).to_table()
        assert every.num_rows == count
        field = pa.compute.field
        for expression, most in (
            (field("number") < 500, 80),
            (field("number") > 7 * count, 0),
            (field("float") > 120, 240),
            (~(field("float") <= 120), 240),  # so does a NaN
            (field("text") == "03", 60),
            (field("text").is_null() & (field("number") < 100), 20),
        ):
            scan = await array.scan(filters=expression)
            assert sum(it.cells for it in await scan.plan()) <= most
            found: Any = await scan.to_table()
            key = [("x", "ascending")]
            expected = every.filter(expression).sort_by(key)
            assert repr(found.sort_by(key).to_pylist()) == repr(expected.to_pylist())
