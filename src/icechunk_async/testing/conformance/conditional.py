"""Promises about conditional writes: the check and the write are one atomic step."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pytest

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.errors import PreconditionFailedError, UnsafeStorageError
from icechunk_async.storage import ABSENT, Version
from icechunk_async.testing._processes import (
    PROCESSES,
    create_in_processes,
    increment,
    increment_in_processes,
)
from icechunk_async.testing.conformance._base import Promises, exists, read, skip_unless_promised

if TYPE_CHECKING:
    from icechunk_async.storage import Expected, Storage

__all__ = ["ConditionalPromises"]

# A race proves that a server is wrong, and never that it is right: one that looks and writes within
# microseconds, as moto does, passes these nearly always.
_WRITERS: Final = 64
_ROUNDS: Final = 20


class ConditionalPromises(Promises):
    """The promises of ``put(if_version=...)``, alone and in races."""

    async def test_a_creation_lands_where_nothing_is(self, storage: Storage) -> None:
        """``ABSENT`` expects no object, and one is there afterwards."""
        skip_unless_promised(storage, "conditional_create")
        version = await storage.put("key", b"created", if_version=ABSENT)
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"created", version)

    async def test_a_creation_is_refused_where_something_is(self, storage: Storage) -> None:
        """The existing object stays, bytes and version; an empty object counts."""
        skip_unless_promised(storage, "conditional_create")
        for body in (b"first", b""):
            version = await storage.put("key", body)
            with pytest.raises(PreconditionFailedError):
                await storage.put("key", b"second", if_version=ABSENT)
            found = await storage.get("key")
            assert (bytes(found.data), found.version) == (body, version)

    async def test_a_creation_lands_after_a_deletion(self, storage: Storage) -> None:
        """A deleted object is absent."""
        skip_unless_promised(storage, "conditional_create")
        await storage.put("folder/key", b"first")
        await storage.delete(["folder/key"])
        await storage.put("folder/key", b"second", if_version=ABSENT)
        assert await read(storage, "folder/key") == b"second"

    async def test_an_update_of_the_current_version_lands(self, storage: Storage) -> None:
        """The version may come from a put, from a read, or from an update."""
        skip_unless_promised(storage, "conditional_update")
        version = await storage.put("key", b"0")
        version = await storage.put("key", b"1", if_version=version)
        version = await storage.put("key", b"2", if_version=version)
        version = (await storage.get("key")).version
        version = await storage.put("key", b"3", if_version=version)
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"3", version)

    async def test_an_update_of_an_older_version_is_refused(self, storage: Storage) -> None:
        """The existing object stays, bytes and version."""
        skip_unless_promised(storage, "conditional_update")
        old = await storage.put("key", b"old")
        current = await storage.put("key", b"current")
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"lost", if_version=old)
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"current", current)

    async def test_an_update_of_a_missing_object_is_refused(self, storage: Storage) -> None:
        """A missing or deleted object is at no version; no object appears."""
        skip_unless_promised(storage, "conditional_update")
        version = await storage.put("folder/key", b"first")
        await storage.delete(["folder/key"])
        for key in ("folder/key", "never", "nowhere/never"):
            with pytest.raises(PreconditionFailedError):
                await storage.put(key, b"second", if_version=version)
            assert not await exists(storage, key)

    async def test_an_update_with_a_made_up_version_is_refused(self, storage: Storage) -> None:
        """A version that the store never issued matches nothing."""
        skip_unless_promised(storage, "conditional_update")
        await storage.put("key", b"first")
        # To a service some of these mean something: "*" is any version in HTTP, 0 no object in
        # Google's.
        for token in ("", "0", "*", "made-up"):
            with pytest.raises(PreconditionFailedError):
                await storage.put("key", b"second", if_version=Version(token))
        assert await read(storage, "key") == b"first"

    async def test_a_refusal_tells_key_and_expectation(self, storage: Storage) -> None:
        """Handlers find the key and what was expected in the error's context."""
        skip_unless_promised(storage, "conditional_create")
        skip_unless_promised(storage, "conditional_update")
        expectations: list[Expected] = [await storage.put("key", b"first"), ABSENT]
        await storage.put("key", b"second")
        for expected in expectations:
            with pytest.raises(PreconditionFailedError) as caught:
                await storage.put("key", b"third", if_version=expected)
            assert caught.value.context.get("key") == "key"
            assert caught.value.context.get("expected") == expected

    async def test_conditional_writes_that_are_not_promised_are_refused(
        self, storage: Storage
    ) -> None:
        """A store that cannot check and write in one step does not do it in two."""
        version = await storage.put("there", b"first")
        promises = storage.capabilities
        for promised, key, expected in (
            (promises.conditional_create, "new", ABSENT),
            (promises.conditional_update, "there", version),
        ):
            if promised:
                await storage.put(key, b"second", if_version=expected)
                assert await read(storage, key) == b"second"
            else:
                with pytest.raises(UnsafeStorageError):
                    await storage.put(key, b"second", if_version=expected)
                assert await exists(storage, "new") == promises.conditional_create
                assert await read(storage, "there") == b"first"

    async def test_of_racing_creators_exactly_one_wins(self, storage: Storage) -> None:
        """The check and the creation are one step, also between two handles."""
        skip_unless_promised(storage, "conditional_create")
        async with self.reopen(storage.description) as other:
            for _ in range(5):
                await storage.delete(["folder/key"])
                winners = await _race((storage, other), "folder/key", [ABSENT] * _WRITERS)
                assert len(winners) == 1
                assert await read(storage, "folder/key") == b"%d" % winners[0]

    async def test_of_racing_updaters_exactly_one_wins(self, storage: Storage) -> None:
        """The check and the update are one step, also between two handles."""
        skip_unless_promised(storage, "conditional_update")
        async with self.reopen(storage.description) as other:
            for _ in range(5):
                version = await storage.put("key", b"first")
                winners = await _race((storage, other), "key", [version] * _WRITERS)
                assert len(winners) == 1
                assert await read(storage, "key") == b"%d" % winners[0]

    async def test_creators_and_updaters_exclude_each_other(self, storage: Storage) -> None:
        """If the object exists, an updater wins and no creator; if not, the reverse."""
        skip_unless_promised(storage, "conditional_create")
        skip_unless_promised(storage, "conditional_update")
        for _ in range(5):
            version = await storage.put("key", b"first")
            # In turns, so that both kinds are among the first to arrive.
            expectations: list[Expected] = [ABSENT, version] * (_WRITERS // 2)
            winners = await _race((storage,), "key", expectations)
            assert [expectations[winner] for winner in winners] == [version]
            await storage.delete(["key"])
            winners = await _race((storage,), "key", expectations)
            assert [expectations[winner] for winner in winners] == [ABSENT]

    async def test_increments_by_racing_writers_are_not_lost(self, storage: Storage) -> None:
        """A number that is only updated by compare-and-set counts every update."""
        skip_unless_promised(storage, "conditional_update")
        await storage.put("number", b"0")
        async with self.reopen(storage.description) as other:

            async def count(handle: Storage) -> None:
                await increment(handle, "number", 8)

            await bounded_map(count, [storage, other] * 4, limit=8)
        assert await read(storage, "number") == b"64"

    async def test_an_update_does_not_hide_a_put(self, storage: Storage) -> None:
        """An update that checked before a put does not write after it."""
        skip_unless_promised(storage, "conditional_update")
        for _ in range(_ROUNDS):
            version = await storage.put("key", b"first")

            async def update(version: Version = version) -> None:
                with suppress(PreconditionFailedError):
                    await storage.put("key", b"updated", if_version=version)

            # An update on either side: which of them comes late depends on the store.
            await gather(update(), storage.put("key", b"put"), update())
            assert await read(storage, "key") == b"put"

    async def test_an_update_does_not_revive_a_deleted_object(self, storage: Storage) -> None:
        """An update that checked before a deletion does not write after it."""
        skip_unless_promised(storage, "conditional_update")
        for _ in range(_ROUNDS):
            version = await storage.put("folder/key", b"first")

            async def update(version: Version = version) -> None:
                with suppress(PreconditionFailedError):
                    await storage.put("folder/key", b"updated", if_version=version)

            await gather(update(), storage.delete(["folder/key"]), update())
            assert not await exists(storage, "folder/key")

    async def test_of_creators_in_several_processes_exactly_one_wins(
        self, storage: Storage
    ) -> None:
        """The check and the creation are one step for every process that uses the storage."""
        skip_unless_promised(storage, "shared")
        skip_unless_promised(storage, "conditional_create")
        # Fifty races for one start of the processes, which takes much longer than they do.
        keys = [f"key-{n}" for n in range(50)]
        won = await asyncio.to_thread(create_in_processes, self.reopen, storage.description, keys)
        assert sorted(key for winner in won for key in winner) == sorted(keys)

    async def test_increments_by_several_processes_are_not_lost(self, storage: Storage) -> None:
        """The check and the update are one step for every process that uses the storage."""
        skip_unless_promised(storage, "shared")
        skip_unless_promised(storage, "conditional_update")
        await storage.put("number", b"0")
        where = (self.reopen, storage.description)
        await asyncio.to_thread(increment_in_processes, *where, "number", 25)
        assert await read(storage, "number") == b"%d" % (25 * PROCESSES)


async def _race(handles: tuple[Storage, ...], key: str, expectations: list[Expected]) -> list[int]:
    """Let a writer per expectation write its number; return the numbers that landed."""

    async def write(number: int) -> int | None:
        try:
            handle = handles[number % len(handles)]
            await handle.put(key, b"%d" % number, if_version=expectations[number])
        except PreconditionFailedError:
            return None
        return number

    writers = range(len(expectations))
    landed = await bounded_map(write, writers, limit=len(expectations))
    return [number for number in landed if number is not None]
