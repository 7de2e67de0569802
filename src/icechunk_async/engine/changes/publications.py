"""The publications of the forks of one session, and how they are put together.

A publication holds what a fork changed since the state that others know from it, and enough of
that state to notice clashes: a digest of each document that it replaces, and a stamp for each
array that it touches. So nobody needs the state itself.

Publications count in the order of their stamps. A stamp is the time of its maker's clock, but later
than all that the maker had seen. So what was written with another publication in view lies above it
whatever the clocks say; they decide only between two that did not know of each other.

Pure: values in, values out.
"""

from __future__ import annotations

from dataclasses import field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Self

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ArrayChanges, ChangeSet, Deleted
from icechunk_async.engine.changes.compare import compare_refs
from icechunk_async.engine.changes.merge import Merger, check_fits
from icechunk_async.engine.changes.wire import Lineage
from icechunk_async.errors import FormatError
from icechunk_async.format.manifest.refs import ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.snapshot import Node, Nodes

__all__ = [
    "GIVEN_UP",
    "UNKNOWN",
    "Base",
    "News",
    "Noted",
    "Publication",
    "Shared",
    "SincePublished",
    "in_order",
    "laid_over",
    "news_since",
    "next_stamp",
    "note_more",
    "noted_in",
    "noted_together",
    "stamped",
    "taken_in",
    "with_unknown",
    "without_journals",
]

GIVEN_UP: Final = -1
"""In place of a number of publications: none of them counts."""
UNKNOWN: Final = -1
"""The stamp of an array with changes that nobody else knows yet."""
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class News:
    """Changes since a state, as if that were a snapshot, with what tells whether it still holds."""

    changes: ChangeSet
    digests: Mapping[NodeId, bytes]
    """The digests of the metadata documents that were replaced or deleted, by node."""
    stamps: Mapping[NodeId, int]
    """The stamps, in that state, of the arrays whose chunks were changed or deleted."""

    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        changes = self.changes
        return not (changes.new or changes.updated or changes.deleted or changes.chunks)


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication of a fork."""

    fork_id: bytes
    number: int
    """Counts the publications of the fork, from 0."""
    stamp: int
    news: News
    seen: Mapping[bytes, int] = field(default_factory=dict["bytes", "int"])
    """The number of publications of each other fork that this one builds on."""
    lineage: Lineage = field(default_factory=Lineage)
    serial: bytes = b""
    """Random; tells it from that of another copy of the fork."""


@dataclass(frozen=True, slots=True)
class Base:
    """The snapshot that a session builds on, as far as publications are put together on it."""

    id: SnapshotId
    nodes: Nodes
    spec_version: int


@dataclass(frozen=True, slots=True)
class Shared:
    """The state of a session that its forks can see, against the session's base."""

    changes: ChangeSet = field(default_factory=ChangeSet)
    """Must not change any more."""
    stamps: Mapping[NodeId, int] = field(default_factory=dict["NodeId", "int"])
    """When chunks of an array were changed last."""
    taken: Mapping[bytes, int] = field(default_factory=dict["bytes", "int"])
    """The number of publications of each fork that are in it, or ``GIVEN_UP``."""
    serials: Mapping[bytes, bytes] = field(default_factory=dict["bytes", "bytes"])
    """The serial of the last of these."""
    clock: int = 0
    """The highest stamp in it."""
    since: int = 0
    """Forks of this generation and later ones fit, see the record of the lease."""

    def takes(self, fork_id: bytes, number: int) -> bool:
        """Return whether a publication is still to be taken in."""
        known = self.taken.get(fork_id, 0)
        return known != GIVEN_UP and number >= known

    def covers(self, seen: Mapping[bytes, int]) -> bool:
        """Return whether all these publications are in it, or given up."""
        return all(not self.takes(fork_id, count - 1) for fork_id, count in seen.items())

    def with_own(self, changes: ChangeSet, stamp: int) -> Self:
        """Return the state after the session made its present changes known."""
        known = self.changes.chunks
        stamps = {it: at for it, at in self.stamps.items() if it in changes.chunks}
        for node_id, it in changes.chunks.items():
            if not _same_chunks(it, known.get(node_id)):
                stamps[node_id] = stamp
        return replace(self, changes=without_journals(changes), stamps=stamps, clock=stamp)


