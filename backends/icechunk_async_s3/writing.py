"""Writes: one object, in one request or in parts, with or without a condition.

Each conditional write carries a unique id in the object's metadata. If the reply is lost, or says
"refused" although an earlier attempt of the same write may have landed, the id is read back: it is
there only if this very write landed.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import anyio

from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    UnsafeStorageError,
)
from icechunk_async.storage import Absent, Version
from icechunk_async_s3.failures import LostReplyError, Refusal, explain
from icechunk_async_s3.transport import RefusedError, condition, parse_etag, version_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async_s3.options import Options
    from icechunk_async_s3.transport import Body, Reply, Transport

__all__ = ["WRITE_ID", "Upload", "Writer", "abort", "begin", "join", "upload", "upload_copy"]

_PART_BYTES: Final = 16 * 1024 * 1024
_MOST_PARTS: Final = 10_000
_COPIED_PART_BYTES: Final = 1024**3
"""S3 takes up to 5 GiB. The service copies some hundred MiB a second."""
_AT_A_TIME: Final = 4
_TRIES_OF_A_PART: Final = 3
_ABORT_SECONDS: Final = 10.0


@dataclass(slots=True)
class Upload:
    """An upload whose parts are not yet joined."""

    transport: Transport
    key: str
    full: str
    upload_id: str
    parts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


async def upload(
    transport: Transport, options: Options, key: str, full: str, body: Body
) -> Version:
    """Write a large object unconditionally and return its version.

    Raises:
        OutcomeUnknownError: no reply came to the last request, which creates the object.

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
    """Send all parts of an object, which is not there before `join`.

    Raises:
        IcechunkError: a part could not be sent; those that were are removed again.

    Cancellation: the parts are removed again.
    """
    made = await _create(transport, options, key, full, metadata)
    try:
        made.parts = await _send_parts(made, body)
    except BaseException:
        await abort(made)
        raise
    return made


async def _create(
    transport: Transport,
    options: Options,
    key: str,
    full: str,
    metadata: Mapping[str, str] | None = None,
) -> Upload:
    """Begin an upload without parts."""
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
    upload_id: str | None = begun.get("UploadId")
    if not upload_id:
        raise _odd(transport, asked, "the server named no upload")
    return Upload(transport, key, full, upload_id)


def _odd(transport: Transport, asked: str, what: str) -> StorageError:
    return StorageError(
        f"{asked} {transport.place.url!r}: {what}. The server does not follow the protocol, or a "
        "proxy before it takes headers away; use another one.",
        url=transport.place.url,
    )


async def upload_copy(
    transport: Transport,
    options: Options,
    key: str,
    full: str,
    *,
    origin: Mapping[str, str],
    size_bytes: int,
) -> Version:
    """Copy a large object of this service in parts; its bytes stay with the service.

    Args:
        transport: of the target.
        options: of the target.
        key: the target.
        full: its name in the bucket.
        origin: ``Bucket`` and ``Key`` of the source.
        size_bytes: of the source.

    Raises:
        OutcomeUnknownError: no reply came to the last request, which creates the object.
        IcechunkError: a part could not be copied; those that were are removed again.

    Cancellation: the parts are removed again, unless the object was being made.
    """
    made = await _create(transport, options, key, full)
    try:
        made.parts = await _copy_parts(made, origin, size_bytes)
        return await _complete(made)
    except OutcomeUnknownError:
        raise
    except BaseException:
        await abort(made)
        raise


