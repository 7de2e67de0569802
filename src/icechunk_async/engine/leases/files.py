"""The files of a leased session as bytes: the segments that it spilled, and publications of forks.

Each segment holds what changed since the one before it. Chunks that were set are in the encoding of
forks; what was taken back is listed beside it.

The name of a publication says which fork published, as which of its publications, and in which
generation of forks. It is created only if it is absent, so that no two copies of a fork publish the
same number.

Pure. Bytes from storage are untrusted: damage is a `FormatError`.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.change_set import ChangeSet
from icechunk_async.engine.changes.publications import News, Publication
from icechunk_async.engine.changes.wire import (
    ForkState,
    counts_of,
    counts_to,
    decode_fork,
    encode_fork,
    stamps_of,
    stamps_to,
)
from icechunk_async.engine.leases.record import decode_document, encode_document, typed
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.engine.changes.change_set import Deleted
    from icechunk_async.format.ids import SessionId, SnapshotId
    from icechunk_async.format.snapshot import Node

__all__ = [
    "PublicationName",
    "Segment",
    "Spilled",
    "decode_publication",
    "decode_segment",
    "encode_publication",
    "encode_segment",
    "replay",
]

_SPILL: Final = "spill"
_PUBLICATION: Final = "publication"
# A stamp has to grow for every publication after it, and msgpack has 64 bits for it.
_MAX_STAMP: Final = 1 << 62
# At most 18 digits: text that others wrote must not become an integer of any size.
_NAME: Final = re.compile(r"([0-9]{8,18})-([0-9a-f]{12})-([0-9]{8,18})")


@dataclass(frozen=True, slots=True)
class Segment:
    """The changes of a session since the segment before it."""

    base_id: SnapshotId
    changes: ChangeSet
    """Nodes and chunks that were set."""
    whole: frozenset[NodeId] = frozenset()
    """Arrays whose changes take the place of those in earlier segments."""
    not_new: frozenset[str] = frozenset()
    """Paths of nodes that earlier segments create and that are not created any more."""
    not_updated: frozenset[NodeId] = frozenset()
    not_deleted: frozenset[NodeId] = frozenset()
    stamps: Mapping[NodeId, int] = field(default_factory=dict["NodeId", "int"])
    """When arrays were changed last, for the session's forks; see ``changes.publications``."""

    def is_empty(self) -> bool:
        """Return whether replaying it changes nothing."""
        taken_back = self.whole or self.not_new or self.not_updated or self.not_deleted
        return self.changes.is_empty() and not taken_back and not self.stamps


@dataclass(slots=True)
class Spilled:
    """The contents of the segments so far, as far as telling what is new needs them."""

    base_id: SnapshotId
    new: dict[str, Node] = field(default_factory=dict["str", "Node"])
    updated: dict[NodeId, Node] = field(default_factory=dict["NodeId", "Node"])
    deleted: dict[NodeId, Deleted] = field(default_factory=dict["NodeId", "Deleted"])
    revisions: Mapping[NodeId, int] = field(default_factory=dict["NodeId", "int"])
    """The revisions of arrays with changes."""

    @classmethod
    def of(cls, base_id: SnapshotId, changes: ChangeSet) -> Self:
        """Return the state in which segments hold just these changes."""
        revisions = {node_id: it.revision for node_id, it in changes.chunks.items()}
        return cls(
            base_id, dict(changes.new), dict(changes.updated), dict(changes.deleted), revisions
        )

    def take(self, changes: ChangeSet) -> tuple[Segment, Self]:
        """Return the new part of a session's changes, and the state that is spilled with it.

        The changes begin to note what is set from now on.
        """
        part = ChangeSet(sources=changes.sources)
        # By identity: nodes are replaced, never changed, so that nothing is compared by value.
        part.new = {k: it for k, it in changes.new.items() if self.new.get(k) is not it}
        part.updated = {k: it for k, it in changes.updated.items() if self.updated.get(k) is not it}
        part.deleted = {k: it for k, it in changes.deleted.items() if self.deleted.get(k) != it}
        # Arrays without changes any more, as after `discard` or a deletion: replaying drops what
        # there was.
        whole = self.revisions.keys() - changes.chunks.keys()
        for node_id, it in changes.chunks.items():
            journal = it.taken_journal()
            if journal is None and it.revision and self.revisions.get(node_id) == it.revision:
                continue
            # Nobody noted what was set, or some of it was undone, which a list of what was set
            # cannot tell.
            if journal is None or node_id not in self.revisions:
                whole.add(node_id)
                part.chunks[node_id] = it.copy()
            # The same number means that nothing was set since, and the journal is empty.
            elif self.revisions[node_id] != it.revision:
                journal.kept_grid = it.kept_grid
                part.chunks[node_id] = journal
        segment = Segment(
            self.base_id,
            part,
            frozenset(whole),
            frozenset(self.new.keys() - changes.new.keys()),
            frozenset(self.updated.keys() - changes.updated.keys()),
            frozenset(self.deleted.keys() - changes.deleted.keys()),
        )
        return segment, self.of(self.base_id, changes)


def encode_segment(session_id: SessionId, segment: Segment) -> bytes:
    """Return a segment as bytes. Cost: some 12 to 25 bytes for each chunk that was set."""
    state = ForkState(session_id, segment.base_id, segment.changes)
    return encode_document(
        _SPILL,
        {
            "changes": encode_fork(state),
            "whole": sorted(map(bytes, segment.whole)),
            "not_new": sorted(segment.not_new),
            "not_updated": sorted(map(bytes, segment.not_updated)),
            "not_deleted": sorted(map(bytes, segment.not_deleted)),
            "stamps": stamps_to(segment.stamps),
        },
    )


