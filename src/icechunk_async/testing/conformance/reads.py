"""Promises about reading: whole objects, ranges, versions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import ObjectNotFoundError
from icechunk_async.storage import ByteRange, SuffixRange, Version
from icechunk_async.testing.conformance._base import Promises

if TYPE_CHECKING:
    from icechunk_async.storage import RangeRequest, Storage

__all__ = ["ReadPromises"]

_BODY: Final = b"0123456789"
_CLOCKS_DIFFER_BY: Final = timedelta(days=1)


class ReadPromises(Promises):
    """The promises of ``get`` and ``get_if_changed``."""

    async def test_get_answers_what_was_put(self, storage: Storage) -> None:
        """The bytes come back, with the size and the version that ``put`` returned."""
        version = await storage.put("key", _BODY)
        found = await storage.get("key")
        assert (bytes(found.data), found.size_bytes, found.version) == (_BODY, 10, version)

    async def test_data_is_bytes_or_a_memoryview(self, storage: Storage) -> None:
        """Callers slice and decode the bytes without checking their type."""
        await storage.put("key", _BODY)
        for byte_range in (None, ByteRange(2, 4), SuffixRange(3), ByteRange(20)):
            assert isinstance((await storage.get("key", byte_range)).data, bytes | memoryview)

    async def test_get_of_a_missing_object_raises(self, storage: Storage) -> None:
        """A missing object is an error, not empty; the error names the key."""
        await storage.put("other", _BODY)
        for key in ("missing", "other/below", "oth"):
            with pytest.raises(ObjectNotFoundError) as caught:
                await storage.get(key)
            assert caught.value.context.get("key") == key

    async def test_a_range_of_a_missing_object_raises(self, storage: Storage) -> None:
        """Not even a range that asks for nothing succeeds."""
        for byte_range in (ByteRange(0, 1), ByteRange(0, 0), ByteRange(5), SuffixRange(0)):
            with pytest.raises(ObjectNotFoundError):
                await storage.get("missing", byte_range)

    async def test_a_range_answers_the_bytes_in_it(self, storage: Storage) -> None:
        """``start`` is in the range, ``stop`` is not."""
        await _expect(storage, ByteRange(2, 5), b"234")
        await _expect(storage, ByteRange(0, 1), b"0")
        await _expect(storage, ByteRange(9, 10), b"9")
        await _expect(storage, ByteRange(0, 10), _BODY)

    async def test_a_range_without_stop_goes_to_the_end(self, storage: Storage) -> None:
        """Without ``stop`` everything from ``start`` is returned."""
        await _expect(storage, ByteRange(7), b"789")
        await _expect(storage, ByteRange(0), _BODY)

    async def test_a_range_that_ends_beyond_the_object_is_cut(self, storage: Storage) -> None:
        """Like a slice: bytes beyond the end are left out."""
        await _expect(storage, ByteRange(8, 1000), b"89")
        # More than 32 bits, and more than a client should allocate beforehand.
        await _expect(storage, ByteRange(0, 1 << 40), _BODY)

    async def test_a_range_that_starts_beyond_the_object_is_empty(self, storage: Storage) -> None:
        """Like a slice: a range outside the object is empty, not an error."""
        # Most services answer 416, some with success and no bytes.
        for byte_range in (ByteRange(10), ByteRange(10, 12), ByteRange(1000, 2000), ByteRange(99)):
            await _expect(storage, byte_range, b"")

    async def test_a_range_of_no_bytes_is_empty(self, storage: Storage) -> None:
        """A range that stops where it starts asks for nothing, and gets it."""
        await _expect(storage, ByteRange(3, 3), b"")
        await _expect(storage, ByteRange(0, 0), b"")

    async def test_a_suffix_answers_the_last_bytes(self, storage: Storage) -> None:
        """A suffix counts from the end."""
        await _expect(storage, SuffixRange(3), b"789")
        await _expect(storage, SuffixRange(10), _BODY)

    async def test_a_suffix_longer_than_the_object_answers_all(self, storage: Storage) -> None:
        """Bytes before the beginning are left out."""
        await _expect(storage, SuffixRange(11), _BODY)
        await _expect(storage, SuffixRange(1 << 40), _BODY)

    async def test_a_suffix_of_no_bytes_is_empty(self, storage: Storage) -> None:
        """The last zero bytes are empty; ``-0`` must not become "from the start"."""
        await _expect(storage, SuffixRange(0), b"")

    async def test_every_range_of_an_empty_object_is_empty(self, storage: Storage) -> None:
        """An empty object has ranges, too."""
        # Services answer ranges of an empty object with 416, which must not become an error.
        await storage.put("empty", b"")
        for byte_range in (None, ByteRange(0), ByteRange(0, 5), ByteRange(3), SuffixRange(4)):
            found = await storage.get("empty", byte_range)
            assert (bytes(found.data), found.size_bytes) == (b"", 0)

    async def test_a_range_tells_size_and_version_of_the_object(self, storage: Storage) -> None:
        """Both are of the whole object, so that a reader can continue from there."""
        version = await storage.put("key", _BODY)
        for byte_range in (ByteRange(2, 5), ByteRange(50), SuffixRange(2), SuffixRange(0)):
            found = await storage.get("key", byte_range)
            assert (found.size_bytes, found.version) == (10, version)

    async def test_get_if_changed_answers_none_at_the_same_version(self, storage: Storage) -> None:
        """An unchanged object is not sent again."""
        version = await storage.put("key", _BODY)
        assert await storage.get_if_changed("key", version) is None
        assert await storage.get_if_changed("key", (await storage.get("key")).version) is None

    async def test_get_if_changed_answers_a_changed_object(self, storage: Storage) -> None:
        """After a change the whole new object comes, with its version."""
        old = await storage.put("key", _BODY)
        new = await storage.put("key", b"changed")
        found = await storage.get_if_changed("key", old)
        assert found is not None
        assert (bytes(found.data), found.size_bytes, found.version) == (b"changed", 7, new)

    async def test_get_if_changed_of_a_missing_object_raises(self, storage: Storage) -> None:
        """An object that was deleted is not an unchanged one."""
        version = await storage.put("key", _BODY)
        await storage.delete(["key"])
        with pytest.raises(ObjectNotFoundError):
            await storage.get_if_changed("key", version)

    async def test_get_tells_when_the_object_was_written(self, storage: Storage) -> None:
        """The time, if given, is aware, in UTC, and about now."""
        await storage.put("key", _BODY)
        written = (await storage.get("key")).last_modified
        if written is not None:
            assert written.utcoffset() == timedelta(0)
            assert abs(datetime.now(UTC) - written) < _CLOCKS_DIFFER_BY

    async def test_what_was_read_stays_as_it_was_read(self, storage: Storage) -> None:
        """A result does not change when the object is replaced, or another one is read."""
        await storage.put("key", b"old old old")
        found = await storage.get("key")
        await storage.put("key", b"new new new")
        # A storage that reads into a buffer which it uses again would show one of these.
        await storage.put("other", b"third")
        await storage.get("other")
        assert bytes(found.data) == b"old old old"

    async def test_many_reads_at_once_answer_each_its_own_object(self, storage: Storage) -> None:
        """Concurrent reads do not mix up their results."""
        bodies = {f"key-{n}": b"%d" % n * (n + 1) for n in range(200)}
        for key, body in bodies.items():
            await storage.put(key, body)

        async def get(key: str) -> tuple[str, bytes]:
            return key, bytes((await storage.get(key)).data)

        assert dict(await bounded_map(get, bodies, limit=64)) == bodies

    async def test_missing_objects_do_not_spoil_other_reads(self, storage: Storage) -> None:
        """Of reads at the same time those fail whose object is missing, and no others."""
        await storage.put("key", _BODY)

        async def get(key: str) -> bytes | None:
            try:
                return bytes((await storage.get(key)).data)
            except ObjectNotFoundError:
                return None

        found = await bounded_map(get, ["key", "missing"] * 32, limit=64)
        assert found == [_BODY, None] * 32

    async def test_an_unknown_version_counts_as_changed(self, storage: Storage) -> None:
        """A version of another object, or of none, is not the version of this one."""
        await storage.put("key", _BODY)
        other = await storage.put("other", b"something else")
        for version in (other, Version("never-answered")):
            assert await storage.get_if_changed("key", version) is not None


async def _expect(storage: Storage, byte_range: RangeRequest, data: bytes) -> None:
    await storage.put("key", _BODY)
    assert bytes((await storage.get("key", byte_range)).data) == data
