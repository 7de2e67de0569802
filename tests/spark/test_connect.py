"""Spark Connect: the driver is a client, and has no JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.java import java_home

DRIVER = Path(__file__).with_name("connect_driver.py")


@pytest.mark.thorough
@pytest.mark.timeout(660)  # on a crowded machine
def test_arrays_are_read_and_written_through_connect(tmp_path: Path) -> None:
    """SQL, tables, chunk-wise computing and appending, with a server in a separate process."""
    pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect], which is not here")
    home = java_home(tmp_path / "java")
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYTHONWARNINGS"] = "ignore"
    if home is not None:
        environment["JAVA_HOME"] = home
    ended = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path)],
        env=environment,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
