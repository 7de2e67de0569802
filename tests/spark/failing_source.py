"""The data source with trouble at named steps: a writer whose processes fail, die or are slow.

Options of the format ``icechunk-failing``: ``trouble`` names the step, ``notes`` is a directory for
notes between processes, which say what happened already.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from icechunk_async.errors import ConflictError
from icechunk_async.spark.write.rows import RowWriter, batch_writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from icechunk_async.spark.write.task import RowsWritten

__all__ = ["FailingSource", "fail", "kill_executor", "once", "wait_for"]

PATIENCE_SECONDS = 600


def once(notes: Path, name: str) -> bool:
    """Return True the first time, in any process."""
    try:
        (notes / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_for(path: Path) -> None:
    """Wait until another process has made a note."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path.name} did not happen.")
        time.sleep(0.01)


def kill_executor() -> None:
    """Kill the JVM that this worker's daemon belongs to; called in a task."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
    parent = int(daemon.rpartition(")")[2].split()[1])
    assert "java" in Path(f"/proc/{parent}/cmdline").read_text(encoding="utf-8")
    os.kill(parent, signal.SIGKILL)


def fail(trouble: str, notes: Path) -> None:
    """Make trouble in a task that has written its chunks and not yet said so.

    ``task fails`` always fails; all else happens once.
    """
    match trouble:
        case "task fails":
            raise RuntimeError("A task fails whenever it is tried.")
        case "task fails once" if once(notes, "failed"):
            raise RuntimeError("once")
        case "worker dies" if once(notes, "failed"):
            os.kill(os.getpid(), signal.SIGKILL)
        case "executor dies" if once(notes, "failed"):
            kill_executor()
        case "driver dies with tasks" if once(notes, "failed"):
            os.kill(int((notes / "driver").read_text(encoding="utf-8")), signal.SIGKILL)
            # The task itself ends when Spark notices.
            wait_for(notes / "never")
        case "task is slow":
            if once(notes, "failed"):
                wait_for(notes / "second")
            else:
                (notes / "second").touch()
        case _:
            pass


class FailingSource(DataSource):
    """Writes as the format ``icechunk`` does, with trouble."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "icechunk-failing"

    def writer(self, schema: StructType, overwrite: bool) -> FailingWriter:  # noqa: FBT001
        """Return the writer of a batch."""
        given = {name.lower(): value for name, value in self.options.items()}
        trouble, notes = given.pop("trouble"), Path(given.pop("notes"))
        writer = batch_writer(given, schema, overwrite=overwrite)
        assert isinstance(writer, RowWriter)
        return FailingWriter(writer, trouble, notes)


class FailingWriter(RowWriter):
    """Writes the rows of one batch, with trouble."""

    def __init__(self, writer: RowWriter, trouble: str, notes: Path) -> None:
        """Keep plain data."""
        super().__init__(writer.plan)
        self.trouble = trouble
        self.notes = notes

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:  # type: ignore[override]
        """Write the rows of one partition, and make trouble before saying so."""
        written: Any = super().write(iterator)
        if written.answer.task == 1:
            fail(self.trouble, self.notes)
        result: RowsWritten = written
        return result

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish, with trouble before or after."""
        if self.trouble == "commit fails before" and once(self.notes, "failed"):
            raise ConflictError("before")
        if self.trouble == "commit dies before" and once(self.notes, "failed"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit(messages)
        if self.trouble == "commit fails after" and once(self.notes, "failed"):
            raise ConflictError("after")
        if self.trouble == "commit dies after" and once(self.notes, "failed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Note that Spark asks for it."""
        (self.notes / "aborted").touch()
        super().abort(messages)
