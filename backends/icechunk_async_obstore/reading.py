"""Whole objects and ranges that behave like slices, over a client whose ranges do not.

There are no empty ranges on the wire, none that begin where the object ends, and no suffixes on
Azure: what cannot be asked in one request is asked after the object's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import obstore

from icechunk_async.errors import StorageUnavailableError
from icechunk_async.storage import ByteRange, RangeRequest, Retrieved, SuffixRange, slice_range
from icechunk_async_obstore.failures import read_report
from icechunk_async_obstore.versions import Service, version_of

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

    from icechunk_async_obstore.options import Client

__all__ = ["look", "read_body", "read_range"]

_LOOKS: Final = 8
"""How often a range is asked for again when the object changes between two requests."""


async def read_range(
    client: Client, service: Service, key: str, path: str, byte_range: RangeRequest
) -> Retrieved:
    """Read an object or part of it; the client's errors leave as they are.

    Raises:
        StorageUnavailableError: the object changed again and again, or came in part.
    """
    if _fits_one_request(byte_range, service):
        try:
            options = _options(byte_range)
            answer = await obstore.get_async(client, path, options=options)
            return await read_body(service, answer, key, byte_range)
        except Exception as error:
            if byte_range is None or not _is_outside(error):
                raise
    for _ in range(_LOOKS):
        found = await _read_measured(client, service, key, path, byte_range)
        if found is not None:
            return found
    raise StorageUnavailableError(
        f"{key!r} changed {_LOOKS} times while {byte_range} of it was read. Try again.", key=key
    )


async def look(client: Client, service: Service, path: str) -> GetResult:
    """Return what is known of an object, without its body."""
    # In answers of GCS to HEAD the length of an empty object may be missing, which the client
    # takes for an error. The body of a GET is not fetched before it is asked for.
    return await obstore.get_async(client, path, options={"head": service is not Service.GS})


async def read_body(
    service: Service, answer: GetResult, key: str, byte_range: RangeRequest = None
) -> Retrieved:
    """Fetch the body of an answer, which must be as long as was promised.

    Raises:
        StorageUnavailableError: it is not.
    """
    meta = answer.meta
    version = version_of(service, meta, key)
    expected = slice_range(byte_range, meta["size"])
    data = memoryview(await answer.bytes_async())
    if tuple(answer.range) != expected or len(data) != expected[1] - expected[0]:
        raise StorageUnavailableError(
            f"{key!r}: bytes {expected} were asked for, and {len(data)} bytes of "
            f"{tuple(answer.range)} came. Try again.",
            key=key,
        )
    return Retrieved(data, version, meta["size"], meta["last_modified"])


async def _read_measured(
    client: Client, service: Service, key: str, path: str, byte_range: RangeRequest
) -> Retrieved | None:
    """Ask for the size first; None where the object changed before it was read."""
    meta = (await look(client, service, path)).meta
    version = version_of(service, meta, key)
    start, stop = slice_range(byte_range, meta["size"])
    if start == stop:
        return Retrieved(b"", version, meta["size"], meta["last_modified"])
    try:
        answer = await obstore.get_async(client, path, options={"range": (start, stop)})
        found = await read_body(service, answer, key, ByteRange(start, stop))
    except Exception as error:
        if _is_outside(error):
            return None
        raise
    return found if found.version == version else None


def _options(byte_range: RangeRequest) -> GetOptions:
    match byte_range:
        case ByteRange(start, stop) if stop is not None:
            return {"range": (start, stop)}
        case ByteRange(start):
            return {"range": {"offset": start}}
        case SuffixRange(length):
            return {"range": {"suffix": length}}
        case None:
            return {}


def _fits_one_request(byte_range: RangeRequest, service: Service) -> bool:
    match byte_range:
        case ByteRange(start, stop):
            return start != stop
        case SuffixRange(length):
            return length > 0 and service is not Service.AZ
        case None:
            return True


def _is_outside(error: Exception) -> bool:
    """Return whether the range had nothing of the object, however the server says so."""
    text = str(error)
    return (
        read_report(error).status == 416
        or "StartTooLarge" in text
        or "CONTENT_RANGE header" in text
    )
