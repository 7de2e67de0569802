"""Promises about deleting: what is gone, what stays, what is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import IcechunkError, ObjectNotFoundError
from icechunk_async.testing.conformance._base import Promises
from icechunk_async.testing.conformance._helpers import exists, fill, listed, names, read

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["DeletePromises"]


class DeletePromises(Promises):
    """What ``delete`` removes and answers."""

    async def test_a_deleted_object_is_gone(self, storage: Storage) -> None:
        """It can no longer be read or listed, and what has a similar key stays."""
        await fill(storage, ["folder/a", "folder/ab", "folder/b"])
        assert await storage.delete(["folder/a"]) == []
        with pytest.raises(ObjectNotFoundError):
            await storage.get("folder/a")
        assert names(await listed(storage)) == ["folder/ab", "folder/b"]

    async def test_a_missing_object_counts_as_deleted(self, storage: Storage) -> None:
        """What is to be gone and is gone is no failure."""
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
        keys = [f"folder-{n % 7}/key-{n}" for n in range(2500)]
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
        assert await storage.delete([]) == []
        assert await exists(storage, "a")

    async def test_a_deleted_key_can_be_written_again(self, storage: Storage) -> None:
        """Nothing of the deletion is left, and nothing of the folders that it emptied."""
        for body in (b"one", b"two", b"three"):
            await storage.put("deep/down/key", body)
            assert await read(storage, "deep/down/key") == body
            await storage.delete(["deep/down/key"])
            assert not await exists(storage, "deep/down/key")
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
