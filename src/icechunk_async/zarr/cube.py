"""Arrays along their versions: values of many versions, each different chunk read once."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.tree.workspace import read_ref
from icechunk_async.engine.versions.sharing import shared_chunks
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.zarr.decoding import ChunkCodec
from icechunk_async.zarr.documents import array_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.versions.timeline import ArrayVersion, Track
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.manifest.chunk import ChunkRef

    type Key = int | slice | npt.NDArray[np.integer[Any]]
    type Indices = npt.NDArray[np.intp]

__all__ = ["CubeArray", "Key"]

_CONCURRENT_CHUNKS: Final = 16
_NUMBERS: Final = "biufc"


class _Form(NamedTuple):
    """How the chunks of some versions are encoded and laid out."""

    codec: ChunkCodec
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any


@dataclass(frozen=True)
class CubeArray:
    """One array along its versions. Plain data: it pickles, and holds no values."""

    track: Track
    shape: tuple[int, ...]
    """Versions, then the largest size that a version has along each axis."""
    dtype: np.dtype[Any]
    missing: Any
    """The value of cells that a version does not have."""

    @classmethod
    def of(cls, track: Track, snapshots: Sequence[SnapshotId], missing: Any = None) -> CubeArray:
        """Look at the metadata of all versions.

        Args:
            track: the versions of the array.
            snapshots: of these versions, for messages.
            missing: the value of cells that a version does not have. None: NaN or NaT if the data
                type has one, else the fill value of the newest version.

        Raises:
            InvalidInputError: the versions cannot be stacked, or their chunks cannot be decoded.
        """
        newest = track.newest
        last = _form_of(newest)
        dtype = last.dtype
        for number, state in enumerate(track.states):
            form = _form_of(state)
            # All states are checked, also those whose rows nobody will read: an error when a
            # dataset is opened is better than one in the middle of a computation.
            if len(state.shape) == len(newest.shape) and form.dtype == dtype:
                continue
            at = snapshots[int(np.flatnonzero(track.rows == number)[0])]
            if len(state.shape) != len(newest.shape):
                raise InvalidInputError(
                    f"{newest.path!r} has {len(newest.shape)} axes, and {len(state.shape)} in "
                    f"snapshot {at}, so these versions cannot be stacked. Choose others with "
                    "since= or until=."
                )
            if form.dtype.kind not in _NUMBERS or dtype.kind not in _NUMBERS:
                raise InvalidInputError(
                    f"{newest.path!r} has the data type {last.dtype}, and {form.dtype} in snapshot "
                    f"{at}, which have no common one. Choose other versions with since= or until=."
                )
            dtype = np.result_type(dtype, form.dtype)
        sizes = (max(axis) for axis in zip(*(it.shape for it in track.states), strict=True))
        if missing is None:
            missing = _missing(dtype, last.fill)
        return cls(track, (len(track.rows), *sizes), dtype, missing)

    @property
    def document(self) -> Mapping[str, Any]:
        """The metadata document of the newest version that has the array."""
        found: dict[str, Any] = json.loads(self.track.newest.document)
        return found

    @property
    def attributes(self) -> dict[str, Any]:
        """A copy of the attributes in `document`."""
        return dict(self.document.get("attributes") or {})

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Cells of a chunk (of a shard, where there are such) in the newest version that has it."""
        return _form_of(self.track.newest).chunks

    async def read(self, engine: Engine, key: Sequence[Key]) -> npt.NDArray[Any]:
        """Read a part of the values.

        Args:
            engine: of the repository.
            key: an index, a slice of positive step or an array of indices for each axis, the
                versions first. They select as in orthogonal indexing.

        Raises:
            FormatError: a manifest or a chunk is damaged, or missing.
            ChunkDamagedError: reads are verified, and bytes are not those that were written.
            VirtualChunkError: a source cannot be read, or is not the one that was referred to.

        Cancellation: no effect.

        Cost: the manifests of the versions, see `shared_chunks`, and one request for each different
        chunk. Memory: the result, and sixteen chunks.
        """
        wanted = [_indices(it, size) for it, size in zip(key, self.shape, strict=True)]
        reading = _Reading(engine, self, self.track.rows[wanted[0]], wanted[1:])
        values = await reading.run()
        singles = (isinstance(it, int | np.integer) for it in key)
        found: npt.NDArray[Any] = values[tuple(0 if one else slice(None) for one in singles)]
        return found


class _Piece(NamedTuple):
    """Where cells of one chunk go, along one axis."""

    chunk: int
    source: Indices
    """Cells of the chunk."""
    target: Indices
    """Their places in the result."""

    def clipped(self, size: int) -> _Piece:
        """Leave out the cells of a chunk from ``size`` on: the array ends there."""
        inside = self.source < size
        if inside.all():
            return self
        return _Piece(self.chunk, self.source[inside], self.target[inside])


