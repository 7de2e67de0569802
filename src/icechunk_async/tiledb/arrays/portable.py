"""Arrays and fragments as plain data, which other processes open in the state that was found.

A process that plans a read lists the array once, and loads all footers. Those that read get what it
found, and list nothing: they neither see what was written since, nor miss what was there without
an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.tiledb.arrays.array import TileDBArray
from icechunk_async.tiledb.arrays.directory import ArrayDirectory
from icechunk_async.tiledb.arrays.fragments import load_fragments, restored_fragments
from icechunk_async.tiledb.format.history import Commits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.tiledb.arrays.folder import Folder
    from icechunk_async.tiledb.arrays.fragments import Fragment
    from icechunk_async.tiledb.format.conditions import Condition
    from icechunk_async.tiledb.format.fragment import Footer
    from icechunk_async.tiledb.format.history import Deletion, TimedName, Window
    from icechunk_async.tiledb.format.schema import Enumeration, Schema

__all__ = ["PortableArray", "PortableFragment"]


@dataclass(frozen=True, slots=True)
class PortableFragment:
    """A fragment whose footer was read; plain data."""

    name: TimedName
    footer: Footer

    @classmethod
    def of(cls, array: TileDBArray, number: int) -> Self:
        """Return a fragment of an open array by its number."""
        it = array.fragments[number]
        return cls(it.name, it.footer)


@dataclass(frozen=True, slots=True)
class PortableArray:
    """The state of an array in a range of times; plain data, without its location."""

    window: Window
    schema: Schema
    schemas: Mapping[str, Schema]
    """The schemas that were loaded, by the names of their files."""
    schema_files: tuple[str, ...]
    fragments: tuple[TimedName, ...]
    """The fragments that are seen, the oldest first."""
    footer_files: tuple[TimedName, ...]
    deletions: tuple[tuple[Deletion, Condition], ...]
    enumerations: Mapping[str, Enumeration]
    """By the names of attributes."""

    @classmethod
    async def of(cls, array: TileDBArray) -> Self:
        """Return the state of an open array. Cost: a request for each enumeration."""
        directory = array.directory
        return cls(
            array.window,
            array.schema,
            directory.known_schemas,
            directory.schema_files,
            tuple(it.name for it in array.fragments),
            directory.footer_files,
            array.deletions,
            await array.enumerations(),
        )

    async def open(self, folder: Folder) -> TileDBArray:
        """Return the array with all fragments.

        Args:
            folder: that of the array.

        Raises:
            FormatError: a fragment was vacuumed since, or is damaged.

        Cost: the requests of `load_fragments`.
        """
        directory = self._directory(folder, self.fragments)
        return self._array(directory, await load_fragments(directory, self.fragments))

    async def open_with(self, folder: Folder, fragments: Sequence[PortableFragment]) -> TileDBArray:
        """Return the array with some of its fragments only, in the order of writing.

        Args:
            folder: that of the array.
            fragments: the fragments, the oldest first.

        Cost: no request, but one for each schema of a fragment that was not loaded before.
        """
        directory = self._directory(folder, (it.name for it in fragments))
        pairs = [(it.name, it.footer) for it in fragments]
        return self._array(directory, await restored_fragments(directory, pairs))

    def _directory(self, folder: Folder, names: Iterable[TimedName]) -> ArrayDirectory:
        return ArrayDirectory(
            folder,
            self.schema_files,
            # What is seen was decided where the read was planned. Nothing here decides it once
            # more.
            Commits(frozenset(it.text for it in names)),
            self.footer_files,
            dict(self.schemas),
            {},
        )

    def _array(self, directory: ArrayDirectory, fragments: tuple[Fragment, ...]) -> TileDBArray:
        return TileDBArray(
            directory.folder, directory, self.window, self.schema, fragments, self.deletions
        )
