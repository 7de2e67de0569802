"""Options of readers, writers and streams: checked, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.spark.read.pushdown import parse_where
from icechunk_async.spark.write.transactions import Transaction
from icechunk_async.storage.registry import normalize_url
from icechunk_async.sync import Repository
from icechunk_async.sync.conflicts import ConflictDetector
from icechunk_async.sync.storage import Storage
from icechunk_async.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.spark.budget import Budget
    from icechunk_async.spark.read.pushdown import Predicate
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = [
    "CHANGE_COLUMNS",
    "EARLIEST",
    "LATEST",
    "STORAGE",
    "ReadOptions",
    "StreamOptions",
    "WriteOptions",
    "given_options",
    "names_stream_options",
    "storage_options",
]


STORAGE: Final = "storage."
"""Begins the names of options for the storage backend."""
_VIRTUAL: Final = "virtual-chunk-access"
_REFS: Final = ("branch", "tag", "snapshot-id")
_KNOWN: Final = (
    "path",
    *_REFS,
    "as-of-timestamp",
    "from-snapshot-id",
    "group",
    "arrays",
    "where",
    "layout",
    "table",
    "decode",
    "nan-as-null",
    "push-filters",
    "partition-bytes",
    "batch-rows",
    _VIRTUAL,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """One request to read; it pickles with its secrets and shows none."""

    url: str
    branch: str | None = None
    tag: str | None = None
    snapshot_id: str | None = None
    as_of: datetime | None = None
    from_snapshot_id: str | None = None
    """With the table ``changes``: the older of two snapshots."""
    group: str = ""
    arrays: tuple[str, ...] | None = None
    """Those to read; None leaves it to the group."""
    where: tuple[Predicate, ...] = ()
    """What rows must fulfil, exactly."""
    layout: str = "rows"
    table: str | None = None
    decode: bool = True
    """Decode CF times, scales, offsets and fill values as xarray does."""
    nan_as_null: bool = True
    push_filters: bool = False
    """Off, since Spark 4.3 has one plan for all uses of a data frame: what one of them pushed
    would be missing from the others."""
    partition_bytes: int = 128 << 20
    batch_rows: int = 1 << 17
    storage: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    virtual: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    budget: Budget | None = None
    """Requests that all tasks of an executor may have under way, once it is known."""

    @classmethod
    def parse(cls, options: Mapping[str, str], *, snapshot_id: str | None = None) -> Self:
        """Read the options of ``spark.read``; their names' case does not count.

        Args:
            options: names and values as Spark gives them.
            snapshot_id: read this snapshot, whatever the options name.

        Raises:
            InvalidInputError: an option is unknown, or its value is none of its kind.
        """
        given = given_options(options, _KNOWN, "reading", "load")
        parsed = cls(
            url=normalize_url(given["path"]),
            branch=given.get("branch"),
            tag=given.get("tag"),
            snapshot_id=given.get("snapshot-id"),
            as_of=_time(given.get("as-of-timestamp")),
            from_snapshot_id=given.get("from-snapshot-id"),
            group=given.get("group", "").strip("/"),
            arrays=_names(given.get("arrays")),
            where=parse_where(given.get("where", "")),
            layout=_choice("layout", given.get("layout", "rows"), ("rows", "chunks")),
            table=_choice("table", given["table"], TABLES) if "table" in given else None,
            decode=_flag("decode", given.get("decode", "true")),
            nan_as_null=_flag("nan-as-null", given.get("nan-as-null", "true")),
            push_filters=_flag("push-filters", given.get("push-filters", "false")),
            partition_bytes=_count("partition-bytes", given.get("partition-bytes", "134217728")),
            batch_rows=_count("batch-rows", given.get("batch-rows", "131072")),
            storage=storage_options(given),
            virtual=_access(given.get(_VIRTUAL)),
        )
        parsed.check_refs()
        return parsed if snapshot_id is None else parsed.pinned(snapshot_id)

    def check_refs(self) -> None:
        """Raise InvalidInputError if more than one state of the repository is named."""
        named = [
            name
            for name, value in zip(_REFS, (self.branch, self.tag, self.snapshot_id), strict=True)
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
        """Return the request for one snapshot, whatever happens to branches and tags."""
        return replace(self, branch=None, tag=None, as_of=None, snapshot_id=snapshot_id)


def given_options(
    options: Mapping[str, str], known: tuple[str, ...], what: str, method: str
) -> dict[str, str]:
    """Return options with their names in lower case, once all are known and ``path`` is there.

    Args:
        options: names and values as Spark gives them.
        known: the names, ``path`` first; the storage's own are known as well.
        what: is done with them, for messages.
        method: is given the path, likewise.

    Raises:
        InvalidInputError: an option is unknown, or no repository is named.
    """
    given = {name.lower(): value for name, value in options.items()}
    unknown = [it for it in given if it not in known and not it.startswith(STORAGE)]
    if unknown:
        raise InvalidInputError(
            f"Unknown option {unknown[0]!r} for {what} the format 'icechunk'. Known are "
            f"{', '.join(known[1:])}, and {STORAGE}<name> for the storage."
        )
    if "path" not in given:
        raise InvalidInputError(f"No repository was named. Give its URL: {method}('s3://...').")
    return given


def storage_options(given: Mapping[str, str]) -> dict[str, object]:
    """Return the options of the storage backend.

    A value that is JSON is that, any other is a string: ``true`` is none, ``"true"`` is one.
    Ids and secrets of digits only are strings all the same.
    """
    found: dict[str, object] = {}
    for name, text in given.items():
        key = name.lower()
        if key.startswith(STORAGE):
            found[key.removeprefix(STORAGE)] = _value(key, text)
    return found


_SECRET: Final = ("secret", "password", "token", "key", "credential")


def _value(name: str, text: str) -> object:
    if any(it in name for it in _SECRET) and not text.startswith(('"', "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(name for name in (it.strip() for it in text.split(",")) if name)


def _choice(name: str, text: str, known: tuple[str, ...]) -> str:
    if text.lower() not in known:
        raise InvalidInputError(
            f"The option {name!r} cannot be {text!r}. Give one of {', '.join(known)}."
        )
    return text.lower()


def _flag(name: str, text: str) -> bool:
    return _choice(name, text, ("true", "false")) == "true"


def _count(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidInputError(f"The option {name!r} must be a positive number, not {text!r}.")
    return number


def _time(text: str | None) -> datetime | None:
    """Read ISO 8601, UTC unless it says otherwise, or milliseconds since the epoch."""
    if text is None:
        return None
    try:
        if text.lstrip("-").isdigit() and len(text) > len("20260131"):
            return _EPOCH + timedelta(milliseconds=int(text))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidInputError(
            f"The option 'as-of-timestamp' cannot be {text!r}. Give ISO 8601 such as "
            "2026-01-31T12:00:00Z, or milliseconds since 1970."
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _access(text: str | None) -> dict[str, Any]:
    """Read which containers of virtual chunks may be read: JSON, options by URL prefix."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        # The text is not shown: it may hold credentials.
        raise InvalidInputError(
            f"The option {_VIRTUAL!r} must be a JSON object of URL prefixes, such as "
            '{"s3://bucket/": null}; it is none.'
        )
    return value  # pyright: ignore[reportUnknownVariableType]


