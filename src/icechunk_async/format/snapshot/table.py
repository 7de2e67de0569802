"""The nodes of a snapshot's file, in which a node is found without decoding the others."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from functools import cached_property
from itertools import islice
from operator import lt
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.checks import lookups_pay_for_all
from icechunk_async.format.flatbuffers.single import TableList
from icechunk_async.format.ids import NodeId
from icechunk_async.format.snapshot.columns import (
    ARRAY,
    Layout,
    decode_node,
    decode_nodes,
    kinds_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.splicing import Spans
    from icechunk_async.format.snapshot.nodes import Node

__all__ = ["NodeTable"]

_SCANNED: Final = 256
"""Nodes looked at together in search of arrays."""
_BLOCK: Final = 1024
"""Nodes decoded at a time when all are asked for."""


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
        return Layout(self.tables, self.spec_version, vtables=True)

    @cached_property
    def bare_spans(self) -> Spans:
        """Where the nodes lie in the file without their vtables, which they may share."""
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
            row = self._halve(path.encode(errors="surrogatepass"))
            if row is not None:
                return row
        index = self.index
        place = bisect_left(index.paths, path)
        if place < self._count and index.paths[place] == path:
            return index.rows[place]
        return None

    def _halve(self, wanted: bytes) -> int | None:
        most = len(wanted) + 1  # bytes that tell

        def path_at(row: int) -> bytes:
            return self._row(row).raw(1, required="path", most=most)

        row = bisect_left(range(self._count), wanted, key=path_at)
        if row == self._count or path_at(row) != wanted:
            return None
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
        """
        index = self.index
        for first in range(0, len(paths), _BLOCK):
            chosen = paths[first : first + _BLOCK]
            names = [index.paths[place] for place in chosen]
            found = [self.known.get(name) for name in names]
            missing = [at for at, node in enumerate(found) if node is None]
            rows = [index.rows[chosen[at]] for at in missing]
            tables = self.tables.select(np.array(rows, np.int64))
            made = decode_nodes(tables, [names[at] for at in missing])
            for node in found:
                yield next(made) if node is None else node


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
