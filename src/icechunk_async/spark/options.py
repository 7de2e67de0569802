"""Options of readers, writers and streams: one table, and requests parsed by it.

`OPTIONS` names every option once. Parsing, error messages and the page *Options of the Spark
source* are served from it.
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.commit.once import Transaction
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.spark.requests import JOB_REQUESTS, JOB_SETTING
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.storage.registry import normalize_url
from icechunk_async.sync import Repository
from icechunk_async.sync.conflicts import ConflictDetector
from icechunk_async.sync.storage import Storage
from icechunk_async.tables import TABLES
from icechunk_async.tiledb.arrays.folder import is_tiledb_url, storage_location
from icechunk_async.urls import IcechunkURL, is_icechunk_url
from icechunk_async.zarr.queries.parsing import parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from icechunk_async.spark.requests import Budget
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.session import Session
    from icechunk_async.zarr.queries.predicates import Where

__all__ = [
    "CHANGE_COLUMNS",
    "EARLIEST",
    "LATEST",
    "OPTIONS",
    "STORAGE",
    "Option",
    "ReadOptions",
    "StreamOptions",
    "Use",
    "WriteOptions",
    "names_stream_options",
    "parse_options",
    "storage_options",
]

STORAGE: Final = "storage."
"""Prefix of options that go to the storage backend."""
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
CHANGE_COLUMNS: Final = pa.schema(
    [
        ("_change", pa.string()),
        ("_snapshot_id", pa.string()),
        ("_written_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""Columns added by the option `changes` = `all`: the kind of change, and its commit."""

_VIRTUAL: Final = "virtual-chunk-access"
_TILEDB: Final = "tiledb"
_OF_REPOSITORIES: Final = (
    "branch", "tag", "snapshot-id", "ref", "from-snapshot-id", "group", "table", "decode", _VIRTUAL
)  # fmt: skip
"""Options that mean nothing to a TileDB array."""
_REFS: Final = ("branch", "tag", "snapshot-id", "ref")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECRET: Final = ("secret", "password", "token", "key", "credential")


class Use(Enum):
    """The four ways in which Spark uses a source."""

    READ = "spark.read"
    READ_STREAM = "spark.readStream"
    WRITE = "df.write"
    WRITE_STREAM = "df.writeStream"


_READING: Final = frozenset({Use.READ, Use.READ_STREAM})
_WRITING: Final = frozenset({Use.WRITE, Use.WRITE_STREAM})
_ALL: Final = _READING | _WRITING


def _text(name: str, text: str) -> str:
    del name
    return text


def _path(name: str, text: str) -> str:
    del name
    return text.strip("/")


def _names(name: str, text: str) -> tuple[str, ...]:
    del name
    return tuple(it for it in (part.strip() for part in text.split(",")) if it)