def decode_segment(data: bytes | memoryview, session_id: SessionId, where: str) -> Segment:
    """Read a segment.

    Raises:
        FormatError: it is damaged, or of another session.
    """
    document = decode_document(_SPILL, data, where)

    def items[T](name: str, kind: type[T]) -> Iterable[T]:
        found = cast("list[object]", typed(document.get(name), list, where))
        return [typed(it, kind, where) for it in found]

    # One decoder reads all changes of untrusted origin: forks that travel, segments, publications.
    state = decode_fork(typed(document.get("changes"), bytes, where))
    if state.session_id != session_id:
        raise FormatError(f"{where!r} is of another session than {session_id}.")
    try:
        return Segment(
            state.base_id,
            state.changes,
            frozenset(NodeId(it) for it in items("whole", bytes)),
            frozenset(items("not_new", str)),
            frozenset(NodeId(it) for it in items("not_updated", bytes)),
            frozenset(NodeId(it) for it in items("not_deleted", bytes)),
            stamps_of(document.get("stamps")),
        )
    except InvalidInputError as error:
        raise FormatError(f"{where!r} is damaged: {error}.") from error


def replay(
    base_id: SnapshotId, segments: Sequence[Segment], before: ChangeSet | None = None
) -> ChangeSet:
    """Return the changes that segments, in their order, lead to.

    Args:
        base_id: the snapshot that they are against.
        segments: those to apply.
        before: what earlier ones led to, which is not touched.

    Raises:
        FormatError: they are against another snapshot, or do not follow one another.
    """
    changes = ChangeSet() if before is None else before.copy()
    for segment in segments:
        if segment.base_id != base_id:
            raise FormatError(
                f"Spilled changes are against snapshot {segment.base_id}, and their session builds "
                f"on {base_id}. They are damaged."
            )
        part = segment.changes
        # Taken back first, then set: a node that was deleted and created anew is in both.
        _leave_out(changes.new, segment.not_new)
        _leave_out(changes.updated, segment.not_updated)
        _leave_out(changes.deleted, segment.not_deleted)
        for node_id in segment.whole:
            changes.chunks.pop(node_id, None)
        changes.new |= part.new
        changes.updated |= part.updated
        changes.deleted |= part.deleted
        for node_id, it in part.chunks.items():
            known = changes.chunks.get(node_id)
            if known is None:
                changes.chunks[node_id] = it.copy()
                continue
            if known.rank != it.rank:
                raise FormatError("Spilled changes give an array another number of axes.")
            known.set_many(it.columns())
            known.kept_grid = it.kept_grid
        # Each segment holds all of them, so the newest counts.
        changes.sources = part.sources
    return changes


def _leave_out[K](entries: dict[K, Any], keys: Iterable[K]) -> None:
    for key in keys:
        entries.pop(key, None)


class PublicationName(NamedTuple):
    """The name of a publication."""

    generation: int
    fork_id: bytes
    number: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a name; None if it is that of something else."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        generation, fork_id, number = found.groups()
        return cls(int(generation), bytes.fromhex(fork_id), int(number))

    def __str__(self) -> str:
        return f"{self.generation:08d}-{self.fork_id.hex()}-{self.number:08d}"


def encode_publication(session_id: bytes, base_id: SnapshotId, publication: Publication) -> bytes:
    """Return a publication as bytes. Cost: some 12 to 25 bytes for each chunk that was changed."""
    news = publication.news
    state = ForkState(session_id, base_id, news.changes, publication.lineage)
    return encode_document(
        _PUBLICATION,
        {
            "changes": encode_fork(state),
            "number": publication.number,
            "stamp": publication.stamp,
            "serial": publication.serial,
            "digests": sorted([bytes(it), digest] for it, digest in news.digests.items()),
            "stamps": stamps_to(news.stamps),
            "seen": counts_to(publication.seen),
        },
    )


def decode_publication(
    data: bytes | memoryview,
    session_id: bytes,
    base_id: SnapshotId,
    name: PublicationName,
    where: str,
) -> Publication:
    """Read a publication.

    Raises:
        FormatError: it is damaged, of another fork or session, or against another base.
    """
    document = decode_document(_PUBLICATION, data, where)
    state = decode_fork(typed(document.get("changes"), bytes, where))
    number = typed(document.get("number"), int, where)
    stamp = typed(document.get("stamp"), int, where)
    found = (state.session_id, state.base_id, state.lineage.fork_id, number)
    # The name is what others rely on when they count; the contents may have been copied to it.
    if found != (session_id, base_id, name.fork_id, name.number):
        raise FormatError(f"{where!r} is another publication, or of another session.")
    if not 0 < stamp < _MAX_STAMP:
        raise FormatError(f"{where!r} holds the stamp {stamp}, which cannot be.")
    try:
        digests = {
            NodeId(typed(node_id, bytes, where)): typed(digest, bytes, where)
            for node_id, digest in cast(
                "list[list[object]]", typed(document.get("digests"), list, where)
            )
        }
        news = News(state.changes, digests, stamps_of(document.get("stamps")))
        seen = counts_of(document.get("seen"))
    except (ValueError, TypeError, InvalidInputError) as error:
        raise FormatError(f"{where!r} is damaged: {error}.") from error
    serial = typed(document.get("serial"), bytes, where)
    return Publication(name.fork_id, number, stamp, news, seen, state.lineage, serial)
