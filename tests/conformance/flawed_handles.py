"""Storages that spoil cancellation, or handles as a whole; each breaks one promise."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from icechunk_async.errors import (
    InvalidObjectKeyError,
    ObjectNotFoundError,
    StorageError,
)
from icechunk_async.storage import (
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
)
from icechunk_async_memory import MemoryStorage, open_memory
from tests.conformance.flawed import Delimiter, Flawed, breaks, turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

# -- cancellation


@breaks("test_a_cancelled_get_changes_nothing")
class KeepsItsLockWhenReading(Flawed):
    """Frees its lock after the wait, but not when the wait is cancelled."""

    _locked = False

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Lock, wait, read, unlock."""
        if self._locked:
            raise StorageError("locked")
        self._locked = True
        await turn()
        self._locked = False
        return await self.inner.get(key, byte_range)


@breaks("test_a_cancelled_update_leaves_the_old_object_or_the_new")
class KeepsItsLockWhenUpdating(Flawed):
    """Frees its lock after the wait, but not when the wait is cancelled."""

    _locked = False

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Lock, wait, write, unlock."""
        if if_version is not None:
            if self._locked:
                raise StorageError("locked")
            self._locked = True
            await turn()
            self._locked = False
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_a_cancelled_put_leaves_the_old_object_or_the_new")
class WritesTheCallersBufferLate(Flawed):
    """Goes on with a buffer that is no longer its own."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin without tasks."""
        super().__init__(inner)
        self._tasks: set[asyncio.Task[Version]] = set()

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write behind a shield."""
        task = asyncio.get_running_loop().create_task(self._later(key, data, if_version))
        self._tasks.add(task)
        return await asyncio.shield(task)

    async def _later(self, key: str, data: Data, expected: Expected) -> Version:
        for _ in range(3):
            await turn()
        return await self.inner.put(key, data, if_version=expected)


@breaks("test_a_cancelled_get_changes_nothing")
class IgnoresCancellation(Flawed):
    """Swallows what should end it."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Go on."""
        with suppress(asyncio.CancelledError):
            await turn()
        return await self.inner.get(key, byte_range)


@breaks("test_a_cancelled_deletion_leaves_whole_objects")
class EmptiesBeforeItDeletes(Flawed):
    """Truncates an object, then removes it."""

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete in two steps."""
        wanted = list(keys)
        for key in wanted:
            await self.inner.put(key, b"")
        await turn()
        return await self.inner.delete(wanted)


@breaks("test_a_cancelled_listing_changes_nothing")
class GoesOnWithACancelledListing(Flawed):
    """Begins the next listing where a cancelled one ended."""

    _at = 0

    async def list_prefix(
        self, prefix: str = "", *, start_after: str | None = None, delimiter: Delimiter = None
    ) -> AsyncIterator[ListEntry]:
        """Keep the place until the end is reached."""
        entries = self.inner.list_prefix(prefix, start_after=start_after, delimiter=delimiter)
        found = [entry async for entry in entries]
        while self._at < len(found):
            self._at += 1
            if self._at % 500 == 0:
                await turn()
            yield found[self._at - 1]
        self._at = 0


@breaks("test_a_cancelled_sync_changes_nothing")
class LosesWhatItDidNotSync(Flawed):
    """Forgets what it was to sync when it is cancelled."""

    async def sync(self) -> None:
        """Drop everything."""
        try:
            await turn()
        except asyncio.CancelledError:
            entries = await self.everything()
            await self.inner.delete(e.key for e in entries if isinstance(e, ObjectInfo))
            self._broken = True
            raise
        if getattr(self, "_broken", False):
            raise StorageError("nothing to sync")


@breaks("test_cancelled_operations_leave_no_task_behind")
class WorksBehindAShield(Flawed):
    """Lets a task continue when its caller is gone."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read in a task."""

        async def read() -> Retrieved:
            for _ in range(3):
                await turn()
            return await self.inner.get(key, byte_range)

        return await asyncio.shield(asyncio.get_running_loop().create_task(read()))


# -- handles


