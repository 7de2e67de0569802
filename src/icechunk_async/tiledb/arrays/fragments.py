"""Fragments of an array: their footers, and the blocks of their metadata, read when needed.

The end of a metadata file is read first, which holds the footer and of small files everything. It
is kept in a cache with a limit, so that ten thousand fragments do not fill the memory.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.storage import ByteRange, SuffixRange
from icechunk_async.tiledb.arrays.directory import AT_ONCE, FRAGMENT_METADATA
from icechunk_async.tiledb.format.commits import decode_footers
from icechunk_async.tiledb.format.fragment import (
    RTree,
    decode_conditions_block,
    decode_extremes,
    decode_footer,
    decode_null_counts,
    decode_offsets,
    decode_rtree,
    decode_sums,
    dense_tile_box,
    dense_tile_count,
    footer_length,
    read_footer_head,
)
from icechunk_async.tiledb.format.history import LEGACY_SCHEMA, NAMELESS_VERSION, fragment_folder
from icechunk_async.tiledb.format.tiles import generic_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from icechunk_async.storage import Retrieved
    from icechunk_async.tiledb.arrays.directory import ArrayDirectory
    from icechunk_async.tiledb.arrays.folder import Folder
    from icechunk_async.tiledb.format.commits import FooterPlace
    from icechunk_async.tiledb.format.fragment import (
        Footer,
        Numbers,
        TileExtremes,
    )
    from icechunk_async.tiledb.format.history import TimedName
    from icechunk_async.tiledb.format.schema import Attribute, Schema

__all__ = ["FieldFiles", "Fragment", "TilePlaces", "load_fragments", "restored_fragments"]

_TAIL_BYTES: Final = 64 << 10
"""The end of a metadata file that is read at once: the footer, and often the whole file."""
_WHOLE_BYTES: Final = 4 << 20
"""Metadata files up to this size are read whole once more than their end is needed."""
_KEPT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a metadata file."""

    start: int
    data: bytes
    size: int
    """Bytes of the whole file."""

    def cut(self, start: int, stop: int) -> memoryview | None:
        """Return bytes of the file; None if they are not all here."""
        if start < self.start or stop > self.start + len(self.data):
            return None
        return memoryview(self.data)[start - self.start : stop - self.start]


@dataclass(frozen=True, slots=True)
class FieldFiles:
    """The files of a field in a fragment; None if there is no such file."""

    values: str
    """Values, or the offsets of values of variable length."""
    variable: str | None
    validity: str | None


@dataclass(frozen=True, slots=True)
class TilePlaces:
    """Where the tiles of a field are in its files. Offsets end with the size of the file."""

    files: FieldFiles
    values: Numbers
    variable: Numbers | None
    variable_sizes: Numbers | None
    """Plain bytes of each tile of variable length."""
    validity: Numbers | None

    def range_of(self, offsets: Numbers, tile: int) -> ByteRange:
        """Return the bytes of a tile in a file."""
        return ByteRange(int(offsets[tile]), int(offsets[tile + 1]))