_APP: Final = ("txnappid", "appid")
_VERSION: Final = "txnversion"
_KNOWN_TO_WRITERS: Final = (
    "path",
    "branch",
    "group",
    "append-dim",
    "append-values",
    "if-written",
    "message",
    "rebase",
    "checkpointlocation",
    "executor-cores",
    *_APP,
    _VERSION,
)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """One request to write; it pickles with its secrets and shows none."""

    storage: Storage
    branch: str = "main"
    group: str = ""
    append_dim: str | None = None
    append_values: tuple[Any, ...] | None = None
    """The coordinates to append, where they do not go on in equal steps."""
    if_written: str = "replace"
    message: str = "Written by Spark"
    rebase: bool = True
    app_id: str | None = None
    version: int | None = None
    cores: int = 0
    """Tasks that run at a time in one executor, and share its budget of requests; 0 where each
    task is to ask Spark."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Read the options of ``df.write``; their names' case does not count.

        Raises:
            InvalidInputError: an option is unknown, or its value is none of its kind.
        """
        given = given_options(options, _KNOWN_TO_WRITERS, "writing", "save")
        apps = [given[name] for name in _APP if name in given]
        values = given.get("append-values")
        return cls(
            storage=Storage.from_url(normalize_url(given["path"]), **storage_options(given)),
            branch=given.get("branch", "main"),
            group=given.get("group", "").strip("/"),
            append_dim=given.get("append-dim"),
            append_values=None if values is None else _values(values),
            if_written=_given_choice(given, "if-written", ("replace", "error", "ignore")),
            message=given.get("message", "Written by Spark"),
            rebase=_given_choice(given, "rebase", ("detect", "none")) == "detect",
            app_id=apps[0] if apps else None,
            version=_number("txnVersion", given[_VERSION]) if _VERSION in given else None,
            cores=_number("executor-cores", given.get("executor-cores", "0")),
        )

    @property
    def transaction(self) -> Transaction | None:
        """What names the write.

        Raises:
            InvalidInputError: only one of its two options is given.
        """
        if self.app_id is None and self.version is None:
            return None
        if self.app_id is None or self.version is None:
            raise InvalidInputError(
                "The options 'txnAppId' and 'txnVersion' go together: who writes, and a number "
                "that counts up. Give both or none."
            )
        return Transaction(self.app_id, self.version)

    @property
    def solver(self) -> ConflictSolver | None:
        """What decides conflicts with commits that came meanwhile."""
        return ConflictDetector() if self.rebase else None

    def path_of(self, name: str) -> str:
        """Return the path of an array of the group."""
        return f"{self.group}/{name}" if self.group else name

    def open(self) -> Repository:
        """Open the repository."""
        return Repository.open(self.storage)


