"""Files of others become references, in one commit, again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xarray as xr
import zarr

from icechunk_async.errors import IngestError, InvalidInputError, NodeExistsError
from icechunk_async.spark import ingest_virtual, ingested_files, list_sources
from tests.spark.sources import field, make_newer, open_for, write_netcdf

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import Progress
    from icechunk_async.sync import Repository


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A directory of files of four days each."""
    directory = tmp_path / "sources"
    directory.mkdir()
    for number in range(4):
        write_netcdf(directory / f"f{number}.nc", 4 * number)
    return directory


@pytest.fixture
def repo(url: str, sources: Path) -> Repository:
    """A repository that may read them."""
    return open_for(url, sources)


def dataset(repo: Repository, group: str = "") -> xr.Dataset:
    """Read what was ingested, whole."""
    store = repo.readonly_session("main").store
    return xr.open_zarr(store, group=group, consolidated=False).load()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def commits(repo: Repository) -> int:
    """Count the commits of the branch."""
    return len(list(repo.ancestry(branch="main")))


def files(sources: Path) -> list[str]:
    """Return the paths of all files."""
    return sorted(map(str, sources.glob("*.nc")))


def test_files_are_concatenated_and_ingested_again_when_they_change(
    spark: SparkSession, repo: Repository, sources: Path
) -> None:
    """One commit; none where nothing changed; then new and changed files only, in their places."""
    told: list[Progress] = []
    made = ingest_virtual(spark, repo, files(sources)[:3], concat_dim="time", progress=told.append)
    assert made.counts == {"ingested": 3}
    assert [(it.done, it.total) for it in (told[0], told[-1])] == [(0, 3), (3, 3)]
    assert made.frame.filter("status = 'ingested'").count() == 3
    found = dataset(repo)
    np.testing.assert_array_equal(found["t"], field(0, 12))
    days = np.datetime64("2000-01-01", "ns") + np.arange(12) * np.timedelta64(1, "D")
    np.testing.assert_array_equal(found["time"], days)
    np.testing.assert_array_equal(found["lat"], [10, 20, 30])

    again = ingest_virtual(spark, repo, files(sources)[:3], concat_dim="time")
    assert (again.counts, again.published.committed) == ({"unchanged": 3}, False)
    assert again.published.snapshot_id == made.published.snapshot_id
    assert commits(repo) == 2

    write_netcdf(sources / "f1.nc", 104)
    more = ingest_virtual(spark, repo, files(sources), concat_dim="time")
    assert more.report.column("status").to_pylist() == [
        *("unchanged", "ingested", "unchanged", "ingested")
    ]
    expected = np.concatenate([field(it, 4) for it in (0, 104, 8, 12)])
    np.testing.assert_array_equal(dataset(repo)["t"], expected)
    listed = ingested_files(repo)
    assert listed.column("start").to_pylist() == [0, 4, 8, 12]
    assert listed.column("count").to_pylist() == [4] * 4


def test_overwrite_moves_and_removes_files(
    spark: SparkSession, repo: Repository, sources: Path
) -> None:
    """Files that come to lie elsewhere are scanned again; those not listed leave."""
    paths = files(sources)
    ingest_virtual(spark, repo, [paths[0], paths[2], paths[3]], concat_dim="time")
    made = ingest_virtual(spark, repo, paths[:3], concat_dim="time", mode="overwrite")
    assert made.report.column("status").to_pylist() == [
        *("unchanged", "ingested", "ingested", "removed")
    ]
    np.testing.assert_array_equal(dataset(repo)["t"], field(0, 12))