def next_stamp(now_us: int, clock: int) -> int:
    """Return a stamp that is later than all that its maker has seen."""
    return max(now_us, clock + 1)


def stamped(stamps: Mapping[NodeId, int], news: News, stamp: int) -> dict[NodeId, int]:
    """Return the stamps of arrays after a publication."""
    found = {it: at for it, at in stamps.items() if it not in news.changes.deleted}
    found.update(dict.fromkeys(news.changes.chunks, stamp))
    return found


def without_journals(changes: ChangeSet) -> ChangeSet:
    """Return a copy that notes nothing."""
    found = changes.copy()
    for it in found.chunks.values():
        it.journal = None
    return found


def _same_chunks(one: ArrayChanges, other: ArrayChanges | None) -> bool:
    """Return whether two states of an array, one made from the other, are surely the same."""
    return other is not None and (one.revision, one.rank, one.kept_grid) == (
        other.revision,
        other.rank,
        other.kept_grid,
    )


type Noted = Mapping[NodeId, ArrayChanges | None]
"""Chunks that were set in arrays for a while; None: nobody noted them."""


def noted_in(changes: ChangeSet) -> Noted:
    """Return the contents of the journals of arrays, which must not be added to."""
    return {node_id: it.journal for node_id, it in changes.chunks.items()}


def note_more(
    noted: dict[NodeId, ArrayChanges | None], changes: ChangeSet, known: ChangeSet
) -> None:
    """Add what journals hold of the arrays that a state has changes of.

    Cost: in proportion to what is added.
    """
    for node_id in known.chunks.keys() & changes.chunks.keys():
        journal = changes.chunks[node_id].journal
        before = noted.get(node_id)
        # Once unknown, an array stays unknown: what was not noted lies before all that is noted
        # from now on, and only a comparison of states finds it.
        if journal is None:
            noted[node_id] = None
        elif not journal.is_empty() and (before is not None or node_id not in noted):
            together = noted[node_id] = before or ArrayChanges(journal.rank)
            together.set_many(journal.columns())


def noted_together(noted: Sequence[Noted], known: ChangeSet) -> dict[NodeId, ArrayChanges | None]:
    """Join notes that follow one another, of the arrays that a state has changes of."""
    found: dict[NodeId, ArrayChanges | None] = {}
    for node_id in known.chunks:
        notes = [notes[node_id] for notes in noted if node_id in notes]
        if any(it is None for it in notes):
            found[node_id] = None
        elif parts := [it for it in notes if it is not None and not it.is_empty()]:
            together = found[node_id] = ArrayChanges(parts[0].rank)
            for it in parts:
                together.set_many(it.columns())
    return found


