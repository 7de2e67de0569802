"""The difference of two states of a session's changes; pure."""

from __future__ import annotations

import numpy as np

from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.format.manifest.row_index import rows_in

__all__ = ["changes_since"]


def changes_since(now: ChangeSet, then: ChangeSet) -> ChangeSet:
    """Return the changes of a session since an earlier state, as those of a fork of that state.

    Merged with `ForkPoint(then)` into a session in that state, they make it one in the state
    ``now``.

    Args:
        now: the changes of the session against its base snapshot.
        then: its changes earlier, or those of the session that it is a copy of. Neither moves
            nodes.
    """
    since = ChangeSet(sources=now.sources - then.sources)
    for path, node in now.new.items():
        before = then.new.get(path)
        if before is None or before.id != node.id:
            since.new[path] = node
        elif before.user_data != node.user_data:
            since.updated[node.id] = node
    for node_id, node in now.updated.items():
        before = then.updated.get(node_id)
        if before is None or before.user_data != node.user_data:
            since.updated[node_id] = node
    since.deleted.update({it: gone for it, gone in now.deleted.items() if it not in then.deleted})
    kept = {node.id for node in now.new.values()}
    for path, node in then.new.items():
        if node.id not in kept:
            since.deleted[node.id] = Deleted(path, node.array is not None)
    for node_id, changes in now.chunks.items():
        found = _chunks(changes, then.chunks.get(node_id))
        if not found.is_empty() or found.kept_grid is not None:
            since.chunks[node_id] = found
    return since


def _chunks(now: ArrayChanges, then: ArrayChanges | None) -> ArrayChanges:
    """Return the chunks of an array that were set or deleted since, and to what it was shrunk."""
    since = ArrayChanges(now.rank)
    if then is None or then.rank != now.rank:
        since.kept_grid = now.kept_grid
        since.set_many(now.columns())
        return since
    since.kept_grid = None if now.kept_grid == then.kept_grid else now.kept_grid
    refs, before = now.columns(), then.columns()
    new = np.ones(len(refs), np.bool_)
    # One by one only where both states name a chunk; what is new needs no comparison.
    for row in np.flatnonzero(rows_in(refs.coords, before.coords)).tolist():
        new[row] = then.find(tuple(refs.coords[row].tolist()))[1] != refs.ref(row)
    since.set_many(refs.take(new))
    return since