def test_unreadable_files_are_reported_and_others_ingested(
    spark: SparkSession, repo: Repository, sources: Path
) -> None:
    """Damaged, missing, of another shape, no HDF5 or NetCDF file at all: each with its reason."""
    (sources / "text.nc").write_text("no data")
    whole = (sources / "f1.nc").read_bytes()
    (sources / "cut.nc").write_bytes(whole[: len(whole) // 2])
    write_netcdf(sources / "lzf.nc", 0, compression="lzf")
    write_netcdf(sources / "wide.nc", 0, chunks=(4, 3))
    names = ["f0.nc", "text.nc", "cut.nc", "lzf.nc", "wide.nc", "gone.nc", "f1.nc"]
    paths = [str(sources / it) for it in names]
    with pytest.raises(IngestError, match="5 of 7 files") as caught:
        ingest_virtual(spark, repo, paths, concat_dim="time", on_error="fail")
    report: Any = caught.value.context["report"]
    assert report.num_rows == 7
    assert commits(repo) == 1
    made = ingest_virtual(spark, repo, paths, concat_dim="time", files_per_task=2)
    assert made.counts == {"ingested": 2, "failed": 5}
    reasons = made.report.column("reason").to_pylist()
    expected = [None, "no HDF5 or NetCDF file", "OSError", "'lzf'", "chunk_grid", "is gone", None]
    for reason, words in zip(reasons, expected, strict=True):
        assert (reason is None) if words is None else (words in reason)
    np.testing.assert_array_equal(dataset(repo)["t"], field(0, 8))


def test_file_that_became_unreadable_keeps_its_place(
    spark: SparkSession, repo: Repository, sources: Path
) -> None:
    """Its references stay, guarded; a list in which it would have to move is refused."""
    paths = files(sources)
    ingest_virtual(spark, repo, paths[:2], concat_dim="time")
    (sources / "f1.nc").write_text("broken")
    make_newer(sources / "f1.nc")
    made = ingest_virtual(spark, repo, paths, concat_dim="time")
    assert made.report.column("status").to_pylist() == [
        *("unchanged", "kept", "ingested", "ingested")
    ]
    store = repo.readonly_session("main").store
    with pytest.raises(Exception, match="changed since it was referenced"):
        zarr.open_array(store, path="t", mode="r")[4:8]
    with pytest.raises(InvalidInputError, match="would have to be written anew with the others"):
        ingest_virtual(spark, repo, paths[1:], concat_dim="time", mode="overwrite")


def test_a_changed_file_with_fewer_chunks_leaves_none_behind(
    spark: SparkSession, repo: Repository, sources: Path
) -> None:
    """Chunks that a file no longer has read as fill values."""
    import h5py

    paths = files(sources)[:2]
    ingest_virtual(spark, repo, paths, concat_dim="time")
    with h5py.File(paths[0], "r+") as file:
        values = file["t"][:2]
        attributes = dict(file["t"].attrs.items())
        units = attributes["units"]
    write_netcdf(sources / "f0.nc", 0)
    with h5py.File(paths[0], "r+") as file:
        whole: Any = file
        del whole["t"]
        data = file.create_dataset(
            "t", shape=(4, 3), dtype="f4", chunks=(2, 3), compression="gzip", shuffle=True
        )
        whole["t"][:2] = values
        data.attrs["units"] = units
        for axis, name in enumerate(("time", "lat")):
            data.dims[axis].attach_scale(file[name])
    made = ingest_virtual(spark, repo, paths, concat_dim="time")
    assert made.counts == {"ingested": 1, "unchanged": 1}
    found = dataset(repo)["t"].to_numpy()
    np.testing.assert_array_equal(found[:2], field(0, 2))
    np.testing.assert_array_equal(found[2:4], np.zeros((2, 3)))


def test_each_file_becomes_a_group(spark: SparkSession, repo: Repository, sources: Path) -> None:
    """By its name or as asked; removed files lose theirs; nothing else is replaced."""
    paths = files(sources)
    made = ingest_virtual(spark, repo, paths[:2], group="raw")
    assert made.report.column("group").to_pylist() == ["/raw/f0", "/raw/f1"]
    np.testing.assert_array_equal(dataset(repo, "raw/f1")["t"], field(4, 4))
    again = ingest_virtual(spark, repo, paths[:2], group="raw")
    assert not again.published.committed
    write_netcdf(sources / "f1.nc", 50)
    made = ingest_virtual(spark, repo, paths[1:3], group="raw", mode="overwrite")
    assert made.counts == {"ingested": 2, "removed": 1}
    np.testing.assert_array_equal(dataset(repo, "raw/f1")["t"], field(50, 4))
    root = zarr.open_group(repo.readonly_session("main").store, path="raw", mode="r")
    assert sorted(root.group_keys()) == ["_ingest", "f1", "f2"]
    with pytest.raises(NodeExistsError, match="not ingested"):
        ingest_virtual(spark, repo, paths[3:], group="/", group_of=lambda _: "raw")
    with pytest.raises(InvalidInputError, match="group_of"):
        ingest_virtual(spark, repo, paths, group="x", group_of=lambda _: "same")
    with pytest.raises(InvalidInputError, match="concat_dim=None"):
        ingest_virtual(spark, repo, paths, group="raw", concat_dim="time")


OFFICIAL = """
import sys, icechunk, zarr
url, prefix = sys.argv[1:]
access = icechunk.containers_credentials({prefix: None})
storage = icechunk.local_filesystem_storage(url)
repo = icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)
store = repo.readonly_session("main").store
print(zarr.open_array(store, path="t", mode="r")[:].tolist())
print(zarr.open_array(store, path="time", mode="r")[:].tolist())
"""


def test_the_official_engine_reads_what_was_ingested(
    spark: SparkSession, repo: Repository, url: str, sources: Path
) -> None:
    """References, their guards, and what was copied."""
    pytest.importorskip("icechunk", reason="the official engine: see the group spark")
    ingest_virtual(spark, repo, files(sources), concat_dim="time")
    done = subprocess.run(
        [
            *(sys.executable, "-c", OFFICIAL),
            *(url.removeprefix("file://"), f"{sources.as_uri()}/"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    np.testing.assert_array_equal(json.loads(lines[0]), field(0, 16))
    assert json.loads(lines[1]) == list(range(16))


def test_sources_are_listed(repo: Repository, sources: Path) -> None:
    """By prefix and pattern: their URLs in order, and sizes."""
    (sources / "other.txt").write_text("")
    os.truncate(sources / "f2.nc", 10**6)
    paths = [sources / f"f{number}.nc" for number in range(4)]
    found = list_sources(repo, f"{sources}/", "f*.nc")
    assert list(found.items()) == [(it.as_uri(), it.stat().st_size) for it in paths]
    assert found[paths[2].as_uri()] == 10**6
