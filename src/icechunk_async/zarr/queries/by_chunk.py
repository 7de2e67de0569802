"""Several aggregates of an array at once, for each chunk along some of its dimensions.

`described` checks a question and tells the types of its answers without reading; `answered`
computes all answers of a part from one plan.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.paths import check_path
from icechunk_async.zarr.queries.aggregate import gathered
from icechunk_async.zarr.queries.arrays import QueriedArray
from icechunk_async.zarr.queries.measuring import (
    ExtremeTexts,
    check_function,
    is_whole_text,
    summary,
)
from icechunk_async.zarr.queries.planning import check_conditions, planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.format.statistics import Rows
    from icechunk_async.zarr.queries.arrays import Box
    from icechunk_async.zarr.queries.meaning import Meaning
    from icechunk_async.zarr.queries.planning import Plan
    from icechunk_async.zarr.store import IcechunkStore

    type Values = npt.NDArray[Any]
    type Groups = list[npt.NDArray[np.int64]]
    """The chunks of a plan that belong to each answer."""

__all__ = ["COSTS", "Question", "answered", "described"]

COSTS: Final = ("chunks", "chunks_read", "bytes_read", "bytes_skipped")
_MOST_ANSWERS: Final = 5_000_000
_BYTES_AN_ANSWER: Final = 1 << 10
"""An answer takes as long as to handle some bytes."""
_DECODED: Final = frozenset(
    {
        "_FillValue",
        "missing_value",
        "_Unsigned",
        "scale_factor",
        "add_offset",
        "coordinates",
        "grid_mapping",
    }
)
"""Attributes that tell how to decode the array, or are about its other dimensions."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Aggregates of an array; plain data."""

    path: str
    where: str | None
    axes: tuple[int, ...]
    """The axes that stay, in the order of the array."""
    dims: tuple[str, ...]
    """Their names."""
    other_dims: tuple[str, ...]
    """The names of the others, as far as they have any."""
    sizes: tuple[int, ...]
    """The cells of a chunk along them."""
    shape: tuple[int, ...]
    """The chunks along them."""
    dtypes: dict[str, np.dtype[Any]]
    """The type of each aggregate, by its name."""
    attributes: dict[str, Any]
    """Of the array, without those that tell how to decode it."""
    document: bytes
    """The ``zarr.json`` that all this is from."""

    @property
    def group(self) -> str:
        """Where the array is; empty for the root."""
        return self.path.rpartition("/")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The aggregates, and what they cost."""
        return (*self.dtypes, *COSTS)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type of an answer."""
        return self.dtypes.get(name, np.dtype(np.int64))

    def region(self, part: Box) -> list[slice]:
        """Return the cells of some chunks along the axes that stay, and all along others."""
        found = [slice(None)] * (max(self.axes, default=-1) + 1)
        for axis, size, it in zip(self.axes, self.sizes, part, strict=True):
            found[axis] = slice(it.start * size, it.stop * size)
        return found


