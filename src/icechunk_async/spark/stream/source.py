"""The streaming source: commits of a branch as batches of rows or chunks.

An offset is the id of a snapshot up to which everything was read, with the columns of the table.
Spark stores offsets in checkpoints, so that a query that starts again learns if it has others.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from icechunk_async.engine.versions.feed import places_of_changes
from icechunk_async.errors import (
    InvalidInputError,
    NodeNotFoundError,
    StreamPositionLostError,
)
from icechunk_async.format.json.values import is_object
from icechunk_async.spark.options import CHANGE_COLUMNS, EARLIEST, LATEST, StreamOptions
from icechunk_async.spark.read.reader import Reading
from icechunk_async.spark.read.schemas import arrow_schema
from icechunk_async.spark.stream.changes import (
    ChangePart,
    ChunksState,
    TableState,
    changed_chunks,
    changed_rows,
    chunk_parts,
    row_parts,
    schema_changed,
)
from icechunk_async.spark.stream.commits import (
    commits_after,
    first_snapshot,
    snapshots_of,
    tip_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    from pyspark.sql.datasource import InputPartition

    from icechunk_async.repository import Repository
    from icechunk_async.spark.stream.commits import Commit

    type Offset = dict[str, Any]

__all__ = [
    "StreamReader",
    "UnlimitedReader",
    "place_of",
    "stream_schema",
]

_log = logging.getLogger(__name__)
_KEY = "snapshot-id"
_COLUMNS = "columns"


def stream_schema(options: Mapping[str, str]) -> StructType:
    """Return the columns of a query without a schema: those at the tip of the branch."""
    parsed = StreamOptions.parse(options)
    schema = Reading.begin(replace(parsed.read, branch=parsed.branch)).spark_schema()
    if not parsed.every_change:
        return schema
    return StructType([*schema.fields, *from_arrow_schema(CHANGE_COLUMNS).fields])


class StreamReader(DataSourceStreamReader):
    """The part of a source that every version of PySpark uses. It pickles as plain data.

    One object lives as long as the query, in a process beside Spark's driver; tasks get copies.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        """Check and keep the request. Cost: none."""
        self.options = options
        fields = [it for it in schema.fields if it.name not in CHANGE_COLUMNS.names]
        self.table = StructType(fields)
        self.wanted = arrow_schema(schema)
        if not fields or (options.read.where and options.read.layout == "chunks"):
            raise InvalidInputError(
                "A stream needs columns of the table, not only those that describe changes."
                if not fields
                else "The option 'where' selects rows, and does not go with the layout 'chunks'."
            )
        self.columns: dict[str, str] | None = None
        """Types of the columns of a table of rows; other tables always have the same."""
        if options.read.layout == "rows":
            self.columns = {it.name: str(it.type) for it in arrow_schema(self.table)}
        self.began: Offset | None = None
        """The tip at which a query began, until its first batch has an end."""

    def initialOffset(self) -> Offset:  # noqa: N802 -- PySpark's name
        """Return where a new query begins.

        Spark asks again if a query restarts before its first batch was completed. A query that
        begins at the tip therefore has an empty first batch, which stays empty if it is planned
        again at a newer tip.
        """
        starting, branch = self.options.starting, self.options.branch
        if starting == EARLIEST:
            return self._offset(
                self.options.read.repository.ask(lambda it: first_snapshot(it, branch))
            )
        if starting == LATEST:
            self.began = self.tip()
            return self.began
        return self._offset(starting)

    def tip(self) -> Offset:
        """Return the offset of the branch's tip."""
        branch = self.options.branch
        return self._offset(self.options.read.repository.ask(lambda it: tip_of(it, branch)))

    def offset(self, commit: Commit) -> Offset:
        """Return the offset after a commit."""
        return self._offset(commit.snapshot_id)

    def _offset(self, snapshot_id: str) -> Offset:
        found: Offset = {_KEY: snapshot_id}
        return found if self.columns is None else {**found, _COLUMNS: self.columns}

    def check_columns(self, start: Offset) -> None:
        """Check that a query continues with the columns that it had.

        Raises:
            StreamSchemaChangedError: it does not, and was not told to.
        """
        before, now = start.get(_COLUMNS), self.columns
        # Checkpoints of old versions of this library do not say.
        if self.options.any_schema or now is None or not is_object(before):
            return
        # A checkpoint is a file, and its values may be of any type.
        known = {it: str(kind) for it, kind in before.items()}
        if known == now:
            return
        told = [f"{it!r} ({kind}) is new" for it, kind in now.items() if it not in known]
        told += [f"{it!r} ({kind}) is gone" for it, kind in known.items() if it not in now]
        told += [
            f"{it!r} was {kind} and is {now[it]}"
            for it, kind in known.items()
            if now.get(it, kind) != kind
        ]
        # Only now, when the error is certain: it opens every snapshot since.
        changed = self._changed_at(start)
        who = "This query asks for" if changed is None else f"Since commit {changed} the table has"
        raise schema_changed(
            f"{who} other columns than this stream has read up to snapshot {place_of(start)}: "
            f"{', '.join(told)}.",
            changed,
        )

    def _changed_at(self, start: Offset) -> str | None:
        """Return the first commit after an offset whose table has other columns than before."""
        before: str | None = None
        for at in [place_of(start), *(it.snapshot_id for it in self.after(start))]:
            try:
                found = Reading(self.options.read.pinned(at)).spark_schema().simpleString()
            except (NodeNotFoundError, InvalidInputError):
                found = ""
            if before not in {None, found}:
                return at
            before = found
        return None

    def after(self, start: Offset, end: Offset | None = None) -> list[Commit]:
        """Return the commits between two offsets.

        Raises:
            StreamPositionLostError: one of them is not in the history any more.
        """
        # The first batch may have been planned before a restart, up to an older tip.
        begins_again = self.options.starting == LATEST
        last = None if end is None else place_of(end)
        return self.options.read.repository.ask(
            lambda it: commits_after(
                it, self.options.branch, place_of(start), last, may_be_older=begins_again
            )
        )

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Plan a batch.

        Cost: the log of each commit, and coordinates; of arrays that the commit resized, or whose
        commits store no log, the manifests that it wrote as well, array by array.
        """
        self.check_columns(start)
        parts: list[ChangePart] = []
        # Looked up again: the plan may be made anew after a restart, in another process than
        # `latestOffset`.
        commits = self.after(start, end)
        # The state after one commit is that before the next, so that each snapshot is opened once.
        before: Any = None
        for commit in commits:
            before, found = self._plan(commit, before)
            parts += found
        _log.info(
            "Branch %r after snapshot %s: %d commits up to %s, in %d partitions.",
            self.options.branch,
            place_of(start),
            len(commits),
            place_of(end),
            len(parts),
        )
        return parts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition, in a task."""
        assert isinstance(partition, ChangePart)
        options, every = self.options.read, self.options.every_change
        if options.layout == "chunks":
            schema = arrow_schema(self.table)
            for kind, batch in changed_chunks(partition, options, schema, every_change=every):
                yield self._shown(batch, kind, partition.commit)
            return
        anyhow = self.options.any_schema
        for batch in changed_rows(partition, options, self.table, any_schema=anyhow):
            yield self._shown(batch, partition.kind, partition.commit)

    def _plan(self, commit: Commit, before: Any) -> tuple[Any, list[ChangePart]]:
        """Plan one commit; return the state after it, for the next one, and its parts."""
        options, every = self.options.read, self.options.every_change
        schema = arrow_schema(self.table)
        touched = options.repository.ask(lambda it: _touched(it, commit, options.group))
        old = None if commit.parent_id is None else options.pinned(commit.parent_id)
        new = options.pinned(commit.snapshot_id)
        if options.layout == "chunks":
            chunks = ChunksState(new)
            if before is None:
                before = None if old is None else ChunksState(old)
            found = chunk_parts(before, chunks, touched, commit, schema=schema, every_change=every)
            return chunks, found
        anyhow = self.options.any_schema
        table = TableState.of(new, schema, any_schema=anyhow)
        if before is None and old is not None:
            before = TableState.of(old, schema, any_schema=anyhow)
        return table, row_parts(before, table, touched, commit, every_change=every)

    def _shown(self, batch: pa.RecordBatch, kind: str, commit: Commit) -> pa.RecordBatch:
        """Return a batch with the columns of the schema, in its order."""
        told = {"_change": kind, "_snapshot_id": commit.snapshot_id}
        columns: list[pa.Array[Any]] = []
        for field in self.wanted:
            if field.name in batch.schema.names:
                columns.append(batch.column(field.name).cast(field.type))
                continue
            if field.name not in CHANGE_COLUMNS.names:
                raise InvalidInputError(
                    f"There is no column {field.name!r}. The table has "
                    f"{', '.join((*batch.schema.names, *CHANGE_COLUMNS.names))}."
                )
            value = told.get(field.name, commit.written_at)
            columns.append(pa.repeat(pa.scalar(value), batch.num_rows).cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.wanted)


