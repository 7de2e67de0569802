"""The pipeline that users copy publishes what the files say, and does nothing twice."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import h5py
import matplotlib.image as mpimg
import numpy as np
import pytest
import zarr
from examples import spark_pipeline as example
from rich.console import Console

from icechunk_async.sync import Repository
from icechunk_async.sync.credentials import LocalFileSystemAccess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt
    from pyspark.sql import SparkSession

DELIVERIES = [1900, 1910]


@pytest.fixture(scope="module")
def done(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[example.Pipeline, dict[str, example.Decades]]:
    """Run the pipeline for a few decades."""
    pipeline = example.Pipeline(spark, tmp_path_factory.mktemp("pipeline"))
    return pipeline, example.run(pipeline, DELIVERIES, Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, h5py.File]]:
    """Open the sample files."""
    with (
        h5py.File(example.SAMPLES / "A1B_north_america.nc") as copied,
        h5py.File(example.SAMPLES / "E1_north_america.nc") as referred,
        h5py.File(example.SAMPLES / "ostia_monthly.nc") as ocean,
    ):
        yield {"A1B": copied, "E1": referred, "ocean": ocean}


def by_hand(file: h5py.File, decades: int) -> example.Decades:
    """Return warming as NumPy computes it from a file."""
    values = np.asarray(file["air_temperature"][: decades * 10], "f8")
    weights = np.cos(np.deg2rad(np.asarray(file["latitude"], "f8")))
    means = np.average(values.mean(axis=2), axis=1, weights=weights)
    warming = means.reshape(-1, 10).mean(axis=1) - means[1:31].mean()
    return {1860 + 10 * at: float(it) for at, it in enumerate(warming)}


def test_sql_tells_the_warming_of_both_releases(
    done: tuple[example.Pipeline, dict[str, example.Decades]], files: dict[str, h5py.File]
) -> None:
    """As NumPy computes it; the older release has what was delivered by then."""
    _, curves = done
    expected = {
        "A1B, until-1910": by_hand(files["A1B"], 5),
        "E1, until-1910": by_hand(files["E1"], 24),
        "A1B, until-1900": by_hand(files["A1B"], 4),
    }
    assert curves.keys() == expected.keys()
    for name, warming in expected.items():
        assert curves[name] == pytest.approx(warming, abs=1e-4)


def test_the_published_arrays_are_those_of_the_files(
    done: tuple[example.Pipeline, dict[str, example.Decades]], files: dict[str, h5py.File]
) -> None:
    """Copied, referred to, and derived by month."""
    pipeline, _ = done
    opened = Repository.open(
        pipeline.url,
        authorize_virtual_chunk_access={f"{example.SAMPLES.as_uri()}/": LocalFileSystemAccess},
    )
    root: Any = zarr.open_group(opened.readonly_session("main").store, mode="r")

    def values(path: str) -> npt.NDArray[Any]:
        return np.asarray(root[path][:])

    np.testing.assert_array_equal(values("A1B/year"), np.arange(1860, 1910))
    copied = files["A1B"]["air_temperature"][:50]
    np.testing.assert_array_equal(values("A1B/air_temperature"), copied)
    np.testing.assert_array_equal(values("E1/air_temperature"), files["E1"]["air_temperature"])
    ocean = np.asarray(files["ocean"]["surface_temperature"])
    ocean = np.where(ocean < 1e19, ocean, np.nan).astype("f8")
    months = np.asarray(files["ocean"]["time"]).astype("M8[h]").astype("M8[M]").astype(int) % 12
    normal = np.array([ocean[months == month].mean(axis=0) for month in range(12)])
    assert np.isfinite(normal).any()
    np.testing.assert_allclose(values("ocean/normal"), normal)
    np.testing.assert_allclose(values("ocean/anomaly"), ocean - normal[months], atol=1e-4)


def state(pipeline: example.Pipeline) -> dict[str, list[str]]:
    """Return every snapshot of every branch and tag."""
    repository = pipeline.repository
    refs: list[dict[str, str]] = [{"branch": it} for it in sorted(repository.list_branches())]
    refs += [{"tag": it} for it in sorted(repository.list_tags())]
    return {str(it): [s.id for s in repository.ancestry(**it)] for it in refs}


def test_each_curve_is_seen_although_they_are_equal(tmp_path: Path) -> None:
    """As the two scenarios are until 2000, and a single delivery is all that is drawn."""
    decades = {1860 + 10 * it: 0.1 * it for it in range(4)}
    example.draw({"one": decades, "other": decades}, [20.0] * 12, tmp_path / "equal.png")
    example.draw({"one": decades}, [20.0] * 12, tmp_path / "one.png")
    found: list[list[int]] = []
    for name in ("equal.png", "one.png"):
        red, green, blue = np.moveaxis(np.asarray(mpimg.imread(tmp_path / name))[..., :3], -1, 0)
        left = np.arange(red.shape[1]) < red.shape[1] * 0.6  # beside it is the ocean, in blue
        is_red, is_blue = (red > 0.7) & (green < 0.4), (blue > 0.8) & (red < 0.8)
        found.append([int((it & left).sum()) for it in (is_red, is_blue)])
    assert found[0][0] > 1000
    assert found[0][1] > 1000
    assert found[1][1] < 100


def test_steps_are_told_as_they_begin(
    spark: SparkSession, done: tuple[example.Pipeline, dict[str, example.Decades]]
) -> None:
    """Also in a run that has nothing to do; a step takes minutes, and Spark is silent."""
    said = io.StringIO()
    pipeline = example.Pipeline(spark, done[0].directory)
    example.run(pipeline, DELIVERIES, Console(file=said, width=200))
    steps = [it[10:].split(":")[0] for it in said.getvalue().splitlines() if it[2:3] == ":"]
    assert steps == [
        "Referring to E1_north_america.nc and ostia_monthly.nc",
        "Decades before 1900",
        "Decades before 1910",
        "Asking for the warming of each decade, and drawing it",
        "Rewriting manifests, expiring snapshots, collecting garbage, checking objects",
    ]


def test_a_second_run_commits_nothing(
    spark: SparkSession, done: tuple[example.Pipeline, dict[str, example.Decades]]
) -> None:
    """All refs stay, and the answers are the same."""
    pipeline, curves = done
    before = state(pipeline)
    assert len(before) == 4
    again = example.Pipeline(spark, pipeline.directory)
    assert example.run(again, DELIVERIES, Console(file=io.StringIO())) == curves
    assert state(again) == before
    assert (pipeline.directory / "warming.png").read_bytes().startswith(b"\x89PNG")


def test_a_release_does_not_undo_what_others_commit(spark: SparkSession, tmp_path: Path) -> None:
    """Somebody committed to main: nothing moves."""
    pipeline = example.Pipeline(spark, tmp_path)
    example.begin(pipeline)
    other = pipeline.repository.writable_session("main")
    zarr.create_group(other.store, path="other")
    tip = other.commit("Somebody else's")
    with pytest.raises(ValueError, match="committed to main"):
        example.release(pipeline, "first")
    assert pipeline.repository.lookup_branch("main") == tip
    assert not pipeline.repository.list_tags()
