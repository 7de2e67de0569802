"""The operations log of a repo info file as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.format.flatbuffers.splicing import Spans
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import (
    BOOL,
    BYTE,
    MEMBERS,
    SHORT,
    SNAPSHOT,
    STATUS,
    TEXT,
    Update,
    status_from,
    unknown_kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.reading import Tables

__all__ = ["UpdateSpans", "decode_updates"]


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
            if kind not in MEMBERS:
                raise unknown_kind(kind)
            rows = np.flatnonzero(kinds == kind)
            self._cover(details.select(rows), rows, MEMBERS[kind][1], vtables=vtables)
        self.are_blocks = self.spans.are_blocks

    def _cover(
        self,
        details: Tables,
        rows: npt.NDArray[np.int64],
        forms: tuple[int, ...],
        *,
        vtables: bool,
    ) -> None:
        spans = Spans(details, vtables=vtables)
        # A later version of the format may have given this kind another field.
        self.foreign[rows[details.reaches(len(forms))]] = True
        # An entry that is copied must be as sound as one that is decoded: all of it is read.
        for slot, form in enumerate(forms):
            match form:
                case _ if form == TEXT:
                    texts = details.vector(slot, 1, 1, required="name")
                    texts.check_text()
                    spans.cover(texts, ended=True)
                case _ if form == SNAPSHOT:
                    details.struct(slot, SnapshotId.size_bytes, field="snapshot id")
                case _ if form == STATUS:
                    _decode_slot(details, slot, form)
                    statuses = details.tables(slot, required="status")
                    self.foreign[rows[statuses.reaches(3)]] = True
                    inner = Spans(statuses, vtables=vtables)
                    inner.cover(statuses.vector(2, 1, 1), ended=True)
                    spans.cover_tables(np.arange(len(rows)), inner)
                case _:
                    details.scalar(slot, 2 if form == SHORT else 1)
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
    # At most sixteen kinds, so a column for each of their fields.
    for kind in np.unique(kinds).tolist():
        if kind not in MEMBERS:
            raise unknown_kind(kind)
        cls, forms = MEMBERS[kind]
        rows = np.flatnonzero(kinds == kind)
        chosen = details.select(rows)
        columns = [_decode_slot(chosen, slot, form) for slot, form in enumerate(forms)]
        for index, row in enumerate(rows.tolist()):
            detail = cls(*(column[index] for column in columns))
            updates[row] = Update(detail, times[row], backups[row] if has_backup[row] else None)
    return tuple(updates[row] for row in range(len(kinds)))


def _decode_slot(tables: Tables, slot: int, form: int) -> Sequence[Any]:
    match form:
        case _ if form == TEXT:
            return tables.strings(slot, required="name")
        case _ if form == SNAPSHOT:
            ids = tables.struct(slot, SnapshotId.size_bytes, field="snapshot id")
            return [SnapshotId(raw.tobytes()) for raw in ids]
        case _ if form == STATUS:
            statuses = tables.tables(slot, required="status")
            reasons, given = statuses.strings(2), statuses.has(2).tolist()
            states, times = statuses.scalar(0, 1).tolist(), statuses.scalar(1, 8).tolist()
            return [
                status_from(state, time, reason if has_reason else None)
                for state, time, reason, has_reason in zip(
                    states, times, reasons, given, strict=True
                )
            ]
        case _ if form == BOOL:
            return [value != 0 for value in tables.scalar(slot, 1).tolist()]
        case _:
            numbers: list[int] = tables.scalar(slot, 1 if form == BYTE else 2).tolist()
            return numbers
