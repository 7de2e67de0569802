"""NetCDF files of the classic format: a header, then contiguous variables and records.

The format, in its three versions with offsets and sizes of 32 and 64 bits, is specified in the
NetCDF User's Guide, "NetCDF Classic Format Specification".
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest.scan import (
    Places,
    Scanned,
    ScannedArray,
    along_first,
    divided,
    document_of,
    fill_value,
    pieces,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from icechunk_async.spark.ingest.scan import SourceState
    from icechunk_async.spark.ingest.source import RemoteFile

__all__ = ["MAGIC", "scan_netcdf3"]

MAGIC: Final = b"CDF"
_VERSIONS: Final = (1, 2, 5)
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12
_NAMES: Final = (">i1", "S1", ">i2", ">i4", ">f4", ">f8", ">u1", ">u2", ">u4", ">i8", ">u8")
_TYPES: Final = dict(enumerate(_NAMES, start=1))
_FILLS: Final[Mapping[str, Any]] = {
    "i1": -127,
    "i2": -32767,
    "i4": -2147483647,
    "i8": -9223372036854775806,
    "u1": 255,
    "u2": 65535,
    "u4": 4294967295,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}
"""Default fill values of variables without `_FillValue`."""
# The headers of real files have kilobytes. This bounds the memory and time that a hostile one
# takes.
_MAX_HEADER_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class _Variable:
    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    has_records: bool
    attributes: Mapping[str, Any]
    dtype: np.dtype[Any]
    begin: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one record without padding, or of the whole variable if it has no records."""
        return math.prod(self.shape[self.has_records :]) * self.dtype.itemsize

    def end(self, records: int, stride: int) -> int:
        """Return the end of the variable in the file; 0 if it is empty."""
        if not self.record_bytes or (self.has_records and not records):
            return 0
        return self.begin + self.has_records * (records - 1) * stride + self.record_bytes


def scan_netcdf3(
    file: BinaryIO | RemoteFile, url: str, state: SourceState, *, concat_dim: str | None = None
) -> Scanned:
    """Read the header of a file, and none of its data.

    Args:
        file: the file.
        url: its URL.
        state: its state.
        concat_dim: as for `scan_hdf5`; chunks of variables with records are single records.

    Raises:
        InvalidInputError: the file is damaged or truncated.
    """
    header = _Header(file, url, state.size_bytes)
    variables, attributes, records = header.read()
    stride = _record_stride(variables)
    if records is None:  # the writer did not finish: as many as fit into the file
        begins = [it.begin for it in variables if it.has_records]
        records = (state.size_bytes - min(begins)) // stride if begins and stride else 0
    arrays: dict[str, ScannedArray] = {}
    for it in variables:
        end = it.end(records, stride)
        # Also what bounds the number of records, for which places are made below: each takes a byte
        # at least.
        if end > state.size_bytes:
            raise header.damaged(f"{it.name!r} ends at byte {end}, beyond the end of the file")
        if it.name in arrays:
            raise header.damaged(f"it has two variables {it.name!r}")
        arrays[it.name] = _array(it, records, stride, concat_dim)
    return Scanned({"": attributes}, arrays, (url,), (state,))


def _record_stride(variables: Sequence[_Variable]) -> int:
    """Return the bytes from one record to the next; those of a single variable have no padding."""
    # The specification's exception: a single variable with records is stored without padding.
    sizes = [it.record_bytes for it in variables if it.has_records]
    return sizes[0] if len(sizes) == 1 else sum(-(-size // 4) * 4 for size in sizes)


def _array(variable: _Variable, records: int, stride: int, concat_dim: str | None) -> ScannedArray:
    shape, dims, dtype = variable.shape, variable.dims, variable.dtype
    if variable.has_records:
        shape = (records, *shape[1:])
    if dtype.kind == "S" and len(shape) > variable.has_records and shape[-1]:
        # Characters along the last dimension become text of that length.
        shape, dims, dtype = shape[:-1], dims[:-1], np.dtype(f"S{shape[-1]}")
    if variable.has_records:
        chunks = (1, *(max(1, size) for size in shape[1:]))
        numbers = np.arange(records if all(shape) else 0)
        offsets = variable.begin + numbers * stride
        coords = along_first(numbers, len(shape))
        places = Places.of_one(coords, offsets, [variable.record_bytes] * len(numbers))
    else:
        chunks = divided(shape, dims, dtype.itemsize, concat_dim)
        places = pieces(variable.begin, shape, chunks, dtype.itemsize)
        if not all(shape):
            places = Places.none(len(chunks))
    mask = None if dtype.kind == "S" else variable.attributes.get("_FillValue")
    if isinstance(mask, np.ndarray):
        mask = mask.astype(dtype).reshape(-1)[0].item() if mask.size else None
    usual = None if dtype.kind == "S" else _FILLS[dtype.str[1:]]
    old = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunks),
        "dtype": dtype.str,
        "fill_value": fill_value(usual if mask is None else mask, dtype),
        "order": "C",
        "filters": None,
        "compressor": None,
    }
    shown = {name: plain(it) for name, it in variable.attributes.items() if name != "_FillValue"}
    attributes = {name: it for name, it in shown.items() if it is not None}
    return ScannedArray(document_of(variable.name, old, attributes, dims, mask), places)


