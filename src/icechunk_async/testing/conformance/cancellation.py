"""Promises about operations that are cancelled: wherever they wait, nothing is left half done."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from icechunk_async.errors import ObjectNotFoundError
from icechunk_async.storage import ABSENT, Version
from icechunk_async.testing.cancellation import at_every_wait
from icechunk_async.testing.conformance._base import Promises
from icechunk_async.testing.conformance._helpers import (
    fill,
    listed,
    names,
    read,
    skip_unless_promised,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from icechunk_async.storage import Storage

__all__ = ["CancellationPromises"]

_OLD = b"old" * 100_000
_NEW = b"new" * 100_000


class CancellationPromises(Promises):
    """What a cancelled operation leaves behind; each run has a key of its own.

    A cancelled write may still land later, so that nothing can be said about its key but that
    it holds one of two objects, whole.
    """

    async def test_a_cancelled_get_changes_nothing(self, storage: Storage) -> None:
        """Reading goes on as if it had not been tried."""
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
        keys = [f"key-{n:04}" for n in range(1200)]
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
        """What an operation started has ended when the operation has."""
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
