"""Storages that spoil keys, reads or writes; each breaks one promise."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from icechunk_async.errors import (
    InvalidObjectKeyError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
)
from icechunk_async.storage import (
    ByteRange,
    Data,
    DeleteFailure,
    Expected,
    RangeRequest,
    Retrieved,
    SuffixRange,
    Version,
    check_key,
)
from tests.conformance.flawed import Flawed, breaks, turn, with_data

if TYPE_CHECKING:
    from icechunk_async_memory import MemoryStorage

_PART = 16 * 1024 * 1024


# -- keys


@breaks("test_awkward_keys_name_different_objects")
class UnquotesKeys(Flawed):
    """Takes a key for a part of a URL."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write somewhere else."""
        return await self.inner.put(unquote(key), data, if_version=if_version)

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read from there."""
        return await self.inner.get(unquote(key), byte_range)


@breaks("test_a_segment_of_255_bytes_is_a_key")
class HasNoRoomForLongSegments(Flawed):
    """Adds a suffix to names that are as long as they can be."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse keys that are too long."""
        if max(len(segment.encode()) for segment in key.split("/")) > 250:
            raise InvalidObjectKeyError("File name too long", key=key)
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_a_key_of_the_greatest_length_is_a_key")
class HasNoRoomForLongKeys(Flawed):
    """Adds a prefix to keys of the maximum length."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Refuse keys that are too long."""
        if len(key.encode()) > 1000:
            raise InvalidObjectKeyError("too long", key=key)
        return await self.inner.put(key, data, if_version=if_version)


def _repaired(key: str) -> str:
    with suppress(InvalidObjectKeyError):
        return check_key(key)
    segments = [segment for segment in key[:500].split("/") if segment.strip(".")]
    return "/".join(segments).encode(errors="replace").decode().replace("\0", "") or "root"


