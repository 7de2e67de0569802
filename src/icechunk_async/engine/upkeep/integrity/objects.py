"""Look at the objects that manifests refer to: are they there, long enough, and undamaged?

Chunk objects are found in listings, one request for each 1000, or one by one if few are wanted or
the storage cannot list. Virtual objects are looked at one by one.

Chunks are read to compare them with their checksums, and to decode them. The bytes of one object
are read together where they lie together, so that objects that many chunks share cost few requests.
What is in memory at a time is bounded, and so is what is lost when a run is interrupted: after each
portion its caller hears of a cursor.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.integrity.pieces import NO_CODECS, NO_SUM, guarded
from icechunk_async.engine.upkeep.integrity.report import Finding, Level
from icechunk_async.engine.upkeep.sweep import object_name, pages
from icechunk_async.engine.virtual.chunks import check_unchanged
from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    StorageError,
    VirtualAccessError,
    VirtualSourceChangedError,
)
from icechunk_async.format.crc import crc_of, sum_of
from icechunk_async.format.id_set import IdSet, parse_ids
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.upkeep.integrity.pieces import Pieces, VirtualObject, VirtualPieces
    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.storage import Storage

__all__ = [
    "NOT_AUTHORIZED",
    "ChunkDecoder",
    "Contents",
    "Undecided",
    "broken_chunks",
    "broken_virtual",
]

_AT_ONCE: Final = 64
_PAGE: Final = 1000
NOT_AUTHORIZED: Final = "not authorised"
_READS_AT_ONCE: Final = 32
_PORTION_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 8 << 20
"""Ranges of one object are read together up to this size."""
_GAP_BYTES: Final = 1 << 16
"""Bytes between two ranges that cost less than another request."""


async def broken_chunks(
    storage: Storage,
    needed: Pieces,
    level: Level,
    *,
    prefix: str = "chunks/",
    out_of: int | None = None,
) -> list[tuple[int, Finding]]:
    """Look for chunk objects, all of whose keys begin with a prefix.

    Args:
        storage: where they are.
        needed: one piece for each object, see `Pieces.objects`.
        level: *existence*, or above it to compare lengths as well.
        prefix: of the keys.
        out_of: the number of objects that a listing would go through, if these are a sample.

    Returns:
        What is wrong, with the rows of the pieces.

    Cost: one request for each 1000 objects listed; if the storage cannot list, or for few of many,
    one for each object that is needed.
    """
    if not len(needed):
        return []
    # A listing goes through all objects, a thousand a request.
    few = out_of is not None and len(needed) * _PAGE < out_of
    if storage.capabilities.listing and not few:
        sizes = await _listed(storage, needed, prefix)
    else:
        sizes = await _asked(storage, needed)
    return _short(needed, sizes, level)


async def _listed(storage: Storage, needed: Pieces, prefix: str) -> npt.NDArray[np.int64]:
    wanted = IdSet()
    wanted.add(needed.ids)
    # -1 is less than any length: what is not listed is found to be missing.
    sizes = np.full(len(needed), -1, np.int64)
    listed = pages(storage, prefix)
    async with closing(listed):
        async for page in listed:
            ids, valid = parse_ids([object_name(it.key) for it in page])
            rows = np.where(valid, wanted.find(ids), -1)
            lengths = np.array([it.size_bytes for it in page], np.int64)
            sizes[rows[rows >= 0]] = lengths[rows >= 0]
    return sizes


async def _asked(storage: Storage, needed: Pieces) -> npt.NDArray[np.int64]:
    async def size(row: int) -> int:
        try:
            # No bytes are needed: each reply tells the size of the whole object.
            return (await storage.get(needed.key(row), ByteRange(0, 0))).size_bytes
        except ObjectNotFoundError:
            return -1

    return np.array(await bounded_map(size, range(len(needed)), limit=_AT_ONCE), np.int64)


def _short(needed: Pieces, sizes: npt.NDArray[np.int64], level: Level) -> list[tuple[int, Finding]]:
    least = needed.lengths.astype(np.int64) if level >= Level.LENGTH else 0
    found: list[tuple[int, Finding]] = []
    for row in np.flatnonzero(sizes < least).tolist():
        key, size, count = needed.key(row), int(sizes[row]), int(needed.counts[row])
        if size < 0:
            missing = _finding("chunk", key, "missing", f"{key!r} is missing.", count)
            found.append((row, missing))
        else:
            detail = f"{key!r} has {size} bytes, and {int(needed.lengths[row])} are needed."
            found.append((row, _finding("chunk", key, "too short", detail, count)))
    return found


def _finding(kind: str, location: str, problem: str, detail: str, references: int) -> Finding:
    level = Level.LENGTH if problem == "too short" else Level.EXISTENCE
    return Finding(kind, location, problem, level.name.lower(), detail, references)


async def broken_virtual(
    virtual: VirtualChunks,
    needed: Mapping[VirtualObject, tuple[int, int]],
    level: Level,
) -> tuple[list[tuple[VirtualObject, Finding]], dict[VirtualObject, str]]:
    """Look at virtual objects.

    Args:
        virtual: reads them.
        needed: for each, the bytes that it must have, and the number of references.
        level: *existence*, or above it to compare lengths as well.

    Returns:
        What is wrong with them; and those that could not be looked at, with the reason:
        `NOT_AUTHORIZED`, or what the store said.

    Cost: one request for each, several at a time.
    """
    unread: dict[VirtualObject, str] = {}

    async def look(
        item: tuple[VirtualObject, tuple[int, int]],
    ) -> tuple[VirtualObject, Finding] | None:
        it, (size, count) = item
        location = it[0]
        try:
            retrieved = await virtual.fetch(location, ByteRange(0, 0))
            check_unchanged(guarded(it), retrieved)
        except VirtualAccessError:
            unread[it] = NOT_AUTHORIZED
            return None
        except StorageError as error:  # the store is in trouble: this says nothing of the object
            unread[it] = str(error)
            return None
        except IcechunkError as error:
            # To a reader a source that is gone has changed; a report keeps the two apart.
            gone = isinstance(error.__cause__, ObjectNotFoundError)
            changed = isinstance(error, VirtualSourceChangedError)
            problem = "missing" if gone else "changed" if changed else "unreadable"
            return it, _finding("virtual", location, problem, str(error), count)
        if level < Level.LENGTH or retrieved.size_bytes >= size:
            return None
        detail = f"{location!r} has {retrieved.size_bytes} bytes, and {size} are needed."
        return it, _finding("virtual", location, "too short", detail, count)

    order = sorted(needed.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))
    found = await bounded_map(look, order, limit=_AT_ONCE)
    return [it for it in found if it is not None], unread


class Undecided(Exception):  # noqa: N818 -- an answer, not an error
    """A chunk cannot be judged here: a codec or a grid is not supported."""


class ChunkDecoder(Protocol):
    """Decodes chunks as Zarr does."""

    async def decode(self, document: bytes, data: bytes | memoryview) -> str | None:
        """Decode an encoded chunk of the array with this metadata document.

        Returns:
            What is wrong with it, or None.

        Raises:
            Undecided: it cannot be judged.
        """
        ...


@dataclass(slots=True)
class Contents:
    """Reads chunks at one level, and counts."""

    storage: Storage
    virtual: VirtualChunks
    level: Level
    codecs: Sequence[tuple[bytes, ...]]
    """See `Structure.codecs`."""
    decoder: ChunkDecoder | None = None
    chunks_read: int = 0
    bytes_read: int = 0
    without_sum: int = 0
    not_drawn: int = 0
    """Chunks inside manifests that a sample left out."""
    undecided: dict[str, int] = field(default_factory=dict[str, int])
    """Chunks that could not be judged, by reason."""
    unread: dict[str, int] = field(default_factory=dict[str, int])
    """Virtual chunks that could not be read, by reason."""

    def portions(self, pieces: Pieces) -> Iterator[tuple[int, int]]:
        """Divide pieces between objects into portions of bounded size; return ``[start, stop)``."""
        if not len(pieces):
            return
        starts = np.flatnonzero(pieces.new_objects())
        ends = np.append(starts[1:], len(pieces))
        # Cut between objects only, because the state of a run names the last object that was read.
        totals = np.cumsum(pieces.lengths.astype(np.int64))
        begin, base = 0, 0
        for end in ends.tolist():
            total = int(totals[end - 1])
            if total - base >= _PORTION_BYTES or end == len(pieces):
                yield begin, end
                begin, base = end, total

    async def native(self, pieces: Pieces) -> list[tuple[int, Finding]]:
        """Read pieces of chunk objects; return what is wrong, with the rows of the pieces.

        Raises:
            StorageError: the storage did not reply.
        """
        groups = list(_groups(pieces))
        found = await bounded_map(lambda it: self._group(pieces, *it), groups, limit=_READS_AT_ONCE)
        return [it for some in found for it in some]

    async def _group(self, pieces: Pieces, first: int, stop: int) -> list[tuple[int, Finding]]:
        """Read pieces of one object, which lie together, with one request."""
        start = int(pieces.offsets[first])
        # Not the last one's: a long range may hold the short ones behind it.
        end = int((pieces.offsets[first:stop] + pieces.lengths[first:stop]).max())
        key = pieces.key(first)
        try:
            data = (await self.storage.get(key, ByteRange(start, end))).data
        except ObjectNotFoundError:  # deleted since it was looked for
            data = b""
        view = memoryview(data)
        found: list[tuple[int, Finding]] = []
        for row in range(first, stop):
            offset, length = int(pieces.offsets[row]), int(pieces.lengths[row])
            part = view[offset - start : offset - start + length]
            self.chunks_read += 1
            self.bytes_read += len(part)
            about = Finding("chunk", key, "", "", "", int(pieces.counts[row]), offset, length)
            if len(part) < length:
                detail = f"{key!r} ends before byte {offset + length}."
                found.append((row, _said(about, "too short", Level.LENGTH, detail)))
                continue
            problem = await self._judge(part, int(pieces.sums[row]), int(pieces.codecs[row]))
            if problem is not None:
                found.append((row, _said(about, *problem)))
        return found

    async def _judge(
        self, data: bytes | memoryview, expected: int, codecs: int
    ) -> tuple[str, Level, str] | None:
        """Return the problem of a chunk: its name, its level and a sentence."""
        # Counted, so that a report says how much was not compared.
        if expected == NO_SUM:
            self.without_sum += 1
        elif (found := sum_of(data)) != expected:
            text = f"Its CRC-32C is {crc_of(found):08x}, and {crc_of(expected):08x} was stored."
            return "wrong sum", Level.SUMS, text
        if self.level < Level.DECODE or codecs == NO_CODECS:
            return None
        detail = await self.decode(codecs, data)
        return None if detail is None else ("undecodable", Level.DECODE, detail)

    async def decode(self, codecs: int, data: bytes | memoryview) -> str | None:
        """Decode a chunk for every array that uses it; return what is wrong."""
        assert self.decoder is not None  # the level asks for it
        try:
            # A chunk may be in snapshots from before and after a change of codecs. It has to fit
            # both.
            for document in self.codecs[codecs]:
                problem = await self.decoder.decode(document, data)
                if problem is not None:
                    return problem
        except Undecided as reason:
            self.undecided[str(reason)] = self.undecided.get(str(reason), 0) + 1
        return None

    async def outside(self, needed: VirtualPieces) -> list[tuple[VirtualObject, int, Finding]]:
        """Read virtual chunks; return what is wrong, with the objects and offsets."""
        found: list[tuple[VirtualObject, int, Finding]] = []

        async def read(item: tuple[VirtualObject, int, int, int, int]) -> None:
            it, offset, length, codecs, count = item
            about = Finding("virtual", it[0], "", "", "", count, offset, length)
            try:
                data = await self.virtual.read(guarded(it, offset, length), 0, length)
            except (VirtualAccessError, StorageError) as error:
                self.unread[str(error)] = self.unread.get(str(error), 0) + 1
                return
            except IcechunkError as error:
                found.append((it, offset, _said(about, "changed", Level.LENGTH, str(error))))
                return
            self.chunks_read += 1
            self.bytes_read += len(data)
            detail = None if codecs == NO_CODECS else await self.decode(codecs, data)
            if detail is not None:
                found.append((it, offset, _said(about, "undecodable", Level.DECODE, detail)))

        items = [
            (it, offset, length, codecs, count)
            for it, pieces in needed.found.items()
            for (offset, length, codecs), (count, _, _) in sorted(pieces.items())
        ]
        await bounded_map(read, items, limit=_READS_AT_ONCE)
        return sorted(found, key=lambda it: (it[2].location, it[1]))


def _said(about: Finding, problem: str, level: Level, detail: str) -> Finding:
    return replace(about, problem=problem, level=level.name.lower(), detail=detail)


def _groups(pieces: Pieces) -> Iterator[tuple[int, int]]:
    """Return rows ``[first, stop)`` of pieces of one object that are read with one request."""
    new = pieces.new_objects().tolist()
    offsets = pieces.offsets.tolist()
    ends = (pieces.offsets + pieces.lengths).tolist()
    first, reach = 0, 0
    for row in range(len(new)):
        starts_anew = (
            new[row]
            or offsets[row] > reach + _GAP_BYTES
            # Only ranges are joined up to here; a single longer chunk is read whole, as readers do.
            or max(ends[row], reach) - offsets[first] > _REQUEST_BYTES
        )
        if row and starts_anew:
            yield first, row
            first = row
        reach = ends[row] if starts_anew or not row else max(reach, ends[row])
    if new:
        yield first, len(new)
