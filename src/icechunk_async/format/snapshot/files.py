"""The manifests that a snapshot lists, by id: those of a file, with some replaced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.checks import lookups_pay_for_all
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.ids import ManifestId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes
    from icechunk_async.format.flatbuffers.single import Reader, Row

__all__ = ["FileColumns", "Files", "ManifestFileInfo"]

# The id at 0, its size at 16, the number of references at 24; zeros between, by C's alignment.
_STRUCT_BYTES: Final = 32
_ID_BYTES: Final = ManifestId.size_bytes


@dataclass(frozen=True, slots=True)
class ManifestFileInfo:
    """A manifest that some node of the snapshot uses."""

    id: ManifestId
    size_bytes: int
    """Size of the object, header included; 0 where unknown. Readers ask for this many bytes."""
    num_chunk_refs: int


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Manifests as columns, each once, in ascending order of their ids."""

    ids: Bytes
    """``(n, 12)``."""
    size_bytes: npt.NDArray[np.uint64]
    num_chunk_refs: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, infos: Iterable[ManifestFileInfo]) -> FileColumns:
        """Return columns of manifests that are given as such."""
        rows = sorted(infos, key=lambda info: info.id)
        ids = np.frombuffer(b"".join(info.id for info in rows), np.uint8).reshape(-1, _ID_BYTES)
        sizes = np.array([info.size_bytes for info in rows], np.uint64)
        return cls(ids, sizes, np.array([info.num_chunk_refs for info in rows], np.uint32))

    def place(self, manifest_id: bytes) -> int:
        """Return the first row whose id is not lower."""
        return bisect_left(
            range(len(self.ids)), manifest_id, key=lambda row: self.ids[row].tobytes()
        )

    def row(self, manifest_id: ManifestId) -> int | None:
        """Return the row of a manifest; None if it is not listed."""
        row = self.place(manifest_id)
        found = row < len(self.ids) and self.ids[row].tobytes() == manifest_id
        return row if found else None

    def infos(self) -> Iterator[ManifestFileInfo]:
        """Iterate over the manifests."""
        raw = self.ids.tobytes()
        sizes, counts = self.size_bytes.tolist(), self.num_chunk_refs.tolist()
        for row, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            raw_id = raw[_ID_BYTES * row : _ID_BYTES * (row + 1)]
            yield ManifestFileInfo(ManifestId(raw_id), size, count)

    def edited(
        self, put: Collection[ManifestFileInfo], gone: Collection[ManifestId]
    ) -> FileColumns:
        """Return these manifests with some added or replaced, and others left out."""
        found = (self.row(it) for it in (*gone, *(info.id for info in put)))
        rows = np.array(sorted({row for row in found if row is not None}), np.intp)
        ids, sizes = np.delete(self.ids, rows, axis=0), np.delete(self.size_bytes, rows)
        counts = np.delete(self.num_chunk_refs, rows)
        new = FileColumns.of(put)
        stayed = FileColumns(ids, sizes, counts)
        # Places among those that stayed, as `insert` counts them. Of equal ids none is left: they
        # are gone from the old ones first.
        places = np.array([stayed.place(it.tobytes()) for it in new.ids], np.intp)
        return FileColumns(
            np.insert(ids, places, new.ids, axis=0),
            np.insert(sizes, places, new.size_bytes),
            np.insert(counts, places, new.num_chunk_refs),
        )


