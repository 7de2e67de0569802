"""Growth along one dimension: which coordinates follow, how long arrays become, what is cleared.

A task learns from its rows how long the appended dimension has to be, but not from the rows of
others. So tasks write to arrays that are long enough for any, and the commit shortens these.

Shrinking an array keeps the rest of its last chunks, and may keep whole chunks beyond its end.
Grown again, it would show those values in cells that nobody wrote: what is left there is cleared
first.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    AlreadyExistsError,
    InvalidInputError,
    MissingCoordinatesError,
    UnsortedCoordinatesError,
)
from icechunk_async.spark.grid import Appended, Axis, Steps
from icechunk_async.spark.shared import open_array
from icechunk_async.spark.write.values import Encoding, check_read_back, encode_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import zarr

    from icechunk_async.sync.store import IcechunkStore

    type Place = tuple[int, ...]

__all__ = [
    "MOST_APPENDED",
    "Growth",
    "axis_to_append",
    "clear_leftovers",
    "is_sorted",
    "places_beyond",
    "set_length",
]

_CONCURRENT: Final = 64
MOST_APPENDED: Final = 1_000
"""The most coordinates that one write appends without `append-values` or `max-append`: this
number, or those of ten chunks, whichever is more."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A dimension that is appended to.

    Attributes:
        axis: its indices; existing ones are not written to.
        length: its length now.
        most: the length that it may reach.
        arrays: paths of all arrays with this dimension, and the number of the axis in each.
        coordinate: path and encoding of its coordinate array, if it has one.
    """

    axis: Axis
    length: int
    most: int
    arrays: tuple[tuple[str, int], ...]
    coordinate: tuple[str, Encoding] | None

    def prepare(self, store: IcechunkStore) -> None:
        """Make the arrays long enough for every task."""
        for path, axis in self.arrays:
            set_length(store, path, axis, self.most)

    def filled(
        self,
        parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]],
        *,
        fill_gaps: bool,
        allow: bool,
    ) -> npt.NDArray[Any]:
        """Return the new coordinates, as rows gave them, up to the last one.

        Args:
            parts: places and coordinates of the rows of each task.
            fill_gaps: count on by steps where no row has a coordinate.
            allow: accept coordinates that a packed array gives back otherwise.

        Raises:
            ValueRefusedError: a packed array would give back other coordinates.
            AmbiguousCoordinatesError: rows of two tasks have one place and different coordinates.
            MissingCoordinatesError: no row has a coordinate before the last one.
        """
        steps = self.axis.steps
        # They were given with the request, so nothing is gathered from rows.
        if steps is None:
            self._check(self.axis.values[self.length :], allow=allow)
            return self.axis.values[self.length :]
        appended = Appended(self.axis, self.length)
        for places, values in parts:
            appended.add(places, values)
        places, given = appended.columns()
        self._check(given, allow=allow)
        count = int(places[-1]) + 1 - self.length if len(places) else 0
        every = steps.values(count).astype(self.axis.values.dtype)
        if len(places) < count and not fill_gaps:
            missing = np.setdiff1d(np.arange(count), places - self.length)
            raise MissingCoordinatesError(
                f"No row has {every[missing[0]]!s} in column {self.axis.name!r}, and others have "
                f"later coordinates up to {given[-1]!s}: {len(missing):,} are missing. Nothing was "
                "published. If that is meant, option('fill-gaps', 'true') adds them, empty.",
                dimension=self.axis.name,
            )
        every[places - self.length] = given
        return every

    def _check(self, new: npt.NDArray[Any], *, allow: bool) -> None:
        if self.coordinate is not None and not allow:
            check_read_back(new, self.coordinate[1])

    def finish(self, store: IcechunkStore, new: npt.NDArray[Any]) -> None:
        """Shorten the arrays to the length that was written, and write the new coordinates."""
        length = self.length + len(new)
        for path, axis in self.arrays:
            set_length(store, path, axis, length)
        if not len(new):
            return
        written = None if self.coordinate is None else self.coordinate[0]
        others = [(path, axis) for path, axis in self.arrays if path != written]
        # After the new length: `clear_leftovers` looks at the cells that the arrays have now.
        clear_leftovers(store, others, self.length)
        if self.coordinate is not None:
            path, encoding = self.coordinate
            array = open_array(store, path, write=True)
            name = self.axis.name
            array[self.length : length] = encode_column(
                _as_arrow(new),
                encoding,
                may_allow=False,  # another coordinate, such as a shorter text, is another row
                named=lambda row: f"of {name}={new[row]!s}",
            )


def _as_arrow(values: npt.NDArray[Any]) -> pa.Array[Any]:
    return pa.array(values.tolist() if values.dtype.kind in "OUT" else values)


def axis_to_append(
    name: str,
    values: npt.NDArray[Any],
    given: tuple[Any, ...] | None,
    *,
    indexed: bool,
    most: int = MOST_APPENDED,
) -> tuple[Axis, int]:
    """Return the axis of a dimension that is appended to, and the length that it may reach.

    Args:
        name: name of the dimension.
        values: its existing coordinates.
        given: the coordinates to append; None if they continue in equal steps.
        indexed: whether the dimension has no coordinates, so that rows give indices.
        most: how many may be appended in equal steps.

    Raises:
        AlreadyExistsError: a coordinate to append exists.
        UnsortedCoordinatesError: existing coordinates are sorted, and the new ones do not
            continue their order.
        InvalidInputError: there are no equal steps, and no coordinates were given.
    """
    length = len(values)
    if given is not None:
        more = _as_coordinates(name, given, values.dtype)
        if len(np.unique(more)) != len(more) or np.isin(more, values).any():
            raise AlreadyExistsError(
                f"The option 'append-values' names coordinates of {name!r} that exist "
                "already, or one of them twice. Leave them out, or replace values with "
                "mode('overwrite').",
                dimension=name,
            )
        every = np.concatenate([values, more])
        if length > 1 and is_sorted(values) and not is_sorted(every):
            raise UnsortedCoordinatesError(
                f"The coordinates of {name!r} are sorted, and those in the option 'append-values' "
                f"do not continue in their order after {values[-1]!s}. Append later ones only.",
                dimension=name,
            )
        return Axis(name, every, first=length), len(every)
    steps = Steps(np.int64(length - 1), np.int64(1), most) if indexed else None
    steps = steps or Steps.after(values, most)
    if steps is None:
        raise InvalidInputError(
            f"The coordinates of {name!r} do not have equal steps, so the places of appended rows "
            "are unknown. List the new coordinates in the option 'append-values' as JSON, or use "
            "icechunk_async.spark.write_rows, which finds them."
        )
    return Axis(name, values, first=length, steps=steps), length + most


def is_sorted(values: npt.NDArray[Any]) -> bool:
    """Return whether coordinates ascend or descend."""
    if values.dtype.kind == "T":
        values = values.astype(object)
    return bool((values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all())


def _as_coordinates(name: str, given: tuple[Any, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # As objects, since new texts may be longer than the existing ones.
        return np.asarray(given, object if dtype.kind in "UT" else dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"The option 'append-values' has a value that is no coordinate of {name!r}, which are "
            f"{dtype}: {error}. Give a JSON list of such values."
        ) from error


def set_length(store: IcechunkStore, path: str, axis: int, length: int) -> None:
    """Set the length of an array along one axis, without touching chunks.

    Raises:
        InvalidInputError: the chunk grid is irregular.
    """
    key = f"{path}/zarr.json"
    prototype = default_buffer_prototype()
    data = sync(store.get(key, prototype))
    assert data is not None  # the array was opened before
    document = json.loads(data.to_bytes())
    if document["chunk_grid"]["name"] != "regular":
        raise InvalidInputError(
            f"The chunks of {path!r} differ in size, so rows cannot be appended. Make the array "
            "longer first, and use mode('overwrite')."
        )
    # Not Array.resize, which deletes chunks beyond the end when it shrinks an array.
    document["shape"][axis] = length
    sync(store.set(key, prototype.buffer.from_bytes(json.dumps(document).encode())))


def places_beyond(
    shape: Sequence[int], chunks: Sequence[int], axis: int, length: int
) -> Iterable[Place]:
    """Return the chunks of an array that have cells at or after an index of one axis. Pure."""
    counts = [range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    counts[axis] = range(length // chunks[axis], len(counts[axis]))
    return product(*counts)


def clear_leftovers(store: IcechunkStore, arrays: Iterable[tuple[str, int]], length: int) -> None:
    """Clear cells beyond a length in chunks that the session has not written.

    Args:
        store: the store of a session, in which the arrays have their new shape.
        arrays: paths, and the number of the axis that grew.
        length: the length before. Chunks that the session wrote are taken to be right.

    Cost: looks for each chunk with new cells; reads those that are there.
    """
    written = store.session.status().updated_chunks
    for path, axis in arrays:
        array = open_array(store, path, write=True)
        sizes = array.shards or array.chunks
        mine = {tuple(it) for it in written.get(f"/{path}", [])}
        beyond = [it for it in places_beyond(array.shape, sizes, axis, length) if it not in mine]
        for place in _stored(store, path, array, beyond):
            region = [
                slice(at * size, min((at + 1) * size, end))
                for at, size, end in zip(place, sizes, array.shape, strict=True)
            ]
            if region[axis].start >= length:
                sync(store.delete(_key(path, array, place)))
                continue
            region[axis] = slice(length, region[axis].stop)
            values = np.asarray(array[tuple(region)])
            # A chunk that is written is a conflict for others who write it, and bytes that nobody
            # needs.
            if not _all_equal(values, array.fill_value):
                array[tuple(region)] = array.fill_value


def _stored(
    store: IcechunkStore, path: str, array: zarr.Array[Any], places: Sequence[Place]
) -> list[Place]:
    async def exists(place: Place) -> bool:
        return await store.exists(_key(path, array, place))

    async def look() -> list[bool]:
        return await bounded_map(exists, places, limit=_CONCURRENT)

    return [place for place, there in zip(places, sync(look()), strict=True) if there]


def _key(path: str, array: zarr.Array[Any], place: Place) -> str:
    return f"{path}/{array.metadata.encode_chunk_key(place)}"


def _all_equal(values: np.ndarray[Any, Any], fill: Any) -> bool:
    same = values == fill
    if values.dtype.kind in "fcMm":
        same = same | ((values != values) & (np.asarray(fill) != np.asarray(fill)))  # noqa: PLR0124 - NaN
    return bool(np.all(same))
