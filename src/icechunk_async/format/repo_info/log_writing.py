"""Write the operations log of a repo info file: entries of the last file are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from icechunk_async.format.flatbuffers.blocks import REF, Shape, string, table, vector
from icechunk_async.format.flatbuffers.splicing import (
    FEWEST_COPIED,
    NewTable,
    Source,
    place_before,
    weave,
)
from icechunk_async.format.flatbuffers.writing import long_vector
from icechunk_async.format.operations_log import (
    BOOL,
    BYTE,
    MEMBERS,
    SHORT,
    SNAPSHOT,
    STATUS,
    TEXT,
    NewCommit,
    encode_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from icechunk_async.format.flatbuffers.blocks import Block, Long
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.repo_info.log import OperationsLog

__all__ = ["encode_log", "encode_updates"]

_CODES: Final = {TEXT: REF, SNAPSHOT: "12s", BYTE: "B", SHORT: "H", BOOL: "B", STATUS: REF}
_WRITTEN: Final[dict[type, tuple[int, tuple[str, ...], tuple[int, ...], Shape]]] = {
    cls: (
        number,
        tuple(cls.__dataclass_fields__),
        forms,
        Shape(*(_CODES[form] for form in forms)),
    )
    for number, (cls, forms) in MEMBERS.items()
}
_UPDATE: Final = Shape("B", REF, "Q", REF)
_FEWEST_TOGETHER: Final = 4
"""Commits that are built as copies of one; fewer are quicker one by one."""


def encode_log(log: OperationsLog) -> Block | tuple[Long, int]:
    """Build the vector of entries; those of the file below are copied.

    Raises:
        FormatError: one of them is damaged, or of a kind that this library does not know.
    """
    stored, first, stop = log.stored
    if stored is None or stop - first < FEWEST_COPIED:
        return vector(_encode_kept(log, tuple(log)))
    layout = stored.layout
    gone = layout.foreign.copy()
    anew = [row for row in np.flatnonzero(gone).tolist() if first <= row < stop]
    # Rows before `first` were replaced by new entries, and those from `stop` on were cut off.
    gone[:first], gone[stop:] = True, True
    # New entries are the newest, so they go before the first one that is kept. Those written anew
    # go where they were.
    rows = [*[first] * len(log.new), *anew]
    blocks = _encode_kept(log, [*log.new, *map(stored.update, anew)])
    new = [NewTable(row, *block) for row, block in zip(rows, blocks, strict=True)]
    source = Source(stored.payload, stored.tables.positions, layout.spans)
    if layout.are_blocks:
        spliced = weave(source, gone, new)
    else:
        found = place_before(source, stored.bare_spans, np.arange(len(gone)), gone, new)
        if found is None:
            return vector(encode_updates(tuple(log)))
        spliced = found
    return long_vector(spliced.positions, spliced.parts)


def _encode_kept(log: OperationsLog, updates: Sequence[Update]) -> list[Block]:
    """Build entries of a log; those that were written before were kept, and others are from now."""
    before = log.written
    missing = [it for it in updates if id(it) not in before]
    made = dict(zip(map(id, missing), encode_updates(missing), strict=True))
    log.written = {id(it): before.get(id(it)) or (it, made[id(it)]) for it in updates}
    return [log.written[id(it)][1] for it in updates]


def encode_updates(updates: Sequence[Update]) -> list[Block]:
    """Build the Update tables of a log."""
    found: list[Block | None] = [None] * len(updates)
    alike: dict[tuple[str, int], list[int]] = {}
    for row, update in enumerate(updates):
        detail, backup = update.detail, update.backup_path
        # With a branch and a backup's name of equal lengths all parts lie at the same places, and a
        # time of 0 would be left out of the table.
        if type(detail) is NewCommit and backup and update.updated_at:
            alike.setdefault((detail.branch, len(backup.encode())), []).append(row)
        else:
            found[row] = _build(update)
    for rows in alike.values():
        if len(rows) < _FEWEST_TOGETHER:
            built = [_build(updates[it]) for it in rows]
        else:
            built = _build_commits([updates[it] for it in rows])
        for row, block in zip(rows, built, strict=True):
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


def _encode_slot(value: Any, form: int) -> Block | bytes | int:
    match form:
        case _ if form == TEXT:
            return string(value)
        case _ if form == SNAPSHOT:
            return bytes(value)
        case _ if form == STATUS:
            return encode_status(value)
        case _:
            return int(value)
