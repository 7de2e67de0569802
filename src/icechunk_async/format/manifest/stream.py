"""Finding a reference in a large manifest that is decompressed in passing and never held.

Files of other writers have no index, and all that one of them holds may take more than a gigabyte.
To find one reference it is enough to pass through it: what tells where references are is kept, and
every so many of them. A second passage takes what lies between two of these. Decompressing to a
window that stays in the processor's cache takes half of the time that filling so much memory does.

Nothing here is believed: what is found has the coordinates that were asked for, and that something
is missing only the whole file tells. Files that are laid out in other ways than the writers of
today do, for example with references before their vector, are left to that as well.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import (
    HEADER_BYTES,
    FileType,
    believable_bytes,
    check_header,
)
from icechunk_async.format.flatbuffers.buffer import as_array
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.manifest.packed import BYTES_PER_REF
from icechunk_async.format.manifest.reading import MAX_RANK
from icechunk_async.format.manifest.seekable.index import rows_between
from icechunk_async.format.manifest.seekable.reading import PartialBuffer, PartialManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes, Positions
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRef, Coordinates

__all__ = ["StreamedManifest", "open_streamed"]

_WINDOW_BYTES: Final = 1 << 19
_MAX_LOOKBACK_BYTES: Final = 1 << 24
"""What a frame may ask to be held of what was decompressed before."""
_HEAD_BYTES: Final = 1 << 16
"""Of the beginning so much is kept: the root, and the array."""
_TAIL_BYTES: Final = 1 << 20
"""Of the end so much is kept: what was written first, such as the vtable that most share."""
_STEP: Final = 4096
_RECORD_BYTES: Final = 256
"""What is kept of a reference: its table, and the coordinates behind it."""
_MAX_STRETCH_BYTES: Final = 1 << 24
"""References from one that was kept to the next mostly lie together."""
_PASSAGES: Final = 2
"""After the first; who needs more reads the whole file."""

type _Stretch = tuple[int, int]
"""Bytes ``[start, stop)`` of the payload."""


class _AbsentBytesError(Exception):
    """Bytes of the payload are needed that were not kept."""

    def __init__(self, stretch: _Stretch) -> None:
        super().__init__(stretch)
        self.stretch = stretch


class _KeptBuffer(PartialBuffer):
    """A FlatBuffer of which stretches are kept."""

    def __init__(self, size_bytes: int) -> None:
        self._kept: list[_Stretch] = []  # ascending, with bytes between; changed in single steps
        super().__init__(size_bytes)

    def keep(self, start: int, stop: int) -> None:
        """Note that bytes are here."""
        kept = self._kept
        first = last = bisect_left(kept, (start, start))
        if first and kept[first - 1][1] >= start:
            first -= 1
            start, stop = kept[first][0], max(stop, kept[first][1])
        while last < len(kept) and kept[last][0] <= stop:
            stop = max(stop, kept[last][1])
            last += 1
        kept[first:last] = [(start, stop)]

    def need(self, position: int, size: int) -> None:
        if size:
            kept = self._kept
            place = bisect_right(kept, (position, self.size)) - 1
            if place < 0 or position + size > kept[place][1]:
                raise _AbsentBytesError((position, position + size))

    @property
    def kept_bytes(self) -> int:
        """How much is here."""
        return sum(stop - start for start, stop in self._kept)


class _Passage:
    """One passage through the payload, from its beginning."""

    def __init__(self, frame: memoryview, buffer: _KeptBuffer) -> None:
        self._frame = frame
        self._buffer = buffer
        self._wanted: list[_Stretch] = []  # a heap

    def want(self, stretches: Iterable[_Stretch], passed: int) -> None:
        """Keep these, too; none may begin before ``passed``, where the window begins."""
        for start, stop in stretches:
            if start < passed:
                raise _AbsentBytesError((start, stop))
            if start < stop:
                heapq.heappush(self._wanted, (start, stop))

    def windows(self) -> Iterator[tuple[int, Bytes]]:
        """Iterate over the payload as long as something is wanted: where it is, and the bytes."""
        window = np.empty(_WINDOW_BYTES, np.uint8)
        start = 0
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_LOOKBACK_BYTES)
        with decompressor.stream_reader(self._frame) as stream:
            while self._wanted:
                count = stream.readinto(memoryview(window))  # pyright: ignore[reportUnknownMemberType]
                if count == 0:
                    raise FormatError("A manifest holds fewer bytes than it declares.")
                yield start, window[:count]
                start += count

    def take(self, start: int, window: Bytes) -> None:
        """Copy what is wanted of a window."""
        stop = start + len(window)
        unfinished: list[_Stretch] = []
        while self._wanted and self._wanted[0][0] < stop:
            begin, end = stretch = heapq.heappop(self._wanted)
            low, high = max(begin, start), min(end, stop)
            self._buffer.data[low:high] = window[low - start : high - start]
            if end <= stop:
                self._buffer.keep(begin, end)
            else:
                unfinished.append(stretch)
        for stretch in unfinished:
            heapq.heappush(self._wanted, stretch)


class StreamedManifest:
    """A manifest of which little is held. Usable from any thread."""

    def __init__(self, data: bytes | memoryview, frame: memoryview, size_bytes: int) -> None:
        """Pass through the file; use :func:`open_streamed`.

        Raises:
            _AbsentBytesError: it is laid out in another way.
            FormatError: it is damaged, or holds several arrays.
        """
        self.data = data
        """The file, as it is stored."""
        self._frame = frame
        self._buffer = _KeptBuffer(size_bytes)
        self._passages = 0
        self._passing = threading.Lock()  # nobody waits for it
        self._packed = self._pass_through()
        self.id = self._packed.id

    @property
    def weight(self) -> int:
        """As how many references this counts in a cache."""
        return (len(self.data) + self._buffer.kept_bytes) // BYTES_PER_REF

    def find(self, node_id: NodeId, coords: Coordinates) -> ChunkRef | None:
        """Return the reference of a chunk; None if it was not found, whether or not it is there.

        Cost: one passage through the file, rarely two; none where another thread is at one, or too
        many were made: then so much is looked for that all of it is needed. May block.
        """
        if node_id != self._node or len(coords) != self._fences.shape[1]:
            return None
        rows = rows_between(self._fences, coords, _STEP, self._count)
        try:
            while True:
                try:
                    return self._packed.find(node_id, coords, rows)
                except _AbsentBytesError as absent:
                    if not self._fetch([self._stretch_of(rows), self._beside(absent.stretch)]):
                        return None
        except (FormatError, zstandard.ZstdError, MemoryError):
            return None  # the whole file tells what is wrong

    def _fetch(self, wanted: list[_Stretch]) -> bool:
        """Pass through the file once more, if that is worth it."""
        if self._passages >= _PASSAGES or not self._passing.acquire(blocking=False):
            return False
        try:
            self._passages += 1
            passage = _Passage(self._frame, self._buffer)
            passage.want(wanted, 0)
            for start, window in passage.windows():
                passage.take(start, window)
        finally:
            self._passing.release()
        return True

    def _stretch_of(self, rows: range) -> _Stretch:
        """Return where some references are, if they lie together; else nothing."""
        tables = self._tables(np.arange(rows.start, rows.stop))
        if len(tables) == 0:
            return 0, 0
        start, stop = int(tables.min()), min(int(tables.max()) + _RECORD_BYTES, self._buffer.size)
        return (start, stop) if stop - start <= _MAX_STRETCH_BYTES else (start, start)

    def _beside(self, stretch: _Stretch) -> _Stretch:
        """Return a little more than a stretch: what is looked at next lies there."""
        start, stop = stretch
        more = max(stop, min(start + _RECORD_BYTES, self._buffer.size))
        return max(0, start - _RECORD_BYTES), more

    def _around(self, places: Positions) -> list[_Stretch]:
        """Return what is kept of tables that lie at some places."""
        stops = np.minimum(places + _RECORD_BYTES, self._buffer.size)
        return list(zip(places.tolist(), stops.tolist(), strict=True))

    def _tables(self, rows: npt.NDArray[np.int64]) -> Positions:
        """Return where references are."""
        return as_array(self._buffer.targets(self._first + 4 * rows))

    def _pass_through(self) -> PartialManifest:
        """Keep what tells where references are, and some of them."""
        buffer, size = self._buffer, self._buffer.size
        passage = _Passage(self._frame, buffer)
        head, tail = min(_HEAD_BYTES, size), max(size - _TAIL_BYTES, 0)
        passage.want([(0, head), (tail, size)], 0)
        packed: PartialManifest | None = None
        tables: Positions | None = None
        ahead: Positions = np.empty(0, np.int64)
        end = 0
        for start, window in passage.windows():
            passage.take(start, window)
            passed = start + len(window)
            if packed is None and passed >= head:
                packed = PartialManifest(buffer)
                self._node, self._first, self._count = packed.only_array()
                end = self._first + 4 * self._count
                passage.want([(self._first, end)], start)
                passage.take(start, window)
            if tables is None and packed is not None and passed >= end:
                tables = self._tables(np.arange(0, self._count, _STEP))
                passage.want(self._around(tables), start)
                passage.take(start, window)
                ahead = np.sort(tables)
            whole = passed if passed == size else passed - _RECORD_BYTES
            count = int(np.searchsorted(ahead, whole, side="right"))
            here, ahead = ahead[:count], ahead[count:]
            # A table mostly shares the vtable of one before it, which lies behind it.
            if count:
                vtables = here - buffer.words(here, 4).astype(np.int32)
                passage.want(self._around(np.unique(vtables[vtables >= start])), start)
                passage.take(start, window)
        if packed is None or tables is None:
            raise FormatError("A manifest refers to bytes outside of itself.")
        index = Tables(buffer, tables).vector(0, 4, 4, required="index")
        (rows, self._fences), *others = index.matrices(MAX_RANK)
        if rows is not None or others:
            raise FormatError("A manifest has references of different ranks.")
        return packed


def open_streamed(data: bytes | memoryview) -> StreamedManifest | None:
    """Pass through the file of a manifest; None if it has to be read as a whole.

    Raises:
        UnsupportedSpecVersionError, FormatError: what stands before its contents is damaged.

    Cost: time for decompression; memory for a tenth of what it holds.
    """
    view = memoryview(data)
    check_header(view, FileType.MANIFEST)
    frame = view[HEADER_BYTES:]
    try:
        size_bytes = zstandard.get_frame_parameters(frame).content_size
        if not _TAIL_BYTES <= size_bytes <= believable_bytes(len(frame)):
            return None
        return StreamedManifest(data, frame, size_bytes)
    except (_AbsentBytesError, FormatError, zstandard.ZstdError, MemoryError):
        return None
