"""A separate driver, whose query writes to a sink that kills it: run by the tests of sinks.

Arguments: the step, the URL of the repository, and a directory with the files to read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.spark.dying_sink import DyingSource


def main(step: str, url: str, directory: Path) -> None:
    """Append what the files say."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(DyingSource)
    machine: Any = spark.sparkContext._jvm  # pyright: ignore[reportPrivateUsage]
    notes = directory / "notes"
    for pid in (os.getpid(), machine.java.lang.ProcessHandle.current().pid()):
        (notes / f"driver-{pid}").touch()
    frame = spark.readStream.schema("time long, x long, v float").csv(str(directory / "source"))
    writer = frame.coalesce(1).writeStream.format("dying").option("append-dim", "time")
    writer = writer.option("txnAppId", "stations").option("dies", step).option("notes", str(notes))
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    writer.trigger(availableNow=True).start(url).awaitTermination(120)
    (directory / "end").touch()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
