"""GRIB 2 files by their indexes: each message becomes a chunk, decoded by a GRIB codec.

An index (`.idx` of wgrib2, `.index` of ECMWF) lists where messages are and what they contain.
The grid is read from the first message of each variable.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.errors import UnknownCodecError
from zarr.registry import get_codec_class

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest.scan import Places, Scanned, ScannedArray
from icechunk_async.spark.ingest.source import Source
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Grid", "Message", "grib_file", "grid_of", "read_index", "scan_grib_index"]

# The grid is the third section, after two short ones.
_HEAD_BYTES: Final = 16 << 10
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9]+")
_ROWS_AND_COLUMNS: Final = frozenset({0, 1, 2, 3, 10, 20, 30, 40, 41, 42, 43})
"""Grid templates that begin with the numbers of columns and rows (WMO, section 3)."""
_LATITUDE_LONGITUDE: Final = frozenset({0, 40})


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a file, as its index describes it."""

    variable: str
    level: str
    about: str
    """Reference time, forecast, and other fields that distinguish it within its variable."""
    offset: int
    length: int | None
    """None for the last message, which extends to the end of the file."""

    @property
    def name(self) -> str:
        """The name of its array."""
        return _NO_NAME.sub("_", f"{self.variable}_{self.level}").strip("_")


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of a message."""

    rows: int
    columns: int
    template: int


def read_index(text: str, url: str) -> list[Message]:
    """Parse an index of wgrib2 or of ECMWF.

    Raises:
        InvalidInputError: the text is neither, or lists messages with several fields.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        found = _of_ecmwf(lines) if text.lstrip().startswith("{") else _of_wgrib2(lines)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidInputError(f"{url!r} is no index of a GRIB file: {error!r:.200}.") from error
    if not found:
        raise InvalidInputError(f"The index {url!r} names no messages.")
    if len({it.offset for it in found}) < len(found):
        raise InvalidInputError(
            f"The index {url!r} has messages with several fields, of which codecs decode only the "
            "first. Split them, for example with 'wgrib2 -submsg_uv' or grib_copy."
        )
    return found


def _of_wgrib2(lines: Sequence[str]) -> list[Message]:
    parts = [line.split(":") for line in lines]
    offsets = [int(it[1]) for it in parts]
    # wgrib2 lists where messages start. Each ends where the next begins.
    ends = [*offsets[1:], None]
    return [
        Message(
            it[3],
            it[4],
            ":".join([it[2], *it[5:]]).rstrip(":"),
            offset,
            None if end is None else end - offset,
        )
        for it, offset, end in zip(parts, offsets, ends, strict=True)
    ]


def _of_ecmwf(lines: Sequence[str]) -> list[Message]:
    found: list[Message] = []
    for line in lines:
        it = json.loads(line)
        level = f"{it.get('levtype', '')} {it.get('levelist', '')}".strip()
        apart = ("_offset", "_length", "param", "levtype", "levelist")
        about = ",".join(f"{name}={value}" for name, value in it.items() if name not in apart)
        found.append(Message(it["param"], level, about, int(it["_offset"]), int(it["_length"])))
    return found


def grid_of(head: bytes, url: str) -> Grid:
    """Parse the grid of a message from its first bytes.

    Raises:
        InvalidInputError: they are not a GRIB 2 message, or its grid has no rows and columns.
    """
    if head[:4] != b"GRIB" or head[7:8] != b"\x02":
        raise InvalidInputError(f"{url!r} has no message of GRIB 2 where its index says so.")
    # Section 0 has 16 bytes; each other begins with its length and its number.
    at = 16
    while at + 5 <= len(head):
        size, number = int.from_bytes(head[at : at + 4], "big"), head[at + 4]
        if number == 3 and at + 38 <= len(head):
            template = int.from_bytes(head[at + 12 : at + 14], "big")
            columns = int.from_bytes(head[at + 30 : at + 34], "big")
            rows = int.from_bytes(head[at + 34 : at + 38], "big")
            # Bounded: the file is untrusted, and readers allocate arrays of this shape.
            if template not in _ROWS_AND_COLUMNS or not 0 < columns * rows < 1 << 32:
                raise InvalidInputError(
                    f"A message of {url!r} is on a grid (template 3.{template}) that is no "
                    "rectangle of rows and columns."
                )
            return Grid(rows, columns, template)
        # A section that claims no length would be read for ever.
        at += max(size, 5)
    raise InvalidInputError(f"A message of {url!r} has no grid in its first bytes.")


