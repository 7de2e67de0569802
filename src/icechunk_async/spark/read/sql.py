"""Views of a repository, and table functions, for statements of SQL.

Views are read in many tasks: there is one for each table of a group, and each about the repository.
A function takes the URL and the state in the statement, and one task makes its rows.

Spark calls `analyze` of a function while it plans, in a separate process, and hands what it
returns to the task that runs `eval`. So the snapshot and the parts to read are decided once, and
errors come before any task runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

from pyspark.sql import functions as sql
from pyspark.sql.types import (
    BooleanType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from icechunk_async.arrow.boxes import num_rows
from icechunk_async.arrow.sql import free_name, group_name, word
from icechunk_async.arrow.table import open_group, table_kinds
from icechunk_async.errors import (
    BranchNotFoundError,
    InvalidInputError,
    SnapshotNotFoundError,
    TagNotFoundError,
)
from icechunk_async.format.paths import check_path
from icechunk_async.spark.options import ReadOptions
from icechunk_async.spark.read.reader import IcechunkReader, Part, Reading
from icechunk_async.tables import TABLES
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.measuring import check_function
from icechunk_async.zarr.queries.parsing import parse_where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType

    from icechunk_async.repository import Repository
    from icechunk_async.zarr.queries.aggregate import Aggregate
    from icechunk_async.zarr.queries.meaning import Meaning

    type Given = Mapping[str, str]
    type Row = tuple[Any, ...]

__all__ = ["register_functions", "register_views"]


def register_views(
    spark: SparkSession,
    url: str,
    *,
    ref: str = "main",
    prefix: str | None = None,
    tables: Iterable[str] = TABLES,
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make temporary views for SQL of all groups of a repository, and of the tables about it.

    All views of arrays are of one snapshot, the one that `ref` names now; call this again to see
    later commits. Where the arrays of a group have several sets of dimensions, there is a view for
    each: the one with the most dimensions is named like the group, others also by their
    dimensions. Arrays of types that Spark does not have are left out. The views of two refs, under
    two prefixes, can be joined.

    Args:
        spark: the session; the format `icechunk` is registered with it.
        url: URL of the repository.
        ref: name of a branch or tag, or the id of a snapshot.
        prefix: name of the view of the root group, and what other names begin with; by default
            the last part of the URL. The group `a/b` is `prefix_a_b`, and the table `snapshots` is
            `prefix__snapshots`.
        tables: the tables about the repository to make views of; by default all.
        options: options of the source for all views, such as `storage.region`. No statement of SQL
            shows them.

    Returns:
        What each view holds, by its name. Views of these names are replaced.

    Raises:
        InvalidInputError: there is no such ref or table, or a branch and a tag are both called so.

    Cost: reads the metadata of all arrays, and asks Spark for the columns of each view.
    """
    from icechunk_async.spark.source import register  # noqa: PLC0415 -- it imports this package

    register(spark)
    given = dict(options or {})
    read = ReadOptions.parse({"path": url, **given})
    snapshot_id, groups = read.repository.ask(lambda it: _contents(it, ref))
    start = word(url.rstrip("/").rpartition("/")[2] if prefix is None else prefix)
    made: dict[str, str] = {}
    for group in groups:
        pinned = {"snapshot-id": snapshot_id, "group": group}
        kinds = table_kinds(open_group(ReadOptions.parse({"path": url, **given, **pinned})))
        for number, (dims, arrays) in enumerate(kinds.items()):
            name = group_name(start, group, dims, first=not number)
            columns = {**given, **pinned, "arrays": ",".join(arrays)}
            made[_view(spark, url, free_name(name, made), columns)] = (
                f"group {group or '/'!r}: {', '.join(arrays)}"
            )
    for table in tables:
        about = {"table": table}
        # History, manifests and files are those of one snapshot, as the views of arrays beside
        # them.
        if table not in _OF_ALL:
            about["snapshot-id"] = snapshot_id
        name = free_name(f"{start}__{table}", made)
        made[_view(spark, url, name, {**given, **about})] = f"table {table!r}"
    return made


_OF_ALL: Final = frozenset({"refs", "ops"})
"""Tables about the repository, not one snapshot."""


