"""The contents and the history of a repository, as Arrow tables.

Tables are named as lakehouse users expect: ``snapshots``, ``refs``, ``ops``, ``nodes``,
``manifests``, ``chunks`` and ``changes``. `read_table` answers one whole,
`table_batches` in parts; ``.to_pandas()`` makes a data frame of it. Needs ``pyarrow``.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async.engine.tree.listing import ChunkType
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.versions import ChunkChanges, NodeChange

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from datetime import datetime, timedelta

    from icechunk_async.repository import Repository
    from icechunk_async.session import Session

__all__ = ["TABLES", "read_table", "schema_of", "table_batches"]

_TIME: Final = pa.timestamp("us", tz="UTC")
_SPANS: Final = pa.list_(pa.int64())
_TEXT: Final = pa.string()
_SCHEMAS: Final[dict[str, pa.Schema]] = {
    "snapshots": pa.schema(
        [
            ("snapshot_id", _TEXT),
            ("parent_id", _TEXT),
            ("written_at", _TIME),
            ("message", _TEXT),
            ("metadata", _TEXT),
        ]
    ),
    "refs": pa.schema([("name", _TEXT), ("type", _TEXT), ("snapshot_id", _TEXT)]),
    "ops": pa.schema([("updated_at", _TIME), ("operation", _TEXT), ("details", _TEXT)]),
    "nodes": pa.schema(
        [
            ("path", _TEXT),
            ("type", _TEXT),
            ("node_id", _TEXT),
            ("shape", _SPANS),
            ("num_chunks", _SPANS),
            ("dimension_names", pa.list_(_TEXT)),
            ("metadata", _TEXT),
        ]
    ),
    "manifests": pa.schema(
        [
            ("manifest_id", _TEXT),
            ("size_bytes", pa.int64()),
            ("num_chunk_refs", pa.int64()),
            ("array", _TEXT),
            ("first_chunk", _SPANS),
            ("end_chunk", _SPANS),
        ]
    ),
    "chunks": pa.schema(
        [
            ("array", _TEXT),
            ("chunk", _SPANS),
            ("kind", _TEXT),
            ("location", _TEXT),
            ("offset", pa.int64()),
            ("size_bytes", pa.int64()),
        ]
    ),
    "changes": pa.schema(
        [("change", _TEXT), ("path", _TEXT), ("moved_to", _TEXT), ("chunk", _SPANS)]
    ),
}
TABLES: Final = tuple(_SCHEMAS)
"""The names of all tables."""
# The rows of a batch are Python objects until it is made: some tens of megabytes.
_ROWS: Final = 65_536


def schema_of(table: str) -> pa.Schema:
    """Return the columns of a table.

    Raises:
        InvalidInputError: there is no such table.
    """
    if table not in _SCHEMAS:
        raise InvalidInputError(f"There is no table {table!r}. There are {', '.join(TABLES)}.")
    return _SCHEMAS[table]


async def read_table(
    repository: Repository,
    table: str,
    *,
    branch: str | None = None,
    tag: str | None = None,
    snapshot_id: SnapshotId | str | None = None,
    ref: SnapshotId | str | None = None,
    as_of: datetime | timedelta | str | None = None,
    from_snapshot_id: SnapshotId | str | None = None,
    group: str = "",
) -> pa.Table:
    """Return a table whole; arguments and errors as `table_batches`.

    Memory: the table.
    """
    batches = table_batches(
        repository,
        table,
        branch=branch,
        tag=tag,
        snapshot_id=snapshot_id,
        ref=ref,
        as_of=as_of,
        from_snapshot_id=from_snapshot_id,
        group=group,
    )
    return pa.Table.from_batches([it async for it in batches], schema_of(table))


async def table_batches(
    repository: Repository,
    table: str,
    *,
    branch: str | None = None,
    tag: str | None = None,
    snapshot_id: SnapshotId | str | None = None,
    ref: SnapshotId | str | None = None,
    as_of: datetime | timedelta | str | None = None,
    from_snapshot_id: SnapshotId | str | None = None,
    group: str = "",
) -> AsyncGenerator[pa.RecordBatch]:
    """Iterate over the rows of a table, in batches.

    Args:
        repository: an open repository.
        table: one of `TABLES`. ``refs`` and ``ops`` are about the whole repository; the
            others about one snapshot, ``snapshots`` about it and its ancestors. ``manifests`` has a
            row for each array: small arrays share a file, whose size and count stand in each row.
        branch: the snapshot at its tip; ``main`` if nothing is named.
        tag: its snapshot.
        snapshot_id: this snapshot.
        ref: any of these, see `Repository.readonly_session`.
        as_of: with a branch: what was its tip at this time.
        from_snapshot_id: for ``changes``: the snapshot to compare with; the parent if None.
        group: for ``nodes``, ``manifests``, ``chunks``: only what lies in this group.

    Raises:
        InvalidInputError: there is no such table.
        BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is no such ref.
        UnsupportedBySpecError: ``ops`` of a repository of format version 1.

    Cost: for ``chunks`` one request for each manifest and memory for one; for ``changes`` that of
    `Repository.changes`; for the others those of the snapshot or of the history.
    """
    schema = schema_of(table)
    if table == "refs":
        yield _batch(schema, await _refs(repository))
    elif table == "ops":
        async for batch in _in_batches(schema, _ops(repository)):
            yield batch
    else:
        # A time needs a branch. Without any name a session takes `main` by itself.
        alone = as_of is not None and branch is None and ref is None
        chosen = "main" if alone else branch
        session = await repository.readonly_session(
            chosen, tag=tag, snapshot_id=snapshot_id, ref=ref, as_of=as_of
        )
        if table == "chunks":
            found = _chunks(session, group)
        else:
            rows = _rows(repository, session, table, group, since=from_snapshot_id)
            found = _in_batches(schema, rows)
        async for batch in found:
            yield batch


def _rows(
    repository: Repository,
    session: Session,
    table: str,
    group: str,
    *,
    since: SnapshotId | str | None,
) -> AsyncIterator[_Row]:
    match table:
        case "snapshots":
            return _snapshots(repository, session)
        case "nodes":
            return _each(_nodes(session, group))
        case "manifests":
            return _each(_manifests(session, group))
        case _:
            return _changes(repository, session, since)


type _Row = tuple[Any, ...]


def _batch(schema: pa.Schema, rows: list[_Row]) -> pa.RecordBatch:
    # `zip` of no rows has no columns.
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [
        pa.array(list(values), kind) for values, kind in zip(columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


async def _in_batches(
    schema: pa.Schema, rows: AsyncIterator[_Row]
) -> AsyncGenerator[pa.RecordBatch]:
    waiting: list[_Row] = []
    async for row in rows:
        waiting.append(row)
        if len(waiting) == _ROWS:
            yield _batch(schema, waiting)
            waiting = []
    if waiting:
        yield _batch(schema, waiting)


async def _each(rows: Iterator[_Row]) -> AsyncGenerator[_Row]:
    for row in rows:
        yield row


async def _refs(repository: Repository) -> list[_Row]:
    # Two looks: a ref that is created between them may be missing, and none is shown twice.
    branches = await repository.branches()
    tags = await repository.tags()
    return [
        *((name, "branch", str(target)) for name, target in sorted(branches.items())),
        *((name, "tag", str(target)) for name, target in sorted(tags.items())),
    ]


async def _ops(repository: Repository) -> AsyncGenerator[_Row]:
    async for update in repository.ops_log():
        detail = update.detail
        shown = {it.name: _plain(getattr(detail, it.name)) for it in fields(detail)}
        yield update.updated_at, type(detail).__name__, json.dumps(shown)


def _plain(value: object) -> object:
    # Ids, times and enumerations have no form in JSON.
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


async def _snapshots(repository: Repository, session: Session) -> AsyncGenerator[_Row]:
    async for info in repository.ancestry(snapshot_id=session.snapshot_id):
        parent = None if info.parent_id is None else str(info.parent_id)
        # Metadata that other programs wrote may have types of MessagePack that JSON lacks, such as
        # bytes.
        metadata = json.dumps(info.metadata, default=str)
        yield str(info.id), parent, info.flushed_at, info.message, metadata


def _paths(session: Session, group: str) -> Iterator[str]:
    root = f"/{group.strip('/')}"
    nodes = session.workspace.base.nodes
    if root in nodes:
        yield root
    yield from nodes.below(root)


def _nodes(session: Session, group: str) -> Iterator[_Row]:
    nodes = session.workspace.base.nodes
    for path in _paths(session, group):
        node = nodes[path]
        document = node.user_data.decode()
        array = node.array
        if array is None:
            yield path, "group", str(node.id), None, None, None, document
            continue
        shape = [axis.array_length for axis in array.dimensions]
        names = None if array.dimension_names is None else list(array.dimension_names)
        yield path, "array", str(node.id), shape, list(array.grid), names, document


def _manifests(session: Session, group: str) -> Iterator[_Row]:
    base = session.workspace.base
    for path in _paths(session, group):
        array = base.nodes[path].array
        for ref in () if array is None else array.manifests:
            info = base.manifests.get(ref.manifest_id)
            # Of a damaged snapshot the table shows what there is. `verify` is what finds damage.
            size, count = (None, None) if info is None else (info.size_bytes, info.num_chunk_refs)
            first = [start for start, _ in ref.extents]
            end = [stop for _, stop in ref.extents]
            yield str(ref.manifest_id), size, count, path, first, end


async def _chunks(session: Session, group: str) -> AsyncGenerator[pa.RecordBatch]:
    nodes = session.workspace.base.nodes
    # Indexed by the numbers of the column, so that no row is looked at alone.
    kinds = np.array([kind.name.lower() for kind in ChunkType])
    for path in _paths(session, group):
        if nodes[path].array is None:
            continue
        async for batch in session.array_chunk_iterator(path, _ROWS):
            places = batch.paths
            columns = [
                pa.array([path] * len(batch), _TEXT),
                pa.array(batch.coords.astype(np.int64).tolist(), _SPANS),
                pa.array(kinds[batch.kinds], _TEXT),
                pa.array([it or None for it in places.tolist()], _TEXT),
                pa.array(batch.offsets.astype(np.int64)),
                pa.array(batch.lengths.astype(np.int64)),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMAS["chunks"])


_CHANGES: Final = {"created": "new", "deleted": "deleted", "updated": "updated"}


async def _changes(
    repository: Repository, session: Session, since: SnapshotId | str | None
) -> AsyncGenerator[_Row]:
    newer = session.snapshot_id
    if since is None:
        since = (await repository.lookup_snapshot(newer)).parent_id
        # The first snapshot is empty: there is nothing before it, and nothing changed.
        if since is None or newer == INITIAL_SNAPSHOT_ID:
            return
    async for change in repository.changes(since, newer, batch_size=_ROWS):
        match change:
            case ChunkChanges():
                for place in change.coords.tolist():
                    yield "updated_chunk", change.path, None, place
            case NodeChange(kind="moved"):
                yield "moved_node", change.previous_path, change.path, None
            case NodeChange():
                kind = "array" if change.is_array else "group"
                yield f"{_CHANGES[change.kind]}_{kind}", change.path, None, None
            case _:  # cells, which are not asked for
                pass
