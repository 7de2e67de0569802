"""Moves of nodes: whole subtrees get other paths, and nothing else changes.

A session's moves are kept twice: as requested, to be replayed on another base, and as their net
effect on each node of the base. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidMoveError, NodeExistsError, NodeNotFoundError
from icechunk_async.format.paths import ancestors

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from icechunk_async.format.snapshot import Node, Nodes
    from icechunk_async.format.transaction_log import Move

__all__ = ["Moves"]


@dataclass(slots=True)
class Moves:
    """The moves of a session, relative to the nodes of its base snapshot."""

    requested: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """``(from, to)`` of each call, in order."""
    _by_source: dict[str, Move] = field(default_factory=dict[str, "Move"])
    """The net move of each node that is elsewhere now, by its path in the base."""
    _by_target: dict[str, Move] = field(default_factory=dict[str, "Move"])
    _targets: list[str] = field(default_factory=list[str])
    """Sorted, so that the nodes below a path are a slice of the list."""

    def copy(self) -> Moves:
        """Return moves that can be added to without touching these."""
        by_source, by_target = dict(self._by_source), dict(self._by_target)
        return Moves(list(self.requested), by_source, by_target, list(self._targets))

    def net(self) -> tuple[Move, ...]:
        """Return a move for each node that is elsewhere now, in the order of transaction logs."""
        # By segments (spec, "Transaction logs"): ``/a/b`` comes before ``/a-b``, unlike in
        # snapshots.
        return tuple(sorted(self._by_source.values(), key=lambda move: move.target.split("/")))

    def origin(self, path: str) -> str | None:
        """Return the base's path of the node that may be at ``path``; None if it moved away."""
        move = self._by_target.get(path)
        if move is not None:
            return move.source
        return None if path in self._by_source else path

    def place(self, path: str) -> str:
        """Return where the base's node at ``path`` is after the moves."""
        move = self._by_source.get(path)
        return path if move is None else move.target

    def find(self, base: Nodes, path: str) -> Node | None:
        """Return the node at a path after the moves."""
        if not self._by_source:
            return base.get(path)
        origin = self.origin(path)
        node = None if origin is None else base.get(origin)
        return node if node is None or origin == path else replace(node, path=path)

    def paths(self, base: Nodes, below: str | None = None) -> list[str]:
        """Return the paths of all nodes after the moves, or of all below one, in order."""
        found: Iterable[str] = base.paths if below is None else base.below(below)
        if not self._by_source:
            return list(found)
        stayed = [path for path in found if path not in self._by_source]
        if below is None:
            return sorted(stayed + self._targets)
        prefix = _prefix(below)
        start = bisect_left(self._targets, prefix)
        after = islice(self._targets, start, None)
        arrived = takewhile(lambda path: path.startswith(prefix), after)
        return sorted([*stayed, *(path for path in arrived if path != below)])

    def add(self, base: Nodes, source: str, target: str, *, created: Container[str] = ()) -> None:
        """Move the node at ``source``, and all below it, to ``target``.

        Args:
            base: the nodes of the base snapshot.
            source: where the node is now.
            target: where it goes.
            created: paths of groups that are created beside the moves.

        Raises:
            NodeNotFoundError: nothing is at ``source``.
            NodeExistsError: something is at ``target``, or where a node below would go.
            InvalidMoveError: ``target`` is ``source`` or below it, or not in a group.

        Cost: time in proportion to the nodes moved.
        """
        from icechunk_async.format.transaction_log import Move  # noqa: PLC0415 -- on use

        self._check(base, source, target, created)
        subtree = [source, *self.paths(base, source)]
        stem = target.rstrip("/")
        places = {path: stem + path[len(source) :] or "/" for path in subtree}
        for place in places.values():  # there can be nodes below a path that is free
            if place not in places and self.find(base, place) is not None:
                raise _taken(source, target, place)
        # Old entries go before new ones come, because a new place can be an old one of the same
        # subtree: without a node at ``/a``, the nodes ``/a/a`` and ``/a/a/a`` can move to ``/a``
        # and ``/a/a``.
        origins = {path: self.origin(path) for path in subtree}
        # Each insertion shifts the list, so for many nodes sorting it anew takes less time.
        few = len(subtree) < len(self._targets) >> 3
        for path in subtree:
            arrived = self._by_target.pop(path, None)
            if arrived is not None:
                del self._by_source[arrived.source]
                if few:
                    del self._targets[bisect_left(self._targets, path)]
        for path, origin in origins.items():
            assert origin is not None  # there is a node
            place = places[path]
            # A node that came back to its place in the base has not moved: a log lists no such
            # move.
            if place != origin:
                node = base[origin]
                move = Move(origin, place, node.id, node.array is not None)
                self._by_source[origin] = self._by_target[place] = move
                if few:
                    insort(self._targets, place)
        if not few:
            self._targets = sorted(self._by_target)
        # Last, so that a refused move leaves nothing. It is kept even if nothing moved in the end:
        # as in the official engine, a session that moved a node there and back has changes.
        self.requested.append((source, target))

    def _check(self, base: Nodes, source: str, target: str, created: Container[str]) -> None:
        if self.find(base, source) is None:
            raise NodeNotFoundError(
                f"There is nothing at {source!r} to be moved to {target!r}.", path=source
            )
        if target == source or target.startswith(_prefix(source)):
            raise InvalidMoveError(
                f"{source!r} cannot be moved to {target!r}, which is itself or below it. Move its "
                "children one by one into a group that exists.",
                source=source,
                target=target,
                code="move-into-self-or-descendant",
            )
        if self.find(base, target) is not None:
            raise _taken(source, target, target)
        for parent in ancestors(target)[:1]:
            if parent in created:
                continue
            above = self.find(base, parent)
            if above is None or above.array is not None:
                problem = "does not exist" if above is None else "is an array, not a group"
                raise InvalidMoveError(
                    f"{source!r} cannot be moved to {target!r}: {parent!r} {problem}, and moving "
                    "creates no groups. Create the group in a writable session, commit, and move "
                    "in a new session.",
                    source=source,
                    target=target,
                    parent=parent,
                    code="move-destination-parent-missing",
                )

    def replay(self, base: Nodes) -> Moves:
        """Return the same moves made on another base.

        Raises:
            As `add`, with the ``source`` of the move that is not possible there.
        """
        again = Moves()
        for source, target in self.requested:
            again.add(base, source, target)
        return again

    def obstacle(self, base: Nodes) -> str | None:
        """Return the source of the first move that is not possible on another base."""
        again = Moves()
        for source, target in self.requested:
            try:
                again.add(base, source, target)
            except (NodeNotFoundError, NodeExistsError, InvalidMoveError):
                return source
        return None


def _prefix(path: str) -> str:
    return path if path.endswith("/") else f"{path}/"


def _taken(source: str, target: str, place: str) -> NodeExistsError:
    return NodeExistsError(
        f"{source!r} cannot be moved to {target!r}: there is a node at {place!r}, and moving "
        "overwrites nothing. Choose another place, or delete it in a writable session first.",
        path=place,
    )
