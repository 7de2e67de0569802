"""A proposal as a value, and as the JSON that is stored; see docs/reference/proposals.md.

What is stored may come from anybody who can write to the repository: sizes are bounded, and any
fault is a `FormatError`.
"""

from __future__ import annotations

import json
import math
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, IcechunkError, InvalidInputError
from icechunk_async.format.ids import ProposalId, SnapshotId
from icechunk_async.format.json.reading import Part, parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

    from icechunk_async.format.json.metadata import JSON

__all__ = [
    "MOST_BYTES",
    "MOST_CHECKS",
    "MOST_DETAIL",
    "MOST_MESSAGE",
    "MOST_NAME",
    "MOST_TITLE",
    "ArrayReview",
    "Candidate",
    "CellReview",
    "ChangeMap",
    "CheckResult",
    "KeyReview",
    "NodeReview",
    "ProposalRecord",
    "ProposalState",
    "Review",
    "check_names",
    "check_size",
    "decode_record",
    "encode_record",
]

# Maps take most of it: `zarr.review` makes 80 at most, of 48 by 48 fields, some 1.3 MB.
MOST_BYTES: Final = 16 << 20
"""Bytes of a record."""
MOST_TITLE: Final = 500
MOST_MESSAGE: Final = 20_000
MOST_NAME: Final = 200
"""Characters of the name of a check."""
MOST_CHECKS: Final = 100
MOST_DETAIL: Final = 4_000
"""Characters of what a check said."""
_MOST_REF: Final = 4_096
_MOST_PATH: Final = 16_384
_MOST_VALUE: Final = 1_000
_MOST_ROWS: Final = 1_000
_MOST_SIDE: Final = 64
"""Fields of a map along one side."""
_MOST_COUNT: Final = 1 << 63
_MOST_NUMBER: Final = 1_000_000
_MOST_US: Final = 1 << 52
_VERSION: Final = 1
_FORMAT: Final = "icechunk-async proposal"

type Outcome = Literal["passed", "failed", "error", "timed out"]
_OUTCOMES: Final[tuple[Outcome, ...]] = ("passed", "failed", "error", "timed out")
type NodeKind = Literal["created", "deleted", "moved", "updated"]
_KINDS: Final[tuple[NodeKind, ...]] = ("created", "deleted", "moved", "updated")


class ProposalState(Enum):
    """The states of proposals."""

    OPEN = "open"
    ACCEPTING = "accepting"
    """About to be merged. A killed process leaves this state, and accepting again continues."""
    ACCEPTED = "accepted"
    CLOSED = "closed"
    """Rejected or given up."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can happen to the proposal any more."""
        return self in {ProposalState.ACCEPTED, ProposalState.CLOSED}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check on the candidate."""

    name: str
    outcome: Outcome
    """``passed``; ``failed``: the check said so; ``error``: it raised, or could not be run; ``timed
    out``."""
    detail: str
    """The words of the check; of a command the end of its output."""
    seconds: float
    """How long it ran."""
    at_us: int
    """When it ended; microseconds since the epoch."""

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        return self.outcome == "passed"

    @property
    def ended_at(self) -> datetime:
        """When it ended (aware, UTC)."""
        return clock.from_us(self.at_us)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The very state that is checked and published: a snapshot that no branch holds yet."""

    snapshot_id: SnapshotId
    target_id: SnapshotId
    """The tip of the branch that it was made for, and its parent."""
    results: tuple[CheckResult, ...] = ()

    @property
    def passed(self) -> frozenset[str]:
        """The names of the checks that passed on it."""
        return frozenset(it.name for it in self.results if it.passed)


