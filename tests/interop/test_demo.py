"""The repository that the demonstration leaves behind, read by both engines and as files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import icechunk
import iris_sample_data
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.cli.app import app
from icechunk_async.cli.demo.changes import read
from icechunk_async.cli.demo.data import read_netcdf, refer_to_file
from icechunk_async.errors import VirtualSourceChangedError
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore", EncodingWarning)  # Matplotlib's, when it first lists fonts
    import matplotlib.image

    from icechunk_async.cli.demo.drawing import open_scenario, yearly_means

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

# Dask, where it is installed, reads its configuration so when xarray first asks for it.
pytestmark = pytest.mark.filterwarnings("ignore::EncodingWarning")

VARIABLES = [
    "air_temperature",
    "forecast_period",
    "forecast_reference_time",
    "height",
    "latitude",
    "latitude_longitude",
    "longitude",
    "time",
    "time_bnds",
]
CORRECTED = (190, slice(30, 37), slice(23, 31))
FILES = Path(iris_sample_data.path).resolve()


@dataclass(frozen=True)
class Run:
    """One run of the demonstration."""

    directory: Path
    result: dict[str, Any]
    story: str

    @property
    def repository(self) -> Path:
        """Where the repository is."""
        return self.directory / "repository"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demonstration."""
    directory = tmp_path_factory.mktemp("demo") / "new"
    result = CliRunner().invoke(app, ["demo", str(directory), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return Run(directory, json.loads(result.stdout), result.stderr)


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, h5py.File]]:
    """Open the sample files."""
    with (
        h5py.File(FILES / "A1B_north_america.nc") as copied,
        h5py.File(FILES / "E1_north_america.nc") as referred,
    ):
        yield {"A1B": copied, "E1": referred}


@pytest.fixture(scope="module")
def official(demo: Run) -> icechunk.Repository:
    """Open the repository with the official engine."""
    return icechunk.Repository.open(
        icechunk.local_filesystem_storage(str(demo.repository)),
        authorize_virtual_chunk_access={
            demo.result["container"]: icechunk.credentials.LocalFileSystemAccess
        },
    )


def expected(files: Mapping[str, h5py.File], group: str, name: str) -> npt.NDArray[Any]:
    """Return the values of a variable as its file has them."""
    return np.asarray(files[group][name][...])


@pytest.mark.parametrize("group", ["A1B", "E1"])
@pytest.mark.parametrize("name", VARIABLES)
def test_the_official_engine_reads_the_release(
    official: icechunk.Repository, files: dict[str, h5py.File], group: str, name: str
) -> None:
    """Every value, copied or referred to, is that of the file."""
    store = official.readonly_session(tag="v1").store
    array = zarr.open_array(store, path=f"{group}/{name}", mode="r")
    np.testing.assert_array_equal(array[...], expected(files, group, name))


def test_the_official_engine_reads_the_correction(
    official: icechunk.Repository, files: dict[str, h5py.File]
) -> None:
    """On main the cells around Hudson Bay are 2 K colder in 2050, and nothing else changed."""
    store = official.readonly_session(branch="main").store
    values = expected(files, "A1B", "air_temperature")
    values[CORRECTED] -= np.float32(2)
    array = zarr.open_array(store, path="A1B/air_temperature", mode="r")
    np.testing.assert_array_equal(array[...], values)


def test_the_official_engine_sees_the_same_history(
    official: icechunk.Repository, demo: Run
) -> None:
    """Branches, tags, and 32 snapshots: a first, 24 decades, and what followed."""
    assert official.list_branches() == {"main"}
    assert official.list_tags() == {"v1"}
    assert official.lookup_tag("v1") == demo.result["release"]
    assert official.lookup_branch("main") == demo.result["tip"]
    history = list(official.ancestry(branch="main"))
    assert len(history) == 32
    assert demo.result["correction"] in {it.id for it in history}
    messages = [it.message for it in history[::-1]]
    assert messages[1:3] == ["A1B: 1860 to 1869", "A1B: 1870 to 1879"]
    assert messages[25] == "E1: refer to E1_north_america.nc"
    assert messages[-1] == "Round the means of E1 to 0.01 K"


def test_the_official_engine_sees_the_same_changes(
    official: icechunk.Repository, demo: Run
) -> None:
    """The correction is one chunk."""
    changed = official.diff(
        from_snapshot_id=demo.result["release"], to_snapshot_id=demo.result["correction"]
    )
    assert changed.updated_chunks == {"/A1B/air_temperature": [[190, 0, 0]]}


def test_the_official_engine_guards_the_file(official: icechunk.Repository) -> None:
    """Every reference of E1 leads to the file, and none of A1B does."""
    session = official.readonly_session(branch="main")
    locations = session.all_virtual_chunk_locations()
    assert set(locations) == {(FILES / "E1_north_america.nc").as_uri()}


async def test_a_modified_file_is_not_read(tmp_path: Path) -> None:
    """References are guarded by the time of the file's last change."""
    path = Path(shutil.copy(FILES / "E1_north_america.nc", tmp_path))
    prefix = f"{tmp_path.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(tmp_path)))
    async with Repository.create(
        f"memory://{tmp_path.name}",
        config=RepositoryConfig().with_virtual_chunk_container(container),
        authorize_virtual_chunk_access={prefix: None},
    ) as repository:
        await refer_to_file(repository, read_netcdf(path), "E1")
        session = await repository.readonly_session("main")
        assert float(await read(session, "E1/height")) == 1.5
        os.utime(path, (4_000_000_000, 4_000_000_000))  # in the year 2096
        with pytest.raises(VirtualSourceChangedError, match="was modified"):
            await read(session, "E1/height")


