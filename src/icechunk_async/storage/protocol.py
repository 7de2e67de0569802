"""The storage contract: seven operations of an object store and what each promises.

A backend is any class with these methods (no base class is needed) that raises the errors of
`icechunk_async.errors`. The promises are checked one by one by
`icechunk_async.testing.conformance`.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidObjectKeyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from datetime import datetime

    from icechunk_async.errors import IcechunkError

__all__ = [
    "ABSENT",
    "MAX_KEY_BYTES",
    "Absent",
    "BlockingStorage",
    "ByteRange",
    "Capabilities",
    "CommonPrefix",
    "Data",
    "DeleteFailure",
    "Expected",
    "ListEntry",
    "ObjectInfo",
    "Retrieved",
    "Storage",
    "StorageDescription",
    "SuffixRange",
    "Version",
    "check_key",
    "slice_range",
]

MAX_KEY_BYTES: Final = 1024
"""The longest key, in UTF-8 bytes; the smallest limit of the large services."""

type Data = bytes | bytearray | memoryview
"""The types of bytes that can be written."""


@dataclass(frozen=True, slots=True)
class Version:
    """One state of one object, opaque: an ETag, a generation, a file's identity.

    States of a key that hold different bytes never have the same version; states that hold equal
    bytes may.
    """

    token: str


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""As an expectation: there is no object with this key."""

