"""Statistics of chunks that are made as they are written, while their bytes are at hand."""

from __future__ import annotations

import json
import logging
import math
import threading
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import numpy as np
from zarr.core.chunk_utils import ChunkTransform

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, StorageError
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.statistics import (
    ChunkStatistics,
    cells_within,
    chunk_keys,
    joined,
    row_type,
)
from icechunk_async.zarr.decoding import ChunkCodec
from icechunk_async.zarr.queries.arrays import MOST_CELLS
from icechunk_async.zarr.queries.meaning import meaning_of
from icechunk_async.zarr.queries.measuring import measure

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.tree.workspace import ChunkRecorder
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.snapshot import Node
    from icechunk_async.format.statistics import Rows, ValueKind
    from icechunk_async.storage import Data
    from icechunk_async.zarr.queries.meaning import Meaning

__all__ = ["WrittenChunks", "recorder_for"]

_log = logging.getLogger(__name__)
_LARGE_BYTES: Final = 1 << 18
"""Chunks above are measured two at a time; smaller ones, on an event loop, must not wait."""
_LARGE_AT_ONCE: Final = 2
_ROWS: Final = 1 << 16
"""The most rows of one object, 6 MB."""
_AT_ONCE: Final = 8
_PATIENCE_SECONDS: Final = 5.0
"""The longest that a commit waits for an object with statistics, repeated requests included."""
_FORMS: Final = 64
"""The most documents of arrays that are remembered: each change of a shape is another one."""


def recorder_for(assets: Assets) -> ChunkRecorder | None:
    """Return a recorder for a new session; None unless the repository asks for statistics."""
    return WrittenChunks(assets) if assets.keeps_statistics else None


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """How the bytes of an array's chunks become numbers or texts."""

    codec: ChunkCodec
    transform: ChunkTransform
    meaning: Meaning
    shape: tuple[int, ...]
    """Cells of the array along each axis."""

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.codec.spec.shape

    @property
    def bytes_a_chunk(self) -> int:
        return math.prod(self.chunks) * self.meaning.cell_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """The statistics of one chunk, without its key."""

    meaning: Meaning
    within: tuple[int, ...]
    chunks: tuple[int, ...]
    rows: Rows