class _Reading:
    """One part of a cube while it is read."""

    def __init__(
        self, engine: Engine, cube: CubeArray, rows: npt.NDArray[np.int32], axes: list[Indices]
    ) -> None:
        self._engine = engine
        self._cube = cube
        self._axes = axes
        self._rows = _rows_of(rows)
        self._states = [(it, cube.track.states[it]) for it in self._rows if it >= 0]
        self._values = np.empty((len(rows), *map(len, axes)), cube.dtype)

    async def run(self) -> npt.NDArray[Any]:
        values = self._values
        if values.size:
            await self._engine.assets.compute(self._fill, size_bytes=values.nbytes)
            # Versions that are encoded differently share no chunk: each encoding is read for
            # itself.
            forms: dict[int, list[tuple[int, ArrayVersion]]] = {}
            for number, state in self._states:
                forms.setdefault(id(_form_of(state)), []).append((number, state))
            for states in forms.values():
                await self._read(_form_of(states[0][1]), states)
        return values

    def _fill(self) -> None:
        """Set the cells that a version does not have, and fill values."""
        # All rows of one shape and one fill value at once: a cube may have thousands of versions.
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number in self._rows:
            state = None if number < 0 else self._cube.track.states[number]
            about = () if state is None else (state.shape, id(_form_of(state)))
            alike.setdefault(about, []).append(number)
        for about, numbers in alike.items():
            rows = self._joined(numbers)
            shape = about[0] if about else (0,) * len(self._axes)
            inside = [np.flatnonzero(it < size) for it, size in zip(self._axes, shape, strict=True)]
            if not about or any(
                len(it) < len(axis) for it, axis in zip(inside, self._axes, strict=True)
            ):
                self._values[_selection([rows])] = self._cube.missing
            if about:
                fill = _form_of(self._cube.track.states[numbers[0]]).fill
                self._values[_selection([rows, *inside])] = fill

    def _joined(self, numbers: Sequence[int]) -> Indices:
        """Return the rows of the result that have one of some states."""
        if len(numbers) == 1:
            return self._rows[numbers[0]]
        return np.sort(np.concatenate([self._rows[it] for it in numbers]))

    async def _read(self, form: _Form, states: list[tuple[int, ArrayVersion]]) -> None:
        """Read the chunks of versions that are encoded alike."""
        pieces = [_pieces(axis, size) for axis, size in zip(self._axes, form.chunks, strict=True)]
        grid = tuple(len(it) for it in pieces)
        mesh = np.meshgrid(
            *(np.array([it.chunk for it in axis], np.uint32) for axis in pieces), indexing="ij"
        )
        places = np.stack([it.ravel() for it in mesh], 1) if mesh else np.empty((1, 0), np.uint32)
        versions = [state for _, state in states]
        table, chunks = await shared_chunks(self._engine.assets, versions, places)
        # By chunk instead of by version: most versions share most chunks, and each different one is
        # read and decoded once.
        # Two versions of two places, `table` [[0, 1], [0, 2]]: `order` is 0, 2, 1, 3, and chunk 0
        # goes to the cells 0 and 2 of the table, the first place of both versions. A -1, of no
        # chunk, sorts before all and belongs to no span.
        order = np.argsort(table, axis=None, kind="stable")
        bounds = np.searchsorted(table.ravel()[order], np.arange(len(chunks) + 1))

        async def read(number: int) -> None:
            rows, columns = np.divmod(order[bounds[number] : bounds[number + 1]], len(places))
            # For messages. The chunk may be at several places, of which the first is named.
            path, coords = versions[int(rows[0])].path, tuple(places[columns[0]].tolist())
            values = await _decoded(self._engine, form, chunks[number], path, coords)
            # One chunk may serve several places of a grid: equal chunks are shared, and shifts move
            # them.
            writes: list[tuple[Indices, list[_Piece]]] = []
            different: list[int] = np.unique(columns).tolist()
            for place in different:
                index = np.unravel_index(place, grid) if grid else ()
                whole = [axis[it] for axis, it in zip(pieces, index, strict=True)]
                having: list[int] = rows[columns == place].tolist()
                some = [states[it] for it in having]
                writes.extend(self._writes(form, some, whole))
            size_bytes = sum(len(it) for it, _ in writes) * values.nbytes
            await self._engine.assets.compute(
                lambda: self._write(values, writes), size_bytes=size_bytes
            )

        await bounded_map(read, range(len(chunks)), limit=_CONCURRENT_CHUNKS)

    def _writes(
        self, form: _Form, states: list[tuple[int, ArrayVersion]], pieces: list[_Piece]
    ) -> list[tuple[Indices, list[_Piece]]]:
        """Return where a chunk goes, that some versions have at one place of the grid."""
        # A version that is shorter has fewer cells of an edge chunk. What is stored behind its end
        # comes from a longer version, and stays out.
        ends: dict[tuple[int, ...], list[int]] = {}
        for number, state in states:
            axes = zip(pieces, form.chunks, state.shape, strict=True)
            end = tuple(min(size, length - it.chunk * size) for it, size, length in axes)
            ends.setdefault(end, []).append(number)
        return [
            (
                self._joined(numbers),
                [it.clipped(size) for it, size in zip(pieces, end, strict=True)],
            )
            for end, numbers in ends.items()
        ]

    def _write(self, values: npt.NDArray[Any], writes: list[tuple[Indices, list[_Piece]]]) -> None:
        for rows, pieces in writes:
            found = values[_selection([it.source for it in pieces])]
            self._values[_selection([rows, *(it.target for it in pieces)])] = found


