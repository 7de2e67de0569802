"""Make virtual references from single values, specifications or columns; pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, VirtualContainerError
from icechunk_async.format.json.values import check_text
from icechunk_async.format.manifest.chunk import Kind, VirtualChunk
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import NO_ETAG, ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.engine.virtual.chunks import VirtualLocations

__all__ = ["VirtualChunkSpec", "column_refs", "grid_refs", "one_ref", "spec_refs"]


_MAX_SECONDS: Final = (1 << 32) - 1
# A negative number becomes one of at least 2**63 in a column without signs.
_TOO_FAR: Final = np.uint64(1 << 62)
_TOO_FAR_CHUNK: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class VirtualChunkSpec:
    """One virtual chunk: where it goes in its array and where its bytes are."""

    index: Sequence[int]
    """Coordinates in the array's chunk grid."""
    location: str
    """URL of the object that holds the bytes."""
    offset: int
    """First byte."""
    length: int
    """Number of bytes."""
    etag_checksum: str | None = None
    """Refuse to read once the object's ETag is another."""
    last_updated_at_checksum: datetime | None = None
    """Refuse to read once the object was modified after this."""


def seconds_of(moment: datetime) -> int:
    """Return whole seconds since the epoch, rounded up so that the moment itself passes.

    Raises:
        InvalidInputError: the format cannot hold it.
    """
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    # The format keeps whole seconds. Rounded down, a source modified at this very moment would be
    # refused as younger.
    seconds = math.ceil(moment.timestamp())
    if not 0 < seconds <= _MAX_SECONDS:
        raise InvalidInputError(f"{moment.isoformat()} cannot guard a virtual chunk: out of range.")
    return seconds


def one_ref(
    locations: VirtualLocations,
    location: str,
    offset: int,
    length: int,
    checksum: str | datetime | None,
    *,
    validate_container: bool,
) -> VirtualChunk:
    """Return one reference, its location normalised and checked."""
    _check_extent(offset, length)
    return VirtualChunk(
        locations.normalize(location, validate_container=validate_container),
        offset,
        length,
        etag=_etag_of(checksum),
        last_modified=seconds_of(checksum) if isinstance(checksum, datetime) else None,
    )


def _etag_of(checksum: str | datetime | None) -> str | None:
    """Return the ETag that guards a chunk, if it is one that a commit can store."""
    if not isinstance(checksum, str):
        return None
    check_text(checksum, "The ETag")
    return checksum


def _check_extent(offset: int, length: int) -> None:
    if offset < 0 or length < 1 or offset + length >= 1 << 63:
        raise InvalidInputError(
            f"Bytes [{offset}, {offset} + {length}) cannot be a virtual chunk: the offset must be "
            "at least 0 and the length at least 1."
        )


def spec_refs(
    locations: VirtualLocations,
    specs: Sequence[VirtualChunkSpec],
    rank: int,
    *,
    validate_containers: bool,
) -> ChunkRefs:
    """Return references for a list of specifications; of equal indices the last counts.

    Raises:
        VirtualContainerError: no container covers one of the locations.
        InvalidInputError: a location, an index, a range of bytes or a time cannot be stored.

    Cost: a microsecond for each; each distinct location is checked once.
    """
    coords = _indices([it.index for it in specs], rank)
    codes, urls = Strings.factorize([it.location for it in specs])
    normal = [
        locations.normalize(it, validate_container=validate_containers) for it in urls.strings
    ]
    offsets, lengths = _extents([it.offset for it in specs], [it.length for it in specs])
    columns: dict[str, object] = {}
    etags = [it.etag_checksum or "" for it in specs]
    if any(etags):
        etag_codes, pool = Strings.factorize(etags)
        for it in pool.strings:
            check_text(it, "The ETag")
        columns["etag_pool"] = pool
        has_etag = np.fromiter(map(bool, etags), bool, len(etags))
        columns["etags"] = np.where(has_etag, etag_codes.astype(np.int32), NO_ETAG)
    # A chunk has one guard, as in the official engine, and the ETag is the exact one.
    moments = [None if it.etag_checksum else it.last_updated_at_checksum for it in specs]
    if any(moments):
        seconds = {it: 0 if it is None else seconds_of(it) for it in set(moments)}
        columns["modified"] = np.array([seconds[it] for it in moments], np.uint32)
    return ChunkRefs.build(
        coords,
        Kind.VIRTUAL,
        objects=codes,
        offsets=offsets,
        lengths=lengths,
        locations=Strings(tuple(normal)),
        **columns,
    ).sort()


def _indices(indices: Sequence[Sequence[int]], rank: int) -> npt.NDArray[np.uint32]:
    """Return the coordinates of chunks, ``(n, rank)``."""
    try:
        # Columns first: only if something is wrong each index is looked at, for the message.
        if set(map(len, indices)) <= {rank}:
            flat = np.fromiter(chain.from_iterable(indices), np.int64, len(indices) * rank)
            found = flat.reshape(len(indices), rank)
            if not len(flat) or (found.min() >= 0 and found.max() < _TOO_FAR_CHUNK):
                return found.astype(np.uint32)
    except OverflowError:
        pass  # one of the numbers is far out of any grid
    wrong = next(
        it for it in indices if len(it) != rank or not all(0 <= at < _TOO_FAR_CHUNK for at in it)
    )
    raise InvalidInputError(
        f"Virtual chunk index {tuple(wrong)} does not fit an array of {rank} axes."
    )


