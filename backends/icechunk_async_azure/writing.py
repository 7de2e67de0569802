"""Writes and deletions of blobs, with or without a condition.

Each conditional write carries a unique id in the blob's metadata, so that after a lost reply the
blob shows if this very write landed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import anyio
from azure.core import MatchConditions
from azure.storage.blob import BlobBlock

from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageClosedError,
    StorageUnavailableError,
    ThrottledError,
)
from icechunk_async.storage import Absent, DeleteFailure, Version
from icechunk_async_azure.clients import released
from icechunk_async_azure.failures import FOREIGN, code_of, status_of, was_not_applied
from icechunk_async_azure.requests import is_etag

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from azure.storage.blob import BlobProperties

    from icechunk_async.storage import Data, Expected
    from icechunk_async_azure.clients import Client
    from icechunk_async_azure.requests import Requests

__all__ = [
    "BLOCK_BYTES",
    "Write",
    "delete",
    "for_each",
    "owned",
    "settle",
    "stage_bytes",
    "write",
    "write_blocks",
]


async def for_each[T](
    work: Callable[[T], Awaitable[object]], items: Iterable[T], *, limit: int
) -> None:
    """Await ``work`` of every item, at most ``limit`` at a time.

    Raises:
        IcechunkError: the first failure; running items finished, no others were started.

    Cancellation: running items are cancelled and awaited.
    """
    pending = iter(items)
    failures: list[IcechunkError] = []

    async def worker() -> None:
        for item in pending:  # shared: each item goes to one worker
            if failures:
                return
            try:
                await work(item)
            except IcechunkError as error:
                failures.append(error)

    # A backend may import only the storage contract and the errors, so not the shared helper.
    async with anyio.create_task_group() as tasks:  # noqa: TID251
        for _ in range(limit):
            tasks.start_soon(worker)
    if failures:
        raise failures[0]


BLOCK_BYTES: Final = 16 * 1024 * 1024
"""Larger objects are sent in blocks of this size, which one commit joins."""
_BLOCKS_AT_ONCE: Final = 4
_TRIES: Final = 5
_PAUSES: Final = (0.02, 0.1, 0.5)
"""Pauses between attempts to read back a write."""
_WRITE_ID: Final = "icechunkwriteid"
# Codes of conditions that do not hold; empty where a proxy left it out. Other conflicts (409), such
# as a lease, say nothing of the condition.
_REFUSALS: Final = frozenset(
    {"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet", "SourceConditionNotMet", ""}
)


@dataclass(frozen=True, slots=True)
class Write:
    """One write: its target, its condition, and the id that identifies it."""

    key: str
    expected: Expected
    write_id: str
    action: str = "write"
    subject: str | None = None
    """The key that ``expected`` concerns, if it is another one."""

    @classmethod
    def of(cls, key: str, expected: Expected) -> Write:
        """Return a new write of ``key``."""
        return cls(key, expected, str(uuid4()))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata stored with the blob."""
        return {_WRITE_ID: self.write_id}

    @property
    def conditions(self) -> dict[str, Any]:
        """The expectation as arguments of the driver."""
        match self.expected:
            case Absent.ABSENT:
                return {"match_condition": MatchConditions.IfMissing}
            case Version(etag):
                return {"etag": etag, "match_condition": MatchConditions.IfNotModified}
            case _:
                return {}

    def refused(self, found: str) -> PreconditionFailedError:
        """Return the error of a write that found another state."""
        subject = self.subject or self.key
        wanted = "absent" if self.expected is Absent.ABSENT else f"at {self.expected}"
        return PreconditionFailedError(
            f"{subject!r} {found}, and was expected {wanted}; nothing was changed. Read it again "
            "and decide anew.",
            key=subject,
            expected=self.expected,
        )


def owned(data: Data) -> bytes:
    """Return bytes that the caller cannot change while they are sent."""
    return data if isinstance(data, bytes) else bytes(data)


async def write(requests: Requests, key: str, data: bytes, expected: Expected) -> Version:
    """Write one whole object."""
    name = requests.name(key)
    task = Write.of(key, expected)
    if isinstance(expected, Version) and not is_etag(expected):
        raise task.refused("is at no such version")  # '*' would match any
    client = await requests.client("write", key)
    if len(data) > BLOCK_BYTES:

        async def stage(block_id: str, start: int) -> None:
            part = data[start : start + BLOCK_BYTES]
            await stage_bytes(requests, client, task, block_id, part)

        return await write_blocks(requests, client, task, range(0, len(data), BLOCK_BYTES), stage)
    blob: Any = client.blob(name)
    request = blob.upload_blob(
        data,
        length=len(data),
        # Without it the driver adds ``If-None-Match: *`` by itself.
        overwrite=True,
        metadata=task.metadata,
        max_concurrency=1,
        **task.conditions,
    )
    return await settle(requests, client, task, request)


async def stage_bytes(
    requests: Requests, client: Client, task: Write, block_id: str, data: bytes
) -> None:
    """Send one block; see `write_blocks`."""
    blob: Any = client.blob(requests.name(task.key))
    request = blob.stage_block(block_id, data, length=len(data))
    await requests.ask(request, task.action, key=task.key)


