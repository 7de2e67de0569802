"""The layout `chunks`: a row for each chunk, with its location, extent, bytes and statistics."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.arrow.boxes import cut, grouped
from icechunk_async.arrow.table import path_of, values_of
from icechunk_async.engine.tree.listing import ChunkBatch, ChunkType
from icechunk_async.errors import InvalidInputError, NodeNotFoundError
from icechunk_async.spark.read.opened import arrays_of, open_group
from icechunk_async.spark.tasks import few

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.arrow.boxes import Box
    from icechunk_async.format.snapshot import Node
    from icechunk_async.repository import Repository
    from icechunk_async.session import Session
    from icechunk_async.spark.options import ReadOptions

__all__ = [
    "DEFAULT",
    "LOADED",
    "SCHEMA",
    "STATISTICS",
    "chunk_bytes",
    "chunk_shape",
    "listed",
    "loading",
    "manifest_breaks",
    "nodes_of",
    "parts",
    "read",
    "rows_of",
    "statistics_of",
]


STATISTICS: Final = pa.struct(
    [
        ("valid", pa.int64()),
        ("missing", pa.int64()),
        ("minimum", pa.float64()),
        ("maximum", pa.float64()),
        ("mean", pa.float64()),
    ]
)
_ORDERED: Final = "biufmM"


def statistics_of(values: npt.NDArray[Any]) -> dict[str, int | float | None]:
    """Summarize values as rows show them; NaN and NaT count as missing.

    Times are in seconds since 1970, durations in seconds. Minimum, maximum and mean are None for
    types without an order, such as text and complex numbers, and where no value is valid.
    """
    kind = values.dtype.kind
    flat = values.reshape(-1)
    if isinstance(flat, np.ma.MaskedArray):
        flat = flat.compressed()
    if kind in "mM":
        flat = flat[~np.isnat(flat)].astype(f"{kind}8[us]").astype(np.int64) / 1e6
    elif kind in "fc":
        flat = flat[~np.isnan(flat)]
    found: dict[str, int | float | None] = {
        "valid": len(flat),
        "missing": values.size - len(flat),
        "minimum": None,
        "maximum": None,
        "mean": None,
    }
    if len(flat) and kind in _ORDERED:
        found |= {
            "minimum": float(flat.min()),
            "maximum": float(flat.max()),
            # A sum of float32 loses digits from some millions of values on.
            "mean": float(flat.mean(dtype=np.float64)),
        }
    return found


_PLACES: Final = pa.list_(pa.int64())
SCHEMA: Final = pa.schema(
    [
        ("array", pa.string()),
        ("key", pa.string()),
        ("chunk", _PLACES),
        ("start", _PLACES),
        ("stop", _PLACES),
        ("kind", pa.string()),
        ("location", pa.string()),
        ("offset", pa.int64()),
        ("size_bytes", pa.int64()),
        ("dtype", pa.string()),
        ("data", pa.binary()),
    ]
)
DEFAULT: Final = pa.schema([it for it in SCHEMA if it.name != "data"])
"""Columns of a query without a schema: Spark would read the bytes for a `count(*)`, too."""
TENSOR: Final = pa.field("tensor", pa.binary())
"""The decoded values in C order, only if the caller's schema names this column."""
SUMMARY: Final = pa.field("statistics", STATISTICS)
"""Statistics of the values as rows show them, only if the caller's schema names this column."""
LOADED: Final = frozenset({"data", "tensor", "statistics"})
"""Columns that need the bytes of chunks."""
_CONCURRENT: Final = 16
# As the bytes of rows that are loaded at once: a batch of Arrow is held whole, here and by Spark.
_BATCH_BYTES: Final = 32 << 20
_MAX_CHUNKS: Final = 4096