@pytest.mark.parametrize("group", ["A1B", "E1"])
async def test_we_read_the_release(demo: Run, files: dict[str, h5py.File], group: str) -> None:
    """Every value is that of the file."""
    container = demo.result["container"]
    async with Repository.open(
        demo.repository, authorize_virtual_chunk_access={container: None}
    ) as repository:
        session = await repository.readonly_session(tag="v1")
        for name in VARIABLES:
            array = await zarr.api.asynchronous.open_array(
                store=session.store, path=f"{group}/{name}", mode="r"
            )
            found = np.asarray(await array.getitem(...))
            np.testing.assert_array_equal(found, expected(files, group, name))


def test_xarray_reads_both_scenarios(demo: Run, files: dict[str, h5py.File]) -> None:
    """Lazily, with times decoded: yearly means weighted by area, from 1860 to 2099."""

    async def means(group: str) -> tuple[list[int], npt.NDArray[Any]]:
        container = demo.result["container"]
        async with Repository.open(
            demo.repository, authorize_virtual_chunk_access={container: None}
        ) as repository:
            session = await repository.readonly_session(tag="v1")

            def read() -> tuple[list[int], npt.NDArray[Any]]:
                found = yearly_means(open_scenario(session.store, group))
                return found.time.to_numpy().tolist(), found.to_numpy()

            return await asyncio.to_thread(read)

    for group in files:
        years, found = asyncio.run(means(group))
        assert years == list(range(1860, 2100))
        weights = np.cos(np.deg2rad(expected(files, group, "latitude")))
        values = expected(files, group, "air_temperature").astype("f8")
        by_hand = np.average(values.mean(axis=2), axis=1, weights=weights) - 273.15
        np.testing.assert_allclose(found, by_hand, atol=1e-3)


def test_result_holds_the_corrected_value(demo: Run, files: dict[str, h5py.File]) -> None:
    """It is correct at the tag, on the branch, and as of the tag's time."""
    told = demo.result["corrected_value"]
    original = float(expected(files, "A1B", "air_temperature")[tuple(told["at"])])
    assert (told["before"], told["as_of_release"]) == (original, original)
    assert told["after"] == pytest.approx(original - 2)


def test_rebased_commits_of_two_writers_are_both_kept(
    official: icechunk.Repository, files: dict[str, h5py.File]
) -> None:
    """Means of each scenario; those of E1 rounded as the one who solved the conflict wanted."""
    store = official.readonly_session(branch="main").store
    array = zarr.open_array(store, path="analysis/mean_temperature", mode="r")
    copied, referred = np.asarray(array[...])
    weights = np.cos(np.deg2rad(expected(files, "E1", "latitude").astype("f8")))
    by_latitude = expected(files, "E1", "air_temperature").astype("f8").mean(axis=2)
    by_hand = np.average(by_latitude, axis=1, weights=weights)
    np.testing.assert_allclose(referred, by_hand, atol=0.0051)
    np.testing.assert_array_equal(referred, referred.round(2))
    assert not np.array_equal(referred, referred.round(1))
    assert not np.array_equal(copied, copied.round(2))


def test_demo_prints_every_chapter_and_both_conflicts(demo: Run) -> None:
    """Every chapter, both conflicts by their kinds, and where everything is."""
    for words in (
        "1. A repository",
        "2. Copy scenario A1B: 240 yearly means, one commit a decade",
        "3. Refer to scenario E1",
        "4. Tag a release",
        "5. Correct a few values",
        "6. Travel in time",
        "7. Two writers on one branch",
        "(conflict)",
        "(rebase-failed)",
        "8. Open with xarray, and draw",
        "9. Where everything is, and what to try next",
        "temperature.png",
    ):
        assert words in demo.story


def test_the_result_is_documented(demo: Run) -> None:
    """The help names every key of the JSON document, which is all of standard output."""
    words = set(re.findall(r"\w+", CliRunner().invoke(app, ["demo", "--help"]).stdout))
    assert not {*demo.result, *demo.result["corrected_value"]} - words


def test_picture_is_a_readable_png(demo: Run) -> None:
    """A PNG of a size that can be read, with many colours in it."""
    pixels = matplotlib.image.imread(demo.directory / "temperature.png")
    height, width, _ = pixels.shape
    assert 800 < height < width < 2000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 500


def test_the_commands_to_try_work(demo: Run) -> None:
    """Each printed command runs unchanged; in a shell, those with which that makes a difference."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in demo.result["commands"]:
        assert line in demo.story
        if "|" not in line and line != demo.result["commands"][0]:
            here = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
            assert (here.exit_code, here.stderr) == (0, ""), line
            assert here.stdout.strip(), line
            continue
        finished = subprocess.run(  # noqa: S602  # what users do with them
            line,
            shell=True,
            capture_output=True,
            encoding="utf-8",
            timeout=240,
            check=False,
            env={**os.environ, "PATH": path},
        )
        assert (finished.returncode, finished.stderr) == (0, ""), line
        assert finished.stdout.strip(), line
    assert finished.stdout.strip() == str(37 * 49 * 4)  # the bytes of one map, from the file
