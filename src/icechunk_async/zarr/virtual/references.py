"""Make virtual references from single values, specifications or columns; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.errors import InvalidInputError, VirtualContainerError
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.refs import ChunkRefs, Kind, VirtualChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.engine.virtual.chunks import VirtualLocations
    from icechunk_async.format.manifest.refs import Coordinates

__all__ = ["VirtualChunkSpec", "column_refs", "grid_refs", "one_ref", "spec_refs"]


_MAX_SECONDS: Final = (1 << 32) - 1
_TOO_FAR: Final = np.uint64(1 << 62)


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
    if offset < 0 or length < 1 or offset + length >= 1 << 63:
        raise InvalidInputError(
            f"Bytes [{offset}, {offset} + {length}) cannot be a virtual chunk: the offset must be "
            "at least 0 and the length at least 1."
        )
    return VirtualChunk(
        locations.normalize(location, validate_container=validate_container),
        offset,
        length,
        etag=checksum if isinstance(checksum, str) else None,
        last_modified=seconds_of(checksum) if isinstance(checksum, datetime) else None,
    )


def spec_refs(
    locations: VirtualLocations,
    specs: Sequence[VirtualChunkSpec],
    rank: int,
    *,
    validate_containers: bool,
) -> ChunkRefs:
    """Return references for a list of specifications; of equal indices the last counts."""
    refs: dict[Coordinates, VirtualChunk] = {}
    known: dict[str, str] = {}
    for spec in specs:
        if spec.location not in known:
            known[spec.location] = locations.normalize(
                spec.location, validate_container=validate_containers
            )
        checksum = spec.etag_checksum or spec.last_updated_at_checksum
        if len(spec.index) != rank or min(spec.index, default=0) < 0:
            raise InvalidInputError(
                f"Virtual chunk index {tuple(spec.index)} does not fit an array of {rank} axes."
            )
        refs[tuple(spec.index)] = one_ref(
            locations,
            known[spec.location],
            spec.offset,
            spec.length,
            checksum,
            validate_container=False,
        )
    return ChunkRefs.from_mapping(rank, refs)


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
    etag = checksum if isinstance(checksum, str) else None
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
    if all(normal):
        return refs
    return refs.take(np.array([bool(url) for url in normal], bool)[codes])
