"""Write the snapshots of a repo info file: those that did not change are copied from the last."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.flatbuffers.blocks import REF, Shape, table, vector
from icechunk_async.format.flatbuffers.splicing import (
    FEWEST_COPIED,
    NewTable,
    Source,
    place_before,
    weave,
)
from icechunk_async.format.flatbuffers.writing import joined, long_vector
from icechunk_async.format.repo_info.snapshot_info import NO_PARENT

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.blocks import Block, Long
    from icechunk_async.format.flatbuffers.buffer import Positions
    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info.snapshot_info import SnapshotInfo
    from icechunk_async.format.repo_info.snapshots import Snapshots, SnapshotTable

__all__ = ["encode_snapshots"]

_SNAPSHOT: Final = Shape("12s", "i", "Q", REF, REF, REF)
_PARENT: Final = Struct("<i")
_PARENT_AT: Final = _SNAPSHOT.places[1]
"""Also without the last slot: vtables end at multiples of four bytes."""


class _Numbering:
    """The place of each snapshot in the list that is about to be written."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._stored = stored = snapshots.table
        self.put = sorted(snapshots.put)
        count = 0 if stored is None else len(stored)
        covered = np.zeros(count, bool)
        places = [0] * len(self.put) if stored is None else stored.columns.places(self.put)
        order = None if stored is None else stored.columns.order
        self.places = places
        """Before which of the old ones each new one goes."""
        self.covered = covered
        self.numbers: npt.NDArray[np.int64]
        """Of each row of the file; -2 for those that are gone."""
        if order is None and not snapshots.covered:  # commits do no more than add one
            rows = np.arange(count)
            self.numbers = rows + np.searchsorted(places, rows, side="right")
            self.of_put = {
                it: place + at for at, (it, place) in enumerate(zip(self.put, places, strict=True))
            }
            return
        covered[list(snapshots.covered.values())] = True
        by_place = covered if order is None else covered[order]
        before = np.cumsum(~by_place) - ~by_place
        new_before = np.searchsorted(places, np.arange(count), side="right")
        numbers = before + new_before
        before = np.concatenate([before, [count - int(by_place.sum())]])
        self.of_put = {
            it: int(before[place]) + index
            for index, (it, place) in enumerate(zip(self.put, places, strict=True))
        }
        self.numbers = np.empty(count, np.int64)
        self.numbers[slice(None) if order is None else order] = numbers
        self.numbers[covered] = -2
        for it, row in snapshots.covered.items():
            self.numbers[row] = self.of_put.get(it, -2)

    def of(self, snapshot_id: SnapshotId) -> int:
        """Return the place of a snapshot; raise KeyError if it is not listed."""
        found = self.of_put.get(snapshot_id)
        if found is None:
            row = None if self._stored is None else self._stored.find(snapshot_id)
            found = -2 if row is None else int(self.numbers[row])
        if found < 0:
            raise KeyError(snapshot_id)
        return found


def encode_snapshots(
    snapshots: Snapshots,
) -> tuple[Block | tuple[Long, int], Callable[[SnapshotId], int]]:
    """Build the vector of snapshots, and return the place of each by its id.

    Entries of the file below are copied, with other numbers for their parents.

    Raises:
        FormatError: one of them is damaged.
    """
    numbering = _Numbering(snapshots)
    spliced = _spliced(snapshots, numbering)
    if spliced is not None:
        return spliced, numbering.of
    # By the bytes of their ids: readers halve the list.
    infos = sorted(snapshots.values(), key=lambda info: info.id)
    # Many are of another file, or of a new one: their bytes are not worth keeping.
    encode = _encode if len(infos) <= 2 * FEWEST_COPIED else _encode_anew
    return vector([encode(info, numbering) for info in infos]), numbering.of