class _Header:
    """Parses a header; every count is checked against the remaining bytes."""

    def __init__(self, file: BinaryIO | RemoteFile, url: str, size: int) -> None:
        self._file = file
        self._url = url
        self._left = min(size, _MAX_HEADER_BYTES)
        self._wide = False
        self._begin = ">i"

    def damaged(self, why: str) -> InvalidInputError:
        """Return the error for a damaged file."""
        return InvalidInputError(
            f"{self._url!r} is a damaged file of the classic format of NetCDF: {why}. Get it "
            "again, or leave it out."
        )

    def read(self) -> tuple[list[_Variable], dict[str, Any], int | None]:
        """Return the variables, the attributes, and the number of records if it is known."""
        version = self._take(4)[3]
        if version not in _VERSIONS:
            raise self.damaged(f"its version is {version}, not 1, 2 or 5")
        self._wide = version == 5
        self._begin = ">i" if version == 1 else ">q"
        told = self._take(8 if self._wide else 4)
        records = None if set(told) == {0xFF} else int.from_bytes(told)
        dims = [(self._name(), self._count()) for _ in range(self._list(_DIMENSIONS))]
        given = self._attributes()
        attributes = {name: plain(it) for name, it in given.items()}
        variables = [self._variable(dims) for _ in range(self._list(_VARIABLES))]
        return variables, {name: it for name, it in attributes.items() if it is not None}, records

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise self.damaged("it ends within its header")
        self._left -= size
        found = self._file.read(size)
        if found is None or len(found) != size:
            raise self.damaged("it ends within its header")
        return found

    def _int(self, code: str) -> int:
        (number,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return int(number)

    def _count(self) -> int:
        number = self._int(">q" if self._wide else ">i")
        if number < 0:
            raise self.damaged(f"it has a size of {number}")
        return number

    def _list(self, tag: int) -> int:
        found, count = self._int(">i"), self._count()
        if found not in (0, tag) or (not found and count):
            raise self.damaged(f"a list begins with {found}, not {tag}")
        # An entry has four bytes at least. Without this a header of a few bytes could claim 2**63
        # of them, and a loop would run until it misses the first.
        if count > self._left // 4:
            raise self.damaged(f"a list claims {count} entries")
        return count

    def _padded(self, size: int) -> bytes:
        return self._take(-(-size // 4) * 4)[:size]

    def _name(self) -> str:
        name = self._padded(self._count()).decode(errors="replace")
        # A name becomes a part of a path in the repository.
        if not name or "/" in name or name in (".", ".."):
            raise self.damaged(f"it has the name {name!r}")
        return name

    def _dtype(self) -> np.dtype[Any]:
        code = self._int(">i")
        if code not in _TYPES:
            raise self.damaged(f"it has the type {code}")
        return np.dtype(_TYPES[code])

    def _attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._list(_ATTRIBUTES)):
            name, dtype, count = self._name(), self._dtype(), self._count()
            data = self._padded(count * dtype.itemsize)
            if dtype.kind == "S":
                found[name] = data.rstrip(b"\0").decode(errors="replace")
            else:
                found[name] = np.frombuffer(data, dtype)
        return found

    def _variable(self, dims: Sequence[tuple[str, int]]) -> _Variable:
        name = self._name()
        count = self._count()
        if count > self._left // 4:
            raise self.damaged(f"{name!r} claims {count} dimensions")
        numbers = [self._count() for _ in range(count)]
        if any(it >= len(dims) for it in numbers):
            raise self.damaged(f"{name!r} has an unknown dimension")
        shape = tuple(dims[it][1] for it in numbers)
        # A dimension of length 0 is the one of records.
        if 0 in shape[1:]:
            raise self.damaged(f"{name!r} has records that are not along its first dimension")
        attributes, dtype = self._attributes(), self._dtype()
        self._count()  # the size, which may overflow this field; the shape gives it
        begin = self._int(self._begin)
        if begin < 0:
            raise self.damaged(f"{name!r} begins at {begin}")
        has_records = bool(shape) and not shape[0]
        named = tuple(dims[it][0] for it in numbers)
        return _Variable(name, shape, named, has_records, attributes, dtype, begin)