@dataclass(frozen=True, slots=True)
class KeyReview:
    """A key of a node's metadata that changed, with its values as JSON, cut short."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class NodeReview:
    """An array or a group that was created, deleted, moved, or given other metadata."""

    kind: NodeKind
    path: str
    previous_path: str | None
    is_array: bool
    keys: tuple[KeyReview, ...] = ()
    """Of a node that was updated: what changed in its ``zarr.json``."""


@dataclass(frozen=True, slots=True)
class CellReview:
    """A cell whose value changed."""

    index: tuple[int, ...]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangeMap:
    """A picture of where an array changed, over its last two axes: fields of equal size.

    Values of all other axes are summed in it.
    """

    rows: int
    columns: int
    row_cells: int
    """Cells, or chunks, that a field covers from top to bottom."""
    column_cells: int
    values: tuple[float, ...]
    """Row by row; of the map of chunks their number, of that of cells the mean change."""


@dataclass(frozen=True, slots=True)
class ArrayReview:
    """The chunks of an array that changed, and by how much its values did."""

    path: str
    added: int
    changed: int
    removed: int
    chunks: ChangeMap | None
    """Where the chunks are that changed."""
    cells: int | None = None
    """Cells that both sides have; None if values were not compared, which ``note`` explains."""
    changed_cells: int = 0
    min_change: float | None = None
    mean_change: float | None = None
    max_change: float | None = None
    first: tuple[CellReview, ...] = ()
    values: ChangeMap | None = None
    """The mean change of values; None where nothing numeric changed."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Review:
    """The net changes of a proposal."""

    nodes: tuple[NodeReview, ...] = ()
    more_nodes: int = 0
    """The number of nodes beyond those that are listed."""
    arrays: tuple[ArrayReview, ...] = ()
    more_arrays: int = 0
    """The number of arrays beyond those that are listed."""


@dataclass(frozen=True, slots=True)
class ProposalRecord:
    """One state of a proposal. A later one has the next number."""

    id: ProposalId
    number: int
    serial: str
    """Random; tells records of two writers apart that are equal otherwise."""
    created_us: int
    at_us: int
    """When this record was made."""
    state: ProposalState
    title: str
    message: str
    """Of the merge."""
    into: str
    source_ref: str
    source_id: SnapshotId
    checks: tuple[str, ...]
    """The names of the checks that must pass."""
    candidate: Candidate
    review: Review
    metadata: Mapping[str, JSON] = field(default_factory=dict[str, "JSON"])
    """Properties of the merge."""
    base_id: SnapshotId | None = None
    """The state that both sides began with, where the proposer named one."""
    reason: str = ""
    """Why it was closed."""


def check_names(names: Collection[str]) -> tuple[str, ...]:
    """Return names of checks, validated, each once.

    Raises:
        InvalidInputError: one is no text, empty or too long; or there are too many.
    """
    if isinstance(names, str):
        raise InvalidInputError(f"Checks are several names; {names!r} is one text. Give a list.")
    for name in names:
        _check_name(name)
    found = tuple(dict.fromkeys(names))
    if len(found) > MOST_CHECKS:
        raise InvalidInputError(
            f"A proposal has at most {MOST_CHECKS} checks, and {len(found)} were given."
        )
    return found


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        raise InvalidInputError(
            f"A check has a name of 1 to {MOST_NAME} characters, and not {name!r:.80}."
        )


def encode_record(record: ProposalRecord) -> bytes:
    """Return a record as JSON.

    Raises:
        InvalidInputError: it is too large, or holds text that UTF-8 cannot.
    """
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "id": str(record.id),
        "number": record.number,
        "serial": record.serial,
        "created_us": record.created_us,
        "at_us": record.at_us,
        "state": record.state.value,
        "title": record.title,
        "message": record.message,
        "into": record.into,
        "source": {"ref": record.source_ref, "snapshot": str(record.source_id)},
        "checks": list(record.checks),
        "candidate": {
            "snapshot": str(record.candidate.snapshot_id),
            "target": str(record.candidate.target_id),
            "results": [_result_to(it) for it in record.candidate.results],
        },
        "review": _review_to(record.review),
        "metadata": dict(record.metadata),
        "base": None if record.base_id is None else str(record.base_id),
        "reason": record.reason,
    }
    try:
        # `NaN` is no JSON. A lone surrogate fails in `encode`, with an error that is a ValueError.
        data = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"The proposal cannot be stored as JSON: {error}.") from error
    if len(data) > MOST_BYTES:
        raise InvalidInputError(
            f"The proposal takes {len(data)} bytes as JSON, and at most {MOST_BYTES} are stored. "
            "Give less metadata or a shorter message."
        )
    return data