class WrittenChunks:
    """The statistics of chunks that one session, or a fork, wrote and did not store yet.

    Statistics are never needed: what cannot be measured or stored stays unknown, and no error
    reaches the writer. Usable from several tasks, threads and event loops.

    Memory: some 400 bytes for each chunk until `store`, and two decoded chunks with doubles and
    masks of their cells.
    """

    def __init__(self, assets: Assets) -> None:
        """Begin with nothing written."""
        self._assets = assets
        self._lock = threading.Lock()
        self._large = threading.Semaphore(_LARGE_AT_ONCE)
        self._forms: dict[bytes, _Form | None] = {}
        self._pending: dict[tuple[NodeId, bytes, ValueKind], dict[Coordinates, bytes]] = {}

    def size_bytes(self, node: Node) -> int:
        """Return the size of a decoded chunk; 0 if it is not measured."""
        form = self._form(bytes(node.user_data))
        return 0 if form is None else form.bytes_a_chunk

    def measure(self, node: Node, coords: Coordinates, data: Data) -> _Measured | None:
        """Return the statistics of a chunk; None if its values have no order or cannot be decoded.

        Cost: decodes the chunk on the calling thread, and passes over it some five times.
        """
        form = self._form(bytes(node.user_data))
        if form is None:
            return None
        if form.bytes_a_chunk < _LARGE_BYTES:
            return _measured(form, node, coords, data)
        # This blocks a thread, never an event loop: large chunks are measured on threads, see
        # `size_bytes`.
        with self._large:
            return _measured(form, node, coords, data)

    def keep(self, node: Node, coords: Coordinates, ref: ChunkRef, measured: object) -> None:
        """Keep the statistics of a chunk that was set; of the same place, the last ones count."""
        if not isinstance(measured, _Measured):
            return
        refs = ChunkRefs.from_mapping(len(coords), {coords: ref})
        within = np.array([measured.within], np.int64).reshape(1, -1)
        keys, known = chunk_keys(refs, within, measured.chunks)
        if not known[0]:
            return
        # Only now: the key is made of the reference, which is known when the chunk was stored.
        measured.rows["key"] = keys[0]
        meaning = measured.meaning
        with self._lock:
            place = self._pending.setdefault((node.id, meaning.digest, meaning.kind), {})
            # Bytes take less than an array of one row, of which there may be millions.
            place[coords] = measured.rows.tobytes()

    async def store(self) -> None:
        """Store what was kept, in one object for each array and 65,536 chunks.

        Storage that fails, or needs more than five seconds for an object, is logged and not asked
        again: a commit waits for this. Cancellation: what was not stored stays unknown.
        """
        with self._lock:
            # In one step: what other tasks keep from here on belongs to the next commit.
            taken, self._pending = self._pending, {}
        parts: list[tuple[NodeId, ChunkStatistics]] = []
        for (node_id, digest, kind), rows in taken.items():
            table = joined([np.frombuffer(b"".join(rows.values()), row_type(kind))], kind)
            for start in range(0, len(table), _ROWS):
                part = ChunkStatistics(digest, kind, table[start : start + _ROWS])
                parts.append((node_id, part))

        failures: list[str] = []
        unknown = 0

        async def put(part: tuple[NodeId, ChunkStatistics]) -> None:
            nonlocal unknown
            # After the first failure nothing more is asked of the storage, as the commit waits.
            failure = failures[0] if failures else await self._put(*part)
            if failure is not None:
                failures.append(failure)
                unknown += len(part[1].rows)

        await bounded_map(put, parts, limit=_AT_ONCE)
        if failures:
            _log.warning("statistics of %d chunk(s) stay unknown: %s", unknown, failures[0])

    async def _put(self, node_id: NodeId, statistics: ChunkStatistics) -> str | None:
        """Store an object; return why it is not stored."""
        try:
            with anyio.fail_after(_PATIENCE_SECONDS):
                await self._assets.statistics.put(node_id, statistics)
        except StorageError as error:
            return str(error)
        except TimeoutError:
            return f"storage needed more than {_PATIENCE_SECONDS:g} s for them"
        return None

    def _form(self, document: bytes) -> _Form | None:
        """Return how chunks of an array are decoded, made once for each document."""
        with self._lock:
            if document in self._forms:
                return self._forms[document]
        form = _form_of(document)
        with self._lock:
            # Rare: an array that grows has a new document at each step, and the last ones count.
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            self._forms[document] = form
        return form


def _form_of(document: bytes) -> _Form | None:
    """Return how chunks of an array are decoded; None if `analyze` would leave it out as well.

    Codecs that need an event loop are left to `analyze`.
    """
    try:
        codec = ChunkCodec.of(document)
        if math.prod(codec.spec.shape) >= MOST_CELLS:
            return None
        transform = ChunkTransform(codecs=tuple(cast("Any", codec.pipeline)))
        dtype = np.dtype(codec.spec.dtype.to_native_dtype())
        found: Any = json.loads(document)
        return _Form(codec, transform, meaning_of("", document, dtype), tuple(found["shape"]))
    except (InvalidInputError, TypeError, ValueError) as error:
        _log.debug("chunks of an array get no statistics: %s", error)
        return None


def _measured(form: _Form, node: Node, coords: Coordinates, data: Data) -> _Measured | None:
    spec = form.codec.spec
    places = np.array([coords], np.int64).reshape(1, -1)
    within = tuple(cells_within(places, form.shape, form.chunks)[0].tolist())
    try:
        buffer = spec.prototype.buffer.from_bytes(bytes(data))
        values = np.asarray(form.transform.decode_chunk(buffer, spec).as_numpy_array())
        numbers = form.meaning.numbers_of(values.reshape(spec.shape))
        rows = measure(form.meaning, numbers[tuple(map(slice, within))])
    except Exception as error:  # noqa: BLE001 -- codecs raise anything, and the bytes may be no chunk
        _log.warning("the statistics of a chunk of %r stay unknown: %s", node.path, error)
        return None
    return _Measured(form.meaning, within, form.chunks, rows)
