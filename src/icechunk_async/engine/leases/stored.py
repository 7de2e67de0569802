"""Read what a leased session spilled and its forks published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.publications import Shared, in_order
from icechunk_async.engine.leases.files import (
    PublicationName,
    decode_publication,
    decode_segment,
    replay,
)
from icechunk_async.errors import FormatError, ObjectNotFoundError, StorageUnavailableError
from icechunk_async.format.layout import spill_prefix
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from icechunk_async.engine.changes.publications import Publication
    from icechunk_async.engine.leases.files import Segment
    from icechunk_async.engine.leases.record import LeaseRecord
    from icechunk_async.format.ids import SessionId, SnapshotId
    from icechunk_async.storage import Storage

__all__ = [
    "IncompleteListing",
    "Place",
    "Stored",
    "listed",
    "never_complete",
    "publications_of",
    "segments_of",
    "shared_of",
]

_AT_ONCE: Final = 16


class IncompleteListing(Exception):  # noqa: N818 -- not for users
    """A listing does not show what others already build on, or shows what is gone: list again."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The names of what a session spilled and its forks published."""

    segments: frozenset[str]
    publications: frozenset[PublicationName]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the forks of a session publish."""

    storage: Storage
    session_id: SessionId
    base_id: SnapshotId
    """The snapshot that the session builds on."""


async def listed(storage: Storage, session_id: SessionId) -> Stored:
    """Return the names of what a session stored. Cost: one listing."""
    prefix = spill_prefix(session_id)
    segments: set[str] = set()
    publications: set[PublicationName] = set()
    entries = storage.list_prefix(prefix)
    async with closing(entries):
        async for entry in entries:
            if isinstance(entry, ObjectInfo):
                name = entry.key.removeprefix(prefix)
                published = PublicationName.parse(name)
                if published is None:
                    segments.add(name)
                else:
                    publications.add(published)
    return Stored(frozenset(segments), frozenset(publications))


async def segments_of(
    storage: Storage, session_id: SessionId, names: Sequence[str]
) -> list[Segment]:
    """Return segments by name.

    Raises:
        IncompleteListing: one is gone.
        FormatError: one is damaged.

    Cost: a request for each.
    """

    async def read(name: str) -> Segment:
        key = f"{spill_prefix(session_id)}{_checked(name, session_id)}"
        try:
            data = (await storage.get(key)).data
        except ObjectNotFoundError as error:
            raise IncompleteListing(key) from error
        return decode_segment(data, session_id, key)

    return await bounded_map(read, names, limit=_AT_ONCE)


def _checked(name: str, session_id: SessionId) -> str:
    # It becomes part of a key: `../` or another session's folder must not.
    if not name.isalnum():
        raise FormatError(f"The lease of session {session_id} names a file {name[:40]!r}.")
    return name


def shared_of(
    record: LeaseRecord, segments: Sequence[Segment], before: Shared | None = None
) -> Shared:
    """Return the state that forks see, of the segments that hold it, after earlier ones."""
    stamps = {} if before is None else dict(before.stamps)
    for it in segments:
        stamps.update(it.stamps)
    changes = replay(record.base_id, segments, None if before is None else before.changes)
    return Shared(
        changes, stamps, record.taken, record.serials, clock=record.clock, since=record.since
    )


async def publications_of(
    place: Place,
    shared: Shared,
    names: Iterable[PublicationName],
    known: dict[PublicationName, Publication],
) -> list[Publication]:
    """Return the publications that are not in the shared state yet, in the order they count.

    Args:
        place: where they are.
        shared: the state without them.
        names: of all that count.
        known: those that were read before; gets all that are returned, and no others stay.

    Raises:
        IncompleteListing: one is gone, or builds on one that is not there yet.
        FormatError: one is damaged.

    Cost: a request for each that was not known.
    """
    wanted = [it for it in names if shared.takes(it.fork_id, it.number)]

    async def read(name: PublicationName) -> Publication:
        key = f"{spill_prefix(place.session_id)}{name}"
        try:
            data = (await place.storage.get(key)).data
        except ObjectNotFoundError as error:
            raise IncompleteListing(key) from error
        return decode_publication(data, place.session_id, place.base_id, name, key)

    missing = [it for it in wanted if it not in known]
    found = dict(zip(missing, await bounded_map(read, missing, limit=_AT_ONCE), strict=True))
    found |= {it: known[it] for it in wanted if it in known}
    known.clear()
    known.update(found)
    counts = dict(shared.taken)
    for name in sorted(wanted, key=lambda it: it.number):
        # A fork counts its publications without a gap, so a gap is one that the listing lacks.
        if name.number != counts.get(name.fork_id, 0):
            raise IncompleteListing(str(name))
        counts[name.fork_id] = name.number + 1
    # A listing may show a publication and not yet an older one of another fork that it builds on.
    together = Shared(taken=counts)
    if not all(together.covers(it.seen) for it in found.values()):
        raise IncompleteListing
    return in_order(shared, found.values())


def never_complete(session_id: SessionId) -> StorageUnavailableError:
    """Return the error where no listing was complete."""
    return StorageUnavailableError(
        f"What forks of session {session_id} published could not be read: each listing lacked "
        "publications that others build on, or objects that it showed were deleted. Try again; if "
        "it fails again, files of the session are lost."
    )