async def _copy_parts(
    made: Upload, origin: Mapping[str, str], size_bytes: int
) -> list[dict[str, Any]]:
    # S3 takes 10,000 parts at most, so parts of very large objects are larger.
    size = max(_COPIED_PART_BYTES, -(-size_bytes // _MOST_PARTS))
    parts: list[dict[str, Any]] = []
    for number, start in enumerate(range(0, size_bytes, size), start=1):
        asked = f"copying part {number} of {made.key!r} in"
        # Ranges of HTTP include their last byte.
        last = min(start + size, size_bytes) - 1
        for tries_left in reversed(range(_TRIES_OF_A_PART)):
            try:
                done = await made.transport.call(
                    "upload_part_copy",
                    asked,
                    Key=made.full,
                    UploadId=made.upload_id,
                    PartNumber=number,
                    CopySource=origin,
                    CopySourceRange=f"bytes={start}-{last}",
                )
            except LostReplyError as error:
                if not tries_left:
                    raise error.as_read(asked, made.transport.place) from error
            except RefusedError as error:
                if not tries_left or not error.refusal.is_doubtful:
                    raise explain(
                        error.refusal, asked, made.transport.place, key=made.key
                    ) from error
            else:
                etag = done.get("CopyPartResult", {}).get("ETag")
                if not etag:
                    raise _odd(made.transport, asked, "it has no ETag")
                parts.append({"PartNumber": number, "ETag": etag})
                break
    return parts


async def join(made: Upload, **conditions: str) -> Version:
    """Join the parts to an object, in one request.

    Args:
        made: the result of `begin`.
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
    # S3 keeps the connection alive with blanks after it sent 200, and may end the body with an
    # error.
    if not etag:  # the status is sent before the work, so it alone proves nothing
        raise LostReplyError("the answer ended before it told a version")
    return Version(etag)


async def _send_parts(made: Upload, body: Body) -> list[dict[str, Any]]:
    size = max(_PART_BYTES, -(-len(body) // _MOST_PARTS))
    view = memoryview(body)
    # S3 counts parts from 1.
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

    # Sequential parts would use the bandwidth of one connection. A backend may not import the
    # engine's helper.
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
            etag = reply.headers.get("etag")
            if not etag:  # by which the part is named when all are joined
                raise _odd(transport, asked, "it has no ETag")
            sums = {
                f"Checksum{name.removeprefix('x-amz-checksum-').upper()}": value
                for name, value in ((n.lower(), v) for n, v in reply.headers.items())
                if name.startswith("x-amz-checksum-") and name != "x-amz-checksum-type"
            }
            return {"PartNumber": number, "ETag": etag, **sums}
        # A part of a number replaces the one before it, so repeating is safe, unlike for whole
        # objects.
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
    """Remove the parts, which cost money; the bucket's lifecycle rules remove the rest."""
    asked = "removing parts in"
    with (
        # A cancellation is the usual reason to be here, and must not cancel this as well.
        anyio.move_on_after(_ABORT_SECONDS, shield=True),
        suppress(RefusedError, LostReplyError, IcechunkError),
    ):
        await made.transport.call(
            "abort_multipart_upload", asked, Key=made.full, UploadId=made.upload_id
        )


WRITE_ID: Final = "x-amz-meta-icechunkwriteid"
"""The official engine uses the same name."""

_LARGEST_PUT_BYTES: Final = 5 * 1024**3
"""S3 takes no more in one request."""

_TRIES: Final = 6
"""Tries of a conditional write that the server deferred, or whose request may not have arrived."""

_LOOKS: Final = 4
"""Looks at an object, if the server is busy or the connection breaks."""

_NAME_IN_CALLS: Final = {"if-none-match": "IfNoneMatch", "if-match": "IfMatch"}

_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Write:
    """One conditional write, through all its tries."""

    key: str
    full: str
    body: Body
    expected: Version | Absent
    write_id: str
    in_parts: bool
    upload: Upload | None = None
    """Its parts, while they wait to be joined."""
    maybe_landed: str | None = None
    """The failure of a try that may have landed."""
    turned_away: IcechunkError | None = None
    """The last reply of a server that was too busy."""
    pause_seconds: float = 0.0
    """The pause that the server asked for before the next try."""

    @property
    def asked(self) -> str:
        return f"writing {self.key!r} in"


class Writer:
    """Writes objects of one storage."""

    def __init__(self, transport: Transport, options: Options) -> None:
        """Use `open_s3`."""
        self._transport = transport
        self._options = options

    async def put(self, key: str, full: str, body: Body) -> Version:
        """Write unconditionally; a large body in parts.

        Never repeated here: the first request could arrive late, after another writer's.

        Raises:
            OutcomeUnknownError: the answer was lost, or the server failed.
        """
        if len(body) > self._options.multipart_threshold_bytes:
            return await upload(self._transport, self._options, key, full, body)
        asked = f"writing {key!r} in"
        try:
            reply = await self._transport.send("PUT", full, headers=self._headers(), body=body)
        except LostReplyError as error:
            raise self._unknown(key, str(error)) from error
        if reply.status == 200:
            try:
                return version_of(reply.headers, asked, self._transport.place)
            except StorageError as error:  # it landed, and nothing tells its version
                raise self._unknown(key, "the answer has no ETag") from error
        refusal = await self._transport.refusal(reply)
        if refusal.is_doubtful:
            raise self._unknown(key, f"the server answered {refusal.said}")
        raise explain(refusal, asked, self._transport.place, key=key)

    async def put_if(self, key: str, full: str, body: Body, expected: Version | Absent) -> Version:
        """Write if the object is as expected.

        Raises:
            PreconditionFailedError: it is not, and this write has not landed.
            OutcomeUnknownError: this write may have landed.
            UnsafeStorageError: the body is too large for one request, and the server is not known
                to honour conditions on uploads in parts.

        Cancellation: the write may have landed; parts that wait to be joined are removed.

        Cost: one request, or those of an upload in parts; after a refusal or a lost answer one or
        more that look.
        """
        in_parts = (
            len(body) > self._options.multipart_threshold_bytes
            and await self._transport.joins_conditionally()
        )
        # Never written unconditionally instead: the caller relies on the condition.
        if len(body) > _LARGEST_PUT_BYTES and not in_parts:
            raise UnsafeStorageError(
                f"writing {key!r}: S3 takes at most {_LARGEST_PUT_BYTES} bytes in one request, and "
                "many servers ignore conditions on uploads in parts. Pass "
                "conditional_multipart=True if this one honours them, or write it unconditionally.",
                key=key,
                option="conditional_multipart",
            )
        # One id for all tries (decision 9): it is read back to tell our object from another's with
        # the same bytes.
        write = _Write(key, full, body, expected, str(uuid4()), in_parts)
        try:
            return await self._settle(write)
        except BaseException:
            # Also where the outcome is unknown: without its parts a request to join them that is
            # still on its way can no longer make an object.
            await _discard(write)
            raise

    async def _settle(self, write: _Write) -> Version:
        """Repeat a write until its outcome is known or the tries are used up."""
        for number in range(_TRIES):
            if number:
                # At random, so that writers who collided do not meet again.
                backoff = _FIRST_PAUSE_SECONDS * 2**number * (0.5 + random.random())  # noqa: S311
                await anyio.sleep(max(backoff, write.pause_seconds))
            settled = await self._try(write)
            if settled is not None:
                return settled
        if write.maybe_landed is not None:
            raise self._unknown(write.key, write.maybe_landed)
        if write.turned_away is not None:
            raise write.turned_away
        raise StorageUnavailableError(
            f"{write.asked} {self._transport.place.url!r}: others were writing it each of {_TRIES} "
            "times; nothing was changed. Try again.",
            key=write.key,
        )

    async def _try(self, write: _Write) -> Version | None:
        """Send it once; return its version if it landed, None if it must be tried again.

        Every try carries the same id, so the id is conclusive even if several arrive.
        """
        try:
            answer = await (self._join(write) if write.in_parts else self._send(write))
        except LostReplyError as error:
            write.maybe_landed = str(error)
            return await self._look(write, write.maybe_landed)
        except IcechunkError as error:
            # This try did nothing. That does not tell what an earlier one did.
            if write.maybe_landed is None:
                raise
            raise self._unknown(write.key, write.maybe_landed) from error
        return await self._refused(write, answer) if isinstance(answer, Refusal) else answer

    async def _send(self, write: _Write) -> Version | Refusal:
        headers = {**self._headers(), WRITE_ID: write.write_id}
        name, value = self._condition(write.expected)
        headers[name] = value
        reply = await self._transport.send("PUT", write.full, headers=headers, body=write.body)
        if reply.status == 200:
            try:
                return version_of(reply.headers, write.asked, self._transport.place)
            except StorageError as error:  # it landed, and a look may tell the version
                raise LostReplyError("the answer has no ETag") from error
        return await self._transport.refusal(reply)

    async def _join(self, write: _Write) -> Version | Refusal:
        """Send the parts, unless they are there, and join them."""
        if write.upload is None:
            metadata = {WRITE_ID.removeprefix("x-amz-meta-"): write.write_id}
            write.upload = await begin(
                self._transport,
                self._options,
                write.key,
                write.full,
                write.body,
                metadata=metadata,
            )
        name, value = self._condition(write.expected)
        try:
            return await join(write.upload, **{_NAME_IN_CALLS[name]: value})
        except RefusedError as error:
            return error.refusal

    def _condition(self, expected: Version | Absent) -> tuple[str, str]:
        """Return the header of a condition."""
        match expected:
            case Absent():
                return "if-none-match", "*"
            case Version():
                return "if-match", condition(expected, quoted=self._options.quote_etags)

    async def _refused(self, write: _Write, refusal: Refusal) -> Version | None:
        """Return the version if it landed after all, None if it must be tried again.

        Raises:
            PreconditionFailedError: it has not landed.
            OutcomeUnknownError: that cannot be known.
        """
        status, code = refusal.status, refusal.code
        is_missing = status == 404 and code != "NoSuchBucket"
        if write.in_parts and is_missing and code != "NoSuchKey":
            # Already joined by a repetition of the request, or removed by the bucket's rules.
            write.maybe_landed = write.maybe_landed or f"the server answered {refusal.said}"
        maybe = write.maybe_landed
        if is_missing or status == 412 or code == "PreconditionFailed":
            # Something between here and the server may have sent the request twice: the first
            # landed, and what is answered is the refusal of the second.
            landed = await self._look(write, maybe or "the answer may be to a repetition of it")
            if landed is not None:
                return landed
            if maybe is not None:  # it may have landed, and been replaced since
                raise self._unknown(write.key, maybe)
            raise self.precondition_failed(write.key, write.expected)
        if status == 409 or code == "ConditionalRequestConflict":
            # Another write was in progress and nothing was changed. S3 requires new parts.
            await _discard(write)
            return None
        pause = refusal.retry_after_seconds or 0.0
        write.pause_seconds = min(pause, _LONGEST_PAUSE_SECONDS)
        if refusal.is_doubtful:
            write.maybe_landed = f"the server answered {refusal.said}"
            return await self._look(write, write.maybe_landed)
        error = explain(refusal, write.asked, self._transport.place, key=write.key)
        if status == 503:  # with the same id, so that it is safe even if it had landed
            write.turned_away = error
            return None
        if maybe is not None:
            raise self._unknown(write.key, maybe) from error
        raise error

    async def _look(self, write: _Write, why: str) -> Version | None:
        """Return the version that this write made, None if the object is not from it.

        Raises:
            OutcomeUnknownError: the object cannot be read back, or has changed so that nothing
                proves whether this write was there in between.
        """
        try:
            reply = await self._head(write.full)
        except IcechunkError as error:
            raise self._unknown(write.key, why) from error
        if reply.status == 404:
            return None
        if reply.status != 200:
            refused = await self._transport.explain(reply, write.asked, write.key)
            raise self._unknown(write.key, why) from refused
        if reply.headers.get(WRITE_ID) == write.write_id:
            try:
                return version_of(reply.headers, write.asked, self._transport.place)
            except StorageError as error:
                raise self._unknown(write.key, why) from error
        # Of somebody else, who may have replaced what this write put there: whether that matters
        # the caller knows, by what came before.
        return None

    async def _head(self, full: str) -> Reply:
        """Look at an object, again where the server is busy or the connection broke."""
        for number in range(1, _LOOKS):
            try:
                reply = await self._transport.read("HEAD", full)
            except StorageUnavailableError:
                pass
            else:
                if reply.status < 500 and reply.status != 429:
                    return reply
            await anyio.sleep(_FIRST_PAUSE_SECONDS * 2**number)
        return await self._transport.read("HEAD", full)

    def _headers(self) -> dict[str, str]:
        storage_class = self._options.storage_class
        return {} if storage_class is None else {"x-amz-storage-class": storage_class}

    def precondition_failed(self, key: str, expected: Version | Absent) -> PreconditionFailedError:
        """Return the error for a condition that does not hold."""
        state = "exists already" if isinstance(expected, Absent) else f"is not at {expected}"
        return PreconditionFailedError(
            f"{key!r} in {self._transport.place.url!r} {state}; nothing was changed. "
            "Read it again.",
            key=key,
            expected=expected,
        )

    def _unknown(self, key: str, why: str) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"writing {key!r} in {self._transport.place.url!r}: {why}; it may have landed. Read it "
            "to know.",
            key=key,
        )


async def _discard(write: _Write) -> None:
    """Remove the parts of a write, if it has any that wait."""
    upload, write.upload = write.upload, None
    if upload is not None:
        await abort(upload)
