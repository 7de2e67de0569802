"""A streaming source that takes no more commits into a batch than it was told; PySpark 4.2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from icechunk_async.spark.stream_source import StreamReader

if TYPE_CHECKING:
    type Offset = dict[str, Any]

__all__ = ["AdmittingReader"]


class AdmittingReader(StreamReader, SupportsTriggerAvailableNow):
    """A source that is told where a batch begins, and how much it may have."""

    last: Offset | None = None
    """Where a query ends that reads what was available when it began."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- PySpark's name
        """Answer how many commits one batch has.

        Spark knows limits of its own kinds only: a commit counts as a file.
        """
        most = self.options.max_commits
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read up to the tip of now, whatever is committed later."""
        self.last = self.tip()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Answer where a batch ends: at a commit after ``start``, or there if there is none.

        Raises:
            StreamPositionLostError: the branch's history does not have ``start`` any more.
        """
        began, self.began = self.began, None
        if start == began:
            return start
        last = self.last or self.tip()
        if last == start:
            return start
        commits = self.after(start, last)
        if isinstance(limit, ReadMaxFiles):
            commits = commits[: limit.max_files]
        return self.offset(commits[-1]) if commits else start

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Answer the tip, for the status of the query."""
        return self.tip()
