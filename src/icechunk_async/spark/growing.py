"""Appending along a dimension: how long it may become while tasks write, and how long it is then.

Tasks learn from their rows how far the dimension goes, and none knows of the others'. So all of
them write to arrays that are made long enough for any, and the commit cuts these to what came.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from icechunk_async.errors import (
    AlreadyExistsError,
    InvalidInputError,
    UnsortedCoordinatesError,
)
from icechunk_async.spark.arrays import open_array
from icechunk_async.spark.axes import Axis, Steps

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.spark.encoding import Encoding
    from icechunk_async.sync.store import IcechunkStore

__all__ = ["Growth", "axis_to_append", "is_sorted", "set_length"]

_MOST: Final = 1_000_000
"""Places that one write can append where it was not said how many."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A dimension that becomes longer.

    Attributes:
        axis: its places; those that are there already are not written to.
        length: how long it is now.
        most: how long it may become.
        arrays: all that have it: paths, and the number of their axis.
        coordinate: how its coordinate is stored, if it has one, and the path of that.
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

    def finish(self, store: IcechunkStore, length: int) -> None:
        """Cut the arrays to what the tasks wrote, and write the coordinate of that."""
        for path, axis in self.arrays:
            set_length(store, path, axis, length)
        if self.coordinate is not None and length > self.length:
            path, encoding = self.coordinate
            steps = self.axis.steps
            values = (
                self.axis.values[self.length : length]
                if steps is None
                else steps.values(length - self.length)
            )
            array = open_array(store, path, write=True)
            array[self.length : length] = encoding.encode(values)


def axis_to_append(
    name: str, values: npt.NDArray[Any], given: tuple[Any, ...] | None, *, indexed: bool
) -> tuple[Axis, int]:
    """Answer the places of a dimension that is appended to, and how long it may become.

    Args:
        name: of the dimension.
        values: the coordinates that are there.
        given: those that follow; without them they follow in equal steps.
        indexed: the dimension has no coordinate, and rows count its places.

    Raises:
        AlreadyExistsError: one that is to follow is there already.
        UnsortedCoordinatesError: they do not go on in the order of those that are there.
        InvalidInputError: it cannot be known how the coordinate goes on.
    """
    length = len(values)
    if given is not None:
        more = _as_coordinates(name, given, values.dtype)
        if len(np.unique(more)) != len(more) or np.isin(more, values).any():
            raise AlreadyExistsError(
                f"The option 'append-values' names coordinates of {name!r} that are there "
                "already, or one of them twice. Leave them out, or replace values with "
                "mode('overwrite').",
                dimension=name,
            )
        every = np.concatenate([values, more])
        if length > 1 and is_sorted(values) and not is_sorted(every):
            raise UnsortedCoordinatesError(
                f"The coordinates of {name!r} are sorted, and those in the option 'append-values' "
                f"do not go on in their order after {values[-1]!s}. Append what comes later only.",
                dimension=name,
            )
        return Axis(name, every, first=length), len(every)
    steps = Steps(np.int64(length - 1), np.int64(1), _MOST) if indexed else None
    steps = steps or Steps.after(values, _MOST)
    if steps is None:
        raise InvalidInputError(
            f"The coordinates of {name!r} do not follow each other in equal steps, so that it is "
            "not known where rows go that are appended. Name the new ones in the option "
            "'append-values', as a JSON list; write_rows of icechunk_async.spark does so."
        )
    return Axis(name, values, first=length, steps=steps), length + _MOST


def is_sorted(values: npt.NDArray[Any]) -> bool:
    """Tell whether coordinates ascend or descend."""
    if values.dtype.kind == "T":
        values = values.astype(object)
    return bool((values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all())


def _as_coordinates(name: str, given: tuple[Any, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # Text may be longer than what is there.
        return np.asarray(given, object if dtype.kind in "UT" else dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"The option 'append-values' has what is no coordinate of {name!r}, which are "
            f"{dtype}: {error}. Give a JSON list of such."
        ) from error


def set_length(store: IcechunkStore, path: str, axis: int, length: int) -> None:
    """Give an array another length along one axis; chunks stay as they are.

    Raises:
        InvalidInputError: its chunks differ in size.
    """
    key = f"{path}/zarr.json"
    prototype = default_buffer_prototype()
    data = sync(store.get(key, prototype))
    assert data is not None  # it was opened before
    document = json.loads(data.to_bytes())
    if document["chunk_grid"]["name"] != "regular":
        raise InvalidInputError(
            f"The chunks of {path!r} differ in size, and so cannot be appended to in this way. "
            "Make the array longer first, and use mode('overwrite')."
        )
    document["shape"][axis] = length
    sync(store.set(key, prototype.buffer.from_bytes(json.dumps(document).encode())))