def _view(spark: SparkSession, url: str, name: str, options: Mapping[str, str]) -> str:
    spark.read.format("icechunk").options(**options).load(url).createOrReplaceTempView(name)
    return name


async def _contents(repository: Repository, ref: str) -> tuple[str, list[str]]:
    """Return the snapshot that a ref names, and the groups that have arrays."""
    found = [it for it in (await _branch(repository, ref), await _tag(repository, ref)) if it]
    # Last: a branch may be called like the id of a snapshot, and names are what users choose.
    found = found or [it for it in [await _snapshot(repository, ref)] if it]
    if len(found) != 1:
        raise InvalidInputError(
            f"A branch and a tag are both called {ref!r}. Give the id of the snapshot."
            if found
            else f"No branch, tag or snapshot of the repository is called {ref!r}. list_branches "
            "and list_tags list their names."
        )
    session = await repository.readonly_session(snapshot_id=found[0])
    nodes = session.workspace.base.nodes
    arrays = [path for path in nodes if nodes[path].array is not None]
    return found[0], sorted({path.rpartition("/")[0].strip("/") for path in arrays})


async def _branch(repository: Repository, name: str) -> str | None:
    try:
        return str(await repository.lookup_branch(name))
    except BranchNotFoundError:
        return None


async def _tag(repository: Repository, name: str) -> str | None:
    try:
        return str(await repository.lookup_tag(name))
    except TagNotFoundError:
        return None


async def _snapshot(repository: Repository, snapshot_id: str) -> str | None:
    try:
        return str((await repository.lookup_snapshot(snapshot_id)).id)
    except (SnapshotNotFoundError, InvalidInputError):
        return None


_MOST_ROWS: Final = 1_000_000
"""The most rows of `read_icechunk`: one task makes them, as objects of Python."""
_COSTS: Final = ("count", "chunks", "chunks_read", "bytes_read", "bytes_skipped")


