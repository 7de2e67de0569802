"""Copies of blobs: by the service, in one request or in blocks, or through this machine.

The service reads the source by a URL, which carries a signature or a token of the source. So source
and target may be opened with different credentials.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from azure.core import MatchConditions
from azure.storage.blob import BlobSasPermissions, generate_blob_sas

from icechunk_async.errors import (
    ObjectNotFoundError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.storage import ByteRange, Version
from icechunk_async_azure.reading import read
from icechunk_async_azure.requests import is_etag
from icechunk_async_azure.writing import (
    BLOCK_BYTES,
    Write,
    settle,
    stage_bytes,
    write,
    write_blocks,
)

if TYPE_CHECKING:
    from azure.storage.blob import BlobProperties

    from icechunk_async_azure.clients import Client
    from icechunk_async_azure.requests import Requests

__all__ = ["copy", "copy_from", "copy_through"]

_COPY_TRIES: Final = 10
# Long enough for any block, each of which gets a new signature; short for a URL that leaks.
_SIGNED_FOR: Final = timedelta(hours=1)
_ONE_REQUEST_BYTES: Final = 256 * 1024 * 1024
"""The service copies larger blobs only in blocks."""
_COPIED_BLOCK_BYTES: Final = 100 * 1024 * 1024
"""The largest block from a URL that all versions of the service take."""
_MOST_BLOCKS: Final = 50_000
_NOT_BY_THE_SERVICE: Final = frozenset({400, 401, 403, 409, 413, 501})
"""Replies to a copy that the service cannot make: too large for one request, a source that the
account's firewall or these credentials hide from the service, an emulator without copies."""
_OTHER_VERSION: Final = 412


async def copy(requests: Requests, source: str, target: str, if_version: Version | None) -> Version:
    """Copy one version of an object: by the service if it can, else through this machine."""
    task = replace(Write.of(target, if_version), action="copy", subject=source)
    if if_version is not None and not is_etag(if_version):
        raise task.refused("is at no such version")  # '*' would match any
    try:
        return await _by_service(requests, task, requests, source)
    except _ReplacedError:
        return await copy_through(requests, source, target, if_version)
    except StorageError as error:
        if error.context.get("status") not in _NOT_BY_THE_SERVICE:
            raise
        return await copy_through(requests, source, target, if_version)


async def copy_from(requests: Requests, origin: Requests, key: str) -> None:
    """Copy an object of another container of the account to the same key, by the service alone.

    Raises:
        ObjectNotFoundError: it does not exist.
        StorageError: the service does not copy it.
    """
    task = replace(Write.of(key, None), action="copy", subject=key)
    await _by_service(requests, task, origin, key)


async def _by_service(requests: Requests, task: Write, origin: Requests, source: str) -> Version:
    """Let the service copy ``source`` of ``origin`` to the target of a write.

    Raises:
        ObjectNotFoundError: the source does not exist.
        PreconditionFailedError: the source is at another version than the write expects.
        StorageError: the service does not copy it; ``context`` has the ``status``.
    """
    client = await requests.client("copy", source)
    url, arguments = await _readable(origin, source)
    if isinstance(task.expected, Version):
        arguments["source_etag"] = task.expected.token
        arguments["source_match_condition"] = MatchConditions.IfNotModified
    request = client.blob(requests.name(task.key)).start_copy_from_url(
        url,
        metadata=task.metadata,
        requires_sync=True,  # an asynchronous copy would show a part of an object
        **arguments,
    )
    try:
        return await settle(requests, client, task, request)
    except ObjectNotFoundError as error:
        missing = _missing(source, error)
    except PreconditionFailedError:
        raise
    except StorageError as error:
        if error.context.get("status") not in _NOT_BY_THE_SERVICE:
            raise
        found = await origin.properties(await origin.client("copy", source), source, action="copy")
        if found.size <= _ONE_REQUEST_BYTES:
            raise
        return await _blocks_by_service(requests, task, (origin, source), found)
    raise missing


class _ReplacedError(StorageError):
    """The source is no longer at the version that is being copied."""


