"""The streaming source for versions of PySpark that can limit a batch: 4.2 and later.

Apart from the rest of the source, because older versions lack what it imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from icechunk_async.spark.stream.source import StreamReader, place_of

if TYPE_CHECKING:
    from icechunk_async.spark.stream.source import Offset

__all__ = ["AdmittingReader"]


class AdmittingReader(StreamReader, SupportsTriggerAvailableNow):
    """A source that learns where a batch begins, and how large it may be."""

    last: Offset | None = None
    """Where a query with the trigger `availableNow` ends."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- PySpark's name
        """Return the limit of one batch.

        Spark accepts its own kinds of limits only, so a commit counts as a file.
        """
        most = self.options.max_commits
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read up to the current tip only."""
        self.last = self.tip()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the last commit of the batch, or `start` if there is no newer commit.

        Raises:
            StreamPositionLostError: `start` is not in the history of the branch any more.
        """
        self.check_columns(start)
        # The first batch of a query that begins at the tip is empty; see `initialOffset`.
        began, self.began = self.began, None
        if start == began:
            return start
        # Only up to the tip at the start with `availableNow`, or a busy branch would keep it
        # running.
        last = self.last or self.tip()
        if place_of(last) == place_of(start):
            return start
        commits = self.after(start, last)
        if isinstance(limit, ReadMaxFiles):
            commits = commits[: limit.max_files]
        return self.offset(commits[-1]) if commits else start

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return the tip, for the status of the query."""
        return self.tip()
