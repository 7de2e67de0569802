"""Small values about repositories and sessions: versions, modes, states, flags, statistics."""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, Self, override

from icechunk_async._runtime.clock import from_us, now_us, to_us
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.sync.official.display import (
    Choice,
    Record,
    expression,
    literal,
    public,
    title_of,
)

if TYPE_CHECKING:
    from datetime import datetime

    from icechunk_async.format.operations_log import RepoStatus as NativeStatus

__all__ = [
    "Attribution",
    "ChunkStorageStats",
    "ChunkType",
    "FeatureFlag",
    "RepoAvailability",
    "RepoStatus",
    "SessionMode",
    "SpecVersion",
    "StorageObjectInfo",
]


@public("")
class SpecVersion(Choice):
    """A version of the Icechunk format."""

    v1 = 1
    v2 = 2

    @staticmethod
    def current() -> SpecVersion:
        """Return the version that new repositories are created in."""
        return SpecVersion.v2


@public("")
class ChunkType(Choice):
    """Where a chunk is."""

    uninitialized = 0
    native = 1
    virtual = 2
    inline = 3


@public("")
class SessionMode(Choice):
    """Whether a session reads, writes or moves nodes."""

    readonly = 0
    writable = 1
    rearrange = 2


@public("")
class RepoAvailability(Choice):
    """Whether a repository accepts changes."""

    online = 0
    read_only = 1


_AVAILABILITY: Final = {RepoAvailability.online: "Online", RepoAvailability.read_only: "ReadOnly"}


@public("repository")
@dataclass(frozen=True, repr=False)
class RepoStatus(Record):
    """Whether a repository accepts changes, since when, and why not.

    Attributes:
        availability: whether it accepts changes.
        set_at: since when; now by default.
        limited_availability_reason: why it accepts no changes.
    """

    availability: RepoAvailability
    set_at: datetime = None  # type: ignore[assignment]
    limited_availability_reason: str | None = None

    def __post_init__(self) -> None:
        """Take the present time if none is given."""
        if self.set_at is None:  # pyright: ignore[reportUnnecessaryComparison]
            # The dataclass is frozen, and the official class fills in the present time.
            object.__setattr__(self, "set_at", from_us(now_us()))

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("availability", _AVAILABILITY[self.availability]),
            ("set_at", self.set_at.isoformat()),
            ("limited_availability_reason", self.limited_availability_reason),
        ]

    @classmethod
    def from_native(cls, value: Any) -> Self:
        """Return the counterpart of the engine's; offline counts as read-only."""
        takes_changes = value.availability.value == RepoAvailability.online
        # The format has a third state, Offline, for which the official package has no name either.
        availability = RepoAvailability.online if takes_changes else RepoAvailability.read_only
        return cls(availability, from_us(value.set_at), value.reason)

    def to_native(self) -> NativeStatus:
        """Return the engine's counterpart."""
        from icechunk_async.format import operations_log as updates  # noqa: PLC0415 - needs NumPy

        availability = updates.Availability(int(self.availability))
        reason = self.limited_availability_reason
        return updates.RepoStatus(availability, to_us(self.set_at), reason)


@public("config")
@dataclass(frozen=True, repr=False)
class FeatureFlag(Record):
    """A feature that can be switched, and whether it is on."""

    id: int
    name: str
    default_enabled: bool
    setting: bool | None
    """The setting for this repository; None for the default."""
    enabled: bool


_CLIENT: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(/[A-Za-z0-9!#$%&'*+.^_`|~-]+)?")
_LABEL: Final = re.compile(r"[ !#-'*-:<>-\[\]-~]{0,128}")
"""Printable ASCII without what separates labels."""


@public("")
@dataclass(frozen=True, repr=False)
class Attribution(Record):
    r"""Labels in the User-Agent of the requests for a repository, for the access logs of buckets.

    They are sent to S3, Google Cloud Storage, Azure and web servers, unless the caller opened the
    storage. Requests for virtual chunks have none.

    Attributes:
        client: the software that makes the requests, `name` or `name/version`.
        workload: the purpose of the requests.
        principal: the person or service that they are made for.

    Raises:
        ValueError: `client` is not such a name, or another text is longer than 128 characters,
            not printable ASCII, or has one of `( ) \ ; = "`.
    """

    client: str | None = field(default=None, kw_only=True)
    workload: str | None = field(default=None, kw_only=True)
    principal: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise an error for a client that no header could carry."""
        if self.client is not None and (
            len(self.client) > 128 or not _CLIENT.fullmatch(self.client)
        ):
            raise ValueError(
                f"Attribution(client={self.client!r:.140}): use a name, or name/version, of at "
                "most 128 letters, digits and characters that HTTP allows in tokens."
            )
        for name in ("workload", "principal"):
            value: str | None = getattr(self, name)
            if value is not None and not _LABEL.fullmatch(value):
                raise ValueError(
                    f"Attribution({name}={value!r:.140}): use at most 128 printable ASCII "
                    'characters, none of them one of ( ) \\ ; = and ".'
                )

    @override
    def __repr__(self) -> str:
        return expression(title_of(type(self)), super()._rows())

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(name, literal(value)) for name, value in super()._rows()]


@public("")
@dataclass(frozen=True, repr=False)
class ChunkStorageStats(Record):
    """The bytes of the chunks of a repository."""

    native_bytes: int
    """In the repository's own objects."""
    virtual_bytes: int
    """In objects outside of the repository."""
    inlined_bytes: int
    """Within manifests."""

    def non_virtual_bytes(self) -> int:
        """Return the bytes in the repository itself."""
        return self.native_bytes + self.inlined_bytes

    def total_bytes(self) -> int:
        """Return the bytes of all chunks."""
        return self.non_virtual_bytes() + self.virtual_bytes

    def __add__(self, other: ChunkStorageStats, /) -> ChunkStorageStats:
        if not isinstance(other, ChunkStorageStats):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return ChunkStorageStats(
            self.native_bytes + other.native_bytes,
            self.virtual_bytes + other.virtual_bytes,
            self.inlined_bytes + other.inlined_bytes,
        )


@public("storage")
@dataclass(frozen=True, repr=False)
class StorageObjectInfo(Record):
    """One object in the listing of a storage."""

    key: str
    size_bytes: int
    created_at: datetime
    """The time of the last write."""
