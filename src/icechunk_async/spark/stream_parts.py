"""What one task of a stream reads: plain data, pinned to snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.spark.changed_boxes import Window
    from icechunk_async.spark.planning import Box
    from icechunk_async.spark.stream_history import Commit

__all__ = ["APPENDED", "DELETED", "MIXED", "UPDATED", "ChangePart"]

APPENDED: Final = "appended"
UPDATED: Final = "updated"
DELETED: Final = "deleted"
MIXED: Final = ""
"""The task finds out which chunks are what."""


class ChangePart(InputPartition):
    """What one commit did to boxes of a table's cells, or of the grid of an array's chunks."""

    def __init__(
        self,
        commit: Commit,
        kind: str,
        boxes: Sequence[Box],
        *,
        chunks: tuple[int, ...] = (),
        array: str = "",
        kept: tuple[Window, ...] | None = None,
    ) -> None:
        """Name the boxes.

        Args:
            commit: the one.
            kind: what it did to all of them; deleted is read from the parent, updated from both.
            boxes: disjoint.
            chunks: elements of a chunk of the table's grid.
            array: with the layout ``chunks`` its path.
            kept: along each dimension the places whose rows were there before and still are;
                only where boxes do not tell it.
        """
        super().__init__(None)
        self.commit = commit
        self.kind = kind
        self.boxes = tuple(boxes)
        self.chunks = chunks
        self.array = array
        self.kept = kept
