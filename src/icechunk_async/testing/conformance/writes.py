"""Promises about writing: whole objects, seen by everyone, each state with its version."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.storage import ByteRange
from icechunk_async.testing.conformance._base import Promises
from icechunk_async.testing.conformance._helpers import listed, names, read

if TYPE_CHECKING:
    from icechunk_async.storage import Data, Storage, Version

__all__ = ["WritePromises"]

_BODY_BYTES: Final = 512 * 1024


class WritePromises(Promises):
    """What an unconditional ``put`` leaves behind."""

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
        body = hashlib.shake_128(b"body").digest(self.large_bytes)
        await storage.put("large", body)
        found = await storage.get("large")
        assert found.data == body
        middle = len(body) // 2
        part = await storage.get("large", ByteRange(middle, middle + 1000))
        assert part.data == body[middle : middle + 1000]

    async def test_all_kinds_of_buffers_are_stored_alike(self, storage: Storage) -> None:
        """What counts are the bytes of a buffer, not how it counts its items."""
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
        """Each read after a write answers that write, however often the object is replaced."""
        for number in range(50):
            version = await storage.put("key", b"%d" % number)
            found = await storage.get("key")
            assert (bytes(found.data), found.version) == (b"%d" % number, version)

    async def test_different_bytes_have_different_versions(self, storage: Storage) -> None:
        """No state of an object has the version of an earlier one, also after a deletion."""
        versions: list[Version] = []
        for number in range(100):
            versions.append(await storage.put("key", b"%03d" % number))
            if number % 10 == 9:
                await storage.delete(["key"])
        assert len(set(versions)) == 100

    async def test_puts_of_one_key_at_once_leave_one_of_them(self, storage: Storage) -> None:
        """Each of the writers succeeds, and the object is what one of them wrote."""
        bodies = [bytes([n]) * _BODY_BYTES for n in range(16)]

        async def put(body: bytes) -> Version:
            return await storage.put("key", body)

        versions = await bounded_map(put, bodies, limit=16)
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