def _extents(
    offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return where the bytes of chunks are in their objects, as columns."""
    try:
        first, sizes = (np.fromiter(it, np.int64, len(it)) for it in (offsets, lengths))
    except OverflowError:
        pass  # caught below
    else:
        # A sum beyond 64 bits comes out negative.
        if (first >= 0).all() and (sizes >= 1).all() and (first + sizes >= 0).all():
            return first.astype(np.uint64), sizes.astype(np.uint64)
    for offset, length in zip(offsets, lengths, strict=True):
        _check_extent(offset, length)
    raise AssertionError("all of them fit")


def grid_refs(
    locations: VirtualLocations,
    shape: tuple[int, ...],
    urls: Sequence[str],
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    *,
    first: tuple[int, ...] | None,
    checksum: str | datetime | None,
    validate_containers: bool,
) -> ChunkRefs:
    """Return references for a box of chunks, given as columns in row-major order.

    Chunks whose URL is empty are left out.

    Raises:
        VirtualContainerError: no container covers some; ``context["chunks"]`` has the
            coordinates of all of these.
        InvalidInputError: the columns do not fit each other, or a location is no URL.

    Cost: each distinct URL is checked once; no object is made per chunk.
    """
    count = math.prod(shape)
    first = first if first is not None else (0,) * len(shape)
    if not len(urls) == len(offsets) == len(lengths) == count or len(first) != len(shape):
        raise InvalidInputError(
            f"A box of {shape} chunks needs {count} locations, offsets and lengths, and an offset "
            f"of {len(shape)} numbers; found {len(urls)}, {len(offsets)}, {len(lengths)} and "
            f"{first}."
        )
    first = tuple(map(int, first))
    if count and any(at < 0 or at + size > 1 << 32 for at, size in zip(first, shape, strict=True)):
        raise InvalidInputError(f"A box of {shape} chunks at {first} leaves any chunk grid.")
    codes, pool = Strings.factorize(urls)
    return column_refs(
        locations,
        _box(shape, first),
        pool,
        codes,
        offsets=_own(offsets),
        lengths=_own(lengths),
        checksum=checksum,
        validate_containers=validate_containers,
    )


def _box(shape: tuple[int, ...], first: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return the coordinates of a box in row-major order, ``(n, rank)``."""
    count = math.prod(shape)
    coords = np.empty((count, len(shape)), np.uint32)
    for axis, (start, size) in enumerate(zip(first, shape, strict=True) if count else ()):
        along = np.arange(size, dtype=np.uint32) + np.uint32(start)
        column = coords[:, axis].reshape(-1, size, math.prod(shape[axis + 1 :]))
        column[:] = along[:, None]
    return coords


def _own(values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Copy a column, which its owner may change later; one value for all rows takes no memory."""
    column = np.array(values, np.uint64)
    alike = len(column) > 0 and column[0] == column[-1] and bool((column == column[0]).all())
    return np.broadcast_to(column[0], len(column)) if alike else column


def column_refs(
    locations: VirtualLocations,
    coords: npt.NDArray[np.uint32],
    urls: Strings,
    codes: npt.NDArray[np.uint32],
    *,
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    checksum: str | datetime | None,
    validate_containers: bool,
) -> ChunkRefs:
    """Return references for chunks anywhere; ``codes`` say which of ``urls`` each one has.

    Raises: as `grid_refs`.
    """
    normal: list[str] = []
    uncovered: dict[int, VirtualContainerError] = {}
    for code, url in enumerate(urls.strings):
        # All are looked at before one is refused: the error lists every chunk without a container.
        normal.append(locations.normalize(url, validate_container=False) if url else "")
        if url and validate_containers:
            try:
                locations.resolve(normal[-1])
            except VirtualContainerError as error:
                uncovered[code] = error
    if uncovered:
        first = next(iter(uncovered.values()))
        first.context["chunks"] = coords[np.isin(codes, list(uncovered))].tolist()
        raise first
    if len(coords) and max(offsets.max(), lengths.max()) >= _TOO_FAR:
        raise InvalidInputError(
            "Some offsets or lengths of virtual chunks are negative, or 2**62 or more."
        )
    etag = _etag_of(checksum)
    modified = seconds_of(checksum) if isinstance(checksum, datetime) else 0
    count = len(coords)
    refs = ChunkRefs.build(
        coords,
        Kind.VIRTUAL,
        objects=codes,
        offsets=offsets,
        lengths=lengths,
        etags=np.broadcast_to(np.int32(-1 if etag is None else 0), count),
        modified=np.broadcast_to(np.uint32(modified), count),
        locations=Strings(tuple(normal)),
        etag_pool=Strings(() if etag is None else (etag,)),
    )
    # Empty URLs are chunks that do not exist. Most boxes have none, and need no copy.
    if all(normal):
        return refs
    return refs.take(np.array([bool(url) for url in normal], bool)[codes])
