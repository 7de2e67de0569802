"""Documents that travel between processes as bytes: forks, and merges that are half settled.

A mark, a version, and one msgpack document in a zstd frame with a checksum. Bytes from elsewhere
are not trusted: `typed` and its kin check every value, and reading never runs code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack
import zstandard

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.envelope import decompress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Parcel", "list_of", "rows_of", "table_of", "typed"]

_LEVEL: Final = 3


@dataclass(frozen=True, slots=True)
class Parcel:
    """One kind of document that travels."""

    magic: bytes
    """The bytes that all begin with."""
    version: int
    """Of its encoding; others are refused."""
    name: str
    """As errors call it, after an article."""

    def pack(self, document: Mapping[str, object]) -> bytes:
        """Return the bytes of a document."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        packed = compressor.compress(msgpack.packb(document))
        return self.magic + bytes([self.version]) + packed

    def unpack[T](self, data: bytes | memoryview, parse: Callable[[dict[str, object]], T]) -> T:
        """Return the result of ``parse``, which takes the document.

        Raises:
            FormatError: the bytes are damaged, hostile, or of another version.
        """
        view, start = memoryview(data), len(self.magic) + 1
        if bytes(view[: start - 1]) != self.magic or len(view) <= start:
            raise FormatError(f"These bytes are not a {self.name}, or only the beginning of one.")
        if view[start - 1] != self.version:
            raise FormatError(
                f"A {self.name} was written in version {view[start - 1]} of its encoding, and this "
                f"library reads version {self.version}. Use the same version of icechunk-async "
                "everywhere."
            )
        try:
            return parse(table_of(msgpack.unpackb(bytes(decompress(view[start:], self.name)))))
        except (ValueError, KeyError, TypeError, OverflowError, InvalidInputError) as error:
            raise FormatError(f"The bytes of a {self.name} are damaged: {error!r}.") from error
        except RecursionError as error:
            raise FormatError(f"The bytes of a {self.name} nest too deeply.") from error


def typed[T](value: object, kind: type[T]) -> T:
    """Return a value that has to be of a type.

    Raises:
        FormatError: it is not.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"The bytes hold a {type(value).__name__} in place of a {kind.__name__}.")
    return value


def table_of(value: object) -> dict[str, object]:
    """Return a value that has to be a table; errors as `typed`."""
    return cast("dict[str, object]", typed(value, dict))


def list_of(value: object) -> list[object]:
    """Return a value that has to be a list; errors as `typed`."""
    return cast("list[object]", typed(value, list))


def rows_of(value: object, width: int) -> list[list[Any]]:
    """Return a value that has to be a list of lists of ``width`` values; errors as `typed`."""
    found: list[list[Any]] = [list_of(row) for row in list_of(value)]
    if any(len(row) != width for row in found):
        raise FormatError("The bytes hold a row of another width.")
    return found
