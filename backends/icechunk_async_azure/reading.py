"""Reads: one answer of the service each, so that all bytes are of one version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from azure.core import MatchConditions

from icechunk_async.errors import StorageUnavailableError
from icechunk_async.storage import ByteRange, Retrieved, SuffixRange, Version
from icechunk_async_azure.clients import released
from icechunk_async_azure.failures import FOREIGN, code_of, status_of
from icechunk_async_azure.requests import is_etag

if TYPE_CHECKING:
    from azure.storage.blob import BlobProperties
    from azure.storage.blob.aio import StorageStreamDownloader

    from icechunk_async.storage import RangeRequest
    from icechunk_async_azure.clients import Client
    from icechunk_async_azure.requests import Requests

__all__ = ["read", "read_if_changed"]

_TRIES: Final = 10
"""How often a suffix is asked for again, because the object was replaced between two requests."""


async def read(requests: Requests, key: str, byte_range: RangeRequest) -> Retrieved:
    """Read an object or part of it; a suffix, and a range of nothing, cost two requests at most.

    The service knows no suffixes, so they are asked for by size, of the version that has it.
    """
    requests.name(key)
    client = await requests.client("read", key)
    match byte_range:
        case ByteRange(start, stop) if stop is None or stop > start:
            found = await _download(requests, client, key, start, stop)
            return found if found is not None else await _nothing(requests, client, key)
        case SuffixRange(length) if length > 0:
            return await _read_suffix(requests, client, key, length)
        case None:
            found = await _download(requests, client, key, 0, None)
            return found if found is not None else await _nothing(requests, client, key)
        case _:
            return await _nothing(requests, client, key)


async def read_if_changed(requests: Requests, key: str, version: Version) -> Retrieved | None:
    """Read a whole object unless it is at ``version``, which costs one small answer."""
    requests.name(key)
    if not is_etag(version):  # the service never answered it
        return await read(requests, key, None)
    client = await requests.client("read", key)
    conditions = {"etag": version.token, "match_condition": MatchConditions.IfModified}
    try:
        found = await _download(requests, client, key, 0, None, **conditions)
    except _Unmet:
        return None
    return found if found is not None else await _nothing(requests, client, key)


class _Unmet(Exception):  # noqa: N818 - a signal between two functions
    """The object is in another state than the request was made for."""


async def _read_suffix(requests: Requests, client: Client, key: str, length: int) -> Retrieved:
    for _ in range(_TRIES):
        whole = await requests.properties(client, key)
        if whole.size == 0:
            return _empty(whole)
        start = max(0, whole.size - length)
        conditions = {"etag": whole.etag, "match_condition": MatchConditions.IfNotModified}
        try:
            found = await _download(requests, client, key, start, None, **conditions)
        except _Unmet:
            continue
        if found is not None:
            return found
    raise StorageUnavailableError(
        f"Could not read the end of {key!r}: it was replaced {_TRIES} times meanwhile. Try again.",
        key=key,
    )


async def _nothing(requests: Requests, client: Client, key: str) -> Retrieved:
    """Return no bytes, with size and version of the object."""
    return _empty(await requests.properties(client, key))


def _empty(whole: BlobProperties) -> Retrieved:
    return Retrieved(b"", Version(whole.etag), whole.size, whole.last_modified)


async def _download(
    requests: Requests,
    client: Client,
    key: str,
    start: int,
    stop: int | None,
    **conditions: object,
) -> Retrieved | None:
    """Return bytes from ``start`` on, or None where the object ends before.

    Raises:
        _Unmet: a condition was not met.
    """
    blob: Any = client.blob(requests.name(key))
    bounds: dict[str, int] = {}
    if start or stop is not None:  # without bounds the driver also copes with empty objects
        bounds["offset"] = start
    if stop is not None:
        bounds["length"] = stop - start
    try:
        with released():
            answer: StorageStreamDownloader[bytes] = await blob.download_blob(
                **bounds, **conditions, decompress=False, max_concurrency=1
            )
            data = await answer.readall()
    except FOREIGN as error:
        if status_of(error) == 416:
            return None
        unmet = status_of(error) == 304 or (status_of(error) == 412 and conditions)
        if unmet and code_of(error) in ("ConditionNotMet", ""):
            signal: Exception = _Unmet()
        else:
            signal = requests.explain(error, "read", key=key)
    except (AttributeError, RuntimeError) as error:
        if not requests.clients.closed:
            raise
        signal = requests.explain(error, "read", key=key)
    else:
        whole = answer.properties
        return Retrieved(data, Version(whole.etag), _size(whole), whole.last_modified)
    raise signal


def _size(whole: BlobProperties) -> int:
    # The driver makes the range up again from what the service said of the whole object.
    return int((whole.content_range or "").rpartition("/")[2])
