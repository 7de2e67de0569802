"""Copies: made by the service in one step where it can, through this machine otherwise."""

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
from icechunk_async_azure.writing import BLOCK_BYTES, Write, settle, write, write_blocks

if TYPE_CHECKING:
    from icechunk_async_azure.clients import Client
    from icechunk_async_azure.requests import Requests

__all__ = ["copy", "copy_through"]

_TRIES: Final = 10
_SIGNED_FOR: Final = timedelta(hours=1)
_NOT_BY_THE_SERVICE: Final = frozenset({400, 401, 403, 409, 413, 501})
"""Answers to a copy that the service cannot make: too large (over 256 MiB), a source that the
account's firewall or these credentials hide from the service, an emulator without copies."""


async def copy(requests: Requests, source: str, target: str, if_version: Version | None) -> Version:
    """Copy an object, whole and of one version, in one request where the service can."""
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
        requires_sync=True,  # a copy that is only begun would show a part of an object
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
    for _ in range(_TRIES):
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
        f"Could not copy {source!r}: it was replaced {_TRIES} times meanwhile. Try again.",
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
    """Return a URL that the service itself may read the source from."""
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