def news_since(
    seen: ChangeSet,
    now: ChangeSet,
    base: Nodes,
    stamps: Mapping[NodeId, int],
    noted: Sequence[Noted] = (),
) -> News:
    """Return the changes since a state.

    Args:
        seen: the state, against ``base``.
        now: the changes that were made from it, against the same.
        base: the nodes of the snapshot.
        stamps: of the arrays in that state.
        noted: what was noted since, in order. What was not noted is found by comparison. Then a
            chunk that was set to what it was already is no news.

    Cost: in proportion to the news if they were noted; else to the arrays that were touched.
    """
    # All of them: the commit requires that they exist, also those that were known before.
    part = ChangeSet(sources=now.sources)
    was_there: dict[NodeId, Node | None] = {}
    known = {node.id: node for node in seen.new.values()}
    for path, node in now.new.items():
        was = known.pop(node.id, None)
        if was is None:
            part.new[path] = node
        elif was is not node and was != node:
            part.updated[node.id], was_there[node.id] = node, was
    for node in known.values():
        part.deleted[node.id] = Deleted(node.path, node.array is not None)
        was_there[node.id] = node
    for node_id, node in now.updated.items():
        was = seen.updated.get(node_id)
        # Identity first: nodes are shared until they change, and documents may be long.
        if was is not node and was != node:
            part.updated[node_id], was_there[node_id] = node, was or base.get(node.path)
    for node_id in now.deleted.keys() - seen.deleted.keys():
        gone = part.deleted[node_id] = now.deleted[node_id]
        was_there[node_id] = seen.updated.get(node_id) or base.get(gone.path)
    for node_id, it in now.chunks.items():
        notes = [notes[node_id] for notes in noted if node_id in notes]
        chunks = _new_chunks(it, seen.chunks.get(node_id), notes)
        if not chunks.is_empty() or chunks.kept_grid is not None:
            part.chunks[node_id] = chunks
    touched = [*part.chunks, *part.deleted]
    return News(
        part,
        {node_id: _digest_of(node) for node_id, node in was_there.items()},
        {it: stamps[it] for it in touched if it in stamps},
    )


def _new_chunks(
    now: ArrayChanges, seen: ArrayChanges | None, notes: Sequence[ArrayChanges | None]
) -> ArrayChanges:
    if seen is None or seen.rank != now.rank:
        new = now.copy()
        new.journal = None
        return new
    new = ArrayChanges(now.rank)
    if now.revision and _same_chunks(now, seen):
        return new
    shrunk = now.kept_grid is not None and now.kept_grid != seen.kept_grid
    if notes and all(it is not None for it in notes):
        new.set_many(ChunkRefs.concat([it.columns() for it in notes if it is not None]))
    else:
        # `shrink` edits, and what was seen is compared with again later.
        was = seen.copy()
        if shrunk:
            was.shrink(now.kept_grid or ())
        new.set_many(compare_refs(was.columns(), now.columns()).after)
    if shrunk:
        new.kept_grid = now.kept_grid
    return new


def _digest(document: bytes) -> bytes:
    return blake2b(document, digest_size=_DIGEST_BYTES).digest()


def _digest_of(node: Node | None) -> bytes:
    return b"" if node is None else _digest(node.user_data)  # none: the bytes of a fork lie


class SincePublished:
    """The changes of a session since the state that news were made on."""

    def __init__(
        self, merger: Merger, base: Nodes, stamps: Mapping[NodeId, int], news: News
    ) -> None:
        """Look at the session's changes as merged so far.

        Args:
            merger: what the news are merged by.
            base: the nodes of the session's base.
            stamps: of the session's arrays, with those that were merged before.
            news: what is to be merged.
        """
        self._merger = merger
        self._base = base
        self._stamps = stamps
        self._news = news

    def _node(self, node_id: NodeId, path: str) -> Node | None:
        changes = self._merger.changes
        created = changes.new.get(path)
        if created is not None and created.id == node_id:
            return created
        node = changes.updated.get(node_id) or self._base.get(path)
        return node if node is not None and node.id == node_id else None

    def deleted(self, node_id: NodeId) -> bool:
        """Return whether no node has this id any more."""
        if node_id in self._merger.created:
            return False
        return node_id in self._merger.changes.deleted or self._base.path_of(node_id) is None

    def path(self, node_id: NodeId) -> str | None:
        """Return the path of a node that was created, or deleted."""
        gone = self._merger.changes.deleted.get(node_id)
        return self._merger.created.get(node_id) if gone is None else gone.path

    def document(self, node_id: NodeId, path: str) -> bytes | None:
        """Return the metadata document of a node; None if it is not there."""
        node = self._node(node_id, path)
        return None if node is None else node.user_data

    def document_changed(self, node_id: NodeId, path: str) -> bool:
        """Return whether the document is another than the one that was changed or deleted."""
        document = self.document(node_id, path)
        return document is None or _digest(document) != self._news.digests.get(node_id)

    def chunks_changed(self, node_id: NodeId, *, waiting: bool) -> bool:
        """Return whether chunks were changed by others since; what waits has its stamp already."""
        del waiting
        return self._stamps.get(node_id) != self._news.stamps.get(node_id)


