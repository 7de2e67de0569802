"""The whole pipeline in one command; and killed at every kind of step, and run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import icechunk
import iris_sample_data
import numpy as np
import pytest
import zarr

from tests.pipeline.killed_driver import KILLED, STEPS
from tests.spark.java import java_home

ROOT = Path(__file__).parents[2]
FILES = Path(iris_sample_data.path).resolve()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which Spark runs here."""
    home = java_home(tmp_path_factory.mktemp("java") / "home")
    found = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return found if home is None else {**found, "JAVA_HOME": home}


@pytest.fixture(scope="session")
def whole(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the program as a user would, and show what it prints; answer its directory."""
    directory = tmp_path_factory.mktemp("whole") / "pipeline"
    command = [sys.executable, str(ROOT / "examples" / "spark_pipeline.py"), str(directory)]
    subprocess.run(command, env=environment, check=True, timeout=1500)
    return directory


@pytest.mark.timeout(1600)
def test_the_official_engine_opens_the_result(whole: Path) -> None:
    """Both releases: copied, referenced and derived arrays."""
    repository = icechunk.Repository.open(
        icechunk.local_filesystem_storage(str(whole / "repository")),
        authorize_virtual_chunk_access={
            f"{FILES.as_uri()}/": icechunk.credentials.LocalFileSystemAccess
        },
    )
    assert repository.list_tags() == {"until-2010", "until-2100"}
    for tag, years in (("until-2010", 150), ("until-2100", 240)):
        root: Any = zarr.open_group(repository.readonly_session(tag=tag).store, mode="r")
        copied, referred = root["A1B/air_temperature"][:], root["E1/air_temperature"][:]
        assert copied.shape[0] == years
        np.testing.assert_array_equal(copied[:140], referred[:140])
        for group, values in (("A1B", copied), ("E1", referred)):
            anomaly = root[f"{group}/anomaly"][:]
            expected = values - values[1:31].mean(axis=0, dtype="f8")
            np.testing.assert_allclose(anomaly, expected, atol=1e-4)
    main = repository.readonly_session(branch="main")
    assert set(main.all_virtual_chunk_locations()) == {
        (FILES / name).as_uri() for name in ("E1_north_america.nc", "ostia_monthly.nc")
    }


def drive(
    where: str, place: Path, environment: dict[str, str], *, ends: int = 0
) -> dict[str, Any] | None:
    """Run the driver; answer what it printed, if it got that far."""
    place.mkdir(exist_ok=True)
    arguments = [where, str(place / "pipeline"), str(place / "died")]
    command = [sys.executable, str(Path(__file__).with_name("killed_driver.py")), *arguments]
    ended = subprocess.run(
        command, env=environment, timeout=1800, capture_output=True, text=True, check=False
    )
    assert ended.returncode == ends, ended.stderr[-3000:]
    answer: dict[str, Any] | None = json.loads(ended.stdout) if ended.stdout else None
    return answer


@pytest.mark.timeout(7200)
def test_what_was_killed_ends_alike_when_run_again(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Four times, further on each time: the same answers and the same history as undisturbed.

    So nothing was done twice, and nothing is missing.
    """
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for step in STEPS:
        drive(step, killed, environment, ends=KILLED)
        (killed / "died").unlink()
    assert drive("never", killed, environment) == drive("never", undisturbed, environment)
