"""Promises about writing whole objects, copying and deleting them."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final

import pytest

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.errors import IcechunkError, ObjectNotFoundError, PreconditionFailedError
from icechunk_async.storage import ByteRange
from icechunk_async.testing.conformance._base import (
    Promises,
    check_same,
    exists,
    fill,
    listed,
    names,
    read,
)

if TYPE_CHECKING:
    from icechunk_async.storage import Data, Storage, Version

__all__ = ["CopyPromises", "DeletePromises", "WritePromises"]

# Above the buffers of sockets and files: a store that does not write whole objects shows a part.
_BODY_BYTES: Final = 512 * 1024


class WritePromises(Promises):
    """The promises of an unconditional ``put``."""

    async def test_a_put_replaces_the_whole_object(self, storage: Storage) -> None:
        """Nothing is left of a longer object that was there before."""
        await storage.put("key", b"a long first body")
        await storage.put("key", b"short")
        found = await storage.get("key")
        assert (bytes(found.data), found.size_bytes) == (b"short", 5)

    async def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        """No bytes are a body like any other."""
        await storage.put("empty", b"")
        assert await read(storage, "empty") == b""
        assert names(await listed(storage)) == ["empty"]

    async def test_a_large_object_comes_back_whole(self, storage: Storage) -> None:
        """An object that services and systems take in parts is still one object."""
        # Without a pattern: parts that are swapped, or repeated, come back as other bytes.
        body = hashlib.shake_128(b"body").digest(self.large_bytes)
        await storage.put("large", body)
        found = await storage.get("large")
        check_same(found.data, body)
        middle = len(body) // 2
        part = await storage.get("large", ByteRange(middle, middle + 1000))
        assert part.data == body[middle : middle + 1000]

    async def test_all_kinds_of_buffers_are_stored_alike(self, storage: Storage) -> None:
        """The bytes of a buffer are stored, for any item size."""
        body = bytes(range(256)) * 4
        wide = memoryview(body).cast("I", (16, 16))
        buffers: list[Data] = [body, bytearray(body), memoryview(body), wide]
        for number, buffer in enumerate(buffers):
            await storage.put(f"key-{number}", buffer)
            assert await read(storage, f"key-{number}") == body
        await storage.put("every-second", memoryview(body)[::2])
        assert await read(storage, "every-second") == body[::2]

    async def test_a_buffer_can_be_used_again_after_a_put(self, storage: Storage) -> None:
        """The caller may overwrite and resize its buffer once ``put`` has returned."""
        buffer = bytearray(b"first" * 100)
        await storage.put("key", buffer)
        buffer[:] = b"again"
        await storage.put("other", memoryview(buffer))
        buffer[:] = b"third"
        assert await read(storage, "key") == b"first" * 100
        assert await read(storage, "other") == b"again"

    async def test_every_handle_sees_a_finished_put(self, storage: Storage) -> None:
        """Another handle reads and lists what was written, replaced and deleted."""
        async with self.reopen(storage.description) as other:
            await storage.put("key", b"one")
            assert await read(other, "key") == b"one"
            await other.put("key", b"two")
            assert await read(storage, "key") == b"two"
            assert names(await listed(other)) == ["key"]
            await storage.delete(["key"])
            assert await listed(other) == []

    async def test_a_put_is_seen_at_once(self, storage: Storage) -> None:
        """Each read after a write returns that write, no matter how often it is replaced."""
        for number in range(50):
            version = await storage.put("key", b"%d" % number)
            found = await storage.get("key")
            assert (bytes(found.data), found.version) == (b"%d" % number, version)

    async def test_different_bytes_have_different_versions(self, storage: Storage) -> None:
        """No state of an object has the version of an earlier one, also after a deletion."""
        versions: list[Version] = []
        for number in range(100):
            versions.append(await storage.put("key", b"%03d" % number))
            # A version that counts the writes of an object would begin anew.
            if number % 10 == 9:
                await storage.delete(["key"])
        assert len(set(versions)) == 100

    async def test_puts_of_one_key_at_once_leave_one_of_them(self, storage: Storage) -> None:
        """Each of the writers succeeds, and the object is what one of them wrote."""
        bodies = [bytes([n]) * _BODY_BYTES for n in range(16)]

        async def put(body: bytes) -> Version:
            return await storage.put("key", body)

        versions = await bounded_map(put, bodies, limit=16)
        # Equal versions would let an update replace a state that it has not seen.
        assert len(set(versions)) == len(bodies)
        found = await storage.get("key")
        assert found.data in bodies
        assert found.version == versions[bodies.index(bytes(found.data))]

    async def test_many_puts_at_once_each_write_their_own_object(self, storage: Storage) -> None:
        """Concurrent writes do not mix up their bodies."""
        bodies = {f"key-{n}": b"%d" % n * (n + 1) for n in range(200)}

        async def put(item: tuple[str, bytes]) -> None:
            await storage.put(*item)

        await bounded_map(put, bodies.items(), limit=64)
        assert {key: await read(storage, key) for key in bodies} == bodies

    async def test_readers_see_whole_objects_while_they_are_replaced(
        self, storage: Storage
    ) -> None:
        """A reader gets the bytes, the size and the version of one ``put``, never a mixture."""
        bodies = [bytes([n]) * (_BODY_BYTES - n) for n in range(24)]
        versions = [await storage.put("key", bodies[0])]
        answers: set[tuple[int, int, Version]] = set()
        writing = True

        async def write() -> None:
            nonlocal writing
            versions.extend([await storage.put("key", body) for body in bodies[1:]])
            writing = False

        async def watch() -> None:
            while writing:
                found = await storage.get("key")
                values = set(bytes(found.data))
                assert len(values) == 1, "the bytes of several puts in one answer"
                assert len(found.data) == found.size_bytes
                answers.add((values.pop(), found.size_bytes, found.version))
                await asyncio.sleep(0)  # a store that never waits would keep the writer out

        await gather(write(), watch(), watch(), watch())
        written = {
            (n, len(body), version)
            for n, (body, version) in enumerate(zip(bodies, versions, strict=True))
        }
        assert answers <= written


_COPIED_BYTES = 512 * 1024


class CopyPromises(Promises):
    """The promises of ``copy``."""

    async def test_a_copy_has_the_bytes_of_its_source(self, storage: Storage) -> None:
        """Source and copy both exist; the result is the version of the copy."""
        await storage.put("source", b"body")
        version = await storage.copy("source", "folder/target")
        found = await storage.get("folder/target")
        assert (bytes(found.data), found.version) == (b"body", version)
        assert await read(storage, "source") == b"body"
        assert names(await listed(storage)) == ["folder/target", "source"]

    async def test_a_copy_replaces_an_object(self, storage: Storage) -> None:
        """Nothing is left of the target's old object."""
        await storage.put("source", b"new")
        await storage.put("target", b"a longer old body")
        await storage.copy("source", "target")
        found = await storage.get("target")
        assert (bytes(found.data), found.size_bytes) == (b"new", 3)

    async def test_an_empty_and_a_large_object_can_be_copied(self, storage: Storage) -> None:
        """Objects of all sizes come out whole."""
        for body in (b"", bytes(range(256)) * (self.large_bytes // 256)):
            await storage.put("source", body)
            await storage.copy("source", "target")
            check_same((await storage.get("target")).data, body)

    async def test_a_copy_of_a_missing_object_raises(self, storage: Storage) -> None:
        """The target stays what it was."""
        await storage.put("target", b"old")
        with pytest.raises(ObjectNotFoundError):
            await storage.copy("missing", "target")
        with pytest.raises(ObjectNotFoundError):
            await storage.copy("missing", "other")
        assert await read(storage, "target") == b"old"
        assert not await exists(storage, "other")

    async def test_a_copy_of_the_expected_version_lands(self, storage: Storage) -> None:
        """``if_version`` concerns the source, for any state of the target."""
        await storage.put("target", b"old")
        version = await storage.put("source", b"body")
        await storage.copy("source", "target", if_version=version)
        await storage.copy("source", "new", if_version=version)
        assert await read(storage, "target") == await read(storage, "new") == b"body"

    async def test_a_copy_of_another_version_is_refused(self, storage: Storage) -> None:
        """Neither a target that is there changes, nor does one appear."""
        old = await storage.put("source", b"first")
        await storage.put("source", b"second")
        version = await storage.put("target", b"old")
        for target in ("target", "new"):
            with pytest.raises(PreconditionFailedError):
                await storage.copy("source", target, if_version=old)
        found = await storage.get("target")
        assert (bytes(found.data), found.version) == (b"old", version)
        assert not await exists(storage, "new")

    async def test_an_object_can_be_copied_onto_itself(self, storage: Storage) -> None:
        """The object keeps its bytes, and is at the returned version."""
        await storage.put("key", b"body")
        version = await storage.copy("key", "key")
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"body", version)

    async def test_a_copy_is_independent_of_its_source(self, storage: Storage) -> None:
        """Changing or deleting one does not touch the other."""
        await storage.put("source", b"body")
        await storage.copy("source", "target")
        await storage.copy("source", "second")
        await storage.put("source", b"changed")
        await storage.delete(["second"])
        assert await read(storage, "target") == b"body"
        assert await read(storage, "source") == b"changed"

    async def test_a_copy_is_whole_while_its_source_is_replaced(self, storage: Storage) -> None:
        """The copy has the bytes of one ``put``, never a mixture."""
        bodies = [bytes([n]) * (_COPIED_BYTES - n) for n in range(16)]
        await storage.put("source", bodies[0])
        writing = True

        async def write() -> None:
            nonlocal writing
            for body in bodies:
                await storage.put("source", body)
            writing = False

        async def copy() -> None:
            while writing:
                await storage.copy("source", "target")
                assert (await storage.get("target")).data in bodies
                await asyncio.sleep(0)  # a store that never waits would keep the writer out

        await gather(write(), copy())


class DeletePromises(Promises):
    """The promises of ``delete``."""

    async def test_a_deleted_object_is_gone(self, storage: Storage) -> None:
        """It can no longer be read or listed, and what has a similar key stays."""
        await fill(storage, ["folder/a", "folder/ab", "folder/b"])
        assert await storage.delete(["folder/a"]) == []
        with pytest.raises(ObjectNotFoundError):
            await storage.get("folder/a")
        assert names(await listed(storage)) == ["folder/ab", "folder/b"]

    async def test_a_missing_object_counts_as_deleted(self, storage: Storage) -> None:
        """Deleting a missing object is no failure."""
        await fill(storage, ["there"])
        keys = ["missing", "nowhere/missing", "there/below"]
        assert await storage.delete(keys) == []
        await storage.delete(["there"])
        assert await storage.delete(["there"]) == []

    async def test_a_key_is_no_prefix_when_deleting(self, storage: Storage) -> None:
        """Deleting ``folder`` leaves ``folder/key``, which is another object."""
        await fill(storage, ["folder/key", "folder/sub/key"])
        await storage.delete(["folder", "folder/sub", "fold"])
        assert names(await listed(storage)) == ["folder/key", "folder/sub/key"]

    async def test_many_objects_are_deleted_at_once(self, storage: Storage) -> None:
        """One call takes more keys than services take in one request."""
        keys = [f"folder-{n % 7}/key-{n}" for n in range(self.page_keys * 5 // 2)]
        await fill(storage, keys)
        assert await storage.delete(keys[:-1]) == []
        assert names(await listed(storage)) == keys[-1:]

    async def test_a_key_may_be_given_twice(self, storage: Storage) -> None:
        """The second time it is missing, which is no failure."""
        await fill(storage, ["a", "b"])
        assert await storage.delete(["a", "a", "b", "a"]) == []
        assert await listed(storage) == []

    async def test_keys_may_come_from_a_generator(self, storage: Storage) -> None:
        """Any iterable will do, also one that can be read only once."""
        await fill(storage, ["a", "b", "c"])
        assert await storage.delete(key for key in ("a", "c")) == []
        assert names(await listed(storage)) == ["b"]

    async def test_deleting_nothing_is_no_failure(self, storage: Storage) -> None:
        """No keys mean no objects, not all of them."""
        await fill(storage, ["a"])
        # Some services take an empty list of keys for a malformed request.
        assert await storage.delete([]) == []
        assert await exists(storage, "a")

    async def test_a_deleted_key_can_be_written_again(self, storage: Storage) -> None:
        """Nothing of the deletion is left, and nothing of the folders that it emptied."""
        for body in (b"one", b"two", b"three"):
            await storage.put("deep/down/key", body)
            assert await read(storage, "deep/down/key") == body
            await storage.delete(["deep/down/key"])
            assert not await exists(storage, "deep/down/key")
        # Where there are folders, an empty one must not be in the way.
        await storage.put("deep", b"where a folder was")
        assert await read(storage, "deep") == b"where a folder was"

    async def test_a_failed_deletion_is_reported_and_the_others_are_done(
        self, storage: Storage
    ) -> None:
        """Each key that could not be deleted comes back with its error; it is still there."""
        keys = ["a", "folder/stays", "folder/z", "z"]
        await fill(storage, keys)
        block = self.undeletable(storage, "folder/stays")
        if block is None:
            pytest.skip("the suite's `undeletable` was given no way to make a deletion fail")
        async with block:
            failures = await storage.delete(keys)
        assert [failure.key for failure in failures] == ["folder/stays"]
        assert isinstance(failures[0].error, IcechunkError)
        assert names(await listed(storage)) == ["folder/stays"]