def parts(options: ReadOptions, schema: pa.Schema) -> list[tuple[str, tuple[Box, ...]]]:
    """Return the parts of arrays' chunk grids that tasks list and read, one for each task.

    Cost: reads the snapshot only. The size of the plan depends on bytes, not on chunks.
    """
    if options.where:
        raise InvalidInputError(
            "The option 'where' selects rows, and does not go with the layout 'chunks'. Filter "
            "on the columns 'start' and 'stop' in the query."
        )
    arrays = arrays_of(options)
    for name in options.arrays or ():
        if name not in arrays:
            raise InvalidInputError(
                f"The option 'arrays' names {name!r}, but the group has {', '.join(arrays)}."
            )
    loads = not LOADED.isdisjoint(schema.names)
    planned: list[tuple[str, tuple[Box, ...]]] = []
    least = 0
    for name in options.arrays or arrays:
        array = arrays[name]
        sizes = chunk_shape(array)
        grid = tuple(-(-n // size) for n, size in zip(array.shape, sizes, strict=True))
        # A task that reads no bytes can list very many chunks.
        most = max(1, options.partition_bytes // chunk_bytes(array)) if loads else 1 << 20
        box = tuple((0, count) for count in grid)
        # Cut where manifests begin, so that few tasks load the same manifest.
        breaks = _breaks(options, [name]) if grid else ()
        cuts = cut(box, (1,) * len(grid), most, breaks)
        # A bound from the grid alone, so that `few` refuses before the boxes of a huge grid are
        # made.
        least += -(-prod(grid) // most)
        planned += [(name, boxes) for boxes in few(grouped(cuts, most), least)]
    return planned


def read(
    options: ReadOptions, name: str, boxes: Sequence[Box], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Return rows for the existing chunks of an array in boxes of its chunk grid."""
    array = arrays_of(options)[name]
    loads, most = loading(array, schema)
    for box in boxes:
        for batch in listed(options, name, box):
            for first in range(0, len(batch), most):
                rows = slice(first, first + most)
                yield rows_of(options, name, array, (batch, rows), loads)


def loading(array: Any, schema: pa.Schema) -> tuple[frozenset[str], int]:
    """Return which columns need chunks' bytes, and how many chunks go into one batch."""
    loads = LOADED.intersection(schema.names)
    size = chunk_bytes(array)
    return loads, max(1, min(_MAX_CHUNKS, _BATCH_BYTES // size)) if loads else _MAX_CHUNKS


def listed(options: ReadOptions, name: str, box: Box) -> list[ChunkBatch]:
    """Return the chunks that exist in a box of an array's chunk grid."""
    return options.repository.ask(partial(_listed, options, name, box))


async def _listed(
    options: ReadOptions, name: str, box: Box, repository: Repository
) -> list[ChunkBatch]:
    """Return the references in a box, from those manifests that may have any."""
    session = await repository.readonly_session(snapshot_id=options.snapshot_id)
    workspace = session.workspace
    state = workspace.array_state(path_of(options, name))
    found: list[ChunkBatch] = []
    for manifest in state.manifests:
        spans = zip(manifest.extents, box, strict=True)
        # Extents and boxes are half-open. A manifest that only touches the box has no chunk of it.
        if all(low < stop and start < high for (low, high), (start, stop) in spans):
            refs = await workspace.manifest_refs(state, manifest)
            inside = refs.take(refs.inside(box))
            found.append(ChunkBatch(inside, workspace.virtual.locations))
    return found


def rows_of(
    options: ReadOptions,
    name: str,
    array: Any,
    part: tuple[ChunkBatch, slice | npt.NDArray[np.int64]],
    loads: frozenset[str],
) -> pa.RecordBatch:
    """Return the rows of some chunks of an array."""
    batch, rows = part
    coords = batch.coords[rows].astype(np.int64)
    sizes = np.array(chunk_shape(array), np.int64).reshape(-1)
    start = coords * sizes
    # Chunks at the end of an axis reach beyond it; rows say what of them is in the array.
    stop = np.minimum(start + sizes, np.array(array.shape, np.int64).reshape(-1))
    path = path_of(options, name)
    encode = array.metadata.encode_chunk_key
    keys = [f"{path[1:]}/{encode(tuple(it))}" for it in coords.tolist()]
    columns: dict[str, pa.Array[Any]] = {
        "array": pa.array([path] * len(coords), pa.string()),
        "key": pa.array(keys, pa.string()),
        "chunk": _lists(coords),
        "start": _lists(start),
        "stop": _lists(stop),
        "kind": pa.array([ChunkType(it).name.lower() for it in batch.kinds[rows].tolist()]),
        "location": pa.array([it or None for it in batch.paths[rows].tolist()], pa.string()),
        "offset": pa.array(batch.offsets[rows].astype(np.int64)),
        "size_bytes": pa.array(batch.lengths[rows].astype(np.int64)),
        "dtype": pa.array([array.dtype.str] * len(coords), pa.string()),
    }
    if "data" in loads:
        stored = options.repository.ask(lambda it: _stored(it, options, name, coords))
        columns["data"] = pa.array(stored, pa.binary())
    boxes = [tuple(map(slice, *it)) for it in zip(start.tolist(), stop.tolist(), strict=True)]
    if TENSOR.name in loads:
        columns["tensor"] = pa.array([array[box].tobytes() for box in boxes], TENSOR.type)
    if SUMMARY.name in loads:
        shown = open_group(options).variables[name]
        found = [statistics_of(values_of(shown[box])) for box in boxes]
        columns["statistics"] = pa.array(found, SUMMARY.type)
    return pa.RecordBatch.from_pydict(columns)


async def _stored(
    repository: Repository, options: ReadOptions, name: str, coords: npt.NDArray[np.int64]
) -> list[bytes]:
    session = await repository.readonly_session(snapshot_id=options.snapshot_id)
    path = path_of(options, name)

    async def load(place: list[int]) -> bytes:
        data = await session.workspace.read_chunk(path, tuple(place))
        return b"" if data is None else bytes(data)

    return await bounded_map(load, coords.tolist(), limit=_CONCURRENT)


def manifest_breaks(options: ReadOptions, names: Sequence[str], chunk: int) -> tuple[int, ...]:
    """Return where manifests of arrays begin along the first dimension, in elements."""
    return tuple(it * chunk for it in _breaks(options, names))


def _breaks(options: ReadOptions, names: Sequence[str]) -> tuple[int, ...]:
    async def find(repository: Repository) -> tuple[int, ...]:
        session = await repository.readonly_session(snapshot_id=options.snapshot_id)
        starts: set[int] = set()
        for name in names:
            starts |= _starts(session, path_of(options, name))
        return tuple(sorted(starts))

    return options.repository.ask(find)


def _starts(session: Session, path: str) -> set[int]:
    try:
        state = session.workspace.array_state(path)
    except NodeNotFoundError:
        return set()
    return {it.extents[0][0] for it in state.manifests if it.extents}


def _lists(values: npt.NDArray[np.int64]) -> pa.Array[Any]:
    count, rank = values.shape
    # A batch has 4,096 rows at most, so that int32 has room for any rank.
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * rank)
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))


def chunk_shape(array: Any) -> tuple[int, ...]:
    """Return the shape of a stored object: a shard, or a chunk of an array without shards."""
    return tuple(array.shards or array.chunks)


def chunk_bytes(array: Any) -> int:
    """Return the uncompressed size of a stored object."""
    # Types of variable length have an itemsize of their pointers, and some of zero.
    return prod(chunk_shape(array)) * max(1, int(array.dtype.itemsize))


def nodes_of(options: ReadOptions) -> dict[str, Node]:
    """Return the nodes of the arrays of a group, by name."""
    root = f"/{options.group}" if options.group else "/"
    inside = f"{root.rstrip('/')}/"

    async def find(repository: Repository) -> dict[str, Node]:
        session = await repository.readonly_session(snapshot_id=options.snapshot_id)
        nodes = session.workspace.base.nodes
        names = (path.removeprefix(inside) for path in nodes.below(root))
        found = ((name, nodes[inside + name]) for name in names if "/" not in name)
        return {name: node for name, node in found if node.array is not None}

    return options.repository.ask(find)
