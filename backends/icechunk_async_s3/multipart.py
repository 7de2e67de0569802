"""A large object in parts: a few at a time, and all or nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio

from icechunk_async.errors import IcechunkError, OutcomeUnknownError
from icechunk_async.storage import Version
from icechunk_async_s3.failures import LostReplyError, explain
from icechunk_async_s3.transport import RefusedError
from icechunk_async_s3.versions import parse_etag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async_s3.options import Options
    from icechunk_async_s3.transport import Body, Transport

__all__ = ["Upload", "abort", "begin", "join", "upload"]

_PART_BYTES: Final = 16 * 1024 * 1024
_MOST_PARTS: Final = 10_000
_AT_A_TIME: Final = 4
_TRIES_OF_A_PART: Final = 3
_ABORT_SECONDS: Final = 10.0


@dataclass(slots=True)
class Upload:
    """An object whose parts are sent, or being sent, and not yet joined."""

    transport: Transport
    key: str
    full: str
    upload_id: str
    parts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


async def upload(
    transport: Transport, options: Options, key: str, full: str, body: Body
) -> Version:
    """Write a large object, whatever is there, and answer its version.

    Raises:
        OutcomeUnknownError: no answer came to the last request, which makes the object.

    Cancellation: the parts are removed again, unless the object was being made.
    """
    made = await begin(transport, options, key, full, body)
    try:
        return await _complete(made)
    except OutcomeUnknownError:
        raise
    except BaseException:
        await abort(made)
        raise


async def begin(
    transport: Transport,
    options: Options,
    key: str,
    full: str,
    body: Body,
    *,
    metadata: Mapping[str, str] | None = None,
) -> Upload:
    """Send all parts of an object, which is not there before :func:`join`.

    Raises:
        IcechunkError: a part could not be sent; those that were are removed again.

    Cancellation: the parts are removed again.
    """
    asked = f"writing {key!r} in"
    parameters: dict[str, object] = {"Key": full}
    if metadata is not None:
        parameters["Metadata"] = metadata
    if options.storage_class is not None:
        parameters["StorageClass"] = options.storage_class
    if options.checksum_algorithm is not None:
        parameters["ChecksumAlgorithm"] = options.checksum_algorithm.upper()
    try:
        begun = await transport.call("create_multipart_upload", asked, **parameters)
    except RefusedError as error:
        raise explain(error.refusal, asked, transport.place, key=key) from error
    except LostReplyError as error:
        raise error.as_read(asked, transport.place) from error
    made = Upload(transport, key, full, begun["UploadId"])
    try:
        made.parts = await _send_parts(made, body)
    except BaseException:
        await abort(made)
        raise
    return made


async def join(made: Upload, **conditions: str) -> Version:
    """Make the object of its parts, in one request.

    Args:
        made: what :func:`begin` answered.
        conditions: ``IfMatch`` or ``IfNoneMatch``.

    Raises:
        LostReplyError: no complete answer came; the object may have been made.
        RefusedError: the server said no; a status of 5xx leaves doubt.
        IcechunkError: nothing was sent.
    """
    done = await made.transport.call(
        "complete_multipart_upload",
        f"writing {made.key!r} in",
        Key=made.full,
        UploadId=made.upload_id,
        MultipartUpload={"Parts": made.parts},
        **conditions,
    )
    etag = parse_etag(done.get("ETag", ""))
    if not etag:  # the status comes before the work, so that it alone says nothing
        raise LostReplyError("the answer ended before it told a version")
    return Version(etag)


async def _send_parts(made: Upload, body: Body) -> list[dict[str, Any]]:
    size = max(_PART_BYTES, -(-len(body) // _MOST_PARTS))
    view = memoryview(body)
    starts = iter(list(enumerate(range(0, len(view), size), start=1)))
    parts: dict[int, dict[str, Any]] = {}
    failures: list[IcechunkError] = []

    async def work() -> None:
        for number, start in starts:  # shared: each part goes to one worker
            if failures:
                return
            try:
                parts[number] = await _send_part(made, number, view[start : start + size])
            except IcechunkError as error:
                failures.append(error)

    # Parts in turn would use one connection's bandwidth; the engine's own helper is out of reach.
    async with anyio.create_task_group() as group:  # noqa: TID251
        for _ in range(_AT_A_TIME):
            group.start_soon(work)
    if failures:
        raise failures[0]
    return [parts[number] for number in sorted(parts)]


async def _send_part(made: Upload, number: int, body: Body) -> dict[str, Any]:
    """Send one part; sending it twice leaves one."""
    transport = made.transport
    asked = f"writing part {number} of {made.key!r} in"
    query = (("partNumber", str(number)), ("uploadId", made.upload_id))
    for tries_left in reversed(range(_TRIES_OF_A_PART)):
        try:
            reply = await transport.send("PUT", made.full, query=query, body=body)
        except LostReplyError as error:
            if not tries_left:
                raise error.as_read(asked, transport.place) from error
            continue
        if reply.status == 200:
            sums = {
                f"Checksum{name.removeprefix('x-amz-checksum-').upper()}": value
                for name, value in ((n.lower(), v) for n, v in reply.headers.items())
                if name.startswith("x-amz-checksum-") and name != "x-amz-checksum-type"
            }
            return {"PartNumber": number, "ETag": reply.headers["etag"], **sums}
        if reply.status < 500 or not tries_left:
            raise await transport.explain(reply, asked, made.key)
    raise AssertionError  # the last try returns or raises


async def _complete(made: Upload) -> Version:
    transport, key = made.transport, made.key
    try:
        return await join(made)
    except RefusedError as error:
        if error.refusal.is_doubtful:
            raise _unknown(transport, key, error.refusal.said) from error
        raise explain(error.refusal, f"writing {key!r} in", transport.place, key=key) from error
    except LostReplyError as error:
        raise _unknown(transport, key, str(error)) from error


def _unknown(transport: Transport, key: str, why: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"writing {key!r} in {transport.place.url!r}: {why} when its parts were joined; it may "
        "have landed. Read it to know.",
        key=key,
    )


async def abort(made: Upload) -> None:
    """Remove the parts, which would be paid for; what remains is left to the bucket's rules."""
    asked = "removing parts in"
    with (
        anyio.move_on_after(_ABORT_SECONDS, shield=True),
        suppress(RefusedError, LostReplyError, IcechunkError),
    ):
        await made.transport.call(
            "abort_multipart_upload", asked, Key=made.full, UploadId=made.upload_id
        )