@breaks("test_capabilities_are_constant")
class LearnsItsCapabilities(Flawed):
    """Finds out with the first write what it can do."""

    _written = False

    @property
    def capabilities(self) -> Capabilities:
        """Change."""
        return replace(self.inner.capabilities, conditional_update=not self._written)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Find out."""
        self._written = True
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_every_promise_that_is_not_made_has_a_reason")
class GivesNoReasons(Flawed):
    """Does not say why."""

    @property
    def capabilities(self) -> Capabilities:
        """Without reasons."""
        return replace(self.inner.capabilities, reasons={})


@breaks("test_the_description_opens_the_same_objects")
class DescribesAnother(Flawed):
    """Returns the URL without its prefix."""

    @property
    def description(self) -> StorageDescription:
        """Describe the place above."""
        return StorageDescription("memory://above")


class _Talkative(StorageDescription):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"StorageDescription({self.url!r}, {dict(self.options)!r})"


@breaks("test_no_representation_shows_options")
class ShowsItsOptions(Flawed):
    """Prints what it was opened with."""

    @property
    def description(self) -> StorageDescription:
        """Return a description with a custom representation."""
        return _Talkative(self.inner.description.url)


@breaks("test_no_representation_shows_options")
class ShowsItsSecret(Flawed):
    """Prints its key."""

    @property
    def description(self) -> StorageDescription:
        """Return an option."""
        return StorageDescription(self.inner.description.url, {"token": "s3cr3t"})

    def __repr__(self) -> str:
        """Show it."""
        return "ShowsItsSecret(token='s3cr3t')"


@breaks("test_a_closed_storage_refuses_every_operation")
class NeverCloses(Flawed):
    """Works on after its block."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read through a handle that nobody closes."""
        async with open_memory(self.inner.description.url) as inner:
            return await inner.get(key, byte_range)


@breaks("test_closing_one_handle_leaves_the_others_open")
class SharesItsEnd(Flawed):
    """Closes the pool that all handles use."""

    _ended: ClassVar[set[str]] = set()

    def close(self) -> None:
        """End everything."""
        self._ended.add(self.description.url)

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read while nobody has ended it."""
        if self.description.url in self._ended:
            raise StorageError("the pool is closed")
        return await self.inner.get(key, byte_range)


@breaks("test_sync_returns_and_changes_nothing")
class SyncsOnlyWhatIsThere(Flawed):
    """Fails where there is nothing to sync."""

    async def sync(self) -> None:
        """Want something."""
        if not await self.everything():
            raise StorageError("nothing to sync")


@breaks("test_a_handle_works_on_several_loops_at_once")
class BelongsToOneLoop(Flawed):
    """Keeps a client of the first loop that used it."""

    _loop: asyncio.AbstractEventLoop | None = None

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Refuse other loops."""
        self._loop = self._loop or asyncio.get_running_loop()
        if asyncio.get_running_loop() is not self._loop:
            raise StorageError("attached to a different loop")
        return await self.inner.get(key, byte_range)


class _ForgetfulError(ObjectNotFoundError):
    def __reduce__(self) -> tuple[object, ...]:
        return _ForgetfulError, (self.message,)


@breaks("test_errors_survive_a_pickle")
class RaisesErrorsThatForget(Flawed):
    """Has errors that lose their context on the way."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Raise one."""
        try:
            return await self.inner.get(key, byte_range)
        except ObjectNotFoundError as error:
            raise _ForgetfulError(error.message, **error.context) from None


@breaks("test_blocking_methods_do_what_the_others_do")
class IgnoresRangesWhenBlocking(Flawed):
    """Has blocking methods that were forgotten."""

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read all."""
        return self.inner.get_blocking(key)


@breaks("test_blocking_methods_do_what_the_others_do")
class ChecksNoKeysWhenBlocking(Flawed):
    """Has blocking methods that were forgotten."""

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write somewhere."""
        try:
            return self.inner.put_blocking(key, data)
        except InvalidObjectKeyError:
            return Version("somewhere")


@breaks("test_blocking_methods_may_be_called_from_several_threads")
class BlocksOnOneThread(Flawed):
    """Belongs to the thread that used it first."""

    _thread: int | None = None

    def put_blocking(self, key: str, data: Data) -> Version:
        """Refuse other threads."""
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            raise StorageError("used by another thread")
        return self.inner.put_blocking(key, data)