async def _blocks_by_service(
    requests: Requests, task: Write, place: tuple[Requests, str], found: BlobProperties
) -> Version:
    """Let the service copy a large object, block by block, all of the version that was found."""
    origin, source = place
    if isinstance(task.expected, Version) and task.expected.token != found.etag:
        raise task.refused(f"is at {Version(found.etag)}")
    client = await requests.client("copy", source)
    blob: Any = client.blob(requests.name(task.key))
    # Above 5 TB blocks are larger, since a blob has at most 50,000 of them.
    step = max(_COPIED_BLOCK_BYTES, -(-found.size // _MOST_BLOCKS))

    async def stage(block_id: str, start: int) -> None:
        url, arguments = await _readable(origin, source)
        request = blob.stage_block_from_url(
            block_id,
            url,
            start,
            min(step, found.size - start),
            headers={"x-ms-source-if-match": found.etag},
            **arguments,
        )
        try:
            await requests.ask(request, "copy", key=source)
        except StorageError as error:
            if error.context.get("status") == _OTHER_VERSION:
                raise _ReplacedError(f"{source!r} was replaced.", key=source) from error
            raise

    # The condition was on the source, and the target is replaced whatever it is.
    unconditional = replace(task, expected=None)
    return await write_blocks(requests, client, unconditional, range(0, found.size, step), stage)


def _missing(key: str, error: ObjectNotFoundError) -> ObjectNotFoundError:
    missing = ObjectNotFoundError(f"Could not copy {key!r}: there is no such object.", key=key)
    missing.__cause__ = error.__cause__
    return missing


async def _readable(origin: Requests, key: str) -> tuple[str, dict[str, Any]]:
    """Return a URL from which the service itself may read an object, and the driver's arguments."""
    client = await origin.client("copy", key)
    name = origin.name(key)
    bearer = await origin.ask(client.proof.bearer(), "copy", key=key)
    arguments = {} if bearer is None else {"source_authorization": bearer}
    return _signed(origin, client, client.blob(name).url, name), arguments


def _signed(origin: Requests, client: Client, url: str, name: str) -> str:
    login = origin.clients.login
    match login.kind:
        case "key":
            token = generate_blob_sas(
                login.account_name or "",
                origin.place.container,
                name,
                account_key=str(login.secret),
                permission=BlobSasPermissions(read=True),
                expiry=datetime.now(UTC) + _SIGNED_FOR,
            )
            return f"{url}?{token}"
        case "sas" | "sas-callback":
            return f"{url}?{client.proof.credential.signature}"
        case _:
            return url


async def copy_through(
    requests: Requests, source: str, target: str, if_version: Version | None
) -> Version:
    """Copy an object by reading and writing it; memory: a few blocks."""
    task = replace(Write.of(target, if_version), action="copy", subject=source)
    # Each round copies one version or nothing: blocks become an object only with the last request.
    for _ in range(_COPY_TRIES):
        client = await requests.client("copy", source)
        found = await requests.properties(client, source, action="copy")
        version = Version(found.etag)
        if if_version not in (None, version):
            raise task.refused(f"is at {version}")
        # In one read bytes and version belong together; the properties above are of a moment
        # before.
        if found.size <= BLOCK_BYTES:
            whole = await read(requests, source, None)
            if whole.version == version:
                return await write(requests, target, bytes(whole.data), None)
            continue
        try:
            return await _blocks_through(requests, client, (source, target), version, found.size)
        except _ReplacedError:
            continue
    raise StorageUnavailableError(
        f"Could not copy {source!r}: it was replaced {_COPY_TRIES} times meanwhile. Try again.",
        key=source,
    )


async def _blocks_through(
    requests: Requests, client: Client, keys: tuple[str, str], version: Version, size: int
) -> Version:
    source, target = keys
    task = replace(Write.of(target, None), action="copy")

    async def stage(block_id: str, start: int) -> None:
        part = await read(requests, source, ByteRange(start, min(start + BLOCK_BYTES, size)))
        if part.version != version:
            raise _ReplacedError(f"{source!r} was replaced.", key=source)
        await stage_bytes(requests, client, task, block_id, bytes(part.data))

    return await write_blocks(requests, client, task, range(0, size, BLOCK_BYTES), stage)
