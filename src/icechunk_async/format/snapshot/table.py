"""The nodes of a snapshot's file: one is found without decoding the others, many go by columns."""

from __future__ import annotations

import struct
from bisect import bisect_left
from contextlib import suppress
from functools import cached_property
from itertools import islice
from operator import lt
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.checks import MAX_SHARING, lookups_pay_for_all, unfolded
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.snapshot.node import (
    ARRAY,
    GROUP,
    ArrayData,
    Dimension,
    ManifestRef,
    Node,
    kinds_of,
    no_length,
    unknown_kind,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.reading import Tables
    from icechunk_async.format.flatbuffers.single import Row
    from icechunk_async.format.flatbuffers.splicing import Spans
    from icechunk_async.format.snapshot.layout import Layout

__all__ = ["NodeTable", "decode_node", "decode_nodes"]

_SCANNED: Final = 256
"""Nodes looked at together in search of arrays."""
_BLOCK: Final = 1024
"""Nodes decoded at a time when all are asked for."""
_MAX_INDEX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class _Index:
    """The paths of all nodes."""

    by_row: list[str]
    """In the order of the file; in normal form."""
    paths: list[str]
    """In ascending order of their UTF-8 bytes."""
    rows: Sequence[int]
    """The node of each of `paths`."""
    is_odd: npt.NDArray[np.bool_]
    """Which nodes have another path in the file."""
    is_plain: bool
    """Whether the file lists its nodes in order, with paths in normal form."""


class NodeTable(TableList):
    """The nodes of a file.

    A lookup halves the file's list, which is sorted by path, and reads a few nodes on its way.
    After many of them, where one finds nothing, and for listings, the paths of all nodes are
    decoded once: other writers may have stored paths out of order, or not in normal form.
    """

    def __init__(self, payload: memoryview, first: int, count: int, spec_version: int) -> None:
        """Look at the vector of nodes; as `TableList`."""
        super().__init__(payload, first, count)
        self.spec_version = spec_version
        self.known: dict[str, Node] = {}
        """Nodes that were read one by one."""
        self._halved = 0

    @cached_property
    def index(self) -> _Index:
        """The paths of all nodes.

        Raises:
            FormatError: one of them is damaged, or two are equal.
        """
        stored = self.tables.strings(1, required="path")
        if _are_ascending(stored) and _are_plain(stored):
            none = np.zeros(len(stored), bool)
            return _Index(stored, stored, range(len(stored)), none, is_plain=True)
        by_row = _normalise(stored)
        # Code points of strings and bytes of their UTF-8 are in the same order.
        order = sorted(range(len(by_row)), key=by_row.__getitem__)
        paths = [by_row[row] for row in order]
        if not _are_ascending(paths):
            raise _listed_twice()
        is_odd = np.array([a != b for a, b in zip(by_row, stored, strict=True)], bool)
        return _Index(by_row, paths, order, is_odd, is_plain=False)

    @cached_property
    def layout(self) -> Layout:
        """Where the nodes lie in the file, checked.

        Raises:
            FormatError: one of them is damaged.
        """
        from icechunk_async.format.snapshot.layout import Layout  # noqa: PLC0415 -- to write

        return Layout(self.tables, self.spec_version, vtables=True)

    @cached_property
    def bare_spans(self) -> Spans:
        """Where the nodes lie in the file without their vtables, which they may share."""
        from icechunk_async.format.snapshot.layout import Layout  # noqa: PLC0415 -- to write

        return Layout(self.tables, self.spec_version, vtables=False).spans

    def find(self, path: str) -> int | None:
        """Return the row of the node at a path in normal form.

        Raises:
            FormatError: a node that was looked at is damaged, or there are two at the path.

        Cost: the logarithm of the number of nodes; time in proportion to it once, for the first
        path that is not found, or when many were.
        """
        if lookups_pay_for_all(self._halved, self._count):
            self._halved = 0  # damaged paths are decoded again, after more lookups
            with suppress(FormatError):  # of nodes that may not be asked for
                _ = self.index
        if "index" not in self.__dict__:
            self._halved += 1
            # A path with lone surrogates, which no file has, is not found rather than an error.
            row = self._halve(path.encode(errors="surrogatepass"))
            if row is not None:
                return row
        index = self.index
        place = bisect_left(index.paths, path)
        if place < self._count and index.paths[place] == path:
            return index.rows[place]
        return None

    def _halve(self, wanted: bytes) -> int | None:
        # A node's path may be as long as its writer likes; nothing behind these bytes can matter.
        most = len(wanted) + 1

        def path_at(row: int) -> bytes:
            return self._row(row).raw(1, required="path", most=most)

        row = bisect_left(range(self._count), wanted, key=path_at)
        if row == self._count or path_at(row) != wanted:
            return None
        # Two nodes at one path would be another one for each way of reading.
        if row + 1 < self._count and path_at(row + 1) == wanted:
            raise _listed_twice()
        return row

    def node(self, path: str) -> Node | None:
        """Return the node at a path in normal form, the same object each time.

        Errors and cost as `find`.
        """
        node = self.known.get(path)
        if node is None:
            row = self.find(path)
            if row is None:
                return None
            node = self.known[path] = decode_node(self._row(row), path)
        return node

    def array_rows(self, among: int) -> Iterator[int]:
        """Iterate over the rows of arrays, among the first ``among`` rows."""
        among = min(among, self._count)
        for first in range(0, among, _SCANNED):
            # A few hundred at a time: callers stop at the first array that suits them.
            some = self.entries.span(first, min(first + _SCANNED, among)).tables()
            for row in np.flatnonzero(kinds_of(some) == ARRAY).tolist():
                yield first + row

    def path(self, row: int) -> str:
        """Return the path of a node in normal form."""
        if "index" not in self.__dict__:
            stored = self._row(row).text(1, required="path", counted=False)
            if stored[:1] == "/" and not _may_be_odd(stored):
                return stored
        return self.index.by_row[row]

    def row_of(self, node_id: NodeId) -> int | None:
        """Return the row of a node by its id."""
        ids, rows = self._by_id
        wanted = int.from_bytes(node_id)
        # Of a node that a damaged file lists twice the last row counts, as in a mapping of all
        # nodes.
        place = int(ids.searchsorted(np.uint64(wanted), side="right")) - 1
        return rows.item(place) if place >= 0 and ids.item(place) == wanted else None

    def node_id(self, row: int) -> NodeId:
        """Return the id of a node; nothing else of it is decoded."""
        return NodeId(self._ids[row].tobytes())

    @cached_property
    def _ids(self) -> npt.NDArray[np.uint8]:
        """The ids of all nodes, ``(n, 8)``."""
        return np.ascontiguousarray(self.tables.struct(0, NodeId.size_bytes, field="id"))

    @cached_property
    def _by_id(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
        """The ids as numbers in ascending order, and the row of each."""
        ids = self._ids.view(">u8").ravel().astype(np.uint64)
        rows = np.argsort(ids, kind="stable")
        return ids[rows], rows

    def nodes(self, paths: Sequence[int] | range) -> Iterator[Node]:
        """Iterate over nodes, given by the places of their paths in the index.

        Those that are not known yet are decoded together, and not kept.

        Raises:
            FormatError: one of them is damaged, or they share documents without end.
        """
        index, size_bytes = self.index, 0
        for first in range(0, len(paths), _BLOCK):
            chosen = paths[first : first + _BLOCK]
            names = [index.paths[place] for place in chosen]
            found = [self.known.get(name) for name in names]
            missing = [at for at, node in enumerate(found) if node is None]
            rows = [index.rows[chosen[at]] for at in missing]
            tables = self.tables.select(np.array(rows, np.int64))
            made = decode_nodes(tables, [names[at] for at in missing])
            for known in found:
                node = next(made) if known is None else known
                # Callers may keep all nodes, and the nodes of a hostile file share one document.
                size_bytes += len(node.user_data)
                if size_bytes > MAX_SHARING * len(self.payload):
                    raise unfolded(len(self.payload), size_bytes)
                yield node


def _listed_twice() -> FormatError:
    return FormatError("A snapshot lists a node path twice.")


def _are_ascending(paths: list[str]) -> bool:
    return all(map(lt, paths, islice(paths, 1, None)))


def _are_plain(paths: list[str]) -> bool:
    """Return whether ascending paths are all absolute, and in normal form as far as a look shows.

    The first and the last begin with a slash, and so do those between them.
    """
    if not paths:
        return True
    together = "\n".join(paths[1:] if paths[0] == "/" else paths)
    odd = "/." in together or "//" in together or "/\n" in together or together.endswith("/")
    return not odd and paths[0][:1] == paths[-1][:1] == "/"


def _normalise(paths: list[str]) -> list[str]:
    """Return every path in its normal form, unless another node has that.

    The official engine stores paths such as ``/b/`` and ``/d/./e`` unchanged.
    """
    if any(path[:1] != "/" for path in paths):
        raise FormatError("A snapshot has a node whose path does not begin with a slash.")
    odd = [row for row, path in enumerate(paths) if _may_be_odd(path)]
    paths, taken = list(paths), set(paths)
    for row in odd:
        # Another node may have that path, such as `/b` beside `/b/`. It keeps it, and the odd one
        # stays reachable by what is stored.
        normal = _normal_form(paths[row])
        if normal not in taken:
            taken.add(normal)
            paths[row] = normal
    return paths


def _may_be_odd(path: str) -> bool:
    return "/." in path or "//" in path or (path[-1] == "/" and path != "/")


def _normal_form(path: str) -> str:
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in {"", "."}:
            segments.append(segment)
    return "/" + "/".join(segments)


def decode_nodes(tables: Tables, paths: Sequence[str]) -> Iterator[Node]:
    """Iterate over some nodes, whose tables are given with their paths.

    Raises:
        FormatError: one of them is damaged.
    """
    ids = tables.struct(0, NodeId.size_bytes, field="id").tobytes()
    documents = tables.vector(2, 1, 1, required="user_data").each()
    is_array = (kinds_of(tables) == ARRAY).tolist()
    rows = np.flatnonzero(is_array)
    arrays = _ArrayColumns(tables.select(rows).tables(4, required="node_data")).arrays()
    for row, (path, document) in enumerate(zip(paths, documents, strict=True)):
        node_id = NodeId(ids[8 * row : 8 * row + 8])
        yield Node(node_id, path, document, next(arrays) if is_array[row] else None)


def decode_node(row: Row, path: str) -> Node:
    """Read one node from its table.

    Raises:
        FormatError: it is damaged.
    """
    node_id = NodeId(row.struct(0, NodeId.size_bytes, field="id"))
    document = row.blob(2, required="user_data")
    kind = row.number(3, 1)
    if kind == GROUP:
        return Node(node_id, path, document)
    if kind != ARRAY:
        raise unknown_kind()
    data = row.table(4, required="node_data")
    shape = data.structs(0, 16, 8, required="shape")
    # Its presence decides, not the version: a 0-dimensional array of version 1 has no shape either,
    # and files that were migrated keep their form.
    if data.has(3):
        axes = tuple([Dimension(it.number(0, 8), it.number(1, 4)) for it in data.tables(3)])
    else:
        axes = tuple([_regular(*it) for it in struct.iter_unpack("<QQ", shape)])
    names = tuple([it.text(0) or None for it in data.tables(1)]) if data.has(1) else None
    manifests = [_decode_ref(it, axes) for it in data.tables(2, required="manifests")]
    return Node(node_id, path, document, ArrayData(axes, names, tuple(manifests)))


def _decode_ref(row: Row, axes: tuple[Dimension, ...]) -> ManifestRef:
    manifest_id = ManifestId(row.struct(0, ManifestId.size_bytes, field="object_id"))
    box = row.structs(1, 8, 4, required="extents")
    return ManifestRef(manifest_id, _fitted(list(struct.iter_unpack("<II", box)), axes))


def _fitted(
    box: Sequence[Sequence[int]], axes: tuple[Dimension, ...]
) -> tuple[tuple[int, int], ...]:
    """Return a box with the rank of the array.

    The official engine takes the rank of the box from the first reference in the manifest, and
    compares only the axes that exist.
    """
    missing = [(0, min(axis.num_chunks, _MAX_INDEX)) for axis in axes[len(box) :]]
    return tuple([(start, stop) for start, stop in [*box, *missing][: len(axes)]])


def _regular(array_length: int, chunk_length: int) -> Dimension:
    """Derive the chunk count from the array and chunk length of spec 1."""
    # Both may be 0, which is an empty axis; else it would be divided by.
    if chunk_length == 0:
        if array_length > 0:
            raise no_length()
        return Dimension(0, 0)
    return Dimension(array_length, -(-array_length // chunk_length))


class _ArrayColumns:
    """The ArrayNodeData tables of a file; lists of all rows, and where each row's part is."""

    def __init__(self, tables: Tables) -> None:
        new = tables.vector(3, 4, 4)
        shapes = tables.vector(0, 16, 8, required="shape")
        # Everything is decoded for all rows at once, and each row is cut out of it when it is its
        # turn.
        self._is_new: list[bool] = tables.has(3).tolist()
        self._old_bounds, self._new_bounds = _bounds(shapes.counts), _bounds(new.counts)
        lengths: list[list[int]] = shapes.structs().view("<u8").reshape(-1, 2).tolist()
        self._old_dimensions = [_regular(*it) for it in lengths]
        dimensions = new.tables()
        self._new_dimensions = [
            Dimension(length, chunks)
            for length, chunks in zip(
                dimensions.scalar(0, 8).tolist(), dimensions.scalar(1, 4).tolist(), strict=True
            )
        ]
        self._has_names: list[bool] = tables.has(1).tolist()
        names = tables.vector(1, 4, 4)
        self._name_bounds = _bounds(names.counts)
        self._names = names.tables().strings(0)
        manifests = tables.vector(2, 4, 4, required="manifests")
        self._manifest_bounds = _bounds(manifests.counts)
        refs = manifests.tables()
        self._manifest_ids = refs.struct(0, ManifestId.size_bytes, field="object_id").tobytes()
        extents = refs.vector(1, 8, 4, required="extents")
        self._extent_bounds = _bounds(extents.counts)
        self._extents: list[list[int]] = extents.structs().view("<u4").reshape(-1, 2).tolist()

    def arrays(self) -> Iterator[ArrayData]:
        """Iterate over the arrays, each of which is made when it is its turn."""
        for row, is_new in enumerate(self._is_new):
            bounds = self._new_bounds if is_new else self._old_bounds
            dimensions = self._new_dimensions if is_new else self._old_dimensions
            axes = tuple(dimensions[bounds[row] : bounds[row + 1]])
            names = None
            if self._has_names[row]:
                found = self._names[self._name_bounds[row] : self._name_bounds[row + 1]]
                names = tuple([name or None for name in found])
            refs = range(self._manifest_bounds[row], self._manifest_bounds[row + 1])
            yield ArrayData(axes, names, tuple([self._manifest(index, axes) for index in refs]))

    def _manifest(self, index: int, axes: tuple[Dimension, ...]) -> ManifestRef:
        size = ManifestId.size_bytes
        box = self._extents[self._extent_bounds[index] : self._extent_bounds[index + 1]]
        raw_id = self._manifest_ids[size * index : size * (index + 1)]
        return ManifestRef(ManifestId(raw_id), _fitted(box, axes))


def _bounds(counts: npt.NDArray[np.int64]) -> list[int]:
    """Return where each row's items begin in the list of all; one more for the end."""
    return [0, *np.cumsum(counts).tolist()]
