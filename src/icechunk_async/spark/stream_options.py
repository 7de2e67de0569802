"""What can be asked for when streaming: a request to read, and which commits and changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.spark.options import ReadOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHANGE_COLUMNS", "EARLIEST", "LATEST", "StreamOptions", "names_stream_options"]

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
    """Tell whether some of these options go with streams only."""
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