def _one_of(*known: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() not in known:
            raise InvalidInputError(
                f"The option {name!r} cannot be {text!r}. Give one of {', '.join(known)}."
            )
        return text.lower()

    return parse


def _flag(name: str, text: str) -> bool:
    return _one_of("true", "false")(name, text) == "true"


def _positive(name: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise InvalidInputError(f"The option {name!r} must be a positive number, not {text!r}.")
    return int(text)


def _count(name: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidInputError(f"The option {name!r} must be a number, not {text!r}.")
    return int(text)


def _time(name: str, text: str) -> datetime:
    """Parse ISO 8601, in UTC unless it names a zone, or milliseconds since the epoch."""
    try:
        # Eight digits are a date of ISO 8601, such as 20260131; milliseconds since 1970 have more.
        if text.lstrip("-").isdigit() and len(text) > len("20260131"):
            return _EPOCH + timedelta(milliseconds=int(text))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidInputError(
            f"The option {name!r} cannot be {text!r}. Give ISO 8601 such as "
            "2026-01-31T12:00:00Z, or milliseconds since 1970."
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _where(name: str, text: str) -> tuple[Where, ...]:
    del name
    return parse_where(text)


def _access(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        # The text is not shown: it may hold credentials.
        raise InvalidInputError(
            f"The option {name!r} must be a JSON object of URL prefixes, such as "
            '{"s3://bucket/": null}, and its value is not.'
        )
    return value  # pyright: ignore[reportUnknownVariableType]


def _values(name: str, text: str) -> tuple[Any, ...]:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise InvalidInputError(
            f"The option {name!r} must be a JSON list of coordinates, not {text!r}."
        )
    return tuple(values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _start(name: str, text: str) -> str:
    if text.lower() in {EARLIEST, LATEST}:
        return text.lower()
    try:
        return str(SnapshotId.parse(text))
    except ValueError:
        raise InvalidInputError(
            f"The option {name!r} cannot be {text!r}. Give the id of a snapshot, {EARLIEST} or "
            f"{LATEST}."
        ) from None


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the source.

    Attributes:
        name: as users write it; Spark hands it over in lower case.
        uses: where it is accepted.
        meaning: one line of Markdown for the documentation.
        parse: turns name and text into the value, or raises `InvalidInputError`.
        default: text of the default; None if there is no default value.
        shown: the default in words, where its text would not say it.
        alias: another name of the option.
    """

    name: str
    uses: frozenset[Use]
    meaning: str
    parse: Callable[[str, str], Any] = _text
    default: str | None = None
    shown: str = ""
    alias: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names under which Spark may hand it over."""
        return tuple(it.lower() for it in (self.name, self.alias) if it)

    def value(self, given: Mapping[str, str]) -> Any:
        """Return the parsed value, or the parsed default."""
        # The name comes before the alias, so that it counts where both are given.
        for key in self.keys:
            if key in given:
                return self.parse(self.name, given[key])
        return None if self.default is None else self.parse(self.name, self.default)


_BATCH: Final = frozenset({Use.READ})
_STREAM: Final = frozenset({Use.READ_STREAM})
_ONE_WRITE: Final = frozenset({Use.WRITE})

OPTIONS: Final = (
    Option(
        "path",
        _ALL,
        "URL of the repository: the argument of `load`, `save` or `start`. It may name a ref and a "
        "group as well, see [Open by URL](../how-to/open-by-url.md)",
    ),
    Option(
        "branch", _ALL, "the branch to read the tip of, to follow, or to commit to", shown="`main`"
    ),
    Option("tag", _BATCH, "read the snapshot of a tag"),
    Option("snapshot-id", _BATCH, "read this snapshot"),
    Option(
        "ref",
        _BATCH,
        "read any of these: a branch, a tag, a snapshot id or its first letters, or steps back "
        "such as `main~2`",
    ),
    Option(
        "as-of-timestamp",
        _BATCH,
        "read what was the tip of the branch then: ISO 8601, in UTC unless it names a zone, or "
        "milliseconds since 1970",
        _time,
    ),
    Option(
        "from-snapshot-id",
        _BATCH,
        "with `table` = `changes`: the older of the two snapshots",
        shown="the parent",
    ),
    Option("group", _ALL, "the group of the arrays", _path, "", "the root"),
    Option(
        "arrays",
        _READING,
        "arrays to read, separated by commas; all must have the same dimensions",
        _names,
        shown="those with the most dimensions",
    ),
    Option(
        "where",
        _READING,
        "conditions on columns, to read fewer chunks; in a stream, on dimensions",
        _where,
        "",
        "none",
    ),
    Option(
        "layout",
        _READING,
        "`rows`: a row for each cell; `chunks`: a row for each chunk; `tiledb`: `path` is a TileDB "
        "array, and its cells are the rows (`spark.read` only)",
        _one_of("rows", "chunks", _TILEDB),
        "rows",
    ),
    Option(
        "table",
        _BATCH,
        f"read about the repository: {', '.join(f'`{it}`' for it in TABLES)}",
        _one_of(*TABLES),
    ),
    Option(
        "decode",
        _READING,
        "decode CF times, scales, offsets and fill values as xarray does",
        _flag,
        "true",
    ),
    Option(
        "nan-as-null",
        _READING,
        "NaN becomes null, which aggregates of SQL skip",
        _flag,
        "true",
    ),
    Option(
        "push-filters",
        _READING,
        "prune chunks by the filters of a query; only for data frames that are used once",
        _flag,
        "false",
    ),
    Option(
        # Measured: 64 to 256 MB are best, and 8 MB take 1.7 times as long.
        "partition-bytes",
        _READING,
        "rows of one task, in bytes; always whole chunks",
        _positive,
        str(128 << 20),
    ),
    # Measured: batches of 65,000 to 260,000 rows are 1.3 times as quick as those of 10,000.
    Option("batch-rows", _READING, "rows handed to Spark at once", _positive, str(1 << 17)),
    Option(
        _VIRTUAL,
        _READING,
        'containers of virtual chunks to read, as JSON: `{"s3://archive/": null}`',
        _access,
        "{}",
        "none",
    ),
    Option(
        "starting-snapshot",
        _STREAM,
        "where a new query begins: after the snapshot with this id, at the first commit of the "
        f"branch (`{EARLIEST}`), or with commits from now on (`{LATEST}`)",
        _start,
        EARLIEST,
    ),
    Option(
        "max-commits-per-trigger",
        _STREAM,
        "commits in one batch; needs PySpark 4.2",
        _positive,
        shown="no limit",
    ),
    Option(
        "changes",
        _STREAM,
        "`appended`: only new rows; `all`: also changed and removed rows, with columns that say so",
        _one_of("appended", "all"),
        "appended",
    ),
    Option(
        "schema-change",
        _STREAM,
        "where a commit changed the columns of the table: `fail`, or continue with the `latest`",
        _one_of("fail", "latest"),
        "fail",
    ),
    Option(
        "append-dim",
        _WRITING,
        'with `mode("append")`: the dimension to append along; else use `mode("overwrite")`',
    ),
    Option(
        "append-values",
        _ONE_WRITE,
        "coordinates to append, as a JSON list, if they do not continue in equal steps",
        _values,
    ),
    Option(
        "max-append",
        _WRITING,
        "the most coordinates that one write appends without `append-values`; a row further away "
        "is an error",
        _positive,
        shown="1000, or ten chunks",
    ),
    Option(
        "fill-gaps",
        _WRITING,
        "append coordinates that no row has, without values, where rows have later ones",
        _flag,
        "false",
    ),
    Option(
        "late-rows",
        _WRITING,
        "with `append-dim`, rows whose coordinate exists already: `fail`, `overwrite` values by "
        "them, or `drop` them. The commit counts them in its property `spark-late-rows`",
        _one_of("fail", "overwrite", "drop"),
        "fail",
    ),
    Option(
        "if-written",
        _ONE_WRITE,
        'with `mode("overwrite")`: `error` or `ignore` if an array has values. Spark does not '
        "pass its own modes of these names to data sources",
        _one_of("replace", "error", "ignore"),
        "replace",
    ),
    Option(
        "cast",
        _WRITING,
        "values that an array cannot hold exactly as SQL means them: `refuse`, or `allow` what "
        "NumPy makes of them",
        _one_of("refuse", "allow"),
        "refuse",
    ),
    Option("message", _WRITING, "message of the commit", default="Written by Spark"),
    Option(
        "rebase",
        _WRITING,
        "after commits of others: `detect` conflicts, or refuse in any case (`none`)",
        _one_of("detect", "none"),
        "detect",
    ),
    Option(
        "txnAppId",
        _WRITING,
        "name of the application or query, to write each version once; required for streams",
        alias="appId",
    ),
    Option(
        "txnVersion",
        _ONE_WRITE,
        "number of the write, counting up; a stream uses the number of its batch",
        _count,
    ),
    Option(
        "max-requests",
        _ALL,
        "requests at a time of the whole job, divided by its tasks that run at once; see "
        "[Requests](../explanation/spark.md#requests)",
        _positive,
        shown=f"`{JOB_SETTING}` of the session, or {JOB_REQUESTS}",
    ),
    Option(
        "executor-cores",
        _WRITING,
        "tasks of one executor that share its budget of requests",
        _count,
        "0",
        "what Spark says",
    ),
    Option("checkpointLocation", frozenset({Use.WRITE_STREAM}), "Spark's own checkpoint"),
)
"""Every option. Those that begin with `storage.` are not listed: they are the backend's."""


def parse_options(options: Mapping[str, str], use: Use) -> dict[str, Any]:
    """Return the values of all options of a use, by name, with defaults filled in.

    Args:
        options: names and values as Spark hands them over; case of names does not matter.
        use: what they are for.

    Raises:
        InvalidInputError: an option is unknown or does not go with this use, a value is not
            valid, or no repository is named.
    """
    # Spark lowers names on their way to a source; this library's own functions pass them as given.
    given = {name.lower(): text for name, text in options.items()}
    if "provider" in given or any(it.startswith("option.") for it in given):
        raise InvalidInputError(
            "Spark keeps no options for a table of its catalog whose source is in Python, so that "
            "CREATE TABLE ... USING icechunk would make a table that nobody can read. Make a "
            "temporary view: CREATE TEMPORARY VIEW name USING icechunk OPTIONS (path '...'), or "
            "icechunk_async.spark.register_views for all of a repository."
        )
    known = {key: it for it in OPTIONS for key in it.keys}
    mine = [it for it in OPTIONS if _accepts(it, use)]
    for key in given:
        if key.startswith(STORAGE):
            continue
        if key not in known:
            raise _unknown(key, use, mine)
        if known[key] not in mine:
            raise _misplaced(known[key], use)
    if "path" not in given:
        method = {Use.WRITE: "save", Use.WRITE_STREAM: "start"}.get(use, "load")
        raise InvalidInputError(
            f"No repository was named. Give its URL: {method}('s3://...'). Of a table of Spark's "
            "catalog Spark hands over none: make a temporary view in its place."
        )
    return _named_in({it.name: it.value(given) for it in mine})


def _named_in(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with what a URL such as ``...|icechunk:@tag.v1/group`` names.

    Raises:
        InvalidInputError: the URL cannot be understood, names what cannot be given here, or an
            option names another ref.
    """
    if not is_icechunk_url(values["path"]):
        return values
    url = IcechunkURL.parse(values["path"])
    named = {
        "branch": url.branch,
        "tag": url.tag,
        "snapshot-id": url.snapshot_id,
        "as-of-timestamp": url.as_of,
    }
    refs = (*named, "ref")
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        if name not in values:
            raise InvalidInputError(
                f"{url!r} names {name!r} {str(value)!r}, which cannot be given here. Name a branch."
            )
    twice = [it for it in refs if values.get(it) is not None]
    # The URL names one state, and the options may name none, nor the same one again: which of two
    # counts would be a guess.
    if given and twice:
        raise InvalidInputError(
            f"{url!r} names a state of the repository, and the option {twice[0]!r} one more. Give "
            "one."
        )
    group = "/".join(it for it in (url.group, values["group"]) if it)
    return {**values, **given, "path": url.location, "group": group}


def _accepts(option: Option, use: Use) -> bool:
    # One writer parses for batches and streams; the sink itself refuses what is for one write.
    return use in option.uses or (use in _WRITING and not option.uses.isdisjoint(_WRITING))


def _unknown(key: str, use: Use, known: list[Option]) -> InvalidInputError:
    names = [it.name for it in known if it.name != "path"]
    # Spark asks for the columns of a stream before it says that it is one.
    streams = [it.name for it in OPTIONS if it.uses == _STREAM] if use is Use.READ else []
    # In lower case, as Spark hands over names; the suggestion is written as users write it.
    near = get_close_matches(key, [it.lower() for it in (*names, *streams)], 1)
    guess = next((it for it in (*names, *streams) if near and it.lower() == near[0]), None)
    methods = f"{use.value} and {Use.READ_STREAM.value}" if streams else use.value
    return InvalidInputError(
        f"Unknown option {key!r} for {methods} with the format 'icechunk'. "
        f"{'' if guess is None else f'Did you mean {guess!r}? '}"
        f"Known are {', '.join(names)}, {STORAGE}<name> for the storage"
        f"{f', and of streams alone {", ".join(streams)}' if streams else ''}."
    )


def _misplaced(option: Option, use: Use) -> InvalidInputError:
    method = use.value.partition(".")[2]
    advice = f"It is for {' and '.join(sorted(it.value for it in option.uses))}."
    if use is Use.READ_STREAM and option.uses == _BATCH:
        advice = (
            "A stream follows a branch: name that with 'branch', and where to begin with "
            "'starting-snapshot'; or use read."
        )
    return InvalidInputError(f"The option {option.name!r} does not go with {method}. {advice}")


def storage_options(options: Mapping[str, str]) -> dict[str, object]:
    """Return the options of the storage backend.

    A value that is JSON is parsed (`true` is a boolean, `"true"` is text); any other is text.
    Identifiers and secrets are text even if they consist of digits.
    """
    found: dict[str, object] = {}
    for name, text in options.items():
        key = name.lower()
        if key.startswith(STORAGE):
            found[key.removeprefix(STORAGE)] = _storage_value(key, text)
    return found


def _storage_value(name: str, text: str) -> object:
    # A secret of digits would lose leading zeros, or its type, as a number.
    if any(it in name for it in _SECRET) and not text.startswith(('"', "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_tiledb(options: Mapping[str, str], use: Use) -> None:
    """Raise InvalidInputError if options of a repository, or of a stream, go with an array."""
    if use is not Use.READ:
        raise InvalidInputError(
            "The layout 'tiledb' does not go with readStream: a TileDB array has no commits to "
            "follow. Use read, or ingest it into a repository and follow that."
        )
    given = {name.lower() for name in options}
    for name in _OF_REPOSITORIES:
        if name in given:
            raise InvalidInputError(
                f"The option {name!r} is for repositories, and with the layout 'tiledb' the path "
                "is that of a TileDB array. Leave it out; 'as-of-timestamp' names a time."
            )


def _check_layout(options: Mapping[str, str]) -> None:
    """Raise InvalidInputError if another layout goes with the URL of a TileDB array."""
    layout = next((it for name, it in options.items() if name.lower() == "layout"), _TILEDB)
    if layout.lower() != _TILEDB:
        raise InvalidInputError(
            f"The URL is that of a TileDB array, and the option 'layout' is {layout!r:.50}. Leave "
            "it out, or give the URL of a repository."
        )


def names_stream_options(options: Mapping[str, str]) -> bool:
    """Return whether any option is for streams only; Spark asks for a schema without saying."""
    own = {key for it in OPTIONS if it.uses == _STREAM for key in it.keys}
    return any(name.lower() in own for name in options)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """A request to read. It pickles with its secrets and does not print them."""

    url: str
    branch: str | None = None
    tag: str | None = None
    snapshot_id: str | None = None
    ref: str | None = None
    as_of: datetime | None = None
    from_snapshot_id: str | None = None
    """With the table `changes`: the older of two snapshots."""
    group: str = ""
    arrays: tuple[str, ...] | None = None
    """Arrays to read; None for the group's arrays with the most dimensions."""
    where: tuple[Where, ...] = ()
    """Conditions that every row fulfils."""
    layout: str = "rows"
    table: str | None = None
    decode: bool = True
    nan_as_null: bool = True
    push_filters: bool = False
    """Off by default: Spark 4.3 keeps one plan for all uses of a data frame, so rows that one
    query's filters pruned would be missing from the others."""
    partition_bytes: int = 128 << 20
    batch_rows: int = 1 << 17
    storage: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    virtual: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    max_requests: int | None = None
    """Requests at a time of the whole job; None for what the session says."""
    budget: Budget | None = None
    """Requests shared by tasks, once they are known."""

    @classmethod
    def parse(
        cls, options: Mapping[str, str], *, snapshot_id: str | None = None, use: Use = Use.READ
    ) -> Self:
        """Parse the options of `spark.read`.

        Args:
            options: names and values as Spark hands them over.
            snapshot_id: read this snapshot instead of what the options name.
            use: `spark.readStream` for streams.

        Raises:
            InvalidInputError: an option is unknown, its value is not valid, or options
                contradict each other.
        """
        given = parse_options(options, use)
        if is_tiledb_url(given["path"]):
            _check_layout(options)
            given["layout"] = _TILEDB
        if given["layout"] == _TILEDB:
            _check_tiledb(options, use)
            given["path"] = storage_location(given["path"])
        parsed = cls(
            url=normalize_url(given["path"]),
            branch=given["branch"],
            tag=given.get("tag"),
            snapshot_id=given.get("snapshot-id"),
            ref=given.get("ref"),
            as_of=given.get("as-of-timestamp"),
            from_snapshot_id=given.get("from-snapshot-id"),
            group=given["group"],
            arrays=given["arrays"],
            where=given["where"],
            layout=given["layout"],
            table=given.get("table"),
            decode=given["decode"],
            nan_as_null=given["nan-as-null"],
            push_filters=given["push-filters"],
            partition_bytes=given["partition-bytes"],
            batch_rows=given["batch-rows"],
            storage=storage_options(options),
            virtual=given[_VIRTUAL],
            max_requests=given["max-requests"],
        )
        # Before pinning, which would hide that two states were named.
        parsed.check_refs()
        return parsed if snapshot_id is None else parsed.pinned(snapshot_id)

    def check_refs(self) -> None:
        """Raise InvalidInputError if the options name more than one state of the repository."""
        named = [
            name
            for name, value in zip(
                _REFS, (self.branch, self.tag, self.snapshot_id, self.ref), strict=True
            )
            if value is not None
        ]
        if len(named) > 1:
            raise InvalidInputError(
                f"The options {' and '.join(map(repr, named))} name one state each. Give one."
            )
        if self.as_of is not None and named not in ([], ["branch"]):
            raise InvalidInputError(
                "The option 'as-of-timestamp' goes with a branch; a tag or a snapshot id names "
                "one moment already."
            )
        if self.from_snapshot_id is not None and self.table != "changes":
            raise InvalidInputError(
                "The option 'from-snapshot-id' goes with the table 'changes'. Leave it out, or "
                "add option('table', 'changes')."
            )

    def pinned(self, snapshot_id: str) -> Self:
        """Return the same request for one snapshot, independent of branches and tags."""
        return replace(self, branch=None, tag=None, ref=None, as_of=None, snapshot_id=snapshot_id)

    def with_budget(self) -> Self:
        """Return the same request for tasks, which share requests; opens the repository.

        Tasks of streams begin to read as well, with a budget that must not be divided again.
        """
        if self.budget is not None:
            return self
        # Once, in the driver: the share of a task is computed from this whole one, never from a
        # share.
        return replace(self, budget=self.repository.budget(job_requests=self.max_requests or 0))

    def among(self, parts: int) -> Self:
        """Return the same request for one of `parts` tasks, which share requests."""
        return self if self.budget is None else replace(self, budget=self.budget.among(parts))

    def session(self) -> Session:
        """Return the session of the snapshot, once planning has pinned it."""
        assert self.snapshot_id is not None
        return self.repository.session(self.snapshot_id)

    @property
    def repository(self) -> SharedRepository:
        """The repository to read, with this task's share of the budget."""
        # Made at each use: the request travels to tasks, and only a task knows its share.
        config = None if self.budget is None else self.budget.of_task()
        return SharedRepository.at(
            Storage.from_url(self.url, **self.storage), config, self.virtual or None
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """A request to stream. It pickles with its secrets and does not print them.

    Attributes:
        read: what to read of each snapshot.
        branch: the branch whose commits are followed.
        starting: where a new query begins: the id of the snapshot before its first commit,
            `earliest` or `latest`.
        max_commits: the most commits of one batch; None for no limit.
        every_change: also return rows that a commit changed or removed.
        any_schema: continue with the columns of the query over commits that have others.
    """

    read: ReadOptions
    branch: str
    starting: str
    max_commits: int | None
    every_change: bool
    any_schema: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Parse the options of `spark.readStream`.

        Raises:
            InvalidInputError: an option is unknown or does not go with streams, or its value is
                not valid.
        """
        read = ReadOptions.parse(options, use=Use.READ_STREAM)
        given = parse_options(options, Use.READ_STREAM)
        return cls(
            read=read,
            branch=read.branch or "main",
            starting=given["starting-snapshot"],
            max_commits=given["max-commits-per-trigger"],
            every_change=given["changes"] == "all",
            any_schema=given["schema-change"] == "latest",
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """A request to write. It pickles with its secrets and does not print them."""

    storage: Storage
    branch: str = "main"
    group: str = ""
    append_dim: str | None = None
    append_values: tuple[Any, ...] | None = None
    """Coordinates to append; None if they continue in equal steps."""
    if_written: str = "replace"
    message: str = "Written by Spark"
    rebase: bool = True
    app_id: str | None = None
    version: int | None = None
    cores: int = 0
    """Tasks of one executor that share its budget of requests; 0 if each has to ask Spark."""
    cast: str = "refuse"
    """`allow`: convert values as NumPy does in place of refusing those that change."""
    max_append: int | None = None
    """The most coordinates to append in equal steps; None for the default."""
    fill_gaps: bool = False
    late_rows: str = "fail"
    """Rows whose coordinate along `append_dim` exists: `fail`, `overwrite` or `drop`."""
    max_requests: int | None = None
    """Requests at a time of the whole job; None for what the session says."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Parse the options of `df.write` and `df.writeStream`.

        Raises:
            InvalidInputError: an option is unknown, or its value is not valid.
        """
        given = parse_options(options, Use.WRITE)
        storage = Storage.from_url(normalize_url(given["path"]), **storage_options(options))
        return cls(
            storage=storage,
            branch=given["branch"] or "main",
            group=given["group"],
            append_dim=given["append-dim"],
            append_values=given["append-values"],
            if_written=given["if-written"],
            message=given["message"],
            rebase=given["rebase"] == "detect",
            app_id=given["txnAppId"],
            version=given["txnVersion"],
            cores=given["executor-cores"],
            cast=given["cast"],
            max_append=given["max-append"],
            fill_gaps=given["fill-gaps"],
            late_rows=given["late-rows"],
            max_requests=given["max-requests"],
        )

    @property
    def transaction(self) -> Transaction | None:
        """The name of the write, or None.

        Raises:
            InvalidInputError: only one of its two options is given.
        """
        if self.app_id is None and self.version is None:
            return None
        if self.app_id is None or self.version is None:
            raise InvalidInputError(
                "The options 'txnAppId' and 'txnVersion' go together: the name of the writer, "
                "and a number that counts up. Give both or none."
            )
        return Transaction(self.app_id, self.version)

    @property
    def solver(self) -> ConflictSolver | None:
        """The solver of conflicts with commits made since the write began; None refuses them."""
        return ConflictDetector() if self.rebase else None

    def check_mode(self, *, overwrite: bool) -> None:
        """Raise InvalidInputError if the save mode and the options contradict each other."""
        if overwrite and self.append_dim is not None:
            raise InvalidInputError(
                "mode('overwrite') replaces values, and the option 'append-dim' appends. Use "
                "mode('append'), or leave the option out."
            )
        if not overwrite and self.append_dim is None:
            raise InvalidInputError(
                "mode('append') needs to know along which dimension: option('append-dim', "
                "'time'). To write to places that the arrays have, use mode('overwrite')."
            )

    def path_of(self, name: str) -> str:
        """Return the path of an array of the group."""
        return f"{self.group}/{name}" if self.group else name

    def open(self) -> Repository:
        """Open the repository."""
        return Repository.open(self.storage)