def register_functions(
    spark: SparkSession, *, options: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Make three table functions for SQL, in this session.

    `read_icechunk(url, version, group, arrays, where)` has the rows of a group, of one state: for
    results of up to a million rows, since Spark runs such a function in a single task.
    `icechunk_history(url, version)` has the snapshots that led to a state, the newest first.
    `icechunk_aggregate(url, array, function, where, version)` has one row, with the `value` of
    `Session.aggregate` (count, min, max, sum, mean, var or std) and what it cost; chunks whose
    statistics suffice are not read. All arguments are text and can be given by name; those after
    `url`, or `function`, can be left out. A `version` is a branch, by default `main`, a tag, the id
    of a snapshot, or steps back such as `main~2`.

    Args:
        spark: the session, also one of Spark Connect.
        options: options of the source for all calls, such as `storage.region`. No statement of SQL
            shows them; anyone who may run SQL in the session reads with them what they open.

    Returns:
        The names of the functions. Functions of these names are replaced.

    Raises:
        InvalidInputError: an option is unknown, or says which rows to read.
    """
    given = dict(options or {})
    # No repository is opened: any URL will do to parse the options with.
    _check_shared(ReadOptions.parse({"path": "memory://functions", **given}))
    functions = {
        "read_icechunk": _reading(given),
        "icechunk_history": _history(given),
        "icechunk_aggregate": _aggregate(given),
    }
    for name, function in functions.items():
        spark.udtf.register(name, cast("Any", sql).udtf(function, useArrow=False))
    return tuple(functions)


def _check_shared(options: ReadOptions) -> None:
    """Refuse options that some functions would ignore, as aggregates would ignore `where`."""
    chosen = (options.group, options.arrays, options.where, options.table)
    if any(chosen) or options.layout != "rows":
        raise InvalidInputError(
            "The options 'group', 'arrays', 'where', 'table' and 'layout' cannot be given to all "
            "table functions. Name groups, arrays and conditions in each statement; for the others "
            "load a data frame with the format 'icechunk'."
        )


# The classes are made by functions: what is found by its name in a module travels as that name, and
# would leave the options behind.


def _reading(options: Given) -> type:
    class ReadIcechunk:
        @staticmethod
        def analyze(
            url: AnalyzeArgument,
            version: AnalyzeArgument | None = None,
            group: AnalyzeArgument | None = None,
            arrays: AnalyzeArgument | None = None,
            where: AnalyzeArgument | None = None,
        ) -> _ReadResult:
            named = {"path": url, "ref": version, "group": group, "arrays": arrays, "where": where}
            return _plan_read(_parsed("read_icechunk", options, named))

        def __init__(self, found: _ReadResult) -> None:
            self._found = found

        def eval(
            self,
            url: str,
            version: str | None = None,
            group: str | None = None,
            arrays: str | None = None,
            where: str | None = None,
        ) -> Iterator[Row]:
            del url, version, group, arrays, where  # known since the analysis
            yield from self._found.rows()

    return ReadIcechunk


def _history(options: Given) -> type:
    class IcechunkHistory:
        @staticmethod
        def analyze(url: AnalyzeArgument, version: AnalyzeArgument | None = None) -> _ReadResult:
            named = {"path": url, "ref": version}
            return _plan_read(_parsed("icechunk_history", options, named, table="snapshots"))

        def __init__(self, found: _ReadResult) -> None:
            self._found = found

        def eval(self, url: str, version: str | None = None) -> Iterator[Row]:
            del url, version
            yield from self._found.rows()

    return IcechunkHistory


def _aggregate(options: Given) -> type:
    class IcechunkAggregate:
        @staticmethod
        def analyze(
            url: AnalyzeArgument,
            array: AnalyzeArgument,
            function: AnalyzeArgument,
            where: AnalyzeArgument | None = None,
            version: AnalyzeArgument | None = None,
        ) -> _AggregateResult:
            name = "icechunk_aggregate"
            asked = _Asked(
                _text(name, "array", array) or "",
                # SQL does not tell `MAX` from `max`.
                (_text(name, "function", function) or "").lower(),
                _text(name, "where", where),
            )
            return _plan_aggregate(_parsed(name, options, {"path": url, "ref": version}), asked)

        def __init__(self, found: _AggregateResult) -> None:
            self._found = found

        def eval(
            self,
            url: str,
            array: str,
            function: str,
            where: str | None = None,
            version: str | None = None,
        ) -> Iterator[Row]:
            del url, array, function, where, version
            yield self._found.row()

    return IcechunkAggregate


def _text(function: str, name: str, given: AnalyzeArgument | None) -> str | None:
    """Return a constant text of a call; None if it was left out or is null."""
    if given is None or (given.isConstantExpression and given.value is None):
        return None
    if given.isTable or not given.isConstantExpression or not isinstance(given.value, str):
        raise InvalidInputError(
            f"The argument {name!r} of {function} must be constant text, such as 'main': the "
            "columns of the result follow from it. It cannot be a column or a table."
        )
    return given.value


def _parsed(
    function: str,
    options: Given,
    named: Mapping[str, AnalyzeArgument | None],
    **more: str,
) -> ReadOptions:
    shown = {"path": "url", "ref": "version"}
    texts = {it: _text(function, shown.get(it, it), given) for it, given in named.items()}
    if not texts["path"]:
        raise InvalidInputError(
            f"{function} needs the URL of a repository. Give url => 's3://...'."
        )
    given = {name: text for name, text in texts.items() if text is not None}
    return ReadOptions.parse({**options, **given, **more})


@dataclass
class _ReadResult(AnalyzeResult):
    """The columns of a table, and how to read it."""

    reader: IcechunkReader | None = None
    parts: tuple[Any, ...] = ()

    def rows(self) -> Iterator[Row]:
        assert self.reader is not None
        for part in self.parts:
            for batch in self.reader.read(part):
                # A column at a time: Arrow makes objects of a column much faster than of single
                # cells.
                columns = [_objects(batch, place) for place in range(batch.num_columns)]
                yield from zip(*columns, strict=True)


def _objects(batch: pa.RecordBatch, place: int) -> list[Any]:
    try:
        return batch.column(place).to_pylist()
    except OverflowError:
        name = batch.schema.field(place).name
        raise InvalidInputError(
            f"The column {name!r} has times outside of the years 1 to 9999, which Python has no "
            "objects for. Leave it out with arrays => '...' or such rows with where => '...', or "
            "use a view of icechunk_async.spark.register_views."
        ) from None


def _plan_read(options: ReadOptions) -> _ReadResult:
    # The history of a state ends with its snapshot, which is looked up first, as for arrays.
    pinned = Reading.begin(replace(options, table=None)).options
    reading = Reading(replace(pinned, table=options.table))
    schema = reading.spark_schema()
    reader = IcechunkReader(reading.options, schema)
    parts = [it for it in reader.partitions() if isinstance(it, Part)]
    rows = sum(num_rows(box) for part in parts for box in part.boxes)
    if options.table is None and options.layout == "rows" and rows > _MOST_ROWS:
        raise InvalidInputError(
            f"read_icechunk would return {rows} rows, and Spark runs it in a single task: the most "
            f"are {_MOST_ROWS}. Give where => '...' on dimensions, or use a view of "
            "icechunk_async.spark.register_views, which is read in many tasks."
        )
    # One task reads all parts, and so has the share of a job with one part.
    alone = tuple(Part(it.boxes, it.array, of=1) for it in parts)
    return _ReadResult(schema, reader=reader, parts=alone)


@dataclass(frozen=True)
class _Asked:
    array: str
    function: Any
    where: str | None


@dataclass
class _AggregateResult(AnalyzeResult):
    """The columns of an aggregate, and what to ask."""

    options: ReadOptions | None = None
    asked: _Asked | None = None

    def row(self) -> Row:
        options, asked = self.options, self.asked
        assert options is not None
        assert asked is not None

        async def ask(repository: Repository) -> Aggregate:
            session = await repository.readonly_session(snapshot_id=options.snapshot_id)
            return await session.aggregate(asked.array, asked.function, where=asked.where)

        found = options.repository.ask(ask)
        value = _value(found.value, self.schema["value"].dataType, asked)
        return (value, *(getattr(found, it) for it in _COSTS))


def _plan_aggregate(options: ReadOptions, asked: _Asked) -> _AggregateResult:
    # Planned in one process, evaluated in another, perhaps after a commit: both of one snapshot.
    pinned = Reading.begin(options).options
    # Only for its error, which then comes while the statement is planned.
    parse_where(asked.where or "")

    async def check(repository: Repository) -> Meaning:
        session = await repository.readonly_session(snapshot_id=pinned.snapshot_id)
        array = await QueriedArray.open(session.store, check_path(f"/{asked.array.strip('/')}"))
        check_function(asked.function, array.meaning)
        return array.meaning

    kind = _type_of(pinned.repository.ask(check), asked.function)
    costs = [StructField(it, LongType(), nullable=False) for it in _COSTS]
    return _AggregateResult(
        StructType([StructField("value", kind), *costs]), options=pinned, asked=asked
    )


def _type_of(meaning: Meaning, function: str) -> DataType:
    """Return Spark's type for an aggregate of an array. Pure."""
    stored = meaning.stored.kind
    same = function in ("min", "max")
    if function == "count":
        return LongType()
    if meaning.is_text:
        return StringType()
    if stored == "M":
        return TimestampNTZType()
    if stored == "m":
        return DayTimeIntervalType()
    if meaning.is_truth and same:
        return BooleanType()
    # Averages and packed numbers are no integers, whatever the array stores.
    if meaning.kind == "f" or meaning.is_packed or not (same or function == "sum"):
        return DoubleType()
    # Sums of 64 bits without a sign are beyond those of bigint.
    return DecimalType(38, 0) if stored == "u" and meaning.stored.itemsize == 8 else LongType()


def _value(value: Any, kind: DataType, asked: _Asked) -> Any:
    """Return an aggregate as an object that Spark takes for a type. Pure."""
    if value is None:
        return None
    if isinstance(kind, TimestampNTZType | DayTimeIntervalType):
        rounded = value.astype(f"{value.dtype.kind}8[us]")
        shown = rounded.item()
        # Larger units wrap around; what Python has no object for is an integer.
        same = rounded.astype(value.dtype) == value
        if same and isinstance(shown, datetime | timedelta):
            return shown
    elif isinstance(kind, DecimalType):
        return Decimal(value)
    elif not isinstance(kind, LongType) or -(1 << 63) <= value < 1 << 63:
        return value
    raise InvalidInputError(
        f"The {asked.function} of {asked.array!r} is {value}, which SQL's "
        f"{kind.simpleString()} cannot hold. Use Session.aggregate in Python."
    )