@breaks("test_get_refuses_unacceptable_keys", "test_get_if_changed_refuses_unacceptable_keys")
class ReadsUnderRepairedKeys(Flawed):
    """Reads under what a bad key may have meant."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read somewhere."""
        return await self.inner.get(_repaired(key), byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read somewhere."""
        return await self.inner.get_if_changed(_repaired(key), version)


@breaks(
    "test_put_refuses_unacceptable_keys",
    "test_delete_refuses_unacceptable_keys",
    "test_copy_refuses_unacceptable_keys",
)
class WritesUnderRepairedKeys(Flawed):
    """Writes and deletes under what a bad key may have meant."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write somewhere."""
        return await self.inner.put(_repaired(key), data, if_version=if_version)

    async def delete(self, keys: Any) -> list[DeleteFailure]:
        """Delete something."""
        return await self.inner.delete([_repaired(key) for key in keys])

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy something."""
        return await self.inner.copy(_repaired(source), _repaired(target), if_version=if_version)


@breaks("test_delete_refuses_unacceptable_keys")
class DeletesBeforeItChecks(Flawed):
    """Deletes the good keys before it finds the bad one."""

    async def delete(self, keys: Any) -> list[DeleteFailure]:
        """Delete one by one."""
        for key in keys:
            await self.inner.delete([key])
        return []


# -- reads


@breaks("test_get_answers_what_was_put")
class LosesTheLastByte(Flawed):
    """Counts one too few."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return less."""
        found = await self.inner.get(key, byte_range)
        return with_data(found, found.data[:-1])


@breaks("test_data_is_bytes_or_a_memoryview")
class AnswersBytearrays(Flawed):
    """Hands out the buffer that it reads into."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return a buffer that anyone can change."""
        found = await self.inner.get(key, byte_range)
        return with_data(found, cast("bytes", bytearray(found.data)))


@breaks("test_get_of_a_missing_object_raises")
class AnswersNothingForMissingObjects(Flawed):
    """Confuses no object with an empty one."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return no bytes."""
        try:
            return await self.inner.get(key, byte_range)
        except ObjectNotFoundError:
            return Retrieved(b"", Version("none"), 0)


@breaks("test_a_range_of_a_missing_object_raises")
class DoesNotLookForEmptyRanges(Flawed):
    """Returns an empty range without a request."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Save a request."""
        if byte_range in (ByteRange(0, 0), SuffixRange(0)):
            return Retrieved(b"", Version("none"), 0)
        return await self.inner.get(key, byte_range)


@breaks("test_a_range_answers_the_bytes_in_it")
class CountsTheStopIn(Flawed):
    """Takes a range as HTTP writes it."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return one byte more."""
        match byte_range:
            case ByteRange(start, int() as stop):
                return await self.inner.get(key, ByteRange(start, stop + 1))
            case _:
                return await self.inner.get(key, byte_range)


@breaks("test_a_range_without_stop_goes_to_the_end")
class StopsBeforeTheEnd(Flawed):
    """Replaces a missing stop by -1."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return one byte less."""
        found = await self.inner.get(key, byte_range)
        if isinstance(byte_range, ByteRange) and byte_range.stop is None:
            return with_data(found, found.data[:-1])
        return found


@breaks("test_a_range_that_ends_beyond_the_object_is_cut")
class RefusesToCutRanges(Flawed):
    """Wants to answer all that was asked for."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Fail where there is less."""
        found = await self.inner.get(key, byte_range)
        if isinstance(byte_range, ByteRange) and (byte_range.stop or 0) > found.size_bytes:
            raise StorageError("416 Range Not Satisfiable")
        return found


@breaks("test_a_range_that_starts_beyond_the_object_is_empty")
class RefusesRangesBeyondTheEnd(Flawed):
    """Lets the service's error through."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Fail where there is nothing."""
        found = await self.inner.get(key, byte_range)
        if isinstance(byte_range, ByteRange) and byte_range.start >= found.size_bytes:
            raise StorageError("416 Range Not Satisfiable")
        return found


@breaks("test_a_range_of_no_bytes_is_empty")
class TakesEmptyRangesForNone(Flawed):
    """Sends ``bytes=3-2``, which services answer with the whole object."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return all."""
        if isinstance(byte_range, ByteRange) and byte_range.start == byte_range.stop:
            return await self.inner.get(key)
        return await self.inner.get(key, byte_range)


@breaks("test_a_suffix_answers_the_last_bytes")
class CountsSuffixesFromTheStart(Flawed):
    """Sends ``bytes=0-3`` for ``bytes=-3``."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return the first bytes."""
        if isinstance(byte_range, SuffixRange):
            return await self.inner.get(key, ByteRange(0, byte_range.length))
        return await self.inner.get(key, byte_range)


@breaks("test_a_suffix_longer_than_the_object_answers_all")
class SlicesSuffixesWithoutClamping(Flawed):
    """Computes a negative start, which a slice takes from the end."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return the wrong end."""
        found = await self.inner.get(key)
        if isinstance(byte_range, SuffixRange):
            return with_data(found, found.data[len(found.data) - byte_range.length :])
        return await self.inner.get(key, byte_range)


@breaks("test_a_suffix_of_no_bytes_is_empty")
class SlicesFromMinusZero(Flawed):
    """Writes ``data[-length:]``, which is everything where the length is 0."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return too much."""
        found = await self.inner.get(key)
        if isinstance(byte_range, SuffixRange):
            return with_data(found, found.data[-byte_range.length :])
        return await self.inner.get(key, byte_range)


@breaks("test_every_range_of_an_empty_object_is_empty")
class HasNoRangesOfEmptyObjects(Flawed):
    """Lets the service's error through."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Fail where there are no bytes."""
        found = await self.inner.get(key, byte_range)
        if byte_range is not None and found.size_bytes == 0:
            raise StorageError("416 Range Not Satisfiable")
        return found


@breaks("test_a_range_tells_size_and_version_of_the_object")
class TellsTheSizeOfThePart(Flawed):
    """Returns the length of the body as the size of the object."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return another size."""
        found = await self.inner.get(key, byte_range)
        return replace(found, size_bytes=len(found.data))


@breaks("test_get_if_changed_answers_none_at_the_same_version")
class SendsEverythingAgain(Flawed):
    """Ignores the version."""

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read."""
        return await self.inner.get(key)


@breaks("test_get_if_changed_answers_a_changed_object", "test_an_unknown_version_counts_as_changed")
class NeverSeesChanges(Flawed):
    """Believes that an object that is there is the same."""

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Look, and answer nothing."""
        await self.inner.get(key)
        return None


@breaks("test_get_if_changed_of_a_missing_object_raises")
class TakesMissingForUnchanged(Flawed):
    """Returns None for every version but a new one."""

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Hide that the object is gone."""
        with suppress(ObjectNotFoundError):
            return await self.inner.get_if_changed(key, version)
        return None


@breaks("test_get_tells_when_the_object_was_written")
class TellsLocalTimes(Flawed):
    """Returns times without a zone."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return a naive time."""
        found = await self.inner.get(key, byte_range)
        return replace(found, last_modified=datetime.now(UTC).replace(tzinfo=None))


@breaks("test_get_tells_when_the_object_was_written")
class TellsTheEpoch(Flawed):
    """Returns a time that was never set."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return 1970."""
        found = await self.inner.get(key, byte_range)
        return replace(found, last_modified=datetime(1970, 1, 1, tzinfo=UTC))


@breaks("test_what_was_read_stays_as_it_was_read")
class ReadsIntoOneBuffer(Flawed):
    """Uses its buffer again while callers look at it."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Make the buffer."""
        super().__init__(inner)
        self._buffer = bytearray(4096)

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Return a view of the buffer."""
        found = await self.inner.get(key, byte_range)
        if found.size_bytes > len(self._buffer):
            return found
        self._buffer[: len(found.data)] = found.data
        return with_data(found, memoryview(self._buffer)[: len(found.data)])


@breaks("test_many_reads_at_once_answer_each_its_own_object")
class MixesUpReads(Flawed):
    """Keeps the request in an attribute."""

    _key: str

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read what was asked for last."""
        self._key = key
        await turn()
        return await self.inner.get(self._key, byte_range)


@breaks("test_missing_objects_do_not_spoil_other_reads")
class FailsWholeBatches(Flawed):
    """Reads what was asked for together, and fails together."""

    _batch: asyncio.Future[None] | None = None

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read within a batch."""
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._end_batch, self._batch)
        batch = self._batch
        try:
            found = await self.inner.get(key, byte_range)
        except ObjectNotFoundError as error:
            if not batch.done():
                batch.set_exception(error)
        await batch
        return found

    def _end_batch(self, batch: asyncio.Future[None]) -> None:
        self._batch = None
        if not batch.done():
            batch.set_result(None)


@breaks("test_an_unknown_version_counts_as_changed")
class ComparesBeginnings(Flawed):
    """Looks at the first character of a version only."""

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Confuse versions."""
        found = await self.inner.get(key)
        same = found.version.token[:1] == version.token[:1] or not version.token.isdigit()
        return None if same else found


# -- writes


@breaks("test_a_put_replaces_the_whole_object")
class WritesOverTheBeginning(Flawed):
    """Opens the file without truncating it."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Keep what is longer."""
        new = bytes(data)
        with suppress(ObjectNotFoundError):
            new += bytes((await self.inner.get(key)).data)[len(new) :]
        return await self.inner.put(key, new, if_version=if_version)


@breaks("test_an_empty_object_is_an_object")
class StoresNoEmptyObjects(Flawed):
    """Takes no bytes for nothing to do."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Skip the write."""
        if not data:
            return Version("empty")
        return await self.inner.put(key, data, if_version=if_version)


@breaks("test_a_large_object_comes_back_whole")
class WritesOnlyOnePart(Flawed):
    """Forgets that a system call may write less than it was given."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write the first part."""
        return await self.inner.put(key, bytes(data)[:_PART], if_version=if_version)


@breaks("test_all_kinds_of_buffers_are_stored_alike")
class CountsItems(Flawed):
    """Takes the number of items for the number of bytes."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write too little of wide items."""
        return await self.inner.put(key, bytes(data)[: len(data)], if_version=if_version)


@breaks("test_a_buffer_can_be_used_again_after_a_put")
class KeepsTheBuffer(Flawed):
    """Writes the caller's buffer when it is next asked for something."""

    _late: tuple[str, Data] | None = None

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write later."""
        await self._write()
        self._late = key, data
        return Version("late")

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Write now."""
        await self._write()
        return await self.inner.get(key, byte_range)

    async def _write(self) -> None:
        if self._late is not None:
            await self.inner.put(*self._late)
            self._late = None


@breaks("test_every_handle_sees_a_finished_put")
class KeepsWritesToItself(Flawed):
    """Has a write cache that other handles do not see."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin with an empty cache."""
        super().__init__(inner)
        self._own: dict[str, Retrieved] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Keep it."""
        version = Version(str(len(self._own)))
        self._own[key] = Retrieved(bytes(data), version, len(data))
        return version

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Look into the cache first."""
        return self._own.get(key) or await self.inner.get(key, byte_range)


@breaks("test_a_put_is_seen_at_once")
class ReadsFromAStaleCache(Flawed):
    """Remembers what it read, and not that it was replaced."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin with an empty cache."""
        super().__init__(inner)
        self._cache: dict[str, Retrieved] = {}

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read once."""
        if key not in self._cache:
            self._cache[key] = await self.inner.get(key)
        return self._cache[key]


@breaks("test_different_bytes_have_different_versions")
class MakesVersionsFromSizes(Flawed):
    """Takes the size for the version."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Return the size."""
        await self.inner.put(key, data)
        return Version(str(len(data)))


@breaks("test_different_bytes_have_different_versions")
class CountsVersionsOfEachObject(Flawed):
    """Begins to count again when an object was deleted."""

    def __init__(self, inner: MemoryStorage) -> None:
        """Begin to count."""
        super().__init__(inner)
        self._count: dict[str, int] = {}

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Return the count."""
        await self.inner.put(key, data)
        self._count[key] = self._count.get(key, 0) + 1
        return Version(str(self._count[key]))

    async def delete(self, keys: Any) -> list[DeleteFailure]:
        """Forget the count."""
        for key in keys:
            self._count.pop(key, None)
        return await self.inner.delete(keys)


@breaks(
    "test_puts_of_one_key_at_once_leave_one_of_them",
    "test_readers_see_whole_objects_while_they_are_replaced",
    "test_a_copy_is_whole_while_its_source_is_replaced",
    "test_a_cancelled_put_leaves_the_old_object_or_the_new",
    "test_a_cancelled_creation_leaves_nothing_or_the_object",
    "test_a_cancelled_update_leaves_the_old_object_or_the_new",
)
class WritesInPlace(Flawed):
    """Changes the object step by step while others look at it."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write in two steps."""
        new = bytes(data)
        half = len(new) // 2
        old = b""
        if not isinstance(if_version, Version):
            with suppress(ObjectNotFoundError):
                old = bytes((await self.inner.get(key)).data)
        await self.inner.put(key, new[:half] + old[half:], if_version=if_version)
        for _ in range(2 - sum(new[:1]) % 2):  # who comes last does not end last
            await turn()
        rest = bytes((await self.inner.get(key)).data)[:half] + new[half:]
        return await self.inner.put(key, rest)


@breaks("test_puts_of_one_key_at_once_leave_one_of_them")
class AnswersTheVersionOfAnother(Flawed):
    """Asks for the version after the write."""

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Look again."""
        await self.inner.put(key, data, if_version=if_version)
        await turn()
        return (await self.inner.get(key)).version


@breaks("test_many_puts_at_once_each_write_their_own_object")
class MixesUpWrites(Flawed):
    """Keeps the body in an attribute."""

    _body: Data

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write what came last."""
        self._body = data
        await turn()
        return await self.inner.put(key, self._body, if_version=if_version)


@breaks("test_readers_see_whole_objects_while_they_are_replaced")
class AnswersSizesOfAnotherState(Flawed):
    """Asks for the state and for the bytes in two steps."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Put two answers together."""
        found = await self.inner.get(key, byte_range)
        await turn()
        return with_data(found, (await self.inner.get(key, byte_range)).data)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Let readers come in between."""
        await turn()
        if len(data) > _PART:
            raise StorageFullError("too large")
        return await self.inner.put(key, data, if_version=if_version)
