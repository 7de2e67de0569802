"""Helpers for backends: checked conditions, sorted listings, storages of blocking functions."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

import anyio.to_thread

from icechunk_async.errors import (
    InvalidInputError,
    PreconditionFailedError,
    UnsafeStorageError,
)
from icechunk_async.storage.ending import Ending
from icechunk_async.storage.protocol import (
    Absent,
    Capabilities,
    CommonPrefix,
    ObjectInfo,
    check_key,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from icechunk_async.storage.protocol import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        StorageDescription,
        Version,
    )

__all__ = ["BlockingObjects", "ThreadedStorage", "check_expected", "check_user_agent", "listed"]

_LONGEST_AGENT: Final = 1024


def check_expected(key: str, expected: Expected, found: Version | Absent) -> None:
    """Raise an error if a write expects another state than was found.

    The check and the write that follows must be one atomic step: both under one lock, or in one
    transaction.

    Args:
        key: of the object whose state counts.
        expected: as ``put`` and ``copy`` are given it.
        found: the object's version, or ``ABSENT``.

    Raises:
        PreconditionFailedError: they differ.
    """
    if expected is None or expected == found:
        return
    state = "does not exist" if isinstance(found, Absent) else f"is at {found}"
    raise PreconditionFailedError(
        f"{key!r} {state}, not {expected}; nothing was changed. Read it again.",
        key=key,
        expected=expected,
    )


def listed(
    objects: Iterable[ObjectInfo],
    prefix: str = "",
    start_after: str | None = None,
    delimiter: Literal["/"] | None = None,
) -> Iterator[ListEntry]:
    """Yield the entries of a listing of these objects, see ``Storage.list_prefix``.

    For stores that do not group keys themselves. Of a listing in pages each is handed in by itself,
    with the last key of the page before as ``start_after``.

    Args:
        objects: in the order of their keys' UTF-8 bytes, which is that of ``str``; those that
            are not wanted are left out.
        prefix: see ``list_prefix``, as are the others.
        start_after: what is not greater is left out, groups included.
        delimiter: with ``"/"``, keys with a further ``/`` after the prefix are grouped.
    """
    # Keys of a group follow each other, so that comparing with the last name leaves each group
    # once. With the prefix ``a/`` the keys ``a/b/c`` and ``a/b/d`` are cut behind the next slash:
    # ``a/b/``.
    last = start_after
    for found in objects:
        cut = found.key.find("/", len(prefix)) + 1 if delimiter else 0
        name = found.key[:cut] if cut else found.key
        if found.key.startswith(prefix) and (last is None or name > last):
            last = name
            yield CommonPrefix(name) if cut else found


_PAGE_OBJECTS: Final = 1000
"""Objects of a listing that are drawn with one hop."""


def check_user_agent(value: object) -> None:
    """Validate an option ``user_agent``: the text of a header, or None.

    Raises:
        InvalidInputError: no header could carry it.
    """
    if value is None:
        return
    is_text = isinstance(value, str) and value.isascii() and value.isprintable()
    if not is_text or not 0 < len(str(value).strip()) <= len(str(value)) <= _LONGEST_AGENT:
        raise InvalidInputError(
            f"user_agent={value!r:.200} is not possible: use printable ASCII of 1 to "
            f"{_LONGEST_AGENT} characters.",
            option="user_agent",
        )


class BlockingObjects(Protocol):
    """The blocking functions that `ThreadedStorage` calls on threads.

    Methods are called on worker threads, several at the same time. Keys are checked before, and an
    operation that the capabilities do not promise is never called. The promises, and the errors to
    raise, are those of the methods of `Storage`.
    """

    def get(self, key: str, byte_range: RangeRequest) -> Retrieved:
        """Read an object or part of it."""
        ...

    def put(self, key: str, data: bytes, expected: Expected) -> Version:
        """Write one whole object, in one atomic step with the look at what is expected.

        It survives a power cut once this has returned.
        """
        ...

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """Delete objects; a missing one counts as deleted."""
        ...

    def list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield objects in ascending order of their keys' UTF-8 bytes; none is grouped.

        ``prefix`` and ``start_after`` may be any string and are there to skip what is not wanted;
        it may be yielded all the same. A thousand objects at a time are drawn, on any thread, and
        nothing may be locked between two of them.
        """
        ...


class ThreadedStorage:
    """A `Storage` made of blocking functions; each operation is one hop to a thread.

    It is used in an ``async with`` block, whose end closes it. A call that is cancelled waits for
    its thread, which cannot be interrupted. Copies pass through this process, and take two hops.
    """

    def __init__(
        self,
        objects: BlockingObjects,
        description: StorageDescription,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Make a handle; nothing is done yet.

        Args:
            objects: do the work.
            description: the URL and the options that were given.
            capabilities: what ``objects`` promise; everything where it is left out.
        """
        self._objects = objects
        self._description = description
        self._capabilities = capabilities or Capabilities()
        self._closed: Ending | None = None

    def __repr__(self) -> str:
        """Show the URL."""
        return f"{type(self).__name__}({self._description.url!r})"

    async def __aenter__(self) -> Self:
        """Begin the block in which it is used."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Refuse further use; what is under way is finished."""
        self._closed = Ending()

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities given to the constructor."""
        return self._capabilities

    @property
    def description(self) -> StorageDescription:
        """The URL, and the options that were given."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        check_key(key)
        return await self._run(partial(self._objects.get, key, byte_range))

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object, and answer it unless it is still at ``version``."""
        found = await self.get(key)
        return None if found.version == version else found

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        check_key(key)
        # Here, so that functions of backends need not refuse what they do not promise.
        self._check_promised("writable", f"write {key!r}")
        if isinstance(if_version, Absent):
            self._check_promised("conditional_create", f"create {key!r}")
        elif if_version is not None:
            self._check_promised("conditional_update", f"update {key!r} from {if_version}")
        owned = bytes(data)  # the caller may change its buffer after a cancellation
        return await self._run(partial(self._objects.put, key, owned, if_version))

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; a missing one counts as deleted."""
        doomed = [check_key(key) for key in keys]
        self._check_promised("writable", "delete objects")
        return await self._run(partial(self._objects.delete, doomed))

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects, 1000 with each hop."""
        self._check_promised("listing", "list objects")
        found = self._objects.list(prefix, start_after or "")
        while page := await self._run(lambda: list(islice(found, _PAGE_OBJECTS))):
            for entry in listed(page, prefix, start_after, delimiter):
                self._check_open()
                yield entry
            # The last key, not the last entry: it is greater than a group that the page ended in,
            # whose other keys are then left out. Not less than before, as functions may yield what
            # was not wanted.
            start_after = max(start_after or "", page[-1].key)

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object, through this process."""
        # Before the source is read, which may be long.
        check_key(target)
        found = await self.get(source)
        check_expected(source, if_version, found.version)
        return await self.put(target, found.data)

    async def sync(self) -> None:
        """Return at once: a write is durable when it is acknowledged."""
        self._check_open()

    async def _run[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        return await anyio.to_thread.run_sync(work)

    def _check_promised(self, promise: str, what: str) -> None:
        self._check_open()
        if not getattr(self._capabilities, promise):
            reason = self._capabilities.reasons.get(promise, "it is not promised")
            raise UnsafeStorageError(f"{self!r} cannot {what}: {reason}.")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.error(repr(self))
