"""TileDB arrays and groups in the blocking facade."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

import icechunk_async.tiledb
from icechunk_async.errors import NotFoundError as NativeNotFoundError
from icechunk_async.sync import Repository, in_memory_storage, tiledb
from icechunk_async.sync.config import RepositoryConfig
from icechunk_async.sync.errors import InvalidInputError, NotFoundError
from icechunk_async.sync.storage import local_filesystem_storage
from tests.unit.tiledb.archives import ARCHIVES, golden_jobs, stored_results
from tests.unit.tiledb.virtual_arrays import access_to, expressible, placed, referring_config

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = ARCHIVES[-1]
pa = pytest.importorskip("pyarrow", reason="scans are Arrow, which is not installed")


def _repository(place: Path) -> Repository:
    return Repository.create(
        in_memory_storage(),
        config=RepositoryConfig.from_native(referring_config(place)),
        authorize_virtual_chunk_access=access_to(place),
    )


def test_every_public_name_has_a_counterpart() -> None:
    """Functions and the classes with methods that wait; plain values are the same."""
    waiting = {"TileDBArray", "TileDBGroup", "Scan", "open_array", "open_group"}
    writing = {"ingest_array", "write_virtual_array", "IngestedArray", "VirtualTiles"}
    assert set(tiledb.__all__) == waiting | writing
    assert set(tiledb.__all__) < set(icechunk_async.tiledb.__all__)
    for name in ("TileDBArray", "TileDBGroup", "Scan"):
        ours, native = getattr(tiledb, name), getattr(icechunk_async.tiledb, name)
        methods = {it for it in dir(ours) if not it.startswith("_")} - {"native", "handle"}
        assert {it.removesuffix("_async") for it in methods} <= set(dir(native)) | {
            "schema",
            "members",
            "dataset",
        }


def test_dense_array_is_read_as_tiledb_reads_it(tmp_path: Path) -> None:
    """At a time, by the path, and by a storage of the facade."""
    place = placed(NEWEST, "features-0", tmp_path)
    query = next(it for it in golden_jobs(NEWEST) if it["number"] == "features-0")["queries"][0]
    expected = stored_results(NEWEST, "features-0", 0)
    assert expected is not None
    url = f"tiledb+{place.as_uri()}"
    for location in (place, url, local_filesystem_storage(str(place))):
        with tiledb.open_array(location, end=query["end"]) as array:
            assert array.shape == (1000,)
            found = array.read([slice(0, 1000)], ["a0"])["a0"]
            np.testing.assert_array_equal(found, expected["a0/values"])
            assert array.read([7], ["a0"])["a0"].shape == ()
            assert array.metadata() == {}
            with pytest.raises(InvalidInputError, match="dense"):
                array.scan()
    with tiledb.open_array(place, end=0) as array:
        assert array.native.fragments == ()


def test_methods_that_read_have_a_twin_to_await_and_the_text_of_the_native_ones(
    tmp_path: Path,
) -> None:
    """From any event loop; errors are the facade's."""
    with tiledb.open_array(placed(NEWEST, "features-0", tmp_path)) as array:
        there = asyncio.run(array.read_async([slice(0, 9)], ["a0"]))
        np.testing.assert_array_equal(there["a0"], array.read([slice(0, 9)], ["a0"])["a0"])
        with pytest.raises(InvalidInputError, match="dense"):
            asyncio.run(array.scan_async())
    native = icechunk_async.tiledb
    assert tiledb.TileDBArray.read.__doc__ == native.TileDBArray.read.__doc__
    assert tiledb.ingest_array.__doc__ == native.ingest_array.__doc__