class Fragment:
    """A fragment of an array."""

    def __init__(
        self,
        name: TimedName,
        folder: Folder,
        schema: Schema,
        footer: Footer,
        kept: WeightedCache[str, _Piece],
    ) -> None:
        """Use `load_fragments`."""
        self.name = name
        self.folder = folder
        self.schema = schema
        self.footer = footer
        self._kept = kept
        self._blocks: dict[tuple[str, int], Any] = {}

    def __repr__(self) -> str:
        """Show the name."""
        return f"Fragment({self.name.text!r})"

    @property
    def version(self) -> int:
        """The format version."""
        return self.footer.version

    @property
    def tile_count(self) -> int:
        """The number of tiles."""
        if self.footer.is_dense and self.footer.non_empty is not None:
            return dense_tile_count(self.schema, self.footer.non_empty)
        return self.footer.sparse_tiles

    @property
    def tile_box(self) -> tuple[tuple[int, int], ...]:
        """Of a dense fragment: its tiles, a half-open range along each dimension."""
        assert self.footer.non_empty is not None  # by the check of footers
        return dense_tile_box(self.schema, self.footer.non_empty)

    def cells_of(self, tile: int) -> int:
        """Return the number of cells of a tile."""
        if self.footer.is_dense:
            return self.schema.tile_cells
        is_last = tile == self.footer.sparse_tiles - 1
        return self.footer.last_tile_cells if is_last else self.schema.capacity

    async def rtree(self) -> RTree:
        """Return the tree of boxes around the tiles of a sparse fragment.

        Raises:
            FormatError: it is damaged, or has another number of boxes than there are tiles.
        """
        found: RTree = await self._block(
            self.footer.rtree, "R-tree", lambda it: decode_rtree(it, self.version, self.schema)
        )
        # Numbers of its boxes are numbers of tiles, by which other lists are read.
        leaves = len(found.levels[-1]) if found.levels else 0
        if leaves != self.footer.sparse_tiles:
            raise self._damaged(f"its R-tree has {leaves} boxes for {self.tile_count} tiles")
        return found

    def files(self, name: str) -> FieldFiles:
        """Return the names of the files of a field."""
        it = self.schema.fields[name]
        slot = self.schema.slot(name)
        attributes = len(self.schema.attributes)
        # Names of fields may have characters that files cannot have: version 8 encodes them, and
        # since version 9 there are numbers.
        if self.version >= 9:
            stem = f"a{slot}" if slot < attributes else f"d{slot - attributes - 1}"
        elif self.version == 8:
            stem = _encoded(name)
        else:
            stem = name
        return FieldFiles(
            f"{stem}.tdb",
            f"{stem}_var.tdb" if it.is_variable else None,
            f"{stem}_validity.tdb" if it.is_nullable else None,
        )

    async def places(self, name: str) -> TilePlaces:
        """Return where the tiles of a field are. Cost: see `_bytes`; each list is read once.

        Raises:
            FormatError: the lists are damaged.
        """
        files = self.files(name)
        slot = self.schema.slot(name)
        footer = self.footer
        values = await self._offsets(footer.tile_offsets, footer.file_sizes, slot)
        variable = sizes = validity = None
        if files.variable is not None:
            variable = await self._offsets(
                footer.variable_offsets, footer.variable_file_sizes, slot
            )
            sizes = await self._sizes(footer.variable_sizes, slot)
        if files.validity is not None:
            validity = await self._offsets(
                footer.validity_offsets, footer.validity_file_sizes, slot
            )
        return TilePlaces(files, values, variable, sizes, validity)

    async def coords_places(self) -> TilePlaces:
        """Return where the tiles of the coordinates of a fragment before version 5 are."""
        return await self._places_of("__coords.tdb", len(self.schema.attributes))

    async def times_places(self) -> TilePlaces:
        """Return where the tiles of the times of cells are."""
        return await self._places_of("t.tdb", self.footer.cell_times_slot())

    async def delete_times_places(self) -> TilePlaces:
        """Return where the tiles of the times at which cells were deleted are."""
        # The last slot is that of the indices of the conditions, which are not needed.
        return await self._places_of("dt.tdb", self.footer.slots() - 2)

    async def _places_of(self, file: str, slot: int) -> TilePlaces:
        """Return where the tiles of a single file of cells of fixed length are."""
        footer = self.footer
        values = await self._offsets(footer.tile_offsets, footer.file_sizes, slot)
        return TilePlaces(FieldFiles(file, None, None), values, None, None, None)

    async def extremes(self, name: str) -> tuple[TileExtremes, TileExtremes] | None:
        """Return the stored least and greatest values of the tiles of an attribute.

        None before version 11. Not all can be trusted: see `pruning`.
        """
        if self.version < 11:
            return None
        slot = self.schema.slot(name)
        least: TileExtremes = await self._block(
            int(self.footer.mins[slot]), "minima", decode_extremes
        )
        greatest: TileExtremes = await self._block(
            int(self.footer.maxes[slot]), "maxima", decode_extremes
        )
        return least, greatest

    async def sums(self, it: Attribute) -> npt.NDArray[Any] | None:
        """Return the sums of the tiles of an attribute; None before version 11."""
        if self.version < 11:
            return None
        slot = self.schema.slot(it.name)
        found: npt.NDArray[Any] = await self._block(
            int(self.footer.sums[slot]), "sums", lambda data: decode_sums(data, it)
        )
        return found

    async def null_counts(self, name: str) -> Numbers | None:
        """Return the number of nulls in each tile of an attribute; None before version 11."""
        if self.version < 11:
            return None
        slot = self.schema.slot(name)
        found: Numbers = await self._block(
            int(self.footer.null_counts[slot]), "null counts", decode_null_counts
        )
        return found

    async def processed(self) -> frozenset[str]:
        """Return the names of the delete conditions that were applied to the cells already."""
        position = self.footer.conditions
        if position is None:
            return frozenset()
        found: tuple[str, ...] = await self._block(position, "conditions", decode_conditions_block)
        # They are stored as paths below the array, and known by the names of their files.
        return frozenset(it.rpartition("/")[2] for it in found)

    async def _offsets(self, positions: Numbers, sizes: Numbers, slot: int) -> Numbers:
        """Return the offsets of the tiles in a file, followed by the size of the file."""
        # Before version 5 dimensions have no lists.
        if slot >= len(positions):
            raise self._damaged("its footer has no entry for a field")
        offsets: Numbers = await self._block(
            int(positions[slot]), "tile offsets", lambda it: decode_offsets(it, "tile offsets")
        )
        count = self.tile_count
        if len(offsets) < count:
            raise self._damaged(f"it has {len(offsets)} tile offsets for {count} tiles")
        # The last tile ends with the file. Lists may be longer than there are tiles, with zeros.
        found = np.append(offsets[:count], sizes[slot])
        # Else a range would end before it begins.
        if count and (found[1:] < found[:-1]).any():
            raise self._damaged("its tile offsets do not rise")
        return found

    async def _sizes(self, positions: Numbers, slot: int) -> Numbers:
        sizes: Numbers = await self._block(
            int(positions[slot]), "tile sizes", lambda it: decode_offsets(it, "tile sizes")
        )
        if len(sizes) < self.tile_count:
            raise self._damaged(f"it has {len(sizes)} tile sizes for {self.tile_count} tiles")
        return sizes

    async def _block[T](self, position: int, kind: str, decode: Callable[[memoryview], T]) -> T:
        """Return a block of the metadata, decoded once."""
        key = (kind, position)
        if key not in self._blocks:
            try:
                self._blocks[key] = decode(await self._bytes(position, kind))
            except FormatError as error:
                error.add_note(f"It belongs to the fragment {self.folder.shown!r}.")
                raise
        found: T = self._blocks[key]
        return found

    async def _bytes(self, position: int, kind: str) -> memoryview:
        """Return the generic tile at a position of the metadata file.

        Cost: no request if the end of the file, which was read with the footer, has it; one for the
        rest of a file of up to 4 MiB; else one for each block.
        """
        piece = self._kept.get(self.name.text)
        if piece is None or (piece.start > position and piece.size <= _WHOLE_BYTES):
            piece = _piece(await self._get(ByteRange(0, _WHOLE_BYTES)), 0)
            # One request for all of a small file: a scan needs many of its blocks.
            self._kept.put(self.name.text, piece, len(piece.data))
        end = self._next(position, piece.size)
        found = piece.cut(position, end)
        if found is None:
            read = await self._get(ByteRange(position, end))
            found = memoryview(bytes(read.data))
        length = generic_length(found, kind)
        if length > len(found):
            raise self._damaged(f"its {kind} end beyond the next part of the file")
        return found[:length]

    def _next(self, position: int, size: int) -> int:
        """Return where the block at a position ends at the latest."""
        footer = self.footer
        # Blocks have no length but in their own header. The next position that the footer knows is
        # an end that saves a request for the header alone.
        lists = (
            footer.tile_offsets,
            footer.variable_offsets,
            footer.variable_sizes,
            footer.validity_offsets,
            footer.mins,
            footer.maxes,
            footer.sums,
            footer.null_counts,
        )
        single = [it for it in (footer.rtree, footer.statistics, footer.conditions) if it]
        known = np.concatenate([*lists, np.array([*single, size], np.uint64)])
        beyond = known[known > np.uint64(position)]
        if not len(beyond) or position >= size:
            raise self._damaged(f"a part of its metadata should be at byte {position} of {size}")
        return int(beyond.min())

    async def _get(self, wanted: ByteRange) -> Retrieved:
        return await _get_metadata(self.folder, wanted)

    def _damaged(self, why: str) -> FormatError:
        return FormatError(
            f"The metadata of the TileDB fragment at {self.folder.shown!r} is damaged: {why}."
        )