def _spliced(snapshots: Snapshots, numbering: _Numbering) -> tuple[Long, int] | None:
    stored = snapshots.table
    if stored is None or len(stored) - len(snapshots.covered) < FEWEST_COPIED:
        return None
    layout, gone = stored.columns.layout, numbering.covered.copy()
    parents = stored.columns.parent_column
    # Parents are named by their place in the list, so one new entry changes most of the numbers.
    wanted = np.where(parents == NO_PARENT, NO_PARENT, numbering.numbers[parents])
    if (wanted[~gone] < NO_PARENT).any():
        raise KeyError("the parent of a snapshot")
    fields, present = stored.columns.parent_fields
    # An absent number is 0, and there is no room for another one.
    anew = ~gone & (layout.foreign | (~present & (wanted != 0)))
    gone |= anew
    infos = [stored.info(row) for row in np.flatnonzero(anew).tolist()]
    places = dict(zip(numbering.put, numbering.places, strict=True))
    places.update((it.id, stored.place(it.id)) for it in infos)
    infos = sorted([*infos, *snapshots.put.values()], key=_id_of)
    new = [NewTable(places[it.id], *_encode(it, numbering)) for it in infos]
    source = Source(stored.payload, stored.tables.positions, layout.spans)
    if stored.columns.order is None and layout.are_blocks:
        spliced = weave(source, gone, new)
    else:
        order = np.arange(len(gone)) if stored.columns.order is None else stored.columns.order
        if not _are_apart(stored, fields[~gone & present]):
            return None
        found = place_before(source, stored.columns.bare_spans, order, gone, new)
        if found is None:
            return None
        spliced = found
    changed = ~gone & present & (wanted != parents)
    # Numbers are replaced where they stand in the copy; nothing else of an entry moves.
    data = joined(spliced.parts)
    at = (fields + spliced.shifts)[changed]
    data.view("<i4")[at >> 2] = wanted[changed]
    return long_vector(spliced.positions, [memoryview(data)])


def _are_apart(stored: SnapshotTable, parents: Positions) -> bool:
    """Return whether words at some places may be replaced, and nothing else be changed by it.

    Entries of other writers may share things.
    """
    bare = stored.columns.bare_spans
    order = np.argsort(bare.low, kind="stable")
    if (bare.low[order][1:] < bare.high[order][:-1]).any():
        return False
    parents = np.sort(parents)
    properties = stored.tables.vector(4, 4, 4).tables()
    return not any(_are_in_vtables(parents, it) for it in (stored.tables, properties))


def _are_in_vtables(words: Positions, tables: Tables) -> bool:
    """Return whether one of some words, in ascending order, has bytes in common with a vtable."""
    _, sizes = tables.sizes()
    following = np.searchsorted(words, tables.vtable_places - 3)
    there = following < len(words)
    ends = (tables.vtable_places + sizes)[there]
    return bool((words[following[there]] < ends).any())


def _encode_anew(info: SnapshotInfo, numbering: _Numbering) -> Block:
    parent = NO_PARENT
    if info.parent_id is not None:
        number = numbering.of_put.get(info.parent_id)
        parent = numbering.of(info.parent_id) if number is None else number
    return table(_SNAPSHOT, bytes(info.id), parent, info.flushed_at, *info.blocks)


def _encode(info: SnapshotInfo, numbering: _Numbering) -> Block:
    parent = NO_PARENT if info.parent_id is None else numbering.of(info.parent_id)
    if not (parent and info.flushed_at):  # zeros are left out, so that others lie elsewhere
        return table(_SNAPSHOT, bytes(info.id), parent, info.flushed_at, *info.blocks)
    # An entry on top of the file is written with each commit, and only the number of its parent
    # is another one.
    data, entry = info.written(_written)
    return b"".join((data[:_PARENT_AT], _PARENT.pack(parent), data[_PARENT_AT + 4 :])), entry


def _written(info: SnapshotInfo) -> Block:
    return table(_SNAPSHOT, bytes(info.id), NO_PARENT, info.flushed_at, *info.blocks)


def _id_of(info: SnapshotInfo) -> SnapshotId:
    return info.id