def _result_to(result: CheckResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "outcome": result.outcome,
        "detail": result.detail,
        "seconds": result.seconds,
        "at_us": result.at_us,
    }


def _review_to(review: Review) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "kind": node.kind,
                "path": node.path,
                "previous_path": node.previous_path,
                "is_array": node.is_array,
                "keys": [
                    {"key": it.key, "before": it.before, "after": it.after} for it in node.keys
                ],
            }
            for node in review.nodes
        ],
        "more_nodes": review.more_nodes,
        "arrays": [
            {
                "path": it.path,
                "added": it.added,
                "changed": it.changed,
                "removed": it.removed,
                "chunks": _map_to(it.chunks),
                "cells": it.cells,
                "changed_cells": it.changed_cells,
                "min_change": it.min_change,
                "mean_change": it.mean_change,
                "max_change": it.max_change,
                "first": [
                    {"index": list(cell.index), "before": cell.before, "after": cell.after}
                    for cell in it.first
                ],
                "values": _map_to(it.values),
                "note": it.note,
            }
            for it in review.arrays
        ],
        "more_arrays": review.more_arrays,
    }


def _map_to(found: ChangeMap | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "rows": found.rows,
        "columns": found.columns,
        "row_cells": found.row_cells,
        "column_cells": found.column_cells,
        "values": list(found.values),
    }


def check_size(size_bytes: int, proposal_id: ProposalId, number: int) -> None:
    """Refuse a record that is too large.

    Raises:
        FormatError: it is.
    """
    if size_bytes > MOST_BYTES:
        raise FormatError(
            f"The {_name(proposal_id, number)} has {size_bytes} bytes, and at most {MOST_BYTES} "
            "are read."
        )


def _name(proposal_id: ProposalId, number: int) -> str:
    return f"record {number} of proposal {proposal_id}"


def decode_record(data: bytes | memoryview, proposal_id: ProposalId, number: int) -> ProposalRecord:
    """Return the record that was stored for a proposal under a number.

    Raises:
        FormatError: it is damaged, of another proposal, or of a version that is too new.
    """
    name = _name(proposal_id, number)
    # The listing was believed so far; what came may be longer.
    check_size(len(data), proposal_id, number)
    part = parse_json(data, name)
    if part.members.get("format") != _FORMAT or part.members.get("version") != _VERSION:
        raise FormatError(
            f"The {name} is of format {part.members.get('format')!r:.60}, version "
            f"{part.members.get('version')!r:.20}, and this library reads {_FORMAT!r}, version "
            f"{_VERSION}. Use a newer release."
        )
    try:
        return _record_of(part, proposal_id, number)
    except FormatError:
        raise
    except (IcechunkError, ValueError) as error:  # of ids and states
        raise FormatError(f"The {name} is damaged: {error}") from error


def _record_of(part: Part, proposal_id: ProposalId, number: int) -> ProposalRecord:
    # A record copied to another number would undo what came after it.
    if part.text("id") != str(proposal_id) or part.natural("number", _MOST_NUMBER) != number:
        raise part.fault("says that it is another one")
    source, candidate = part.part("source"), part.part("candidate")
    return ProposalRecord(
        proposal_id,
        number,
        _text(part, "serial", MOST_NAME),
        part.natural("created_us", _MOST_US),
        part.natural("at_us", _MOST_US),
        ProposalState(part.text("state")),
        _text(part, "title", MOST_TITLE),
        _text(part, "message", MOST_MESSAGE),
        _text(part, "into", _MOST_REF),
        _text(source, "ref", _MOST_REF),
        SnapshotId.parse(source.text("snapshot")),
        _names(part),
        Candidate(
            SnapshotId.parse(candidate.text("snapshot")),
            SnapshotId.parse(candidate.text("target")),
            tuple(map(_result_of, _parts(candidate, "results", MOST_CHECKS))),
        ),
        _review_of(part.part("review")),
        part.json_object("metadata"),
        SnapshotId.parse(part.text("base")) if part.has("base") else None,
        _text(part, "reason", MOST_MESSAGE),
    )


