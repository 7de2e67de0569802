"""The operations log: what was done to a repository, newest first (spec 2, "Repo info file")."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.splicing import Spans
from icechunk_async.format.flatbuffers.writing import REF, Shape, string, table
from icechunk_async.format.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.flatbuffers.single import Row
    from icechunk_async.format.flatbuffers.writing import Block

__all__ = [
    "Availability",
    "BranchCreated",
    "BranchDeleted",
    "BranchReset",
    "CommitAmended",
    "ConfigChanged",
    "DetachedSnapshotCreated",
    "ExpirationRan",
    "FeatureFlagChanged",
    "GarbageCollectionRan",
    "MetadataChanged",
    "NewCommit",
    "RepoInitialized",
    "RepoMigrated",
    "RepoStatus",
    "RepoStatusChanged",
    "TagCreated",
    "TagDeleted",
    "Update",
    "UpdateDetail",
    "UpdateSpans",
    "decode_status",
    "decode_update",
    "decode_updates",
    "encode_status",
    "encode_updates",
]


class Availability(IntEnum):
    """Whether a repository may be changed at present; honoured by writers, not enforced."""

    ONLINE = 0
    READ_ONLY = 1
    OFFLINE = 2


@dataclass(frozen=True, slots=True, repr=False)
class RepoStatus:
    """A repository's availability, since when, and why."""

    availability: Availability
    set_at: int
    """Microseconds since the epoch."""
    reason: str | None = None

    def __repr__(self) -> str:
        """Show the fields, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        name, when = self.availability.name, date(self.set_at)
        return f"RepoStatus(availability={name}, set_at={when!r}, reason={self.reason!r})"


@dataclass(frozen=True, slots=True)
class RepoInitialized:
    """The repository was created."""


@dataclass(frozen=True, slots=True)
class RepoMigrated:
    """The repository was brought to another format version."""

    from_version: int
    to_version: int


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The stored configuration was replaced."""


@dataclass(frozen=True, slots=True)
class MetadataChanged:
    """The repository's own metadata was changed."""


@dataclass(frozen=True, slots=True)
class TagCreated:
    """A tag was created."""

    name: str


@dataclass(frozen=True, slots=True)
class TagDeleted:
    """A tag was deleted; its name is never used again."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class BranchCreated:
    """A branch was created."""

    name: str


@dataclass(frozen=True, slots=True)
class BranchDeleted:
    """A branch was deleted."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class BranchReset:
    """A branch was moved to another snapshot."""

    name: str
    previous_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class NewCommit:
    """A snapshot was added to a branch."""

    branch: str
    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class CommitAmended:
    """The newest snapshot of a branch was replaced."""

    branch: str
    previous_snapshot_id: SnapshotId
    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class DetachedSnapshotCreated:
    """A snapshot was added that no branch holds."""

    new_snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class GarbageCollectionRan:
    """Unreferenced objects were deleted."""


@dataclass(frozen=True, slots=True)
class ExpirationRan:
    """Old snapshots were dropped from the history."""


@dataclass(frozen=True, slots=True)
class FeatureFlagChanged:
    """A feature was switched on, off, or back to its default."""

    flag: int
    new_value: bool
    is_set: bool
    """False where the flag went back to its default."""


@dataclass(frozen=True, slots=True)
class RepoStatusChanged:
    """The repository's availability was changed."""

    status: RepoStatus


type UpdateDetail = (
    RepoInitialized
    | RepoMigrated
    | ConfigChanged
    | MetadataChanged
    | TagCreated
    | TagDeleted
    | BranchCreated
    | BranchDeleted
    | BranchReset
    | NewCommit
    | CommitAmended
    | DetachedSnapshotCreated
    | GarbageCollectionRan
    | ExpirationRan
    | FeatureFlagChanged
    | RepoStatusChanged
)

_TEXT, _SNAPSHOT, _BYTE, _SHORT, _BOOL, _STATUS = range(6)
# Union member number -> class and the types of its slots, in the order of the class's fields.
_MEMBERS: Final[dict[int, tuple[type[Any], tuple[int, ...]]]] = {
    1: (RepoInitialized, ()),
    2: (RepoMigrated, (_BYTE, _BYTE)),
    3: (ConfigChanged, ()),
    4: (MetadataChanged, ()),
    5: (TagCreated, (_TEXT,)),
    6: (TagDeleted, (_TEXT, _SNAPSHOT)),
    7: (BranchCreated, (_TEXT,)),
    8: (BranchDeleted, (_TEXT, _SNAPSHOT)),
    9: (BranchReset, (_TEXT, _SNAPSHOT)),
    10: (NewCommit, (_TEXT, _SNAPSHOT)),
    11: (CommitAmended, (_TEXT, _SNAPSHOT, _SNAPSHOT)),
    12: (DetachedSnapshotCreated, (_SNAPSHOT,)),
    13: (GarbageCollectionRan, ()),
    14: (ExpirationRan, ()),
    15: (FeatureFlagChanged, (_SHORT, _BOOL, _BOOL)),
    16: (RepoStatusChanged, (_STATUS,)),
}
_CODES: Final = {_TEXT: REF, _SNAPSHOT: "12s", _BYTE: "B", _SHORT: "H", _BOOL: "B", _STATUS: REF}
_WRITTEN: Final[dict[type, tuple[int, tuple[str, ...], tuple[int, ...], Shape]]] = {
    cls: (
        number,
        tuple(cls.__dataclass_fields__),
        forms,
        Shape(*(_CODES[form] for form in forms)),
    )
    for number, (cls, forms) in _MEMBERS.items()
}
_UPDATE: Final = Shape("B", REF, "Q", REF)
_STATUS_SHAPE: Final = Shape("B", "Q", REF)


