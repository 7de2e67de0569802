"""A real local Spark for all tests of this directory, and a repository for each."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.spark import register
from icechunk_async.sync import Repository
from icechunk_async.sync.storage import local_filesystem_storage
from tests.spark.java import java_home
from tests.spark.sail import sail_session

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """PySpark leaves sockets to the garbage collector, and so warns whenever that runs.

    On another engine, what only Spark has is left out.
    """
    if config.getoption("--engine", "spark") != "spark":
        left = [it for it in items if it.get_closest_marker("only_spark")]
        items[:] = [it for it in items if it not in left]
        config.hook.pytest_deselected(items=left)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            unraisable = "ignore::pytest.PytestUnraisableExceptionWarning"
            item.add_marker(pytest.mark.filterwarnings(unraisable))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the name of another engine that speaks Spark Connect."""
    parser.addoption("--engine", default="spark", choices=("spark", "sail"))


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[SparkSession]:
    """A session of two threads on loopback, which knows the format ``icechunk``."""
    session: SparkSession
    with ExitStack() as stack:
        if request.config.getoption("--engine", "spark") == "sail":
            session = stack.enter_context(sail_session())
        else:
            session = stack.enter_context(_session(tmp_path_factory.mktemp("spark")))
        register(session)
        yield session


@contextmanager
def _session(directory: Path) -> Generator[SparkSession]:
    from pyspark.sql import SparkSession

    home = java_home(directory / "java")
    if home is not None:
        os.environ["JAVA_HOME"] = home
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # Tasks find helpers of the tests.
    paths = [str(ROOT), str(Path(__file__).with_name("preload"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    settings: dict[str, Any] = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The place of a repository, of which nothing is there yet."""
    return (tmp_path / "repo").as_uri()


@pytest.fixture
def repository(url: str) -> Repository:
    """A new repository on the local disk, in the blocking facade."""
    return Repository.create(local_filesystem_storage(url.removeprefix("file://")))
