"""Groups of TileDB: their members, which are arrays and groups, and their metadata."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, NotFoundError
from icechunk_async.tiledb.arrays.array import (
    TileDBArray,
    load_metadata,
    open_folder,
    window_of,
)
from icechunk_async.tiledb.arrays.directory import AT_ONCE, GROUP_FILE, read_timed
from icechunk_async.tiledb.format.history import ALL_TIME, LEGACY_SCHEMA, Window
from icechunk_async.tiledb.format.metadata import GroupMember, decode_group, merge_members

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from icechunk_async.tiledb.arrays.array import Location, Moment
    from icechunk_async.tiledb.arrays.folder import Folder
    from icechunk_async.tiledb.format.metadata import MetadataValue

__all__ = ["TileDBGroup", "open_group"]

_MEMBERS: Final = "__group"
_SCHEMAS: Final = "__schema"


@asynccontextmanager
async def open_group(
    location: Location,
    *,
    start: Moment | None = None,
    end: Moment | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> AsyncGenerator[TileDBGroup]:
    """Open a TileDB group for the length of an ``async with`` block.

    Args:
        location: URL or path of the group's folder, or an open storage whose keys are below it. A
            URL may say what is there: ``tiledb+s3://bucket/group``, ``tiledb:///data/group``.
        start: see only what was written from this time on: a datetime, or milliseconds since 1970.
        end: see only what was written until this time.
        storage_options: options of the storage backend.

    Raises:
        InvalidURLError: the URL is not one of a storage.
        NotFoundError: there is no group.
        FormatError: a file of the group is damaged.
        StorageError: the storage failed.

    Cost: two listings, and a request for each file about members.
    """
    window = window_of(start, end)
    async with open_folder(location, storage_options) as folder:
        yield await TileDBGroup.load(folder, window)


@dataclass(frozen=True, slots=True)
class TileDBGroup:
    """A TileDB group, seen in a range of times. Made by `open_group`."""

    folder: Folder
    window: Window
    members: Mapping[str, GroupMember]
    """Arrays and groups by name."""

    @classmethod
    async def load(cls, folder: Folder, window: Window = ALL_TIME) -> TileDBGroup:
        """Load a group; see `open_group`."""
        listed = await folder.entries()
        if GROUP_FILE not in listed.files:
            raise NotFoundError(
                f"There is no TileDB group at {folder.shown!r}: the file {GROUP_FILE!r} is not "
                "there. Check the URL, which must be that of the group's own folder."
            )
        # Groups of old versions list nothing: the folders in them are their members.
        if _MEMBERS not in listed.folders:
            return cls(folder, window, await _found_members(folder, listed.folders))
        return cls(folder, window, await _stored_members(folder, window))

    async def array(self, name: str) -> TileDBArray:
        """Open a member that is an array, at the time of the group.

        Raises:
            NotFoundError: there is no such member, or no array at its place.
            InvalidInputError: the member is a group, or lies outside of this group's storage.
        """
        return await TileDBArray.load(self.place_of(name, is_group=False), self.window)

    async def group(self, name: str) -> TileDBGroup:
        """Open a member that is a group, at the time of this one; errors as `array`."""
        return await TileDBGroup.load(self.place_of(name, is_group=True), self.window)

    async def metadata(self) -> dict[str, MetadataValue]:
        """Return the key-value metadata of the group at this time."""
        return await load_metadata(self.folder, self.window)

    def place_of(self, name: str, *, is_group: bool) -> Folder:
        """Return the folder of a member; errors as `array`."""
        member = self.members.get(name)
        if member is None:
            raise NotFoundError(
                f"The TileDB group at {self.folder.shown!r} has no member {name!r}. It has "
                f"{', '.join(map(repr, self.members)) or 'none'}."
            )
        if member.is_group != is_group:
            kind = "a group" if member.is_group else "an array"
            raise InvalidInputError(f"The member {name!r} of a TileDB group is {kind}.")
        place = self.folder.member(member.uri, is_relative=member.is_relative)
        if place is None:
            raise InvalidInputError(
                f"The member {name!r} of the TileDB group at {self.folder.shown!r} lies elsewhere, "
                f"at {member.uri!r}. Open that URL."
            )
        return place


async def _stored_members(folder: Folder, window: Window) -> dict[str, GroupMember]:
    contents = await read_timed(folder, _MEMBERS, window)
    return merge_members(map(decode_group, contents))


async def _found_members(folder: Folder, names: frozenset[str]) -> dict[str, GroupMember]:
    """Return the members of a group of old versions, which are the arrays and groups in it."""

    async def look(name: str) -> GroupMember | None:
        entries = await folder.entries(name)
        if GROUP_FILE in entries.files:
            return GroupMember(name, is_relative=True, is_group=True, name=name)
        if LEGACY_SCHEMA in entries.files or _SCHEMAS in entries.folders:
            return GroupMember(name, is_relative=True, is_group=False, name=name)
        return None

    # Names with `__` are TileDB's own, such as `__meta`.
    wanted = sorted(it for it in names if not it.startswith("__"))
    found = await bounded_map(look, wanted, limit=AT_ONCE)
    return {it.key: it for it in found if it is not None}