async def grib_file(index: Source) -> Source:
    """Open the file of an index. Cost: one request."""
    return await Source.open(index.virtual, _file_of(index.url))


async def scan_grib_index(index: Source, file: Source, codec: Mapping[str, Any] | None) -> Scanned:
    """Read an index, and the first bytes of one message of each variable and level.

    Args:
        index: the index.
        file: the file of the index; see `grib_file`.
        codec: the codec that decodes messages; None for that of the package `gribberish`.

    Raises:
        InvalidInputError: the codec is not registered, or see `read_index` and `grid_of`.

    Cost: one request for each variable and level.
    """
    chosen = dict(codec or _codec(""))
    try:
        get_codec_class(str(chosen.get("name")))
    except UnknownCodecError:
        raise InvalidInputError(
            f"No codec {chosen.get('name')!r} is registered with Zarr, so GRIB messages could not "
            "be decoded. Install the package 'gribberish' where tasks run and where arrays "
            "are read, or name a codec in grib_codec=."
        ) from None
    messages = read_index((await index.read()).decode(), index.url)
    groups: dict[str, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.name, []).append(message)
    arrays: dict[str, ScannedArray] = {}
    for name, members in groups.items():
        first = members[0].offset
        # All messages of a variable and level have one grid, so the first one tells it.
        head = await file.read(ByteRange(first, first + _HEAD_BYTES))
        grid = grid_of(head, file.url)
        decoder = chosen if codec else _codec(members[0].variable)
        arrays[name] = _array(members, grid, decoder, file.state.size_bytes)
        if codec is None and grid.template in _LATITUDE_LONGITUDE:
            for axis, size in (("latitude", grid.rows), ("longitude", grid.columns)):
                # The coordinates of a grid come out of any of its messages, by another variable of
                # the codec.
                arrays.setdefault(axis, _coordinate(axis, size, members[0], file.state.size_bytes))
    return Scanned({"": {}}, arrays, (file.url,), (file.state,))


def _codec(variable: str) -> dict[str, Any]:
    return {"name": "gribberish", "configuration": {"var": variable}}


def _file_of(url: str) -> str:
    """Return the URL of the file of an index."""
    if url.endswith(".idx"):
        return url.removesuffix(".idx")
    return f"{url.removesuffix('.index')}.grib2"


def _places(members: Iterable[Message], rank: int, size_bytes: int) -> Places:
    rows = [(it.offset, it.length or size_bytes - it.offset) for it in members]
    coords = np.zeros((len(rows), rank), np.uint32)
    coords[:, 0] = np.arange(len(rows))
    return Places.of_one(coords, [it[0] for it in rows], [it[1] for it in rows])


def _array(
    members: Sequence[Message], grid: Grid, codec: Mapping[str, Any], size_bytes: int
) -> ScannedArray:
    names = ["message", "y", "x"]
    if grid.template in _LATITUDE_LONGITUDE:
        names = ["message", "latitude", "longitude"]
    shape = [len(members), grid.rows, grid.columns]
    attributes = {
        "grib_variable": members[0].variable,
        "grib_level": members[0].level,
        "grib_messages": [it.about for it in members],
    }
    document = _document(shape, [1, *shape[1:]], names, codec, attributes)
    return ScannedArray(document, _places(members, 3, size_bytes))


def _coordinate(axis: str, size: int, message: Message, size_bytes: int) -> ScannedArray:
    units = {"latitude": "degrees_north", "longitude": "degrees_east"}[axis]
    document = _document(
        [size], [size], [axis], _codec(axis), {"standard_name": axis, "units": units}
    )
    return ScannedArray(document, _places([message], 1, size_bytes))


def _document(
    shape: Sequence[int],
    chunks: Sequence[int],
    names: Sequence[str],
    codec: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "float64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN",
        "codecs": [dict(codec)],
        "dimension_names": list(names),
        "attributes": dict(attributes),
    }
