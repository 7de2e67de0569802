"""A separate driver, with tasks that may be tried again: run by the tests of failures.

Arguments: the master, how it writes (``chunks`` or ``rows``), what happens, the URL of the
repository, and a directory for notes between processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import OutcomeUnknownError
from icechunk_async.session import Session
from icechunk_async.spark import Transaction, map_chunks
from icechunk_async_local.storage import LocalStorage
from tests.spark.failing_source import FailingSource, fail, once

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import SparkSession

    from icechunk_async import SnapshotId

ROOT = Path(__file__).parents[2]
DIED = 9
CELLS = 420_000
"""Six chunks, each too large to share an object with others."""


def make_trouble(what: str, notes: Path) -> None:
    """Let this process die, or lose a reply, at a step of the commit."""
    commit, put = Session.commit, LocalStorage.put

    def die() -> None:
        if once(notes, "failed"):
            os._exit(DIED)

    async def committing(session: Session, *arguments: Any, **options: Any) -> SnapshotId:
        if what == "driver dies before the commit":
            die()
        snapshot_id = await commit(session, *arguments, **options)
        if what == "driver dies after the commit":
            die()
        return snapshot_id

    async def putting(storage: LocalStorage, key: str, *arguments: Any, **options: Any) -> Any:
        if what == "driver dies before the reference" and key == "repo":
            die()
        version = await put(storage, key, *arguments, **options)
        if what == "driver dies after the reference" and key == "repo":
            die()
        if what == "reply is lost" and key == "repo" and once(notes, "failed"):
            raise OutcomeUnknownError("The reply was lost.")
        return version

    Session.commit = committing  # type: ignore[assignment]
    LocalStorage.put = putting  # type: ignore[assignment,method-assign]


def begin(master: str, what: str) -> SparkSession:
    """Start Spark, where tasks are tried again."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        "spark.python.worker.reuse": str(what != "no reuse").lower(),
        "spark.speculation": str(what == "task is slow").lower(),
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.01",
        "spark.speculation.minTaskRuntime": "0ms",
    }
    builder = SparkSession.builder.master(master).appName("failing")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def write_chunks(spark: SparkSession, what: str, url: str, notes: Path) -> str:
    """Double an array chunk by chunk; answer whether this call committed."""

    def double(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        (notes / f"worker-{os.getpid()}").touch()
        if (
            block[-1] == CELLS - 1
        ):  # the last chunk of the second task, which has written others by now
            fail(what, notes)
        return np.asarray(block * 2)

    once_only = Transaction("double", 1)
    return str(map_chunks(spark, url, double, ["a"], "a", tasks=2, transaction=once_only).committed)


def write_rows(spark: SparkSession, what: str, url: str, notes: Path) -> str:
    """Double an array by rows."""
    spark.dataSource.register(FailingSource)
    rows = spark.range(0, CELLS, 1, 2).selectExpr("id as x", "cast(id * 2 as int) as a")
    writer = rows.write.format("icechunk-failing").mode("overwrite")
    writer = writer.option("txnAppId", "double").option("txnVersion", 1)
    writer.option("trouble", what).option("notes", str(notes)).save(url)
    return ""


def main(arguments: list[str]) -> None:
    """Double an array, with trouble."""
    master, how, what, url = arguments[:4]
    notes = Path(arguments[4])
    (notes / "driver").write_text(str(os.getpid()), encoding="utf-8")
    spark = begin(master, what)
    make_trouble(what, notes)
    committed = (write_chunks if how == "chunks" else write_rows)(spark, what, url, notes)
    (notes / "end").write_text(committed, encoding="utf-8")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