@dataclass(frozen=True, slots=True, repr=False)
class Update:
    """One entry of the operations log."""

    detail: UpdateDetail
    updated_at: int
    """Microseconds since the epoch; strictly descending along the log."""
    backup_path: str | None = None
    """Name of the backup in which this entry is the newest; None for the newest of all."""

    def __repr__(self) -> str:
        """Show what was done, with a date in place of microseconds."""
        from icechunk_async._display.cards import date  # noqa: PLC0415 -- rarely needed

        return f"Update({self.detail!r}, updated_at={date(self.updated_at)!r})"

    def _repr_html_(self) -> str:
        """Show the entry in a notebook."""
        from icechunk_async._display.versions import operation_card  # noqa: PLC0415 -- rarely needed

        return operation_card(self).html()


def encode_updates(updates: Sequence[Update]) -> list[Block]:
    """Build the Update tables of a log."""
    found: list[Block | None] = [None] * len(updates)
    alike: dict[tuple[str, int], list[int]] = {}
    for row, update in enumerate(updates):
        detail, backup = update.detail, update.backup_path
        if type(detail) is NewCommit and backup and update.updated_at:
            alike.setdefault((detail.branch, len(backup.encode())), []).append(row)
        else:
            found[row] = _build(update)
    for rows in alike.values():
        for row, block in zip(rows, _build_commits([updates[it] for it in rows]), strict=True):
            found[row] = block
    return cast("list[Block]", found)


def _build(update: Update) -> Block:
    number, names, forms, shape = _WRITTEN[type(update.detail)]
    values = [
        _encode_slot(getattr(update.detail, name), form)
        for name, form in zip(names, forms, strict=True)
    ]
    backup = None if update.backup_path is None else string(update.backup_path)
    return table(_UPDATE, number, table(shape, *values), update.updated_at, backup)


def _build_commits(updates: Sequence[Update]) -> list[Block]:
    """Build commits that differ only in three fields: copies of the first with theirs filled in.

    Most of a log is commits, and a handle that has just opened the repository has built none.
    """
    model, entry = _build(updates[0])
    (_, _, time_at, _), detail_at = _UPDATE.places, _UPDATE.end
    texts = [it.backup_path or "" for it in updates]
    ids = [bytes(it.detail.new_snapshot_id) for it in updates if isinstance(it.detail, NewCommit)]
    times = [it.updated_at.to_bytes(8, "little") for it in updates]
    id_at = detail_at + _WRITTEN[NewCommit][3].places[1]
    text_at = len(model) - len(string(texts[0])[0]) + 4  # the text is the table's last part
    columns = ((id_at, ids), (time_at, times), (text_at, [it.encode() for it in texts]))
    rows = np.tile(np.frombuffer(model, np.uint8), (len(updates), 1))
    for at, values in columns:
        column = np.frombuffer(b"".join(values), np.uint8).reshape(len(updates), -1)
        rows[:, at : at + column.shape[1]] = column
    data, size = rows.tobytes(), len(model)
    return [(data[at : at + size], entry) for at in range(0, len(data), size)]


def decode_update(row: Row) -> Update:
    """Read one Update table; as `decode_updates`."""
    kind = row.number(0, 1)
    if kind not in _MEMBERS:
        raise _unknown_kind(kind)
    cls, forms = _MEMBERS[kind]
    table = row.table(1, required="update_type")
    detail = cls(*(_read_slot(table, slot, form) for slot, form in enumerate(forms)))
    backup = row.text(3) if row.has(3) else None
    return Update(detail, row.number(2, 8), backup)


def _read_slot(row: Row, slot: int, form: int) -> Any:
    match form:
        case _ if form == _TEXT:
            return row.text(slot, required="name")
        case _ if form == _SNAPSHOT:
            return SnapshotId(row.struct(slot, SnapshotId.size_bytes, field="snapshot id"))
        case _ if form == _STATUS:
            status = row.table(slot, required="status")
            reason = status.text(2) if status.has(2) else None
            return _status(status.number(0, 1), status.number(1, 8), reason)
        case _ if form == _BOOL:
            return row.number(slot, 1) != 0
        case _:
            return row.number(slot, 1 if form == _BYTE else 2)