async def _decoded(
    engine: Engine, form: _Form, ref: ChunkRef, path: str, coords: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Read and decode a chunk."""
    data = await read_ref(engine.assets, engine.virtual, ref, path, coords)
    try:
        return await form.codec.decode(data)
    # Codecs raise anything when they are given other bytes.
    except Exception as error:
        raise FormatError(
            f"Chunk {coords} of {path!r} cannot be decoded "
            f"({type(error).__name__}: {str(error)[:200]}). It is damaged, or its metadata is."
        ) from error


def _form_of(state: ArrayVersion) -> _Form:
    format_ = _format(state.document, state.path, len(state.shape))
    try:
        return _form(format_)
    except InvalidInputError as error:
        raise InvalidInputError(f"Versions of {state.path!r} cannot be read: {error}") from None


# Two caches: versions differ by their attributes and shapes more often than by their codecs, and
# building codecs is what takes long.
@lru_cache(maxsize=1024)
def _format(document: bytes, path: str, rank: int) -> str:
    """Return the part of a document that decides how chunks are read."""
    values = array_members(document, path, rank)
    values.update(attributes={}, shape=[0] * rank, dimension_names=None)
    return json.dumps(values, sort_keys=True)


@lru_cache(maxsize=128)
def _form(text: str) -> _Form:
    codec = ChunkCodec.of(text.encode())
    spec = codec.spec
    return _Form(codec, spec.shape, spec.dtype.to_native_dtype(), spec.fill_value)


def _missing(dtype: np.dtype[Any], fill: Any) -> Any:
    if dtype.kind in "fc":
        return np.nan
    return np.array("NaT", dtype)[()] if dtype.kind in "mM" else fill


def _indices(key: Key, size: int) -> Indices:
    """Return the indices that a key selects along an axis."""
    if isinstance(key, slice):
        return np.arange(*key.indices(size), dtype=np.intp)
    found = np.atleast_1d(np.asarray(key, np.intp))
    return np.where(found < 0, found + size, found)


def _pieces(indices: Indices, size: int) -> list[_Piece]:
    """Divide the indices along an axis into chunks, ascending."""
    if not len(indices):
        return []
    chunks, sources = np.divmod(indices, max(size, 1))
    # Indices may come in any order, with repetitions. Stable, so that those of a chunk keep theirs.
    order = np.argsort(chunks, kind="stable")
    numbers, starts = np.unique(chunks[order], return_index=True)
    targets = np.split(order, starts[1:])
    return [
        _Piece(number, sources[target], target)
        for number, target in zip(numbers.tolist(), targets, strict=True)
    ]


def _rows_of(rows: npt.NDArray[np.int32]) -> dict[int, Indices]:
    """Return for each state where it is among some rows."""
    if not len(rows):
        return {}
    order = np.argsort(rows, kind="stable")
    numbers, starts = np.unique(rows[order], return_index=True)
    return dict(zip(numbers.tolist(), np.split(order, starts[1:]), strict=True))


def _selection(indices: list[Indices]) -> tuple[Any, ...]:
    """Return an index into an array: slices where that is possible, which NumPy copies fastest."""
    found = [_as_slice(it) for it in indices]
    if sum(not isinstance(it, slice) for it in found) <= 1:
        return tuple(found)
    # Two arrays of indices are paired by NumPy unless they are crossed.
    return np.ix_(*indices)


def _as_slice(indices: Indices) -> slice | Indices:
    if not len(indices):
        return slice(0, 0)
    first = int(indices[0])
    step = int(indices[1]) - first if len(indices) > 1 else 1
    if step > 0 and bool((np.diff(indices) == step).all()):
        return slice(first, int(indices[-1]) + 1, step)
    return indices
