"""A sink that dies once, at a named step: found by tasks and planning processes of Spark."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icechunk_async.spark.source import IcechunkSource
from icechunk_async.spark.stream.sink import StreamWriter, stream_writer
from tests.spark.failing_source import once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from icechunk_async.spark.stream.sink import BatchWritten

__all__ = ["DyingSource"]


class DyingSource(IcechunkSource):
    """The format ``dying``: as ``icechunk``, with the options ``dies`` and ``notes``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "dying"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DyingWriter:  # noqa: N802, FBT001
        """Return the sink."""
        options = {name.lower(): value for name, value in self.options.items()}
        dies, notes = options.pop("dies"), options.pop("notes")
        writer = stream_writer(options, schema, overwrite=overwrite)
        assert isinstance(writer, StreamWriter)
        return DyingWriter(writer, dies, Path(notes))


class DyingWriter(StreamWriter):
    """Does what the sink does, and dies."""

    def __init__(self, writer: StreamWriter, dies: str, notes: Path) -> None:
        """Be like another writer."""
        super().__init__(writer.options, writer.app_id, writer.columns)
        self.dies, self.notes = dies, notes

    def die(self, step: str) -> None:
        """Die if this is the step: a task by a signal, a commit by an error or with the driver."""
        if self.dies != step or not once(self.notes, f"died {step}"):
            return
        for driver in self.notes.glob("driver-*"):
            os.kill(int(driver.name.removeprefix("driver-")), signal.SIGKILL)
        if step.startswith("task"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"died {step}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> BatchWritten:  # type: ignore[override]
        """Write, in a task."""
        self.die("task, before chunks")
        written = super().write(iterator)
        self.die("task, after chunks")
        return written

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: Any) -> None:  # noqa: N803
        """Publish, beside the driver."""
        self.die("before the commit")
        super().commit(messages, batchId)
        self.die("after the commit")
