"""Publications as bytes, and their names: one object each, beside what their session spilled.

A name says which fork published, as which of its publications, and in which generation of forks.
It is created only if it is absent, so that no two copies of a fork publish the same number. Pure.
Bytes from storage are untrusted: damage is a `FormatError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, cast

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
    from icechunk_async.format.ids import SnapshotId

__all__ = ["PublicationName", "decode_publication", "encode_publication"]

_KIND: Final = "publication"
_MAX_STAMP: Final = 1 << 62
_NAME: Final = re.compile(r"([0-9]{8,18})-([0-9a-f]{12})-([0-9]{8,18})")


@dataclass(frozen=True, slots=True, order=True)
class PublicationName:
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
        _KIND,
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
    document = decode_document(_KIND, data, where)
    state = decode_fork(typed(document.get("changes"), bytes, where))
    number = typed(document.get("number"), int, where)
    stamp = typed(document.get("stamp"), int, where)
    found = (state.session_id, state.base_id, state.lineage.fork_id, number)
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