def _piece(read: Retrieved, start: int) -> _Piece:
    return _Piece(start, bytes(read.data), read.size_bytes)


async def _get_metadata(folder: Folder, wanted: ByteRange | SuffixRange) -> Retrieved:
    try:
        return await folder.get(FRAGMENT_METADATA, wanted)
    except ObjectNotFoundError as error:
        raise FormatError(
            f"The TileDB fragment at {folder.shown!r} is committed, and its metadata is gone. "
            "It was vacuumed while it was read, or lost: open the array again."
        ) from error


_ENCODED: Final = {ord(it): f"%{ord(it):02X}" for it in "!#$%&'()*+,/:;=?@[]"} | {
    ord("<"): "%20",
    ord(">"): "%2D",
    ord("\\"): "%30",
    ord("|"): "%3C",
    ord('"'): "%22",
}
"""Names of files in version 8, in which some characters have unusual codes."""


def _encoded(name: str) -> str:
    return name.translate(_ENCODED)


@dataclass(slots=True)
class _Loading:
    """Loads the fragments of a directory."""

    directory: ArrayDirectory
    known: dict[str, FooterPlace] = field(default_factory=dict[str, "FooterPlace"])
    kept: WeightedCache[str, _Piece] = field(
        default_factory=lambda: WeightedCache[str, _Piece](_KEPT_BYTES)
    )

    async def learn(self, names: Iterable[TimedName]) -> None:
        """Read files of consolidated footers until all of some fragments are known."""
        wanted = {it.text for it in names}
        for file in self.directory.footer_files:
            if not wanted - self.known.keys():
                return
            data = await self.directory.folder.read(self.directory.footers_path(file))
            for it in decode_footers(data):
                if it.fragment in wanted:
                    # Later files of footers come first, and repeat what earlier ones had.
                    self.known.setdefault(it.fragment, it)

    async def load(self, name: TimedName) -> Fragment:
        """Load a fragment."""
        folder = self.directory.folder.below(fragment_folder(name))
        place = self.known.get(name.text)
        if place is not None:
            return await self._decode(name, folder, bytes(place.data), is_exact=False)
        read = await _get_metadata(folder, SuffixRange(_TAIL_BYTES))
        piece = _piece(read, read.size_bytes - len(read.data))
        self.kept.put(name.text, piece, len(piece.data))
        version = NAMELESS_VERSION if name.version is None else name.version
        length = await self._length(version, piece)
        if length > piece.size:
            raise FormatError(
                f"The metadata of the TileDB fragment at {folder.shown!r} is damaged: it has "
                f"{piece.size} bytes, and its footer alone should have {length}."
            )
        footer = piece.cut(piece.size - length, piece.size)
        if footer is None:
            longer = await _get_metadata(folder, ByteRange(piece.size - length, piece.size))
            footer = memoryview(longer.data)
        return await self._decode(name, folder, bytes(footer), is_exact=True)

    async def _length(self, version: int, piece: _Piece) -> int:
        """Return the bytes of a footer at the end of its file, its own length included."""
        stored: int | None = None
        # These have only one schema. The footer's length follows from it, since the file does not
        # say where the footer begins.
        if version < 10:
            schema = await self.directory.schema(LEGACY_SCHEMA)
            stored = footer_length(version, schema)
        if stored is not None:
            return stored
        return int.from_bytes(piece.data[-8:], "little") + 8

    async def _decode(
        self, name: TimedName, folder: Folder, data: bytes, *, is_exact: bool
    ) -> Fragment:
        try:
            head = read_footer_head(data)
            schema = await self.directory.schema(head.schema_name or LEGACY_SCHEMA)
            footer = decode_footer(data, schema, is_exact=is_exact)
        except FormatError as error:
            error.add_note(f"It belongs to the fragment {folder.shown!r}.")
            raise
        return Fragment(name, folder, schema, footer, self.kept)


async def load_fragments(
    directory: ArrayDirectory, names: Sequence[TimedName]
) -> tuple[Fragment, ...]:
    """Load fragments, in the order of their names.

    Raises:
        FormatError: a fragment is damaged, or its schema does not exist.
        UnsupportedSpecVersionError: the version of a fragment is not supported.

    Cost: one request for each file of consolidated footers, and for each fragment that is in none.
    """
    loading = _Loading(directory)
    await loading.learn(names)
    return tuple(await bounded_map(loading.load, names, limit=AT_ONCE))


async def restored_fragments(
    directory: ArrayDirectory, known: Sequence[tuple[TimedName, Footer]]
) -> tuple[Fragment, ...]:
    """Return fragments whose footers were read before.

    Raises:
        FormatError: the schema of one does not exist.

    Cost: one request for each schema that is not known yet.
    """
    kept = WeightedCache[str, _Piece](_KEPT_BYTES)
    found: list[Fragment] = []
    for name, footer in known:
        folder = directory.folder.below(fragment_folder(name))
        schema = await directory.schema(footer.schema_name or LEGACY_SCHEMA)
        found.append(Fragment(name, folder, schema, footer, kept))
    return tuple(found)