def in_order(shared: Shared, publications: Iterable[Publication]) -> list[Publication]:
    """Return publications in the order in which they count.

    Raises:
        FormatError: those of a fork do not follow one another.
    """
    # By stamp first; the id of the fork only makes the order the same for all who put them
    # together.
    ordered = sorted(publications, key=lambda it: (it.stamp, it.fork_id, it.number))
    taken, stamps = dict(shared.taken), dict[bytes, int]()
    for it in ordered:
        # A gap would mean that a publication is missing, and what builds on it would be laid over a
        # state that its maker never saw.
        if it.number != taken.get(it.fork_id, 0) or it.stamp <= stamps.get(it.fork_id, 0):
            raise FormatError(
                f"Publications of fork {it.fork_id.hex()} do not follow one another: number "
                f"{it.number} is out of order. They are damaged."
            )
        taken[it.fork_id], stamps[it.fork_id] = it.number + 1, it.stamp
    return ordered


def taken_in(shared: Shared, publications: Sequence[Publication], base: Base) -> Shared:
    """Return the shared state with publications, which are in order.

    Raises:
        MergeFailedError: they clash with each other, or with the session. All clashes are named.
        FormatError: they hold what no fork can have changed.

    Cost: in proportion to the publications, and one sort of the chunks of each array in them.
    """
    merger = Merger(shared.changes, base.id, path_of=base.nodes.path_of)
    stamps, clock = dict(shared.stamps), shared.clock
    taken, serials = dict(shared.taken), dict(shared.serials)
    touched: set[NodeId] = set()
    for it in publications:
        news = it.news
        for node in news.changes.new.values():
            # Ids are random, so that two forks do not draw the same. Equal ids at two paths come
            # from damage, or from bytes that were made to confuse.
            if merger.created.get(node.id, node.path) != node.path:
                raise FormatError(
                    f"Fork {it.fork_id.hex()} published {node.path!r} with the id of another node. "
                    "What it published is damaged."
                )
        since = SincePublished(merger, base.nodes, stamps, news)
        merger.add_since(news.changes, since, it.fork_id.hex())
        stamps = stamped(stamps, news, it.stamp)
        touched |= news.changes.touched()
        taken[it.fork_id], serials[it.fork_id] = it.number + 1, it.serial
        clock = max(clock, it.stamp)
    changes = merger.finish()
    # After all are in: one fork may fill an array that another created. Bytes of forks are
    # untrusted.
    check_fits(changes, base.nodes, base.spec_version, only=touched)
    return replace(
        shared, changes=changes, stamps=stamps, taken=taken, serials=serials, clock=clock
    )


def laid_over(shared: Shared, news: News, base: Base) -> ChangeSet:
    """Return the shared state with changes on top that nobody else knows.

    Raises:
        MergeFailedError: they clash.
    """
    merger = Merger(shared.changes, base.id, path_of=base.nodes.path_of)
    merger.add_since(news.changes, SincePublished(merger, base.nodes, shared.stamps, news))
    return merger.finish()


def with_unknown(
    stamps: Mapping[NodeId, int], known: ChangeSet, changes: ChangeSet
) -> dict[NodeId, int]:
    """Return the stamps of arrays, where others know only some of the changes."""
    found = dict(stamps)
    for node_id, it in changes.chunks.items():
        if not _same_chunks(it, known.chunks.get(node_id)):
            found[node_id] = UNKNOWN
    return found
