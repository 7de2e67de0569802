"""A lease as bytes: who holds a session, what it began at, and what it spilled.

One msgpack document in a zstd frame with a checksum, behind a magic number and a version. When it
was renewed is not in it: that is the object's time of modification, by the storage's clock.
"""

from __future__ import annotations

import os
import socket
from dataclasses import field, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final, Self, cast

import msgpack
import zstandard

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.publications import GIVEN_UP
from icechunk_async.engine.changes.wire import counts_of, counts_to
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.envelope import decompress
from icechunk_async.format.ids import SessionId, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "LeaseRecord",
    "LeaseState",
    "decode_document",
    "decode_lease",
    "default_owner",
    "encode_document",
    "encode_lease",
    "lease_duration_us",
    "typed",
]

_MAGIC: Final = b"ICALEASE"
_VERSION: Final = 1
_HEAD_BYTES: Final = len(_MAGIC) + 1
_LEVEL: Final = 3
_DEFAULT: Final = timedelta(hours=24)
_SHORTEST: Final = timedelta(minutes=1)
_LONGEST: Final = timedelta(days=7)
_MICROSECOND: Final = timedelta(microseconds=1)
_TOKEN_BYTES: Final = 12
_MAX_TEXT: Final = 1000
_MAX_US: Final = 1 << 62
_MOST_SEGMENTS: Final = 1000
"""More than any session spills, see ``spiller``."""


def lease_duration_us(lease: timedelta | bool) -> int:  # noqa: FBT001 -- True is a value here
    """Return for how long a lease holds without being renewed; 24 hours for True.

    Raises:
        InvalidInputError: it is shorter than a minute or longer than 7 days.
    """
    duration = _DEFAULT if lease is True else lease
    if not isinstance(duration, timedelta) or not _SHORTEST <= duration <= _LONGEST:
        raise InvalidInputError(
            f"A session cannot have a lease of {lease!r}: it holds for one minute to 7 days after "
            "each renewal, and a session in use renews it. Give a timedelta, or True for 24 hours."
        )
    return duration // _MICROSECOND


def default_owner() -> str:
    """Return the owner of a lease if nobody names one: the host and the process."""
    return f"{socket.gethostname()}, process {os.getpid()}"


class LeaseState(Enum):
    """The states of a leased session that are stored; that it expired is not."""

    OPEN = "open"
    """It may be written and committed, unless its lease has expired."""
    COMMITTED = "committed"
    ENDED = "ended"
    """Given up, by its holder or by hand."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The contents of the object of a lease."""

    session_id: SessionId
    owner: str
    """For people: who began or resumed the session, and where."""
    branch: str
    base_id: SnapshotId
    duration_us: int
    """How long the lease holds after each renewal."""
    holder: bytes
    """Random; names the process that may renew it."""
    serial: bytes
    """Random; tells one renewal from another, where the reply to a write was lost."""
    began_us: int | None = None
    """When the session began, by the storage's clock; None until it is renewed first."""
    turn: int = 1
    """The number of processes that have held the session, this one included."""
    state: LeaseState = LeaseState.OPEN
    snapshot_id: SnapshotId | None = None
    """The commit of a session that was committed."""
    spilled: tuple[str, ...] = ()
    """Names of the segments that hold its changes, in the order in which they apply."""
    shared: int = 0
    """The number of those, from the first on, that the session's forks see."""
    taken: Mapping[bytes, int] = field(default_factory=dict["bytes", "int"])
    """The number of publications of each fork that these hold; -1: the fork was given up."""
    serials: Mapping[bytes, bytes] = field(default_factory=dict["bytes", "bytes"])
    """The serial of the last of these, which tells copies of a fork from one another."""
    clock: int = 0
    """The highest stamp among the changes that forks see."""
    generation: int = 0
    """Forks of this generation may publish. A new one begins where the session is resumed, is
    rebased or discards its changes."""
    since: int = 0
    """Publications of this generation and later ones count: those of earlier ones do not fit."""
    decided: int = 0
    """Of forks of earlier generations it was decided which publications count, when the session was
    resumed: those that were there."""
    accepted: Mapping[bytes, int] = field(default_factory=dict["bytes", "int"])
    """The number of those by fork, as far as they were not taken in then."""
    sealed: bool = False
    """Whether the session is being published, so that nobody knows whether a fork is in time."""

    @classmethod
    def begin(
        cls, session_id: SessionId, owner: str, branch: str, base_id: SnapshotId, duration_us: int
    ) -> Self:
        """Return the first record of a session."""
        holder = clock.random_bytes(_TOKEN_BYTES)
        return cls(session_id, owner, branch, base_id, duration_us, holder, holder)

    def renewed(self) -> Self:
        """Return the record under another serial."""
        return replace(self, serial=clock.random_bytes(_TOKEN_BYTES))

    def counts(self, generation: int, fork_id: bytes, number: int) -> bool:
        """Return whether a publication is part of the session, once it is taken in."""
        if generation < self.since or self.taken.get(fork_id) == GIVEN_UP:
            return False
        return generation >= self.decided or number < self.accepted.get(fork_id, 0)

    def taken_over(self, owner: str) -> Self:
        """Return the record for another process that continues the session."""
        holder = clock.random_bytes(_TOKEN_BYTES)
        return replace(
            self,
            owner=owner,
            holder=holder,
            turn=self.turn + 1,
            generation=self.generation + 1,
            sealed=False,
        )


