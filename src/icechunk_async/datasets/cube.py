"""History as a dimension: datasets of xarray that read the versions of an array.

The dataset holds no values, and pickles as its `Home` does. Needs `xarray`.
"""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio.to_thread
import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.versions.timeline import trace
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.format.paths import check_path, name_of
from icechunk_async.zarr.cube import CubeArray

try:
    import xarray
    from xarray.backends.common import BackendArray
    from xarray.backends.zarr import FillValueCoder
    from xarray.core import indexing
except ModuleNotFoundError as error:
    raise MissingDriverError(
        "A cube is a dataset of xarray, which is not installed. Install it with: pip install "
        "'icechunk-async[xarray]'",
        module=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.versions.timeline import Choice, Timeline
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.zarr.cube import Key

__all__ = ["Home", "open_cube"]

DIMENSION: Final = "known_at"
# Dask's own default (`array.chunk-size`).
_BLOCK_BYTES: Final = 128 << 20
_COMPARED_VERSIONS: Final = 64


class Home(Protocol):
    """Where a dataset reads: an open repository, or how to open it."""

    def run[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """Ask, and block until there is a reply."""
        ...

    async def run_async[T](self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """Ask, on any loop."""
        ...


async def open_cube(
    home: Home,
    engine: Engine,
    path: str,
    ref: SnapshotId | str,
    choice: Choice,
    *,
    missing: Any = None,
    chunks: Mapping[Hashable, int] | None = None,
) -> xarray.Dataset:
    """Open an array along its versions; see `Repository.cube`."""
    path = check_path(path)
    timeline = await trace(engine, path, ref, choice)
    name = name_of(path) or "array"
    cube = _with_missing(CubeArray.of(timeline.array, timeline.snapshots), missing)
    dimensions = _dimensions(cube)
    if DIMENSION in {name, *dimensions[1:]}:
        raise InvalidInputError(
            f"{path!r} or one of its dimensions is named {DIMENSION!r}, as the dimension of the "
            "versions is, so they cannot be told apart."
        )
    if unknown := set(chunks or ()) - set(dimensions):
        raise InvalidInputError(
            f"chunks= names {sorted(map(str, unknown))}, and the dimensions of the cube are "
            f"{list(dimensions)}."
        )
    coordinates = [it async for it in _coordinates(engine, timeline, cube)]
    opened = _Opened(home, name, cube, timeline, coordinates)
    # Some imports of xarray, and decoding, would hold up the event loop.
    return await anyio.to_thread.run_sync(opened.dataset, chunks)


@dataclass(frozen=True, slots=True)
class _Coordinate:
    """A coordinate of a cube."""

    name: str
    cube: CubeArray
    version: int | None = None
    """The one version whose values are those of all; None: see ``values``."""
    values: npt.NDArray[Any] | None = None
    """Those of all versions; None: they differ."""

    def variable(self, home: Home) -> tuple[str, xarray.Variable]:
        """Return the coordinate under its name in the dataset."""
        variable = _variable(home, self.cube)
        if self.version is not None:
            return self.name, variable[self.version]
        if self.values is not None:
            return self.name, xarray.Variable(variable.dims[1:], self.values, variable.attrs)
        return f"{self.name}_as_known", variable


@dataclass(frozen=True, slots=True)
class _Opened:
    """All that a dataset is made of."""

    home: Home
    name: str
    cube: CubeArray
    timeline: Timeline
    coordinates: Sequence[_Coordinate]

    def dataset(self, chunks: Mapping[Hashable, int] | None) -> xarray.Dataset:
        """Make the dataset, decoded, in Dask's blocks if ``chunks`` are given."""
        variables = dict(it.variable(self.home) for it in self.coordinates)
        times = _times(self.timeline, {self.name, *variables})
        data = _variable(self.home, self.cube)
        decoded = xarray.decode_cf(xarray.Dataset({self.name: data}, {**times, **variables}))
        if chunks is None:
            return decoded
        blocks: dict[Hashable, int] = {}
        blocks.update(_blocks(self.cube))
        blocks.update(chunks)
        return decoded.assign({self.name: decoded[self.name].variable.chunk(blocks)})


def _dimensions(cube: CubeArray) -> tuple[str, ...]:
    given = cube.document.get("dimension_names") or [None] * (len(cube.shape) - 1)
    return (DIMENSION, *(name or f"dim_{axis}" for axis, name in enumerate(given)))


def _with_missing(cube: CubeArray, missing: Any) -> CubeArray:
    """Set the value of cells that a version does not have: one that is masked, if there is one."""
    if missing is None:
        masked = _fill_value(cube)
        return (
            cube if masked is None or cube.dtype.kind in "fcmM" else replace(cube, missing=masked)
        )
    try:
        return replace(cube, missing=np.array(missing, cube.dtype).reshape(())[()])
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(
            f"missing={missing!r} is no value of the data type {cube.dtype}: {error}."
        ) from None


def _fill_value(cube: CubeArray) -> Any:
    """Return the value that xarray masks, decoded; None if nothing is masked."""
    stored = cube.attributes.get("_FillValue")
    if stored is None:
        return None
    try:
        return np.array(FillValueCoder.decode(stored, cube.dtype), cube.dtype)[()]
    except (ValueError, TypeError, OverflowError, struct.error):  # not as xarray writes it
        return None


def _variable(home: Home, cube: CubeArray) -> xarray.Variable:
    attributes = cube.attributes
    for name in ("coordinates", "_FillValue"):
        # `coordinates` names arrays that may not be in the cube; `_FillValue` comes back decoded.
        attributes.pop(name, None)
    masked = _fill_value(cube)
    if masked is not None:
        attributes["_FillValue"] = masked
    return xarray.Variable(
        _dimensions(cube), indexing.LazilyIndexedArray(_Lazy(home, cube)), attributes
    )


def _times(timeline: Timeline, taken: set[str]) -> dict[str, Any]:
    """Return the times and ids of the versions, by name."""
    about: dict[str, Any] = {
        DIMENSION: (DIMENSION, timeline.known_us.astype("datetime64[us]")),
        "committed_at": (DIMENSION, timeline.committed_us.astype("datetime64[us]")),
        "snapshot_id": (DIMENSION, np.array([str(it) for it in timeline.snapshots])),
        "exists": (DIMENSION, timeline.array.rows >= 0),
    }
    return {name: it for name, it in about.items() if name not in taken}


def _blocks(cube: CubeArray) -> dict[str, int]:
    """Return how Dask divides a cube: one chunk in space, and all versions that fit in memory.

    A block reads each chunk that its versions share once.
    """
    # An axis of length 0 has chunks of that length or more, and Dask has no block of length 0.
    sizes = [max(1, min(pair)) for pair in zip(cube.chunk_shape, cube.shape[1:], strict=True)]
    each = math.prod(sizes) * cube.dtype.itemsize
    versions = max(1, min(cube.shape[0], _BLOCK_BYTES // max(each, 1)))
    return dict(zip(_dimensions(cube), (versions, *sizes), strict=True))


async def _coordinates(
    engine: Engine, timeline: Timeline, array: CubeArray
) -> AsyncGenerator[_Coordinate]:
    """Find the coordinates that fit an array."""
    sizes = dict(zip(_dimensions(array), array.shape, strict=True))
    for name, track in timeline.coordinates.items():
        if not track.states:
            continue
        try:
            cube = CubeArray.of(track, timeline.snapshots)
        except InvalidInputError:  # it cannot be stacked, and the array can
            continue
        own = _dimensions(cube)
        if any(sizes.get(it) != size for it, size in zip(own, cube.shape, strict=True)):
            continue
        # One state means equal values without a look at them.
        if len(track.states) == 1 and own != (DIMENSION, name):
            yield _Coordinate(name, cube, int(np.flatnonzero(track.rows >= 0)[-1]))
        else:
            yield _Coordinate(name, cube, values=await _common_values(engine, cube))


async def _common_values(engine: Engine, cube: CubeArray) -> npt.NDArray[Any] | None:
    """Return the values that all versions have, as far as each has some; None if they differ.

    Memory: those of 64 versions.
    """
    states, whole = cube.track.states, [slice(None)] * (len(cube.shape) - 1)
    # Arrays mostly grow. The largest state then has what each of the others has a part of.
    largest = max(range(len(states)), key=lambda it: math.prod(states[it].shape))
    if states[largest].shape != cube.shape[1:]:
        return None  # each is the largest along some axis only
    # One version for each state: versions that share a state have the same bytes, and are read
    # once.
    firsts = [int(np.flatnonzero(cube.track.rows == it)[0]) for it in range(len(states))]
    expected = await cube.read(engine, (firsts[largest], *whole))
    for start in range(0, len(states), _COMPARED_VERSIONS):
        some = firsts[start : start + _COMPARED_VERSIONS]
        found = await cube.read(engine, (np.array(some), *whole))
        for values, state in zip(found, states[start:], strict=False):
            box = tuple(map(slice, state.shape))
            equal_nan = values.dtype.kind in "fcmM"
            if not np.array_equal(values[box], expected[box], equal_nan=equal_nan):
                return None
    return expected


class _Lazy(BackendArray):
    """The values of a cube, read when they are needed."""

    __slots__ = ("_cube", "_home", "dtype", "shape")

    def __init__(self, home: Home, cube: CubeArray) -> None:
        self._home = home
        self._cube = cube
        self.shape = cube.shape
        self.dtype = cube.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read
        )

    async def async_getitem(self, key: indexing.ExplicitIndexer) -> Any:
        """Read without blocking the caller's loop."""
        return await indexing.async_explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read_async
        )

    def _read(self, key: tuple[Key, ...]) -> Any:
        return self._home.run(lambda engine: self._cube.read(engine, key))

    async def _read_async(self, key: tuple[Key, ...]) -> Any:
        return await self._home.run_async(lambda engine: self._cube.read(engine, key))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lazy, (self._home, self._cube)
