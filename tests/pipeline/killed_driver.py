"""The pipeline in a process that kills itself at a named step, once.

Arguments: where to die, the pipeline's directory, and a file that is made when it dies.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples import spark_pipeline as example
from pyspark.sql import SparkSession
from rich.console import Console

from icechunk_async.spark import register
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DELIVERIES", "KILLED", "STEPS"]

DELIVERIES: Final = [1900]
KILLED: Final = 9
CALLS: Final[dict[str, tuple[Any, str, int]]] = {
    "between two arrays": (example, "map_chunks", 3),
    "before the tag": (Repository, "create_tag", 0),
    "before manifests are published": (Repository, "reset_branch", 0),
}
"""Functions that the process dies in, instead of calling them once more."""
STEPS: Final = ("while decades are appended", *CALLS)
"""Where to die, in the order of the pipeline."""


def arrange(where: str, pipeline: example.Pipeline, died: Path) -> None:
    """See to it that this process ends where it should."""

    def die() -> None:
        died.touch()
        os._exit(KILLED)

    def watch() -> None:
        # The first snapshot, two of ingest, and two decades.
        while len(list(pipeline.repository.ancestry(branch="staging"))) < 5:
            time.sleep(0.01)
        die()

    if where == STEPS[0]:
        threading.Thread(target=watch, daemon=True).start()
    elif where != "never":
        owner, name, times = CALLS[where]
        die_at_call(owner, name, times, die)


def die_at_call(owner: Any, name: str, times: int, die: Callable[[], None]) -> None:
    """Limit the number of calls of a function."""
    original, calls = getattr(owner, name), iter(range(times))

    def dying(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            die()
        return original(*arguments, **options)

    setattr(owner, name, dying)


def main(where: str, directory: Path, died: Path) -> None:
    """Run the pipeline, and print what it answers and what its history is."""
    builder = SparkSession.builder.master("local[2]")
    for name, value in example.SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register(spark)
    pipeline = example.Pipeline(spark, directory)
    if not died.exists():
        arrange(where, pipeline, died)
    curves = example.run(pipeline, DELIVERIES, Console(stderr=True))
    history = {
        tag: [it.message for it in pipeline.repository.ancestry(tag=tag)]
        for tag in sorted(pipeline.repository.list_tags())
    }
    history["main"] = [it.message for it in pipeline.repository.ancestry(branch="main")]
    print(json.dumps({"curves": curves, "history": history}))  # noqa: T201
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