class Files(Mapping[ManifestId, ManifestFileInfo]):
    """The manifests that a snapshot lists.

    A lookup halves the file's list, which is sorted by id; after many of them, and for all else, it
    is decoded once, by columns. Where there is no file of format version 1 or 2 they are values,
    whose ids may be of other lengths.
    """

    def __init__(self, infos: Iterable[ManifestFileInfo] = ()) -> None:
        """Hold these manifests."""
        self._known = {info.id: info for info in infos}
        self._file: _StoredFiles | None = None
        self._columns: FileColumns | None = None

    @classmethod
    def from_root(cls, reader: Reader, root: Row) -> Self:
        """Hold the manifests that the root table of a snapshot lists.

        Raises:
            FormatError: the lists are damaged.
        """
        files = cls()
        files._file = _StoredFiles(reader, root)
        return files

    @classmethod
    def of(cls, infos: Mapping[ManifestId, ManifestFileInfo]) -> Files:
        """Return the manifests of any mapping."""
        return infos if isinstance(infos, Files) else Files(infos.values())

    def edited(self, put: Collection[ManifestFileInfo], gone: Collection[ManifestId] = ()) -> Files:
        """Return these manifests with some added or replaced, and others left out.

        Cost: time to copy twenty-four bytes for each manifest of a file.
        """
        if self._are_values:
            left_out = set(gone)
            kept = (info for info in self._known.values() if info.id not in left_out)
            return Files((*kept, *put))
        files = Files(put)
        files._columns = self.columns.edited(put, gone)
        return files

    @property
    def _are_values(self) -> bool:
        return self._file is None and self._columns is None

    @property
    def columns(self) -> FileColumns:
        """All manifests as columns; ids have twelve bytes.

        Raises:
            FormatError: the file lists one beyond any object's size.
        """
        if self._file is not None and self._columns is None:
            self._columns = self._file.columns
        return FileColumns.of(self._known.values()) if self._columns is None else self._columns

    def __getitem__(self, manifest_id: ManifestId) -> ManifestFileInfo:
        """Return a manifest; raise KeyError if it is not listed."""
        found = self._known.get(manifest_id)
        if found is None:
            found = self._find(manifest_id)
            if found is None:
                raise KeyError(manifest_id)
            self._known[manifest_id] = found
        return found

    @overload
    def get(self, manifest_id: ManifestId, /) -> ManifestFileInfo | None: ...

    @overload
    def get[T](
        self, manifest_id: ManifestId, /, default: ManifestFileInfo | T
    ) -> ManifestFileInfo | T: ...

    def get(self, manifest_id: ManifestId, /, default: Any = None) -> Any:
        """Return a manifest, or the default; faster than through an exception."""
        found = self._known.get(manifest_id)
        if found is not None:
            return found
        found = self._find(manifest_id)
        if found is None:
            return default
        self._known[manifest_id] = found
        return found

    def _find(self, manifest_id: ManifestId) -> ManifestFileInfo | None:
        if self._are_values:
            return None
        if self._columns is None and self._file is not None:
            self._columns = self._file.columns_if_they_pay()
            found = self._file.halve(manifest_id) if self._columns is None else None
            if found is not None:
                return found
        columns = self.columns
        row = columns.row(manifest_id)
        if row is None:
            return None
        size, count = columns.size_bytes.item(row), columns.num_chunk_refs.item(row)
        return ManifestFileInfo(manifest_id, size, count)

    def __iter__(self) -> Iterator[ManifestId]:
        """Iterate over ids; those of a file ascend."""
        if self._are_values:
            return iter(self._known)
        raw = self.columns.ids.tobytes()
        return (ManifestId(raw[at : at + _ID_BYTES]) for at in range(0, len(raw), _ID_BYTES))

    def __len__(self) -> int:
        """Count the manifests."""
        return len(self._known) if self._are_values else len(self.columns.ids)


class _StoredFiles(TableList):
    """The two lists of a file: spec 1 has structs, spec 2 tables; a file could have both."""

    def __init__(self, reader: Reader, root: Row) -> None:
        self._structs = root.vector(6, _STRUCT_BYTES, 8, required="manifest_files")
        super().__init__(reader.payload, *root.vector(7, 4, 4))
        self._halved = 0

    def columns_if_they_pay(self) -> FileColumns | None:
        """Return all manifests if lookups took about as long as decoding them.

        None if one of them is damaged, which may not be the one that is looked up.
        """
        if lookups_pay_for_all(self._halved, len(self)):
            self._halved = 0  # a damaged list is decoded again, after more lookups
            with suppress(FormatError):
                return self.columns
        return None

    def halve(self, manifest_id: ManifestId) -> ManifestFileInfo | None:
        """Return a manifest if it is where it should be; of equal ones the last one counts."""
        self._halved += 1

        def id_at(row: int) -> bytes:
            return self._row(row).struct(0, _ID_BYTES, field="id")

        wanted: bytes = manifest_id
        # Not found may mean out of order, or in the list of structs: the caller then looks in the
        # columns.
        row = bisect_right(range(len(self)), wanted, key=id_at) - 1
        if row < 0 or id_at(row) != manifest_id:
            return None
        table = self._row(row)
        size = table.number(1, 8)
        if size >= 1 << 63:
            raise _too_large()
        return ManifestFileInfo(manifest_id, size, table.number(2, 4))

    @cached_property
    def columns(self) -> FileColumns:
        """All manifests."""
        first, count = self._structs
        raw = np.frombuffer(self.payload, np.uint8, _STRUCT_BYTES * count, first)
        structs = raw.reshape(-1, _STRUCT_BYTES)
        tables = self.tables
        ids = np.concatenate([structs[:, :_ID_BYTES], tables.struct(0, _ID_BYTES, field="id")])
        sizes = np.concatenate([structs[:, 16:24].copy().view("<u8").ravel(), tables.scalar(1, 8)])
        counts = np.concatenate([structs[:, 24:28].copy().view("<u4").ravel(), tables.scalar(2, 4)])
        # Readers ask for this many bytes, by numbers that storages and NumPy take as signed.
        if (sizes >= 1 << 63).any():
            raise _too_large()
        words = np.ascontiguousarray(ids).view(">u4").astype(np.uint32)
        order = np.lexsort((words[:, 2], words[:, 1], words[:, 0]))  # stable: the last one counts
        words = words[order]
        last = np.ones(len(words), bool)
        last[:-1] = (words[1:] != words[:-1]).any(axis=1)
        order = order[last]
        return FileColumns(ids[order], sizes[order], counts[order])


def _too_large() -> FormatError:
    return FormatError("A snapshot has a manifest beyond any object's size.")
