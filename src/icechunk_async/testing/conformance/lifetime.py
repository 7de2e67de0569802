"""Promises about handles: descriptions, event loops, closing, and cancelled calls."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import AsyncExitStack, suppress
from dataclasses import fields
from threading import Barrier
from typing import TYPE_CHECKING, Any, Final

import pytest

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async.errors import (
    IcechunkError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    StorageClosedError,
)
from icechunk_async.storage import (
    ABSENT,
    BlockingStorage,
    ByteRange,
    Capabilities,
    Storage,
    StorageDescription,
    Version,
)
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.conformance._base import (
    Promises,
    exists,
    fill,
    listed,
    names,
    read,
    skip_unless_promised,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["CancellationPromises", "LifetimePromises"]

_START_SECONDS: Final = 60.0


class LifetimePromises(Promises):
    """The promises of a handle as a whole."""

    async def test_capabilities_are_constant(self, storage: Storage) -> None:
        """The promises of a storage are known when it is open and do not change."""
        before = storage.capabilities
        assert isinstance(before, Capabilities)
        await storage.put("key", b"body")
        assert storage.capabilities == before

    async def test_every_promise_that_is_not_made_has_a_reason(self, storage: Storage) -> None:
        """Reasons are sentences about missing promises, and about nothing else."""
        promises = storage.capabilities
        flags = {item.name for item in fields(promises)} - {"reasons", "verified", "documented"}
        missing = {name for name in flags if not getattr(promises, name)}
        assert set(promises.reasons) == missing
        assert all(len(reason.split()) > 2 for reason in promises.reasons.values())

    async def test_the_description_opens_the_same_objects(self, storage: Storage) -> None:
        """A description that was pickled elsewhere opens an equal handle."""
        await storage.put("key", b"body")
        description = pickle.loads(pickle.dumps(storage.description))  # noqa: S301 - made here
        assert description == storage.description
        async with self.reopen(description) as other:
            assert await read(other, "key") == b"body"
            assert other.description == storage.description
            assert other.capabilities == storage.capabilities

    async def test_no_representation_shows_options(self, storage: Storage) -> None:
        """Some options are secrets, and representations end in logs."""
        shown = repr(storage.description) + repr(storage)
        for value in storage.description.options.values():
            if isinstance(value, str):
                assert value not in shown
        secret = StorageDescription(storage.description.url, {"key": "a-secret"})
        assert isinstance(storage.description, StorageDescription)
        assert "a-secret" not in repr(type(storage.description)(secret.url, secret.options))

    async def test_a_closed_storage_refuses_every_operation(self, storage: Storage) -> None:
        """After its block a handle raises a clear error."""
        version = await storage.put("key", b"body")
        async with AsyncExitStack() as stack:
            other = await stack.enter_async_context(self.reopen(storage.description))
            # Made while it was open, and not started: its first page is asked for after the block.
            entries = other.list_prefix()
        operations: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: other.get("key"),
            "get_if_changed": lambda: other.get_if_changed("key", version),
            "put": lambda: other.put("key", b"late"),
            "delete": lambda: other.delete(["key"]),
            "list_prefix": lambda: listed(other),
            "a listing from before": lambda: anext(entries),
            "copy": lambda: other.copy("key", "late"),
            "sync": other.sync,
        }
        for operation in operations.values():
            with pytest.raises(StorageClosedError):
                await operation()
        # Neither the late write nor the late copy landed.
        assert names(await listed(storage)) == ["key"]
        assert await read(storage, "key") == b"body"

    async def test_closing_one_handle_leaves_the_others_open(self, storage: Storage) -> None:
        """Handles on the same objects are closed independently."""
        async with self.reopen(storage.description) as other:
            await other.put("key", b"body")
        assert await read(storage, "key") == b"body"
        await storage.put("other", b"body")

    async def test_sync_returns_and_changes_nothing(self, storage: Storage) -> None:
        """It can be called at any time: with nothing written, with much, twice, and at once."""
        await storage.sync()
        keys = [f"folder-{n % 5}/key-{n:03}" for n in range(200)]
        await fill(storage, keys, b"body")
        await storage.delete(keys[::2])
        await gather(storage.sync(), storage.sync(), storage.put("later", b"body"))
        await storage.sync()
        assert names(await listed(storage)) == sorted([*keys[1::2], "later"])
        assert await read(storage, keys[1]) == b"body"

    async def test_a_handle_works_on_several_loops_at_once(self, storage: Storage) -> None:
        """The engine is called from the loops of Zarr, of a facade and of the application."""
        await storage.put("shared", b"body")

        async def work(name: str) -> None:
            async def use(number: int) -> None:
                key = f"{name}/{number:02}"
                await storage.put(key, key.encode())
                assert await read(storage, key) == key.encode()
                assert await read(storage, "shared") == b"body"

            for _ in range(3):
                await bounded_map(use, range(40), limit=8)
                assert len(await listed(storage, f"{name}/")) == 40
                await storage.sync()
                await storage.delete([f"{name}/39"])

        def run(name: str) -> None:
            asyncio.run(work(name))

        # Two loops on threads beside that of the test, all in use at the same time.
        threads = [asyncio.to_thread(run, name) for name in ("one", "two")]
        await gather(*threads, work("three"))
        assert len(await listed(storage)) == 3 * 39 + 1

    async def test_errors_survive_a_pickle(self, storage: Storage) -> None:
        """Errors travel from workers with their type, their message and their context."""
        operations: dict[type[IcechunkError], Callable[[], Awaitable[object]]] = {
            ObjectNotFoundError: lambda: storage.get("missing"),
            InvalidObjectKeyError: lambda: storage.get("/"),
        }
        for kind, operation in operations.items():
            with pytest.raises(kind) as caught:
                await operation()
            error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - made here
            assert type(error) is type(caught.value)
            assert (error.message, error.context) == (caught.value.message, caught.value.context)
            assert str(error)

    async def test_blocking_methods_do_what_the_others_do(self, storage: Storage) -> None:
        """If they exist, they read and write the same objects with the same results."""
        if not isinstance(storage, BlockingStorage):
            pytest.skip("this storage does not answer without an event loop")
        blocking: BlockingStorage = storage
        version = await asyncio.to_thread(blocking.put_blocking, "key", bytearray(b"0123456789"))
        found = await storage.get("key")
        assert (bytes(found.data), found.version) == (b"0123456789", version)
        part = await asyncio.to_thread(blocking.get_blocking, "key", ByteRange(2, 5))
        assert (bytes(part.data), part.size_bytes, part.version) == (b"234", 10, version)
        with pytest.raises(ObjectNotFoundError):
            await asyncio.to_thread(blocking.get_blocking, "missing")
        with pytest.raises(InvalidObjectKeyError):
            await asyncio.to_thread(blocking.put_blocking, "../key", b"body")
        assert not await exists(storage, "missing")

    async def test_blocking_methods_may_be_called_from_several_threads(
        self, storage: Storage
    ) -> None:
        """The codec pipeline of Zarr calls them from its threads, at the same time."""
        if not isinstance(storage, BlockingStorage):
            pytest.skip("this storage does not answer without an event loop")
        blocking: BlockingStorage = storage

        together = Barrier(3)

        def work(name: str) -> None:
            together.wait(_START_SECONDS)  # so that each call has a separate thread
            for number in range(50):
                key = f"{name}/{number}"
                blocking.put_blocking(key, key.encode())
                assert bytes(blocking.get_blocking(key).data) == key.encode()

        await gather(*(asyncio.to_thread(work, name) for name in ("one", "two", "three")))
        assert len(await listed(storage)) == 150


# Longer than what is sent or written in one step, so that there are waits to cancel within.
_OLD = b"old" * 100_000
_NEW = b"new" * 100_000


class CancellationPromises(Promises):
    """The state after a cancelled operation; each run has a separate key.

    A cancelled write may still land later, so its key holds either of two objects, whole.
    """

    async def test_a_cancelled_get_changes_nothing(self, storage: Storage) -> None:
        """Later reads are not affected."""
        await storage.put("key", _OLD)
        async for _ in at_every_wait(lambda _: storage.get("key")):
            assert await read(storage, "key") == _OLD

    async def test_a_cancelled_put_leaves_the_old_object_or_the_new(self, storage: Storage) -> None:
        """Never a part, nor a mixture, also when the caller uses its buffer for something else."""
        buffers = [bytearray(_NEW) for _ in range(100)]
        await fill(storage, [f"key-{n}" for n in range(100)], _OLD)

        async def put(n: int) -> None:
            await storage.put(f"key-{n}", buffers[n])

        async for n in at_every_wait(put):
            # Also resized: a view that the storage kept would make this fail.
            buffers[n][:] = b"something else"
            assert await read(storage, f"key-{n}") in (_OLD, _NEW)
            await storage.put("after", b"works")
        assert await _states(storage, "key-") <= {_OLD, _NEW}

    async def test_a_cancelled_creation_leaves_nothing_or_the_object(
        self, storage: Storage
    ) -> None:
        """Never a part of it."""
        skip_unless_promised(storage, "conditional_create")

        async def create(n: int) -> None:
            await storage.put(f"key-{n}", _NEW, if_version=ABSENT)

        async for n in at_every_wait(create):
            with suppress(ObjectNotFoundError):
                assert await read(storage, f"key-{n}") == _NEW
            await storage.put("after", b"works")
        assert await _states(storage, "key-") <= {_NEW}

    async def test_a_cancelled_update_leaves_the_old_object_or_the_new(
        self, storage: Storage
    ) -> None:
        """Never a part, and no lock that keeps others out."""
        skip_unless_promised(storage, "conditional_update")
        versions = [await storage.put(f"key-{n}", _OLD) for n in range(100)]

        async def update(n: int) -> None:
            await storage.put(f"key-{n}", _NEW, if_version=versions[n])

        async for n in at_every_wait(update):
            assert await read(storage, f"key-{n}") in (_OLD, _NEW)
            other = await storage.put("after", b"works")
            await storage.put("after", b"works as well", if_version=other)
        assert await _states(storage, "key-") <= {_OLD, _NEW}

    async def test_a_cancelled_deletion_leaves_whole_objects(self, storage: Storage) -> None:
        """Each key is there, whole, or gone."""
        await fill(storage, [f"{n}/{m}" for n in range(100) for m in range(3)], _OLD)

        async def delete(n: int) -> None:
            await storage.delete([f"{n}/{m}" for m in range(3)])

        async for _ in at_every_wait(delete):
            await storage.put("after", b"works")
            await storage.delete(["after"])
        assert await _states(storage, "") <= {_OLD}

    async def test_a_cancelled_copy_leaves_the_old_object_or_the_new(
        self, storage: Storage
    ) -> None:
        """The target is what it was or the whole copy; the source stays."""
        await fill(storage, [f"key-{n}" for n in range(100)], _OLD)
        await storage.put("source", _NEW)

        async def copy(n: int) -> None:
            await storage.copy("source", f"key-{n}")

        async for n in at_every_wait(copy):
            assert await read(storage, f"key-{n}") in (_OLD, _NEW)
            assert await read(storage, "source") == _NEW
        assert await _states(storage, "key-") <= {_OLD, _NEW}

    async def test_a_cancelled_listing_changes_nothing(self, storage: Storage) -> None:
        """The next listing is complete."""
        keys = [f"key-{n:04}" for n in range(self.page_keys * 6 // 5)]
        await fill(storage, keys)
        async for _ in at_every_wait(lambda _: listed(storage)):
            assert names(await listed(storage)) == keys

    async def test_a_cancelled_sync_changes_nothing(self, storage: Storage) -> None:
        """Everything is still there, and the next sync returns."""

        async def sync(n: int) -> None:
            await storage.put(f"key-{n}", _NEW)
            await storage.sync()

        async for n in at_every_wait(sync):
            await storage.put(f"key-{n}", _NEW)
            await storage.sync()
            assert await read(storage, f"key-{n}") == _NEW

    async def test_cancelled_operations_leave_no_task_behind(self, storage: Storage) -> None:
        """Tasks that an operation started have ended when it returns."""
        operations: list[Callable[[int], Coroutine[Any, Any, object]]] = [
            lambda _: storage.get("key"),
            lambda _: storage.get_if_changed("key", Version("another")),
            lambda n: storage.put(f"key-{n}", _NEW),
            lambda n: storage.delete([f"key-{n}", "other"]),
            lambda n: storage.copy("key", f"copy-{n}"),
            lambda _: listed(storage),
            lambda _: storage.sync(),
        ]
        await storage.put("key", _OLD)
        before = asyncio.all_tasks()
        for operation in operations:
            async for _ in at_every_wait(operation):
                assert asyncio.all_tasks() == before
            assert asyncio.all_tasks() == before


async def _states(storage: Storage, prefix: str) -> set[bytes]:
    """Return the bodies below a prefix."""
    return {await read(storage, key) for key in names(await listed(storage, prefix))}
