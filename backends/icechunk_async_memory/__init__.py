"""Objects in the memory of one process: the reference implementation of the storage contract.

``memory://name`` opens the objects kept under that name; every handle of the process that opens
the same name sees the same objects, until `forget` drops them or the process ends.
"""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Final, Literal

from icechunk_async.errors import (
    InvalidURLError,
    ObjectNotFoundError,
)
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    StorageDescription,
    Version,
    check_expected,
    check_key,
    listed,
    slice_range,
)
from icechunk_async.storage.ending import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator

__all__ = ["MemoryStorage", "forget", "open_memory"]

_SCHEME: Final = "memory://"
_CAPABILITIES: Final = Capabilities(
    shared=False,
    verified=True,
    reasons={"shared": "objects live in one process; use a file or a bucket to share them"},
)


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    version: Version
    last_modified: datetime


@dataclass(slots=True)
class _Space:
    """The objects of one name. ``lock`` is held over no ``await``."""

    objects: dict[str, _Stored] = field(default_factory=dict[str, _Stored])
    # Blocking calls come from any thread, and a check and its write are two steps.
    lock: threading.RLock = field(default_factory=threading.RLock)
    # One counter for all keys: an object that is deleted and written again gets a new version.
    versions: Iterator[int] = field(default_factory=lambda: count(1))


_spaces: Final[dict[str, _Space]] = {}
# Threads open storages as well: two of them must not make two spaces for a name.
_spaces_lock: Final = threading.Lock()


@asynccontextmanager
async def open_memory(url: str) -> AsyncGenerator[MemoryStorage]:
    """Open the objects named by ``memory://name``; an unknown name is empty.

    Raises:
        InvalidURLError: the name is missing.
    """
    name = url.removeprefix(_SCHEME)
    if not name or name == url:
        raise InvalidURLError(
            f"{url!r} names no memory storage. Use 'memory://some-name'.", url=url
        )
    with _spaces_lock:
        space = _spaces.setdefault(name, _Space())
    storage = MemoryStorage(url, space)
    try:
        yield storage
    finally:
        storage.close()


def forget(url: str) -> None:
    """Drop the objects kept under ``memory://name``; open handles keep seeing them."""
    with _spaces_lock:
        _spaces.pop(url.removeprefix(_SCHEME), None)


class MemoryStorage:
    """A `Storage` in memory; made by `open_memory`.

    No operation waits, so none can be cancelled half-way. It also works without an event loop
    (`BlockingStorage`), and reads bytes alone (`ByteReads`).
    """

    def __init__(self, url: str, space: _Space) -> None:
        """Make a handle; use `open_memory`."""
        self._description = StorageDescription(url)
        self._space = space
        self._closed: Ending | None = None

    def __repr__(self) -> str:
        """Show the URL."""
        return f"MemoryStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """All promises except sharing between processes."""
        return _CAPABILITIES

    @property
    def description(self) -> StorageDescription:
        """The URL; opens the same objects within this process only."""
        return self._description

    def close(self) -> None:
        """Refuse further use; the objects stay."""
        self._closed = Ending()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        return self.get_blocking(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        retrieved = self.get_blocking(key)
        return None if retrieved.version == version else retrieved

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        return self._put(key, data, if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; a missing one counts as deleted."""
        checked = [check_key(key) for key in keys]
        with self._open() as objects:
            # All keys were checked first, so that a bad one deletes nothing.
            for key in checked:
                objects.pop(key, None)
        return []

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List the objects present when the listing starts."""
        with self._open() as objects:
            # A copy of what is there: writers may change the dictionary between two entries.
            # Comparing str compares code points, which is the order of their UTF-8 bytes.
            found = [
                ObjectInfo(key, len(objects[key].data), objects[key].last_modified)
                for key in sorted(objects)
                if key.startswith(prefix)
            ]
        for entry in listed(found, prefix, start_after, delimiter):
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage."""
        check_key(target)
        with self._open() as objects:
            stored = _find(objects, check_key(source))
            check_expected(source, if_version, stored.version)
            return self._store(objects, target, stored.data)

    async def sync(self) -> None:
        """Return at once: nothing here survives the process."""
        self._check_open()

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it, on this thread."""
        check_key(key)
        with self._open() as objects:
            stored = _find(objects, key)
        # Outside of the lock: what is stored never changes, it is only replaced.
        start, stop = slice_range(byte_range, len(stored.data))
        data = stored.data[start:stop]
        return Retrieved(data, stored.version, len(stored.data), stored.last_modified)

    def is_at(self, key: str, version: Version) -> bool:
        """Return whether an object is at a version."""
        stored = self._space.objects.get(key)
        return not self._closed and stored is not None and stored.version == version

    def read_bytes(self, key: str, start: int, stop: int) -> bytes | None:
        """Return bytes of an object, on this thread."""
        self._check_open()
        # No lock: a stored object never changes, it is only replaced.
        stored = self._space.objects.get(key)
        return stored.data[start:stop] if stored and stop <= len(stored.data) else None

    def read_bytes_at_once(self, key: str, start: int, stop: int) -> bytes | None:
        """Return bytes of an object; all of them are in memory."""
        return self.read_bytes(key, start, stop)

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole object, on this thread."""
        return self._put(key, data, None)

    def _put(self, key: str, data: Data, expected: Expected) -> Version:
        check_key(key)
        owned = bytes(data)  # the caller may change its buffer afterwards
        with self._open() as objects:
            found = objects.get(key)
            check_expected(key, expected, found.version if found else ABSENT)
            return self._store(objects, key, owned)

    def _store(self, objects: dict[str, _Stored], key: str, data: bytes) -> Version:
        version = Version(str(next(self._space.versions)))
        objects[key] = _Stored(data, version, datetime.now(UTC))
        return version

    @contextmanager
    def _open(self) -> Generator[dict[str, _Stored]]:
        """Hold the lock over the objects of an open handle."""
        self._check_open()
        with self._space.lock:
            yield self._space.objects

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.error(repr(self))


def _find(objects: dict[str, _Stored], key: str) -> _Stored:
    try:
        return objects[key]
    except KeyError:
        raise ObjectNotFoundError(f"There is no object {key!r}.", key=key) from None