type Expected = Version | Absent | None
"""The state that a write expects to replace: this version, nothing (`ABSENT`), or anything
(None)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of an object; to its end where ``stop`` is None.

    Behaves like a slice: what lies beyond the end of the object is left out.
    """

    start: int
    stop: int | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` unless ``0 <= start <= stop``."""
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ValueError(f"a byte range needs 0 <= start <= stop, not {self}")


@dataclass(frozen=True, slots=True)
class SuffixRange:
    """The last ``length`` bytes of an object; all of it where it is shorter."""

    length: int

    def __post_init__(self) -> None:
        """Raise `ValueError` if the length is negative."""
        if self.length < 0:
            raise ValueError(f"a suffix needs a length of at least 0, not {self.length}")


type RangeRequest = ByteRange | SuffixRange | None
"""Part of an object, or (None) all of it."""


def slice_range(request: RangeRequest, size_bytes: int) -> tuple[int, int]:
    """Return ``(start, stop)`` of a request in an object of ``size_bytes``, clamped to it."""
    match request:
        case None:
            return 0, size_bytes
        case ByteRange(start, stop):
            # Clamped at both ends, and never before its start: of 10 bytes ``[12, 20)`` is empty,
            # at 10.
            start = min(start, size_bytes)
            return start, size_bytes if stop is None else max(start, min(stop, size_bytes))
        case SuffixRange(length):
            return max(0, size_bytes - length), size_bytes


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The result of a read: bytes, and the one state of the object they come from."""

    data: bytes | memoryview
    """The bytes asked for."""
    version: Version
    size_bytes: int
    """Size of the whole object, also where a part was asked for."""
    last_modified: datetime | None = None
    """When the object was written by the store's clock (aware, UTC), where the store tells."""
    etag: str | None = None
    """The ETag that other programs see, where that is not the text of ``version``."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing."""

    key: str
    size_bytes: int
    last_modified: datetime
    """When the object was written, by the store's clock; aware, UTC."""


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A group of keys in a listing with a delimiter: their common beginning, ending in ``/``."""

    prefix: str


type ListEntry = ObjectInfo | CommonPrefix


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """A key that could not be deleted, and why."""

    key: str
    error: IcechunkError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of a storage; opening a repository fails if a needed one is missing."""

    writable: bool = True
    """``put``, ``delete`` and ``copy`` work at all."""
    conditional_create: bool = True
    """``put(if_version=ABSENT)`` is one atomic step."""
    conditional_update: bool = True
    """``put(if_version=Version)`` is one atomic step."""
    listing: bool = True
    """``list_prefix`` works."""
    final_deletion: bool = True
    """A conditional update that races a deletion does not bring the object back."""
    shared: bool = True
    """Other processes that open the same description see the same objects."""
    # Not compared: a handle that is opened again has the same promises, however they were found.
    verified: bool = field(default=False, compare=False)
    """The backend has verified these promises, by construction or by a trial when it was opened. If
    not, creating a repository starts with a trial of them."""
    documented: bool = field(default=False, compare=False)
    """The service documents for all its customers that a condition and its write are one step, and
    is reached encrypted, at its own address. The trial before a repository is created then looks
    for conditions that are ignored, and has no writers race."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reason for each promise that is not made, by field name, with what would help."""


@dataclass(frozen=True, slots=True)
class StorageDescription:
    """A storage as plain data: what is pickled, sent to workers and opened again there.

    ``options`` are the keyword arguments that ``open_storage`` was given. They are left out of
    the repr, since some are secrets.
    """

    url: str
    options: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)


class Storage(Protocol):
    """An object store, or a part of one below a prefix.

    Keys are relative, see `check_key`. Every method may raise

    * ``InvalidObjectKeyError``: a key is not acceptable; nothing was sent;
    * ``UnsafeStorageError``: ``capabilities`` do not promise what it needs; nothing was sent;
    * ``StorageUnavailableError``, ``PermissionDeniedError``, ``StorageError``: the store failed;
    * ``StorageClosedError``: the storage's ``async with`` block has ended. Calls in progress when
    it ends either finish or raise this.

    An object appears, is replaced and disappears as a whole: readers see the bytes of one
    ``put``, never a mixture, and a ``put`` that returned is seen by every later operation,
    listings included, of every handle.

    One handle may be used from several event loops, also at the same time. Cancelling a call
    leaves no task behind.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The promises of this storage; constant while it is open."""
        ...

    @property
    def description(self) -> StorageDescription:
        """The plain data from which ``open_storage`` makes an equal handle."""
        ...

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it.

        Ranges behave like slices: bytes beyond the end are left out, and a range outside the object
        is empty. All bytes of one reply are from one version.

        Raises:
            ObjectNotFoundError: no object has this key, for any range.

        Cancellation: no effect.
        """
        ...

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object, or return None if it is still at ``version``.

        Raises:
            ObjectNotFoundError: no object has this key.

        Cancellation: no effect.
        """
        ...

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object, replacing any other, and return its new version.

        With ``if_version`` the check and the write are one atomic step with respect to every other
        write, copy and deletion of the key, conditional or not, by any handle: of racing writers
        that expect the same state, exactly one lands. It is durable when the call returns, and so
        is, before others can see it, all that this handle changed and acknowledged before the call:
        a reference never outlives what it refers to.

        Bytes of ``data`` count, not items. The caller may change it once the call has returned
        or was cancelled.

        Raises:
            PreconditionFailedError: the object is in another state than ``if_version``
                expects; nothing changed. Never raised for a write that landed.
            OutcomeUnknownError: no answer came; the write may have landed, or may still land.
            StorageFullError: no room; nothing changed.

        Cancellation: the write may have landed, or may still land.
        """
        ...

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; a missing one counts as deleted.

        Returns:
            The keys that could not be deleted, each with its error; empty when all are gone.
            A failure does not keep the other keys from being deleted. Only an unacceptable key
            is raised, before anything is deleted.

        Cancellation: any of the keys may have been deleted.
        """
        ...

    def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List the objects whose keys begin with ``prefix``, in ascending order of UTF-8 bytes.

        ``prefix`` is a plain string, not a folder: ``"a"`` finds ``"a/b"`` and ``"ab"``. It and
        ``start_after`` may be any string. Errors come with the first entry, not with the call.

        Args:
            prefix: beginning of the keys; empty for all.
            start_after: leave out entries that are not greater than this string.
            delimiter: with ``"/"``, keys that have a further ``/`` after the prefix are
                grouped: each group is one `CommonPrefix`, in its place in the order. With
                ``start_after`` a group is compared by its own string.

        A key that exists during the whole listing is listed once; one that is written or
        deleted meanwhile may or may not be.

        Cancellation: no effect. Cost: one request a page; pages are fetched as they are read.
        """
        ...

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage and return the new version of ``target``.

        Args:
            source: key of the object to copy.
            target: key of the copy; an object there is replaced.
            if_version: copy only if ``source`` is at this version.

        Raises:
            ObjectNotFoundError: there is no ``source``.
            PreconditionFailedError: ``source``, which is ``context["key"]``, is at another
                version; nothing changed.
            OutcomeUnknownError: no answer came; the copy may exist.

        Cancellation: the copy may exist, whole.
        """
        ...

    async def sync(self) -> None:
        """Wait until everything this handle has acknowledged will survive a power cut.

        Returns at once if a ``put`` is durable when it returns. A conditional ``put`` needs no call
        before: what was written earlier is durable before it is seen.

        Raises:
            StorageError: some of it may not be stored; do not refer to it. Once bytes were lost,
                every later call raises this again.

        Cancellation: no effect.
        """
        ...


@runtime_checkable
class BlockingStorage(Protocol):
    """Optional methods that need no event loop: for memory and local disks, where a hop costs more.

    Contracts are those of the methods without the suffix. Callable from any thread, also at
    the same time.
    """

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it, on this thread."""
        ...

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole object, on this thread."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if it may name an object.

    A key is one or more segments joined by ``/``; no segment is empty, ``.`` or ``..``, and
    none holds a NUL. It is at most `MAX_KEY_BYTES` long in UTF-8; segments of up to 255
    bytes work everywhere. Whether both ``a`` and ``a/b`` can exist at once is left to the backend,
    which may also refuse names that it keeps for itself.

    Raises:
        InvalidObjectKeyError: it says which rule is broken.
    """
    # The length is asked last, since it needs the key in UTF-8. Lone surrogates have no such form,
    # and no service takes them.
    segments = key.split("/")
    if not all(segments) or "." in segments or ".." in segments:
        problem = "a segment is empty, '.' or '..'"
    elif "\0" in key:
        problem = "it holds a NUL"
    else:
        try:
            if len(key.encode()) <= MAX_KEY_BYTES:
                return key
            problem = f"it is longer than {MAX_KEY_BYTES} bytes"
        except UnicodeEncodeError:
            problem = "it is not valid Unicode"
    raise InvalidObjectKeyError(
        f"{key[:200]!r} cannot name an object: {problem}. "
        "Use relative segments joined by '/', such as 'chunks/ABC'.",
        key=key,
    )