def _given_choice(given: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    text = given.get(name, known[0]).lower()
    if text not in known:
        raise InvalidInputError(
            f"The option {name!r} cannot be {text!r}. Give one of {', '.join(known)}."
        )
    return text


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidInputError(f"The option {name!r} must be a number, not {text!r}.")
    return int(text)


def _values(text: str) -> tuple[Any, ...]:
    try:
        values: Any = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise InvalidInputError(
            f"The option 'append-values' must be a JSON list of coordinates, not {text!r}."
        )
    return tuple(values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_STARTING: Final = "starting-snapshot"
_LIMIT: Final = "max-commits-per-trigger"
_CHANGES: Final = "changes"
_OWN: Final = (_STARTING, _LIMIT, _CHANGES)
_OTHERS: Final = ("tag", "snapshot-id", "as-of-timestamp", "from-snapshot-id", "table")

CHANGE_COLUMNS: Final = pa.schema(
    [
        ("_change", pa.string()),
        ("_snapshot_id", pa.string()),
        ("_written_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""What is told of each row with the option ``changes`` = ``all``: its kind, and its commit."""


def names_stream_options(options: Mapping[str, str]) -> bool:
    """Return whether some of these options go with streams only."""
    return any(name.lower() in _OWN for name in options)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """One request to stream; it pickles with its secrets and shows none.

    Attributes:
        read: what to read of each snapshot.
        branch: whose commits.
        starting: the snapshot after which the stream begins: its id, the first one of the
            branch, or the tip of when the query begins.
        max_commits: of one batch at most; None for no limit.
        every_change: also rows that a commit changed or removed, with columns that tell.
    """

    read: ReadOptions
    branch: str
    starting: str
    max_commits: int | None
    every_change: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Self:
        """Read the options of ``spark.readStream``; their names' case does not count.

        Raises:
            InvalidInputError: an option is unknown or does not go with streams, or its value is
                none of its kind.
        """
        given = {name.lower(): value for name, value in options.items()}
        for name in _OTHERS:
            if name in given:
                raise InvalidInputError(
                    f"The option {name!r} does not go with readStream, which follows a branch. "
                    f"Name that with 'branch', and where to begin with {_STARTING!r}; or use read."
                )
        read = ReadOptions.parse({k: v for k, v in given.items() if k not in _OWN})
        starting = given.get(_STARTING, EARLIEST)
        if starting.lower() in {EARLIEST, LATEST}:
            starting = starting.lower()
        else:
            starting = _snapshot_id(starting)
        limit = given.get(_LIMIT)
        if limit is not None and not (limit.isdigit() and int(limit)):
            raise InvalidInputError(
                f"The option {_LIMIT!r} must be a positive number, not {limit!r}."
            )
        changes = given.get(_CHANGES, "appended").lower()
        if changes not in {"appended", "all"}:
            raise InvalidInputError(
                f"The option {_CHANGES!r} cannot be {changes!r}. Give one of appended, all."
            )
        return cls(
            read=read,
            branch=read.branch or "main",
            starting=starting,
            max_commits=None if limit is None else int(limit),
            every_change=changes == "all",
        )


def _snapshot_id(text: str) -> str:
    try:
        return str(SnapshotId.parse(text))
    except ValueError:
        raise InvalidInputError(
            f"The option {_STARTING!r} cannot be {text!r}. Give the id of a snapshot, {EARLIEST} "
            f"or {LATEST}."
        ) from None
