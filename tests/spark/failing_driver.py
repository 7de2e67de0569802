"""A driver of its own, with tasks that may fail several times: run by the tests of failures.

Arguments: what happens, the URL of the repository, and a directory for notes between processes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import ConflictError
from icechunk_async.spark import Transaction, map_chunks
from icechunk_async.sync import Session

if TYPE_CHECKING:
    import numpy.typing as npt


def once(notes: Path, name: str) -> bool:
    """Answer True the first time, in whichever process."""
    try:
        (notes / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(what: str, url: str, notes: Path) -> None:
    """Double an array, with trouble."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.python.worker.reuse", str(what != "no reuse").lower())
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def double(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        (notes / f"worker-{os.getpid()}").touch()
        if block[-1] == 11:  # the last chunk of the second task, which has written others by now
            if what == "fails once" and once(notes, "failed"):
                raise RuntimeError("once")
            if what == "worker dies" and once(notes, "failed"):
                os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(block * 2)

    commit = Session.commit

    def dying(session: Session, *arguments: Any, **options: Any) -> str:
        if what == "driver dies before the commit" and once(notes, "failed"):
            os._exit(9)
        snapshot_id = commit(session, *arguments, **options)
        if what == "driver dies after the commit" and once(notes, "failed"):
            os._exit(9)
        if what == "reply is lost" and once(notes, "failed"):
            raise ConflictError("The reply was lost, and another try was refused.")
        return snapshot_id

    Session.commit = dying  # type: ignore[assignment,method-assign]
    published = map_chunks(
        spark,
        url,
        double,
        ["a"],
        "a",
        tasks=2,
        transaction=Transaction("double", 1),
        rebase_with=None,
    )
    (notes / "end").write_text(f"{published.committed} {published.snapshot_id}")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
