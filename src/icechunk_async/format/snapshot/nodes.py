"""The nodes of a snapshot by path: those of a file, with some replaced."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView, Mapping, ValuesView
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from icechunk_async.format.ids import ManifestId
from icechunk_async.format.snapshot.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.blocks import Block
    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.snapshot.table import NodeTable

__all__ = ["Nodes"]

_FEW: Final = 32
_LIGHT: Final = 32
"""To encode a node again takes as long as to look at this many in a file that is read again."""


class Nodes(Mapping[str, Node]):
    """The nodes of a snapshot by path, in ascending order of the paths' UTF-8 bytes.

    Nodes are created on access, so that a large hierarchy is cheap to open. What a commit changes
    lies on top of its base's file, so that it is cheap to change.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        """Hold these nodes; each path once."""
        self._table: NodeTable | None = None
        self._put = {node.path: node for node in nodes}
        """Nodes that are not, or no longer, those of the file."""
        self._covered: dict[str, int] = {}
        """Paths at which the nodes of the file do not count, with their rows."""
        self._known = dict(self._put)
        """Nodes found earlier."""
        self._blocks: dict[str, tuple[Node, int, Block]] = {}
        """Nodes that were written, with the format version and their bytes, by path."""
        self._paths: list[str] | None = None
        self._put_ids: dict[NodeId, str] | None = None

    @classmethod
    def from_table(cls, table: NodeTable) -> Self:
        """Hold the nodes of a file; each is created on access."""
        nodes = cls()
        # One memo for all who read the file. Nodes on top of it have another, in which a covered
        # path must not be found.
        nodes._table, nodes._known = table, table.known
        return nodes

    @classmethod
    def _on_top(
        cls,
        table: NodeTable | None,
        put: dict[str, Node],
        covered: dict[str, int],
        blocks: dict[str, tuple[Node, int, Block]],
    ) -> Self:
        nodes = cls()
        nodes._blocks = blocks
        nodes._table, nodes._put, nodes._covered, nodes._known = table, put, covered, dict(put)
        return nodes

    def edited(self, put: Iterable[Node], gone: Collection[str] = ()) -> Self:
        """Return these nodes with some replaced or added, and others, given by path, left out.

        A path that is left out may be that of a node which is added.

        Cost: time in proportion to the changes since the file was written.
        """
        table, new, left_out = self._table, {node.path: node for node in put}, set(gone)
        kept = {path: node for path, node in self._put.items() if path not in left_out}
        covered = dict(self._covered)
        if table is not None:
            for path in (*left_out, *new):
                # A path that is covered already keeps its row; only the first edit looks into the
                # file.
                row = None if path in covered else table.find(path)
                if row is not None:
                    covered[path] = row
        return self._on_top(table, kept | new, covered, self._blocks)

    @property
    def table(self) -> NodeTable | None:
        """The file below; None if all nodes were given as such."""
        return self._table

    @property
    def put(self) -> Mapping[str, Node]:
        """The nodes that lie on top of the file, by path."""
        return self._put

    @property
    def covered(self) -> Mapping[str, int]:
        """The paths of those nodes of the file that do not count any more, with their rows."""
        return self._covered

    @property
    def is_light(self) -> bool:
        """Whether so little lies on top of the file that it would not pay to read a newer one."""
        if self._table is None:
            return len(self._put) <= _FEW
        # Each of k commits copies up to k changes, and reading anew costs in proportion to the
        # file: in all it is cheapest to do so after a root of its length.
        changed = len(self._put) + len(self._covered)
        return changed <= max(_FEW, isqrt(len(self._table) // _LIGHT))

    @property
    def paths(self) -> list[str]:
        """The paths in order; not to be changed."""
        if self._paths is None:
            table = self._table
            if table is None:
                self._paths = sorted(self._put)
            # Nodes were replaced, and none came or went: the usual commit needs no new list.
            elif self._put.keys() == self._covered.keys():
                self._paths = table.index.paths
            else:
                stayed = [path for path in table.index.paths if path not in self._covered]
                # By code points, which is the order of UTF-8 bytes that the format demands.
                self._paths = sorted([*stayed, *self._put])  # quick, as they are in order mostly
        return self._paths

    def __getitem__(self, path: str) -> Node:
        """Return the node at ``path``; raise KeyError if it is missing."""
        node = self.get(path)
        if node is None:
            raise KeyError(path)
        return node

    @overload
    def get(self, path: str, /) -> Node | None: ...

    @overload
    def get[T](self, path: str, /, default: Node | T) -> Node | T: ...

    def get(self, path: str, /, default: Any = None) -> Any:
        """Return the node at ``path``, or the default; faster than through an exception.

        Raises:
            FormatError: it, or a node that was looked at to find it, is damaged.
        """
        node = self._known.get(path)
        if node is not None:
            return node
        if self._table is None or path in self._covered:
            return default
        node = self._table.node(path)
        if node is None:
            return default
        self._known[path] = node
        return node

    def __iter__(self) -> Iterator[str]:
        """Iterate over paths in order."""
        return iter(self.paths)

    def __len__(self) -> int:
        """Count the nodes."""
        stored = 0 if self._table is None else len(self._table)
        return stored - len(self._covered) + len(self._put)

    def __contains__(self, path: object) -> bool:
        """Return whether there is a node at ``path``."""
        if path in self._known:
            return True
        if self._table is None or path in self._covered or not isinstance(path, str):
            return False
        return self._table.find(path) is not None

    def values(self) -> ValuesView[Node]:
        """Return the nodes in order of their paths; they are decoded together, and not kept."""
        return _Values(self)

    def items(self) -> ItemsView[str, Node]:
        """Return the paths and nodes in order; as `values`."""
        return _Items(self)

    def blocks(self, spec_version: int, write: Callable[[Node], Block]) -> list[Block]:
        """Return all nodes as written, in order of their paths; for hierarchies of few nodes.

        They are kept, also for what is edited from these, so that a commit writes only those nodes
        that it changes.
        """
        before = self._blocks
        found: dict[str, tuple[Node, int, Block]] = {}
        for path in self.paths:
            node, known = self[path], before.get(path)
            # By identity, as nodes never change: comparing documents would take longer than writing
            # them.
            if known is None or known[0] is not node or known[1] != spec_version:
                known = node, spec_version, write(node)
            found[path] = known
        self._blocks = found
        return [block for _, _, block in found.values()]

    def at(self, first: int, stop: int) -> Iterator[Node]:
        """Iterate over the nodes of some of the `paths`; as `values`."""
        table = self._table
        if table is None:
            yield from (self._put[path] for path in self.paths[first:stop])
        elif self._put.keys() == self._covered.keys():  # the same paths as those of the file
            below = table.nodes(range(first, stop))
            yield from (self._put.get(node.path, node) for node in below)
        else:
            paths = self.paths[first:stop]
            below = table.nodes(_places(table.index.paths, paths, self._put))
            yield from (self._put.get(path) or next(below) for path in paths)

    def first_arrays(self, among: int) -> Iterator[str]:
        """Iterate over the paths of the arrays among the first ``among`` nodes.

        Of a file they are the first in its order, which other writers may have made another one
        than that of the paths. Nothing else of those nodes is decoded.
        """
        table = self._table
        if table is None or self._put or self._covered:
            yield from (path for path in self.paths[:among] if self[path].array is not None)
        else:
            yield from map(table.path, table.array_rows(among))

    def span(self, path: str) -> tuple[int, int]:
        """Return which of the `paths` are below one: the first, and the one after the last.

        The path itself is among them if it is the root.
        """
        prefix = path if path.endswith("/") else f"{path}/"
        # Descendants lie together, but not behind their parent: `/a`, `/a-b`, `/a/b`.
        first = bisect_left(self.paths, prefix)
        return first, bisect_left(self.paths, prefix[:-1] + "0", first)  # "0" comes after "/"

    def below(self, path: str) -> Iterator[str]:
        """Iterate over the paths of all descendants of ``path``, in order."""
        first, stop = self.span(path)
        return (it for it in self.paths[first:stop] if it != path)

    def path_of(self, node_id: NodeId) -> str | None:
        """Return the path of a node by its id."""
        if self._put_ids is None:
            self._put_ids = {node.id: path for path, node in self._put.items()}
        found = self._put_ids.get(node_id)
        if found is not None or self._table is None:
            return found
        row = self._table.row_of(node_id)
        # A covered node's id is found above if the node was replaced; else it was deleted.
        path = None if row is None else self._table.path(row)
        return None if path in self._covered else path

    def using(self, manifests: Collection[ManifestId]) -> set[ManifestId]:
        """Return those of some manifests that a node refers to.

        Cost: the first time for a file, that of looking at all of its nodes, by columns.
        """
        wanted = set(manifests)
        are_few = self._table is not None and len(self._table) <= _FEW
        found = {
            ref.manifest_id
            for node in (self.values() if are_few else self._put.values())
            if node.array is not None
            for ref in node.array.manifests
            if ref.manifest_id in wanted
        }
        if self._table is None or are_few or len(found) == len(wanted):
            return found  # of layouts without such tables ids may have other lengths
        found.update(it for it, _ in self._stored_uses(self._table, wanted - found))
        return found

    def users(self, manifests: Collection[ManifestId]) -> dict[ManifestId, list[NodeId]]:
        """Return the nodes that refer to some manifests, by manifest. Cost: as `using`."""
        wanted = set(manifests)
        found: dict[ManifestId, list[NodeId]] = {}
        for node in self._put.values():
            for ref in node.array.manifests if node.array is not None else ():
                if ref.manifest_id in wanted:
                    found.setdefault(ref.manifest_id, []).append(node.id)
        if self._table is not None:
            for manifest_id, row in self._stored_uses(self._table, wanted):
                found.setdefault(manifest_id, []).append(self._table.node_id(row))
        # A damaged file may list an id twice, or a node twice.
        return {it: list(dict.fromkeys(ids)) for it, ids in found.items()}

    def _stored_uses(
        self, table: NodeTable, wanted: set[ManifestId]
    ) -> Iterator[tuple[ManifestId, int]]:
        """Iterate over the nodes of the file that refer to manifests: each manifest and row."""
        layout = table.layout
        # By the first eight bytes of ids, which are random, as numbers; what passes is compared
        # whole.
        sought = np.array([int.from_bytes(it[:8], "little") for it in wanted], "<u8")
        rows = np.flatnonzero(_are_in(layout.manifest_heads, sought))
        covered = set(self._covered.values())
        for row, node in zip(rows.tolist(), layout.manifest_rows[rows].tolist(), strict=True):
            if node in covered:  # all of them, where all arrays of a manifest changed
                continue
            manifest_id = ManifestId(layout.manifest_ids[row].tobytes())
            if manifest_id in wanted:
                yield manifest_id, node


def _are_in(numbers: npt.NDArray[Any], few: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which numbers are among some others."""
    if len(few) > _FEW:
        return np.isin(numbers, few)
    found = np.zeros(len(numbers), bool)
    for number in few:
        found |= numbers == number
    return found


def _places(all_paths: list[str], chosen: list[str], put: Mapping[str, Node]) -> list[int]:
    """Return where the chosen paths are among all; both ascend. Those put on top are left out."""
    places: list[int] = []
    at = 0
    for path in chosen:
        if path not in put:
            if all_paths[at] != path:
                # The next one is mostly the right one. Else a search ahead, so that few paths of
                # many cost a logarithm each.
                at = bisect_left(all_paths, path, at)
            places.append(at)
            at = min(at + 1, len(all_paths) - 1)
    return places


class _Values(ValuesView[Node]):
    _mapping: Nodes

    def __iter__(self) -> Iterator[Node]:
        return self._mapping.at(0, len(self._mapping))


class _Items(ItemsView[str, Node]):
    _mapping: Nodes

    def __iter__(self) -> Iterator[tuple[str, Node]]:
        return ((node.path, node) for node in self._mapping.at(0, len(self._mapping)))