class UnlimitedReader(StreamReader):
    """A source for versions of PySpark that do not say where a batch begins: those before 4.2."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        """As `StreamReader`; an option that has no effect is logged."""
        super().__init__(options, schema)
        if options.max_commits is not None:
            _log.warning(
                "The option 'max-commits-per-trigger' has no effect before PySpark 4.2: each batch "
                "reads all commits up to the tip."
            )

    def latestOffset(self) -> Offset:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride] # noqa: N802
        """Return the tip; the first time, the tip at which the query began."""
        began, self.began = self.began, None
        return self.tip() if began is None else began


def place_of(offset: Offset) -> str:
    """Return the id of the snapshot up to which everything was read.

    Raises:
        StreamPositionLostError: the offset is that of another source.
    """
    found: object = offset.get(_KEY)
    if not isinstance(found, str):
        raise StreamPositionLostError(
            f"The checkpoint holds the offset {offset}, which names no snapshot: it is that of "
            "another source. Begin this query with a new checkpoint.",
            branch=None,
            snapshot_id=None,
        )
    return found


async def _touched(
    repository: Repository, commit: Commit, group: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the coordinates of chunks that a commit may have changed, by array of the group."""
    if commit.parent_id is None:
        return {}  # everything is new, even if expired commits wrote it
    before, after = await snapshots_of(repository, commit)
    assert before is not None  # it has a parent
    root = f"/{group}/" if group else "/"
    found = await places_of_changes(
        repository.engine,
        before,
        after,
        within=lambda path: path.startswith(root) and "/" not in path.removeprefix(root),
    )
    return {path.removeprefix(root): coords for path, coords in found.items()}
