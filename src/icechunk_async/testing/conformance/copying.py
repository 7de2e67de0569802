"""Promises about copying within a storage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async._runtime.concurrency import gather
from icechunk_async.errors import ObjectNotFoundError, PreconditionFailedError
from icechunk_async.testing.conformance._base import Promises
from icechunk_async.testing.conformance._helpers import exists, listed, names, read

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["CopyPromises"]

_BODY_BYTES = 512 * 1024


class CopyPromises(Promises):
    """What ``copy`` writes and answers."""

    async def test_a_copy_has_the_bytes_of_its_source(self, storage: Storage) -> None:
        """Source and copy are both there; the answer is the version of the copy."""
        await storage.put("source", b"body")
        version = await storage.copy("source", "folder/target")
        found = await storage.get("folder/target")
        assert (bytes(found.data), found.version) == (b"body", version)
        assert await read(storage, "source") == b"body"
        assert names(await listed(storage)) == ["folder/target", "source"]

    async def test_a_copy_replaces_an_object(self, storage: Storage) -> None:
        """Nothing is left of what was under the target's key."""
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
            assert (await storage.get("target")).data == body

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
        """``if_version`` is about the source, whatever the target is."""
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
        """The object keeps its bytes, and is at the version that was answered."""
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
        bodies = [bytes([n]) * (_BODY_BYTES - n) for n in range(16)]
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