async def write_blocks(
    requests: Requests,
    client: Client,
    task: Write,
    starts: range,
    stage: Callable[[str, int], Awaitable[None]],
) -> Version:
    """Send blocks, then commit them in one conditional step.

    Another write to the blob discards the blocks; then they are sent again, unless the condition no
    longer holds. The service eventually discards the blocks of a failed write.

    Args:
        requests: sends the requests.
        client: the running loop's client.
        task: what is written.
        starts: the position of each block.
        stage: sends the block with an id, at a position.
    """
    blob: Any = client.blob(requests.name(task.key))

    def block_id(start: int) -> str:
        # All ids of a blob have one length, as the service wants. With the write's own id in them
        # blocks of two writers are never mixed.
        return f"{task.write_id}/{start // starts.step:06}"

    async def stage_at(start: int) -> None:
        await stage(block_id(start), start)

    # Blocks wait under the blob's name: a commit of another writer discards these as well.
    for _ in range(_TRIES):
        # Every round stages all blocks, under the same ids: what is left of an earlier round is
        # replaced.
        await for_each(stage_at, starts, limit=_BLOCKS_AT_ONCE)
        commit = blob.commit_block_list(
            [BlobBlock(block_id(start)) for start in starts],
            metadata=task.metadata,
            **task.conditions,
        )
        try:
            return await settle(requests, client, task, commit)
        except _DiscardedError:
            await _check_expectation(requests, client, task)
    raise StorageUnavailableError(
        f"Could not {task.action} {task.key!r}: others wrote it {_TRIES} times while its blocks "
        "were sent; nothing was changed. Try again.",
        key=task.key,
    )


class _DiscardedError(Exception):
    """Another write made the service discard the blocks."""


async def _check_expectation(requests: Requests, client: Client, task: Write) -> None:
    if task.expected is None:
        return
    try:
        found = (await requests.properties(client, task.key, action=task.action)).etag
    except ObjectNotFoundError:
        found = None
    if found is None and task.expected is Absent.ABSENT:
        return
    if isinstance(task.expected, Version) and found == task.expected.token:
        return
    raise task.refused(f"is at {found}" if found else "does not exist")


async def settle(
    requests: Requests, client: Client, task: Write, request: Awaitable[dict[str, Any]]
) -> Version:
    """Await the request of a write; if its outcome is in doubt, read the blob back.

    Raises:
        PreconditionFailedError: it was refused, and did not land.
        OutcomeUnknownError: it may have landed, or may land later.
        IcechunkError: it certainly changed nothing.
    """
    try:
        with released():
            etag = (await request).get("etag")
        if etag:
            return Version(str(etag))
        # It landed, and a proxy took away what tells the version: the blob is asked.
        failed: BaseException = ValueError("the service answered no ETag")
    except FOREIGN as error:
        failed = error
    except RuntimeError as error:
        # The driver stumbles when its connections are closed under it.
        if not requests.clients.closed:
            raise
        failed = error
    if status_of(failed) == 400 and code_of(failed) == "InvalidBlockList":
        raise _DiscardedError
    failure: IcechunkError = requests.explain(failed, task.action, key=task.key)
    refused = status_of(failed) in (409, 412) and code_of(failed) in _REFUSALS
    if isinstance(failure, ObjectNotFoundError) and task.subject is None:
        refused = True  # a missing blob is at no version
    certain = was_not_applied(failed, conditional=task.expected is not None)
    if isinstance(failure, StorageClosedError) or (certain and not refused):
        raise failure
    # In every other case the blob decides, by the id. A refusal, too, may be that of a second
    # request, which a proxy sent although the first had landed.
    return await _read_back(requests, client, task, failure, refused=refused)


async def _read_back(
    requests: Requests, client: Client, task: Write, failure: IcechunkError, *, refused: bool
) -> Version:
    try:
        found = await _look(requests, client, task)
    except ObjectNotFoundError:
        state = "does not exist"
    except IcechunkError:
        raise _unknown(task, failure) from failure
    else:
        if (found.metadata or {}).get(_WRITE_ID) == task.write_id:
            return Version(found.etag)
        state = f"is at {Version(found.etag)}"
    if refused:
        raise task.refused("is in another state" if task.subject else state)
    if isinstance(failure, ThrottledError):
        raise failure  # the service says that it rejected the write, and the blob agrees
    raise _unknown(task, failure) from failure


async def _look(requests: Requests, client: Client, task: Write) -> BlobProperties:
    """Return the blob's state; repeated, because without it the outcome stays unknown."""
    for pause in _PAUSES:
        with suppress(StorageUnavailableError):
            return await requests.properties(client, task.key, action=task.action)
        await asyncio.sleep(pause)
    return await requests.properties(client, task.key, action=task.action)


def _unknown(task: Write, failure: IcechunkError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"{failure.message} The write may have landed, or may land later. Read {task.key!r} to "
        "know.",
        **{**failure.context, "key": task.key},
    )


_AT_ONCE: Final = 16


async def delete(requests: Requests, keys: Iterable[str]) -> list[DeleteFailure]:
    """Delete objects; return those that could not be deleted, in the order of ``keys``."""
    names = {key: requests.name(key) for key in keys}  # all are checked before one is deleted
    if not names:
        requests.clients.check_open()
        return []
    failures: dict[str, IcechunkError] = {}

    async def delete_one(key: str) -> None:
        try:
            client = await requests.client("delete", key)
            request: Any = client.blob(names[key]).delete_blob()
            await requests.ask(request, "delete", key=key)
        except ObjectNotFoundError:
            pass
        except StorageClosedError:
            raise
        except IcechunkError as error:
            failures[key] = error

    await for_each(delete_one, names, limit=min(_AT_ONCE, len(names)))
    return [DeleteFailure(key, failures[key]) for key in names if key in failures]
