"""Writes, copies and deletions of blobs, with or without a condition.

Each conditional write carries a unique id in the blob's metadata, so that after a lost reply the
blob shows if this very write landed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import anyio
from azure.core import MatchConditions
from azure.storage.blob import BlobBlock, BlobSasPermissions, generate_blob_sas

from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
    ThrottledError,
)
from icechunk_async.storage import Absent, ByteRange, DeleteFailure, Version
from icechunk_async_azure.clients import released
from icechunk_async_azure.failures import FOREIGN, code_of, status_of, was_not_applied
from icechunk_async_azure.reading import read
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
    "copy",
    "copy_through",
    "delete",
    "for_each",
    "owned",
    "settle",
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
        starts = range(0, len(data), BLOCK_BYTES)

        async def block(start: int) -> bytes:
            return data[start : start + BLOCK_BYTES]

        return await write_blocks(requests, client, task, starts, block)
    blob: Any = client.blob(name)
    request = blob.upload_blob(
        data,
        length=len(data),
        overwrite=True,
        metadata=task.metadata,
        max_concurrency=1,
        **task.conditions,
    )
    return await settle(requests, client, task, request)


async def write_blocks(
    requests: Requests,
    client: Client,
    task: Write,
    starts: range,
    block: Callable[[int], Awaitable[bytes]],
) -> Version:
    """Send blocks, then commit them in one conditional step.

    Another write to the blob discards the blocks; then they are sent again, unless the condition no
    longer holds. The service eventually discards the blocks of a failed write.

    Args:
        requests: sends the requests.
        client: the running loop's client.
        task: what is written.
        starts: the position of each block.
        block: returns the bytes of the block at a position.
    """
    blob: Any = client.blob(requests.name(task.key))

    def block_id(start: int) -> str:
        return f"{task.write_id}/{start // starts.step:06}"

    async def stage(start: int) -> None:
        data = await block(start)
        request = blob.stage_block(block_id(start), data, length=len(data))
        await requests.ask(request, task.action, key=task.key)

    for _ in range(_TRIES):
        await for_each(stage, starts, limit=_BLOCKS_AT_ONCE)
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
            return Version(str((await request)["etag"]))
    except FOREIGN as error:
        failed: BaseException = error
    except (AttributeError, RuntimeError) as error:
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


_COPY_TRIES: Final = 10
_SIGNED_FOR: Final = timedelta(hours=1)
_NOT_BY_THE_SERVICE: Final = frozenset({400, 401, 403, 409, 413, 501})
"""Replies to a copy that the service cannot make: too large (over 256 MiB), a source that the
account's firewall or these credentials hide from the service, an emulator without copies."""


async def copy(requests: Requests, source: str, target: str, if_version: Version | None) -> Version:
    """Copy one version of an object, in one request if the service can."""
    source_name, target_name = requests.name(source), requests.name(target)
    task = replace(Write.of(target, if_version), action="copy", subject=source)
    if if_version is not None and not is_etag(if_version):
        raise task.refused("is at no such version")  # '*' would match any
    client = await requests.client("copy", source)
    source_url = client.blob(source_name).url
    conditions: dict[str, Any] = {}
    if if_version is not None:
        conditions["source_etag"] = if_version.token
        conditions["source_match_condition"] = MatchConditions.IfNotModified
    bearer = await requests.ask(client.proof.bearer(), "copy", key=source)
    if bearer is not None:
        conditions["source_authorization"] = bearer
    request = client.blob(target_name).start_copy_from_url(
        _signed(requests, client, source_url, source_name),
        metadata=task.metadata,
        requires_sync=True,  # an asynchronous copy would show a part of an object
        **conditions,
    )
    try:
        return await settle(requests, client, task, request)
    except ObjectNotFoundError as error:
        missing = ObjectNotFoundError(
            f"Could not copy {source!r}: there is no such object.", key=source
        )
        missing.__cause__ = error.__cause__
    except PreconditionFailedError:
        raise
    except StorageError as error:
        if error.context.get("status") not in _NOT_BY_THE_SERVICE:
            raise
        return await copy_through(requests, source, target, if_version)
    raise missing


async def copy_through(
    requests: Requests, source: str, target: str, if_version: Version | None
) -> Version:
    """Copy an object by reading and writing it; memory: a few blocks."""
    task = replace(Write.of(target, if_version), action="copy", subject=source)
    for _ in range(_COPY_TRIES):
        client = await requests.client("copy", source)
        found = await requests.properties(client, source, action="copy")
        version = Version(found.etag)
        if if_version not in (None, version):
            raise task.refused(f"is at {version}")
        if found.size <= BLOCK_BYTES:
            whole = await read(requests, source, None)
            if whole.version == version:
                return await write(requests, target, bytes(whole.data), None)
            continue
        try:
            return await _copy_blocks(requests, client, (source, target), version, found.size)
        except _ReplacedError:
            continue
    raise StorageUnavailableError(
        f"Could not copy {source!r}: it was replaced {_COPY_TRIES} times meanwhile. Try again.",
        key=source,
    )


class _ReplacedError(StorageError):
    """The source is no longer at the version that is being copied."""


async def _copy_blocks(
    requests: Requests, client: Client, keys: tuple[str, str], version: Version, size: int
) -> Version:
    source, target = keys

    async def block(start: int) -> bytes:
        part = await read(requests, source, ByteRange(start, min(start + BLOCK_BYTES, size)))
        if part.version != version:
            raise _ReplacedError(f"{source!r} was replaced.", key=source)
        return bytes(part.data)

    task = replace(Write.of(target, None), action="copy")
    return await write_blocks(requests, client, task, range(0, size, BLOCK_BYTES), block)


def _signed(requests: Requests, client: Client, url: str, name: str) -> str:
    """Return a URL from which the service itself may read the source."""
    credential = client.proof.credential
    login = requests.clients.login
    match login.kind:
        case "key":
            token = generate_blob_sas(
                login.account_name or "",
                requests.place.container,
                name,
                account_key=str(login.secret),
                permission=BlobSasPermissions(read=True),
                expiry=datetime.now(UTC) + _SIGNED_FOR,
            )
            return f"{url}?{token}"
        case "sas" | "sas-callback":
            return f"{url}?{credential.signature}"
        case _:
            return url


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
