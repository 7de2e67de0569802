"""Key-value metadata of arrays and groups, and the members of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, UnsupportedSpecVersionError
from icechunk_async.tiledb.format.cursor import Cursor, text_of
from icechunk_async.tiledb.format.tiles import decode_generic
from icechunk_async.tiledb.format.types import (
    TEXT,
    Datatype,
    datatype_of,
    stored_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "GroupFile",
    "GroupMember",
    "MetadataValue",
    "apply_metadata",
    "decode_group",
    "decode_metadata",
    "merge_members",
]

_GROUP_VERSIONS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """A value of the metadata of an array or a group."""

    datatype: Datatype
    data: bytes
    """The stored values, one after another."""

    def plain(self) -> Any:
        """Return text as `str`, bytes as `bytes`, one number as itself, others as a list.

        Text that is not valid, and text of wider units, is returned as bytes.
        """
        if self.datatype in (Datatype.STRING_UTF8, Datatype.STRING_ASCII):
            try:
                return self.data.decode()
            except UnicodeDecodeError:
                return self.data
        if self.datatype in TEXT or stored_dtype(self.datatype).kind not in "iuf":
            return self.data
        if self.datatype in (Datatype.BLOB, Datatype.ANY, Datatype.GEOM_WKB, Datatype.GEOM_WKT):
            return self.data
        import numpy as np  # noqa: PLC0415

        values: list[Any] = np.frombuffer(self.data, stored_dtype(self.datatype)).tolist()
        if self.datatype is Datatype.BOOL:
            values = [bool(it) for it in values]
        return values[0] if len(values) == 1 else values


def decode_metadata(data: bytes | memoryview) -> dict[str, MetadataValue | None]:
    """Read a file of metadata: the values it sets, and None for each key that it deletes.

    Raises:
        FormatError: it is damaged.
    """
    cursor = Cursor(decode_generic(data, "metadata"), "metadata")
    found: dict[str, MetadataValue | None] = {}
    while cursor.remaining:
        key = cursor.text32()
        if cursor.flag():
            found[key] = None
            continue
        datatype = datatype_of(cursor.u8())
        # A count of zero is an empty value, which is not a deleted one.
        size = cursor.u32() * stored_dtype(datatype).itemsize
        found[key] = MetadataValue(datatype, bytes(cursor.take(size)))
    return found


def apply_metadata(
    files: Iterable[dict[str, MetadataValue | None]],
) -> dict[str, MetadataValue]:
    """Return the values that some files of metadata leave, given in the order of writing."""
    found: dict[str, MetadataValue] = {}
    for changes in files:
        for key, value in changes.items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
    return found


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group."""

    uri: str
    """Its location, relative to the group if ``is_relative``."""
    is_relative: bool
    is_group: bool
    name: str | None
    is_deleted: bool = False

    @property
    def key(self) -> str:
        """The name under which it is known: its own, or the last part of its location."""
        return self.name or self.uri.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class GroupFile:
    """A file about the members of a group."""

    version: int
    members: tuple[GroupMember, ...]


def decode_group(data: bytes | memoryview) -> GroupFile:
    """Read a file about the members of a group.

    Raises:
        FormatError: it is damaged.
        UnsupportedSpecVersionError: its version is not supported.
    """
    cursor = Cursor(decode_generic(data, "group"), "group")
    version = cursor.u32()
    if version not in _GROUP_VERSIONS:
        raise UnsupportedSpecVersionError(
            f"A group of TileDB has format version {version}; this library reads 1 and 2. Upgrade "
            "icechunk-async to open it.",
            found=version,
            supported=_GROUP_VERSIONS[-1],
        )
    number = cursor.count(cursor.u64(), 15, "members")
    members = tuple(_member(cursor) for _ in range(number))
    cursor.finish()
    return GroupFile(version, members)


def _member(cursor: Cursor) -> GroupMember:
    version = cursor.u32()
    if version not in _GROUP_VERSIONS:
        raise FormatError(f"A member of a group of TileDB has the unknown version {version}.")
    kind = cursor.u8()
    is_relative = cursor.flag()
    uri = cursor.text64()
    # TileDB's notes on the format have the name always there; files have it after the flag only.
    name = text_of(cursor.bytes64()) if cursor.flag() else None
    is_deleted = cursor.flag() if version >= 2 else False
    if kind not in (1, 2):
        raise cursor.damaged(f"the member {uri!r} is of the unknown kind {kind}")
    return GroupMember(uri, is_relative, kind == 1, name, is_deleted)


def merge_members(files: Iterable[GroupFile]) -> dict[str, GroupMember]:
    """Return the members after some files, given in the order of writing, by name.

    A file of version 1 lists all members; those of version 2 are changes.
    """
    found: dict[str, GroupMember] = {}
    for file in files:
        if file.version == 1:
            found = {}
        # Version 2 of newer releases repeats all members, which replaying changes covers as well.
        for it in file.members:
            if it.is_deleted:
                found.pop(it.key, None)
            else:
                found[it.key] = it
    return found
