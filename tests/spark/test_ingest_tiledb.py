"""Dense TileDB arrays that Spark ingests: their tiles become chunks, and stay in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark import ingest_virtual, ingested_files
from icechunk_async.sync import tiledb
from tests.spark.here import session_here
from tests.spark.sources import open_for
from tests.unit.tiledb.archives import ARCHIVES
from tests.unit.tiledb.virtual_arrays import expressible, placed

if TYPE_CHECKING:
    from pathlib import Path

NEWEST = ARCHIVES[-1]


def test_arrays_become_groups_and_unchanged_ones_are_not_scanned_again(tmp_path: Path) -> None:
    """Each a group of its attributes and coordinates, in one commit; a second run makes none."""
    sources = tmp_path / "sources"
    first = placed(NEWEST, "features-0", sources, name="first")
    second = placed(NEWEST, "features-0", sources, name="second")
    repository = open_for((tmp_path / "repo").as_uri(), sources)
    expected: dict[str, dict[str, Any]] = {}
    unfit: set[str] = set()
    for place in (first, second):
        with tiledb.open_array(place) as array:
            names = expressible(array.schema)
            unfit |= {it.name for it in array.schema.attributes} - set(names)
            expected[place.name] = array.read(attributes=names)
    options: dict[str, Any] = {"kind": "tiledb", "skip": sorted(unfit), "on_error": "fail"}
    files = [first.as_uri(), second.as_uri()]
    done = ingest_virtual(session_here(), repository, files, **options)
    assert done.counts == {"ingested": 2}
    assert all(it > 0 for it in done.report.column("references").to_pylist())
    store = repository.readonly_session("main").store
    for group, arrays in expected.items():
        for name, values in arrays.items():
            made = zarr.open_array(store, path=f"{group}/{name}", mode="r")  # pyright: ignore[reportUnknownMemberType]
            stored = values.view("i8") if values.dtype.kind in "mM" else values
            np.testing.assert_array_equal(made[...], stored)
        coordinates = zarr.open_array(store, path=f"{group}/x", mode="r")  # pyright: ignore[reportUnknownMemberType]
        np.testing.assert_array_equal(coordinates[...], np.arange(1000))
    assert ingested_files(repository).num_rows == 2
    again = ingest_virtual(session_here(), repository, files, **options)
    assert again.counts == {"unchanged": 2}
    assert not again.published.committed
    urls = [f"tiledb+{it}" for it in files]
    by_url = ingest_virtual(session_here(), repository, urls, skip=options["skip"], on_error="fail")
    assert by_url.counts == {"unchanged": 2}
    alone = "Ingest TileDB arrays by themselves"
    with pytest.raises(InvalidInputError, match=alone):
        ingest_virtual(session_here(), repository, [urls[0], files[1]])
    with pytest.raises(InvalidInputError, match=alone):
        ingest_virtual(session_here(), repository, urls, kind="zarr")


def test_array_that_cannot_be_referred_to_is_reported(tmp_path: Path) -> None:
    """With its reason; others are ingested."""
    sources = tmp_path / "sources"
    fit = placed(NEWEST, "features-0", sources, name="fit")
    sparse = placed(NEWEST, "features-2", sources, name="sparse")
    empty = sources / "empty"
    empty.mkdir()
    (empty / "file").write_bytes(b"x")
    missing = (sources / "missing").as_uri()
    repository = open_for((tmp_path / "repo").as_uri(), sources)
    done = ingest_virtual(
        session_here(),
        repository,
        [sparse.as_uri(), fit.as_uri(), empty.as_uri(), missing],
        kind="tiledb",
    )
    assert done.counts == {"failed": 3, "ingested": 1}
    reasons = {row["location"]: row["reason"] for row in done.report.to_pylist()}
    assert "sparse" in reasons[sparse.as_uri()]
    assert "no TileDB array" in reasons[empty.as_uri()]
    assert "nothing to ingest" in reasons[missing]
    assert "Zarr" not in reasons[missing]
    assert reasons[fit.as_uri()] is None


def test_refused_attribute_is_left_out_as_the_reason_says(tmp_path: Path) -> None:
    """By `skip`: there is no argument `validity` or `attributes` here."""
    sources = tmp_path / "sources"
    place = placed("by-0.10.5", "dense-1", sources, name="grid")
    repository = open_for((tmp_path / "repo").as_uri(), sources)

    def reason(*skip: str) -> str:
        files = [place.as_uri()]
        done = ingest_virtual(session_here(), repository, files, kind="tiledb", skip=skip)
        (row,) = done.report.to_pylist()
        return str(row["reason"])

    refused = reason("a1")
    assert "'a2'" in refused
    assert "may be null" in refused
    assert "leaves out the attributes that `skip` names" in refused
    assert "it is copied to an array of strings" in reason("a2")
    assert "of the tiles of 'a0' cannot be referred to" in reason("a1", "a2")


def test_tiles_that_would_have_to_be_copied_are_refused(tmp_path: Path) -> None:
    """Values never travel through the driver; the reason names the first tile."""
    sources = tmp_path / "sources"
    place = placed("by-0.14.5", "dense-1", sources, name="grid")
    with tiledb.open_array(place) as array:
        fit = expressible(array.schema)
        unfit = [it.name for it in array.schema.attributes if it.name not in fit]
    repository = open_for((tmp_path / "repo").as_uri(), sources)
    done = ingest_virtual(session_here(), repository, [place.as_uri()], kind="tiledb", skip=unfit)
    (row,) = done.report.to_pylist()
    assert row["status"] == "failed"
    assert "cannot be referred to" in row["reason"]
    assert "The first one is (" in row["reason"]
    assert "`icechunk_async.tiledb.ingest_array` is what takes" in row["reason"]