def encode_document(kind: str, document: Mapping[str, object]) -> bytes:
    """Return a document of a kind as bytes."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    packed = msgpack.packb({**document, "kind": kind})
    return _MAGIC + bytes([_VERSION]) + compressor.compress(packed)


def decode_document(kind: str, data: bytes | memoryview, where: str) -> dict[str, object]:
    """Read what `encode_document` wrote.

    Raises:
        FormatError: it is damaged, of another kind, or of a newer version of this library.
    """
    view = memoryview(data)
    if bytes(view[: len(_MAGIC)]) != _MAGIC or len(view) <= _HEAD_BYTES:
        raise FormatError(f"{where!r} is not a file of leases, or only the beginning of one.")
    # Before anything is decoded: a newer version may pack it in another way.
    if view[len(_MAGIC)] != _VERSION:
        raise FormatError(
            f"{where!r} is of version {view[len(_MAGIC)]} of the format of leases, and this "
            f"library reads version {_VERSION}. Use the newest icechunk-async."
        )
    try:
        # `decompress` bounds what a small file can become, and msgpack refuses lengths beyond its
        # input.
        document = msgpack.unpackb(bytes(decompress(view[_HEAD_BYTES:], where)))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{where!r} is damaged: {error!r}.") from error
    found = cast("dict[str, object]", document) if isinstance(document, dict) else {}
    if found.get("kind") != kind:
        raise FormatError(f"{where!r} is not a {kind}.")
    return found


def typed[T](value: object, kind: type[T], where: str) -> T:
    """Return a value of a document that must be of a type.

    Raises:
        FormatError: it is of another.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(f"{where!r} holds a {type(value).__name__}, not a {kind.__name__}.")
    return value


def encode_lease(record: LeaseRecord) -> bytes:
    """Return a lease as bytes."""
    return encode_document(
        "lease",
        {
            "session": bytes(record.session_id),
            "owner": record.owner,
            "branch": record.branch,
            "base": bytes(record.base_id),
            "duration": record.duration_us,
            "holder": record.holder,
            "serial": record.serial,
            "began": record.began_us,
            "turn": record.turn,
            "state": record.state.value,
            "snapshot": None if record.snapshot_id is None else bytes(record.snapshot_id),
            "spilled": list(record.spilled),
            "shared": record.shared,
            "taken": counts_to(record.taken),
            "serials": sorted([it, serial] for it, serial in record.serials.items()),
            "clock": record.clock,
            "generation": record.generation,
            "since": record.since,
            "decided": record.decided,
            "accepted": counts_to(record.accepted),
            "sealed": record.sealed,
        },
    )


def decode_lease(data: bytes | memoryview, session_id: SessionId, where: str) -> LeaseRecord:
    """Read a lease.

    Raises:
        FormatError: it is damaged, or that of another session.
    """
    document = decode_document("lease", data, where)

    def value[T](name: str, kind: type[T]) -> T:
        return typed(document.get(name), kind, where)

    def number(name: str, most: int = _MAX_US) -> int:
        found = value(name, int)
        if not 0 <= found <= most:
            raise FormatError(f"{where!r} holds the number {found}, which cannot be.")
        return found

    def text(name: str) -> str:
        # Cut rather than refused: it is shown to people, and nothing depends on it.
        return value(name, str)[:_MAX_TEXT]

    try:
        snapshot = document.get("snapshot")
        spilled = cast("list[object]", value("spilled", list))
        # Each costs a request when the session is resumed.
        if len(spilled) > _MOST_SEGMENTS:
            raise FormatError(f"{where!r} names {len(spilled)} segments, which cannot be.")
        record = LeaseRecord(
            SessionId(value("session", bytes)),
            text("owner"),
            value("branch", str),
            SnapshotId(value("base", bytes)),
            # A longer one would let a file that somebody wrote stop collection for good.
            number("duration", _LONGEST // _MICROSECOND),
            value("holder", bytes),
            value("serial", bytes),
            None if document.get("began") is None else number("began"),
            number("turn"),
            LeaseState(value("state", str)),
            None if snapshot is None else SnapshotId(value("snapshot", bytes)),
            tuple(typed(it, str, where) for it in spilled),
            number("shared", len(spilled)),
            counts_of(document.get("taken")),
            {
                typed(fork_id, bytes, where): typed(serial, bytes, where)
                for fork_id, serial in cast("list[list[object]]", value("serials", list))
            },
            number("clock"),
            number("generation"),
            number("since"),
            number("decided"),
            counts_of(document.get("accepted")),
            value("sealed", bool),
        )
    except (ValueError, TypeError, InvalidInputError) as error:
        raise FormatError(f"{where!r} is damaged: {error}.") from error
    # The name of the file is what others list; the contents may have been copied to it.
    if record.session_id != session_id:
        raise FormatError(f"{where!r} is the lease of session {record.session_id}.")
    return record