class UpdateSpans:
    """Where entries lie in their file, with all that they refer to; checked."""

    def __init__(self, tables: Tables, *, vtables: bool) -> None:
        """Look at all entries of a file.

        Raises:
            FormatError: one of them is damaged, or of a kind that this library does not know.
        """
        self.spans = Spans(tables, vtables=vtables)
        backups = tables.vector(3, 1, 1)
        backups.check_text()
        self.spans.cover(backups, ended=True)
        self.foreign = tables.reaches(4).copy()
        """Entries with fields that this version does not know, which are not copied."""
        kinds = tables.scalar(0, 1)
        details = tables.tables(1, required="update_type")
        for kind in np.unique(kinds).tolist():
            if kind not in _MEMBERS:
                raise _unknown_kind(kind)
            rows = np.flatnonzero(kinds == kind)
            self._cover(details.select(rows), rows, _MEMBERS[kind][1], vtables=vtables)

    def _cover(
        self,
        details: Tables,
        rows: npt.NDArray[np.int64],
        forms: tuple[int, ...],
        *,
        vtables: bool,
    ) -> None:
        spans = Spans(details, vtables=vtables)
        self.foreign[rows[details.reaches(len(forms))]] = True
        for slot, form in enumerate(forms):
            _decode_slot(details, slot, form)
            if form == _TEXT:
                spans.cover(details.vector(slot, 1, 1), ended=True)
            elif form == _STATUS:
                statuses = details.tables(slot, required="status")
                self.foreign[rows[statuses.reaches(3)]] = True
                inner = Spans(statuses, vtables=vtables)
                inner.cover(statuses.vector(2, 1, 1), ended=True)
                spans.cover_tables(np.arange(len(rows)), inner)
        self.spans.cover_tables(rows, spans)


def decode_updates(tables: Tables) -> tuple[Update, ...]:
    """Read Update tables.

    Raises:
        FormatError: an entry is damaged, or of a kind that this library does not know.
    """
    kinds = tables.scalar(0, 1)
    times = tables.scalar(2, 8).tolist()
    backups = tables.strings(3)
    has_backup = tables.has(3).tolist()
    details = tables.tables(1, required="update_type")
    updates: dict[int, Update] = {}
    for kind in np.unique(kinds).tolist():
        if kind not in _MEMBERS:
            raise _unknown_kind(kind)
        cls, forms = _MEMBERS[kind]
        rows = np.flatnonzero(kinds == kind)
        chosen = details.select(rows)
        columns = [_decode_slot(chosen, slot, form) for slot, form in enumerate(forms)]
        for index, row in enumerate(rows.tolist()):
            detail = cls(*(column[index] for column in columns))
            updates[row] = Update(detail, times[row], backups[row] if has_backup[row] else None)
    return tuple(updates[row] for row in range(len(kinds)))


def _decode_slot(tables: Tables, slot: int, form: int) -> Sequence[Any]:
    match form:
        case _ if form == _TEXT:
            return tables.strings(slot, required="name")
        case _ if form == _SNAPSHOT:
            ids = tables.struct(slot, SnapshotId.size_bytes, field="snapshot id")
            return [SnapshotId(raw.tobytes()) for raw in ids]
        case _ if form == _STATUS:
            statuses = tables.tables(slot, required="status")
            return [decode_status(statuses.row(row)) for row in range(len(statuses))]
        case _ if form == _BOOL:
            return [value != 0 for value in tables.scalar(slot, 1).tolist()]
        case _:
            numbers: list[int] = tables.scalar(slot, 1 if form == _BYTE else 2).tolist()
            return numbers


def _encode_slot(value: Any, form: int) -> Block | bytes | int:
    match form:
        case _ if form == _TEXT:
            return string(value)
        case _ if form == _SNAPSHOT:
            return bytes(value)
        case _ if form == _STATUS:
            return encode_status(value)
        case _:
            return int(value)


def _unknown_kind(kind: int) -> FormatError:
    return FormatError(f"The operations log has an entry of unknown type {kind}.")


def decode_status(table: Tables) -> RepoStatus:
    """Read one RepoStatus table."""
    reason = table.strings(2)[0] if table.has(2)[0] else None
    return _status(int(table.scalar(0, 1)[0]), int(table.scalar(1, 8)[0]), reason)


def _status(availability: int, set_at: int, reason: str | None) -> RepoStatus:
    if availability not in set(Availability):
        raise FormatError(f"The repository has an unknown availability, {availability}.")
    return RepoStatus(Availability(availability), set_at, reason)


def encode_status(status: RepoStatus) -> Block:
    """Build a RepoStatus table."""
    reason = None if status.reason is None else string(status.reason)
    return table(_STATUS_SHAPE, int(status.availability), status.set_at, reason)