def _names(part: Part) -> tuple[str, ...]:
    try:
        return check_names(part.json_list("checks"))
    except InvalidInputError as error:
        raise part.fault(f"has unusable checks: {error}") from error


def _text(part: Part, key: str, most: int) -> str:
    text = part.text(key)
    if len(text) > most:
        raise part.fault(f"has {len(text)} characters as {key!r}, and at most {most} are read")
    return text


def _maybe_text(part: Part, key: str, most: int) -> str | None:
    return _text(part, key, most) if part.has(key) else None


def _parts(part: Part, key: str, most: int) -> list[Part]:
    found = part.parts(key)
    if len(found) > most:
        raise part.fault(f"has {len(found)} entries in {key!r}, and at most {most} are read")
    return found


def _count(part: Part, key: str) -> int:
    return part.natural(key, _MOST_COUNT)


def _number(part: Part, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            # JSON has integers of any length, which do not fit a double.
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise part.fault(f"has {value!r:.40} in place of a finite number")


def _maybe_number(part: Part, key: str) -> float | None:
    return _number(part, part.members[key]) if part.has(key) else None


def _result_of(part: Part) -> CheckResult:
    outcome = part.text("outcome")
    for known in _OUTCOMES:
        if known == outcome:
            return CheckResult(
                _text(part, "name", MOST_NAME),
                known,
                _text(part, "detail", MOST_DETAIL),
                _number(part, part.members.get("seconds")),
                part.natural("at_us", _MOST_US),
            )
    raise part.fault(f"has the outcome {outcome!r:.40}, which there is not")


def _review_of(part: Part) -> Review:
    return Review(
        tuple(map(_node_of, _parts(part, "nodes", _MOST_ROWS))),
        _count(part, "more_nodes"),
        tuple(map(_array_of, _parts(part, "arrays", _MOST_ROWS))),
        _count(part, "more_arrays"),
    )


def _node_of(part: Part) -> NodeReview:
    kind = part.text("kind")
    for known in _KINDS:
        if known == kind:
            keys = [
                KeyReview(
                    _text(it, "key", _MOST_PATH),
                    _maybe_text(it, "before", _MOST_VALUE),
                    _maybe_text(it, "after", _MOST_VALUE),
                )
                for it in _parts(part, "keys", _MOST_ROWS)
            ]
            return NodeReview(
                known,
                _text(part, "path", _MOST_PATH),
                _maybe_text(part, "previous_path", _MOST_PATH),
                part.members.get("is_array") is True,
                tuple(keys),
            )
    raise part.fault(f"has the kind {kind!r:.40}, which there is not")


def _array_of(part: Part) -> ArrayReview:
    first = [
        CellReview(
            tuple(it.naturals("index", _MOST_COUNT)),
            _text(it, "before", _MOST_VALUE),
            _text(it, "after", _MOST_VALUE),
        )
        for it in _parts(part, "first", _MOST_ROWS)
    ]
    return ArrayReview(
        _text(part, "path", _MOST_PATH),
        _count(part, "added"),
        _count(part, "changed"),
        _count(part, "removed"),
        _map_of(part, "chunks"),
        _count(part, "cells") if part.has("cells") else None,
        _count(part, "changed_cells"),
        _maybe_number(part, "min_change"),
        _maybe_number(part, "mean_change"),
        _maybe_number(part, "max_change"),
        tuple(first),
        _map_of(part, "values"),
        _text(part, "note", MOST_DETAIL),
    )


def _map_of(part: Part, key: str) -> ChangeMap | None:
    if not part.has(key):
        return None
    inner = part.part(key)
    rows, columns = (inner.natural(it, _MOST_SIDE + 1) for it in ("rows", "columns"))
    listed = inner.json_list("values")
    # The page computes places from these; each side is at most 64.
    if len(listed) != rows * columns:
        raise inner.fault(f"has {len(listed)} values for {rows} times {columns} fields")
    return ChangeMap(
        rows,
        columns,
        _count(inner, "row_cells"),
        _count(inner, "column_cells"),
        tuple(_number(inner, it) for it in listed),
    )