async def described(
    store: IcechunkStore,
    path: str,
    functions: Sequence[str],
    where: str | None,
    dims: Sequence[str],
) -> Question:
    """Return a question about an array, checked.

    Raises:
        NodeNotFoundError: there is no array.
        InvalidInputError: an argument cannot be understood, or there are more than five million
            answers.

    Cost: metadata that the session knows; nothing is read.
    """
    array = await QueriedArray.open(store, check_path(path))
    if not functions:
        raise InvalidInputError("No aggregate is named. Name at least one, such as 'max'.")
    for it in functions:
        check_function(it, array.meaning)
    await check_conditions(store, array, where)
    axes = _axes_of(array, dims)
    shape = tuple(-(-array.shape[axis] // array.chunks[axis]) for axis in axes)
    if math.prod(shape) > _MOST_ANSWERS:
        raise InvalidInputError(
            f"The question has {math.prod(shape)} answers, one for each chunk along {tuple(dims)}, "
            f"and at most {_MOST_ANSWERS} fit in memory. Name fewer dimensions."
        )
    if clash := set(dims) & {*functions, *COSTS}:
        raise InvalidInputError(
            f"{array.path!r} has a dimension that is named as an answer: {', '.join(clash)}. It "
            "cannot stay."
        )
    # Decided before anything is read: xarray wants the types when the dataset is made.
    may_miss = where is not None or bool(array.meaning.missing) or 0 in array.shape
    attributes: dict[str, Any] = json.loads(array.node.user_data).get("attributes") or {}
    return Question(
        array.path,
        where,
        axes,
        tuple(array.dims[axis] or "" for axis in axes),
        tuple(it for it in array.dims if it is not None and it not in dims),
        tuple(array.chunks[axis] for axis in axes),
        shape,
        {it: _dtype(it, array.meaning, may_miss=may_miss) for it in functions},
        {name: it for name, it in attributes.items() if name not in _DECODED},
        bytes(array.node.user_data),
    )


def _axes_of(array: QueriedArray, dims: Sequence[str]) -> tuple[int, ...]:
    """Return the axes with some names, in the order of the array."""
    for name in dims:
        if array.dims.count(name) != 1:
            raise InvalidInputError(
                f"{array.path!r} has no dimension {name!r}, or several. Its dimensions are "
                f"{array.dims}."
            )
    return tuple(axis for axis, name in enumerate(array.dims) if name in dims)


def _dtype(function: str, meaning: Meaning, *, may_miss: bool) -> np.dtype[Any]:
    """Return the type of an aggregate; integers become doubles where there may be no value.

    Text is `object`, as xarray has text of which some may be missing: of `StringDType` its
    own `where` fails, and the width of the longest text is not known beforehand.
    """
    if function == "count":
        return np.dtype(np.int64)
    if meaning.is_text:
        return np.dtype(object)
    native = meaning.stored.newbyteorder("=")
    match function:
        case "sum" | "mean" if meaning.is_time:
            return native
        case "sum" if meaning.kind != "f" and not meaning.is_packed:
            return np.dtype(np.uint64 if meaning.kind == "u" and not meaning.is_truth else np.int64)
        case "min" | "max" if not meaning.is_packed:
            if meaning.is_truth:
                return np.dtype(object if may_miss else bool)
            if meaning.numbers.kind in "iu" and not meaning.is_time:
                return np.dtype(np.float64) if may_miss else meaning.numbers
            return native
        case _:
            return np.dtype(np.float64)


async def answered(store: IcechunkStore, question: Question, part: Box) -> dict[str, Values]:
    """Return the aggregates, and what they cost, of some chunks along the axes that stay.

    Args:
        store: where the array is.
        question: what `described` returned for it.
        part: chunks along each of the axes that stay, at least one.

    Raises:
        FormatError: a chunk that is needed is missing or damaged.
        InvalidInputError: a sum of integers needs more than 64 bits, an integer has no double that
            is equal to it where one is needed, or the array was changed since it was described.

    Cost: as `Session.aggregate`, once for all.
    """
    with telemetry.span("aggregate"):
        plan = await planned(store, question.path, question.where, question.region(part))
        # The types, the chunks and the number of answers were taken from that document.
        if bytes(plan.target.node.user_data) != question.document:
            raise InvalidInputError(
                f"{question.path!r} was resized, or its attributes changed, since its aggregates "
                "were opened. Open them again."
            )
        shape = tuple(it.stop - it.start for it in part)
        meaning = plan.target.meaning

        # Off the loop where there are many answers: millions of them take seconds.
        def begun() -> tuple[Groups, dict[str, ExtremeTexts]]:
            groups = _groups(question, plan, part, shape)
            return groups, {
                it: ExtremeTexts(groups, len(plan), least=it == "min")
                for it in question.dtypes
                if is_whole_text(it, meaning)
            }

        count = math.prod(shape) * len(question.names)
        compute = partial(store.workspace.assets.compute, size_bytes=count * _BYTES_AN_ANSWER)
        groups, texts = await compute(begun)
        rows, reads = await gathered(store, plan, list(texts.values()))

        def values() -> dict[str, Values]:
            found = _costs(plan, groups, reads)
            for function, dtype in question.dtypes.items():
                given = texts[function].found if function in texts else None
                found[function] = _summaries(function, dtype, meaning, rows, groups, texts=given)
            return {name: it.reshape(shape) for name, it in found.items()}

        return await compute(values)


def _groups(question: Question, plan: Plan, part: Box, shape: tuple[int, ...]) -> Groups:
    """Return which chunks of a plan belong to each answer, in C order."""
    # Chunks 0..2 by 0..1, where the first axis stays: `numbers` are 0, 0, 1, 1, 2, 2, and the
    # groups are the chunks 0 and 1, 2 and 3, 4 and 5.
    numbers = np.zeros(len(plan), np.int64)
    for axis, it, length in zip(question.axes, part, shape, strict=True):
        numbers = numbers * length + plan.coords[:, axis] - it.start
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(1, math.prod(shape)))
    return np.split(order, ends)


def _summaries(
    function: Any,
    dtype: np.dtype[Any],
    meaning: Meaning,
    rows: Rows,
    groups: Groups,
    *,
    texts: Values | None,
) -> Values:
    """Return an aggregate of each group of chunks; missing where there is no value.

    Args:
        function: which aggregate.
        dtype: its type.
        meaning: what the values are.
        rows: statistics of the chunks.
        groups: the chunks of each answer.
        texts: the answers if they are text, which rows may not have.
    """
    missing = "NaT" if dtype.kind in "mM" else np.nan
    found = np.empty(len(groups), dtype)
    for at, group in enumerate(groups):
        text = None if texts is None else texts[at]
        value, _ = summary(function, meaning, rows[group], text)
        try:
            found[at] = missing if value is None else value
        # NumPy refuses Python integers that the type cannot hold.
        except OverflowError:
            raise InvalidInputError(
                f"The sum of {meaning.path!r} is {value}, and an array holds 64 bits. "
                "'Session.aggregate' returns it."
            ) from None
        # Above 2**53 not every integer has a double. Another number would be returned without a
        # word.
        if dtype.kind == "f" and isinstance(value, int) and int(found[at]) != value:
            raise InvalidInputError(
                f"The {function} of {meaning.path!r} is {value}, and the nearest double is "
                f"{int(found[at])}. Integers become doubles where values could be missing. "
                "'Session.aggregate' returns it exactly, also of a region."
            )
    return found


def _costs(plan: Plan, groups: Groups, reads: npt.NDArray[np.int64]) -> dict[str, Values]:
    """Return the costs of each group of chunks.

    Coordinates in conditions are read once: the first group has their bytes, so that the sum is
    what was read.
    """
    lengths = plan.lengths()
    is_read = np.zeros(len(plan), bool)
    is_read[reads] = True
    shared = plan.bytes_of_conditions(reads[:0])
    found = {name: np.zeros(len(groups), np.int64) for name in COSTS}
    for at, group in enumerate(groups):
        chosen = group[is_read[group]]
        found["chunks"][at], found["chunks_read"][at] = len(group), len(chosen)
        others = plan.bytes_of_conditions(chosen) - (shared if at else 0)
        found["bytes_read"][at] = lengths[chosen].sum() + others
        found["bytes_skipped"][at] = lengths[group[~is_read[group]]].sum()
    return found