def test_sparse_array_is_scanned_in_batches_and_tables(tmp_path: Path) -> None:
    """With filters, and enumerations as their values."""
    place = placed(NEWEST, "features-2", tmp_path)
    with tiledb.open_array(place) as array:
        assert list(array.enumerations())
        every = array.scan().to_table()
        few = array.scan(["x"], [("x", "<", 500)])
        assert few.schema.names == ["x"]
        batches = list(few.batches())
        values = every.column("x").to_pylist()
        assert sorted(pa.Table.from_batches(batches).column("x").to_pylist()) == sorted(
            it for it in values if it < 500
        )
        assert 0 < sum(it.num_rows for it in batches) < every.num_rows


def test_group_opens_its_members(tmp_path: Path) -> None:
    """Of a group of old versions, whose members are the folders in it."""
    root = tmp_path / "group"
    placed(NEWEST, "features-1", root, name="grid")
    (root / "__tiledb_group.tdb").write_bytes(b"")
    with tiledb.open_group(root) as group:
        assert list(group.members) == ["grid"]
        assert group.array("grid").shape == (10,)
        assert group.metadata() == {}
        with pytest.raises(InvalidInputError, match="an array"):
            group.group("grid")


def test_missing_array_is_an_error_of_both_classes(tmp_path: Path) -> None:
    """As everywhere in the facade."""
    tmp_path.joinpath("file").write_bytes(b"")
    with (
        pytest.raises(NotFoundError, match="no TileDB array") as caught,
        tiledb.open_array(tmp_path),
    ):
        pass
    assert isinstance(caught.value, NativeNotFoundError)


def test_error_in_the_block_leaves_the_array_and_comes_out(tmp_path: Path) -> None:
    """Unchanged."""
    place = placed(NEWEST, "features-1", tmp_path)
    with pytest.raises(ZeroDivisionError), tiledb.open_array(place):
        raise ZeroDivisionError


def test_dense_array_becomes_a_part_of_a_repository(tmp_path: Path) -> None:
    """By a session that is committed by hand, and in one step, which finds nothing new later."""
    place = placed(NEWEST, "features-0", tmp_path)
    repository = _repository(place)
    session = repository.writable_session("main")
    with tiledb.open_array(place) as array:
        names = expressible(array.schema)
        tiles = tiledb.write_virtual_array(session, array, "by-hand", attributes=names, copy=True)
        expected = array.read(attributes=names)
    assert tiles.referenced > 0
    session.commit("by hand")
    (found,) = tiledb.ingest_array(repository, place, "grid", attributes=names, copy=True)
    assert (found.referenced, found.copied) == (tiles.referenced, tiles.copied)
    assert found.snapshot_id == repository.lookup_branch("main")
    assert tiledb.ingest_array(repository, place, "grid", attributes=names, copy=True) == ()
    store = repository.readonly_session("main").store
    for path in ("by-hand", "grid"):
        for name in names:
            made = zarr.open_array(store, path=f"{path}/{name}", mode="r")  # pyright: ignore[reportUnknownMemberType]
            np.testing.assert_array_equal(made[...], expected[name])


def test_where_cells_are_null_is_written_on_request(tmp_path: Path) -> None:
    """By both functions."""
    place = placed(NEWEST, "features-1", tmp_path)
    repository = _repository(place)
    session = repository.writable_session("main")
    with tiledb.open_array(place) as array:
        with pytest.raises(InvalidInputError, match="may be null"):
            tiledb.write_virtual_array(session, array, "by-hand", copy=True)
        tiledb.write_virtual_array(session, array, "by-hand", copy=True, validity=True)
        expected = array.read()["a"]
    session.commit("by hand")
    with pytest.raises(InvalidInputError, match="may be null"):
        tiledb.ingest_array(repository, place, "grid", copy=True)
    tiledb.ingest_array(repository, place, "grid", copy=True, validity=True)
    store = repository.readonly_session("main").store
    for path in ("by-hand", "grid"):
        made = zarr.open_array(store, path=f"{path}/a_validity", mode="r")  # pyright: ignore[reportUnknownMemberType]
        np.testing.assert_array_equal(made[...], ~np.ma.getmaskarray(expected))
