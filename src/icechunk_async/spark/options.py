"""What can be asked for when reading: Spark's options, checked, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.pushdown import parse_where
from icechunk_async.storage.registry import normalize_url
from icechunk_async.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.spark.budget import Budget
    from icechunk_async.spark.pushdown import Predicate

__all__ = ["STORAGE", "ReadOptions", "given_options", "storage_options"]

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
        """Answer the request for one snapshot, whatever happens to branches and tags."""
        return replace(self, branch=None, tag=None, as_of=None, snapshot_id=snapshot_id)


def given_options(
    options: Mapping[str, str], known: tuple[str, ...], what: str, method: str
) -> dict[str, str]:
    """Answer options with their names in lower case, once all are known and ``path`` is there.

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
    """Answer the options of the storage backend.

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
