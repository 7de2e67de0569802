"""The way of publishing of format 2 on storage that creates objects safely and replaces none.

The repo info is a sequence of objects that are created and never replaced. State n is the object
``states/`` with the letters of n. A writer that has seen state n, and wants to replace it, creates
n + 1, in which one writer at most succeeds.

Old states may be collected, and then their numbers can be taken again: by a writer that stood still
since it saw n. So the writer of a state looks whether that is the newest now, and whether the one
before is there. The two newest are never deleted, so a state that came too late is neither, and
nobody ever reads it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.backoff import Backoff
from icechunk_async._runtime.concurrency import closing
from icechunk_async.engine.history.numbers import Numbered, decode_number
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import SAFE_CREATIONS
from icechunk_async.engine.history.repo_info.history import (
    LAYOUT,
    PLAIN,
    create_repo_info,
    read_repo_info,
)
from icechunk_async.engine.history.way import Way
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    UnsafeStorageError,
)
from icechunk_async.format.layout import REPO_INFO, STATES
from icechunk_async.storage import ABSENT, ObjectInfo, Version
from icechunk_async.storage.policies.wrapping import PassingStorage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from datetime import datetime

    from icechunk_async.engine.history.way import Creating, Found
    from icechunk_async.storage import Data, Expected, RangeRequest, Retrieved, Storage

__all__ = ["NUMBERED_WAY", "NumberedStorage"]

_BACKOFF: Final = Backoff(max_tries=20, max_ms=5000)
_LISTINGS: Final = 5
_BATCH: Final = 1000
_KEPT: Final = 2
"""The newest states, which are never deleted: the second shows that there is no gap."""


class NumberedStorage(PassingStorage):
    """A storage whose object ``repo`` is the newest of its numbered states.

    The version of ``repo`` is the number of the state.
    """

    def __init__(self, storage: Storage) -> None:
        """Look at ``storage``, which creates objects if they are absent."""
        super().__init__(storage)
        self._states = Numbered(storage, STATES, "")

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it. Cost: for the repo info, a listing and a request."""
        if key != REPO_INFO:
            return await self.wrapped.get(key, byte_range)
        number = await self._newest()
        return await self._read(number, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``.

        Cost: for the repo info, a listing, and a request if it changed.
        """
        if key != REPO_INFO:
            return await self.wrapped.get_if_changed(key, version)
        number = await self._newest()
        return None if version == _version(number) else await self._read(number)

    async def _read(self, number: int, byte_range: RangeRequest = None) -> Retrieved:
        for _ in range(_LISTINGS):
            try:
                found = await self.wrapped.get(self._states.key(number), byte_range)
            except ObjectNotFoundError:
                newer = await self._newest()
                if newer == number:
                    raise
                number = newer  # the other one was collected meanwhile
            else:
                return replace(found, version=_version(number))
        return replace(
            await self.wrapped.get(self._states.key(number), byte_range), version=_version(number)
        )

    async def _newest(self) -> int:
        """Return the newest number.

        Raises:
            ObjectNotFoundError: there is no state.
            FormatError: the one before the newest is missing.
        """
        for attempt in range(1, _LISTINGS):
            try:
                return self._there(await self._states.newest())
            except FormatError:  # a listing of a folder may miss one that was just created
                await _BACKOFF.wait(attempt)
        return self._there(await self._states.newest())

    def _there(self, number: int | None) -> int:
        if number is None:
            raise ObjectNotFoundError(f"There is no object below {STATES!r}.", key=REPO_INFO)
        return number

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object.

        For the repo info: a listing more. If that fails, or others have written since, the outcome
        is unknown.
        """
        if key != REPO_INFO:
            return await self.wrapped.put(key, data, if_version=if_version)
        if if_version is None:
            raise UnsafeStorageError(f"{REPO_INFO!r} is never written without a condition.")
        number = 0 if if_version is ABSENT else int(if_version.token) + 1
        if not await self._states.append(number, bytes(data), _BACKOFF):
            raise PreconditionFailedError(
                f"State {number} of the repository exists already: another writer was first.",
                key=REPO_INFO,
            )
        await self._check_newest(number)
        return _version(number)

    async def _check_newest(self, number: int) -> None:
        """Raise OutcomeUnknownError unless a state that was created is known to count."""
        newest: list[int] = []
        try:
            numbers = self._states.numbers()
            async with closing(numbers):
                async for it in numbers:
                    newest.append(it)
                    if len(newest) > 1:
                        break
        except IcechunkError as error:
            raise _doubt(number, str(error)) from error
        if newest != [number, number - 1][: number + 1]:
            raise _doubt(number, f"the newest is number {newest[0] if newest else 'none'}")

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage; of the repo info, the state of that version."""
        if source != REPO_INFO:
            return await self.wrapped.copy(source, target, if_version=if_version)
        if if_version is None:
            return await self.wrapped.copy(self._states.key(await self._newest()), target)
        try:
            return await self.wrapped.copy(self._states.key(int(if_version.token)), target)
        except ObjectNotFoundError as error:  # it was collected, so there are newer ones
            raise PreconditionFailedError(
                f"State {if_version.token} of the repository was replaced and collected.",
                key=REPO_INFO,
            ) from error

    async def collect(self, older_than: datetime) -> int:
        """Delete states from before a time, but for the two newest; return their number.

        Those that fail to be deleted stay until the next collection.

        Cancellation: some are deleted. Cost: a listing, and a deletion for each 1,000.
        """
        doomed = [key async for key in self._old(older_than)][::-1]  # the oldest first
        deleted = 0
        for start in range(0, len(doomed), _BATCH):
            batch = doomed[start : start + _BATCH]
            deleted += len(batch) - len(await self.wrapped.delete(batch))
        return deleted

    async def _old(self, older_than: datetime) -> AsyncGenerator[str]:
        """Iterate over the keys of states that may be deleted, newest first."""
        newest = await self._newest()
        if newest < _KEPT:
            return
        entries = self.wrapped.list_prefix(STATES, start_after=self._states.key(newest - 1))
        async with closing(entries):
            async for it in entries:
                if not isinstance(it, ObjectInfo) or it.last_modified >= older_than:
                    continue
                if decode_number(it.key.removeprefix(STATES)) is not None:
                    yield it.key


def _version(number: int) -> Version:
    return Version(str(number))


def _doubt(number: int, why: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"State {number} of the repository was created, and it is not known whether it counts: "
        f"{why}."
    )


async def _tidy(storage: Storage, older_than: datetime) -> None:
    await NumberedStorage(storage).collect(older_than)


_KIND: Final = replace(
    PLAIN,
    layout="format-2-numbered",
    capabilities=replace(
        PLAIN.capabilities,
        way="the layout 'format-2-numbered'",
        instead="Format version 2 itself has: copy the repository, with Repository.copy_to, to "
        "storage that can compare and set.",
        leases=False,
    ),
    storage_needs=(*SAFE_CREATIONS, "listing"),
    tidy=_tidy,
    view=NumberedStorage,
)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    if not storage.capabilities.listing:
        return None  # the newest state is found in a listing
    retrieved = await read_if_there(NumberedStorage(storage), REPO_INFO)
    return None if retrieved is None else partial(read_repo_info, retrieved, _KIND)


async def _create(new: Creating) -> Found:
    return await create_repo_info(new, _KIND)


NUMBERED_WAY: Final = Way(
    _KIND.layout,
    2,
    lambda: LAYOUT,
    _KIND.storage_needs,
    STATES,
    _detect,
    _create,
    view=NumberedStorage,
)
