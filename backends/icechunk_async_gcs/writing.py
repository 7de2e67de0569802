"""Writes, copies and deletions of objects, with or without a condition.

Each conditional write carries a unique id in the object's metadata, so that after a lost reply the
object shows if this very write landed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from email.parser import BytesParser
from itertools import batched
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, urlsplit
from uuid import uuid4

import anyio

from icechunk_async.errors import (
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
    StorageUnavailableError,
    UnreachableError,
)
from icechunk_async.storage import Absent, DeleteFailure, Version
from icechunk_async_gcs.service import Reply, Silence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.storage import Data, Expected
    from icechunk_async_gcs.options import Location
    from icechunk_async_gcs.service import Service

__all__ = ["copy", "delete", "generation_of", "put", "version_in"]

RESUMABLE_BYTES: Final = 8 * 1024 * 1024
"""Larger objects are sent in a resumable upload, which survives a broken connection."""

_WRITE_ID: Final = "icechunkwriteid"
"""The metadata key that the official engine uses, too."""
_GENERATION: Final = re.compile(r"[1-9][0-9]{0,18}")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_PAUSES_SECONDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses between attempts to read back a write: a broken connection may recover soon."""
_CONTENT_TYPE: Final = "application/octet-stream"
_OBJECT_FIELDS: Final = "generation,metadata"


def generation_of(version: Version) -> str | None:
    """Return the generation of a version; None if it is not one.

    Zero is rejected: as a precondition it would mean that there is no object.
    """
    token = version.token
    # 64 bits: the service would call a larger number a bad request, and not a condition that does
    # not hold.
    good = _GENERATION.fullmatch(token) is not None and int(token) < 1 << 63
    return token if good else None


def version_in(document: Any) -> Version:
    """Return the version in a document about an object.

    Raises:
        StorageError: it has no version.
    """
    known = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    version = Version(str(known.get("generation")))
    if generation_of(version) is None:
        raise StorageError(
            "The service answered without the generation of the object, which commits rely on. "
            "Use Google Cloud Storage, or an emulator that has generations."
        )
    return version


@dataclass(frozen=True, slots=True)
class _Write:
    """One write: its name in errors and the id that identifies it."""

    key: str
    name: str
    what: str
    write_id: str
    expected: Expected = None
    """The name in errors."""

    def document(self) -> dict[str, object]:
        """Return the metadata document of the object."""
        return {
            "name": self.name,
            "contentType": _CONTENT_TYPE,
            "metadata": {_WRITE_ID: self.write_id},
        }


async def put(service: Service, key: str, name: str, data: Data, expected: Expected) -> Version:
    """Write an object; see `icechunk_async.storage.Storage.put`."""
    write = _Write(key, name, f"write {key!r}", str(uuid4()), expected)
    match expected:
        case None:
            condition: dict[str, str] = {}
        case Absent.ABSENT:
            condition = {"ifGenerationMatch": "0"}
        case Version():
            generation = generation_of(expected)
            if generation is None:  # not a generation; the service would reject it
                service.check_open()
                raise _conflict(write)
            condition = {"ifGenerationMatch": generation}
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size <= RESUMABLE_BYTES:
        outcome = await _multipart(service, write, data, condition)
    else:
        outcome = await _resumable(service, write, bytes(data), condition)
    return await _settle(service, write, outcome, conditional=bool(condition))


async def _multipart(
    service: Service, write: _Write, data: Data, condition: dict[str, str]
) -> Reply | Silence:
    # Made here: the body that gcsfs makes has bare line feeds, which strict servers refuse. A POST,
    # which aiohttp does not repeat by itself as it repeats PUT where a kept connection breaks.
    boundary = uuid4().hex
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps(write.document())}\r\n"
        f"--{boundary}\r\nContent-Type: {_CONTENT_TYPE}\r\n\r\n"
    )
    contents = data if isinstance(data, bytes) else bytes(data)
    return await service.exchange(
        "POST",
        f"/upload{service.objects}",
        write.what,
        query={"uploadType": "multipart", "fields": _OBJECT_FIELDS, **condition},
        headers={"Content-Type": f"multipart/related; boundary={boundary}"},
        body=b"".join((head.encode(), contents, f"\r\n--{boundary}--\r\n".encode())),
    )


async def _resumable(
    service: Service, write: _Write, data: bytes, condition: dict[str, str]
) -> Reply | Silence:
    begun = await _begin(service, write, len(data), condition)
    if not begun.ok:
        return begun
    # Only path and parameters: the request goes to the configured host, with its credentials.
    place = urlsplit(begun.headers.get("Location", ""))
    target = f"{place.path}?{place.query}"
    # Each round sends the rest from `offset` on. 308 says how much was kept; a lost reply is
    # followed by a question for that, and any other status ends the upload.
    offset, furthest, failures = 0, 0, 0
    while True:
        reply = await _send_from(service, write, target, data, offset)
        failures += _in_doubt(reply)
        while _in_doubt(reply) and failures <= len(_PAUSES_SECONDS):
            await anyio.sleep(_PAUSES_SECONDS[failures - 1])
            reply = await _progress(service, write, target, len(data))
            failures += _in_doubt(reply)
        if isinstance(reply, Silence) or reply.status != 308:
            # A missing session may have been finished.
            gone = isinstance(reply, Reply) and reply.status in (404, 410)
            return Silence(StorageError("the upload session is gone")) if gone else reply
        offset = min(_kept(reply), len(data))
        # More than ever before: a server that says more and less in turns would take them for ever.
        if offset > furthest:
            furthest, failures = offset, 0
        else:
            failures += 1  # the upload made no progress
        # Counted from the last byte that the service kept, so that a long upload may fail now and
        # then.
        if failures > 2 * len(_PAUSES_SECONDS):
            return Silence(StorageError("the upload makes no progress"))


async def _begin(service: Service, write: _Write, size: int, condition: dict[str, str]) -> Reply:
    """Start a resumable upload; no byte of the object is sent yet, so nothing can land."""
    begun = await service.exchange(
        "POST",
        f"/upload{service.objects}",
        write.what,
        query={"uploadType": "resumable", "name": write.name, **condition},
        headers={
            "Content-Type": "application/json; charset=UTF-8",
            "X-Upload-Content-Type": _CONTENT_TYPE,
            "X-Upload-Content-Length": str(size),
        },
        body=json.dumps(write.document()).encode(),
    )
    if isinstance(begun, Silence):
        raise service.silence(begun, write.what) from begun.error
    if begun.in_doubt:
        raise service.refusal(begun, write.what, write.key)
    return begun


async def _send_from(
    service: Service, write: _Write, target: str, data: bytes, offset: int
) -> Reply | Silence:
    """Send the rest of a resumable upload."""
    sent = f"bytes {offset}-{len(data) - 1}/{len(data)}"
    try:
        return await service.exchange(
            "PUT",
            target,
            write.what,
            headers={"Content-Range": sent, "Content-Type": _CONTENT_TYPE},
            body=data,
            start=offset,
        )
    except StorageUnavailableError as error:  # unreachable just now
        return Silence(error)


def _kept(reply: Reply) -> int:
    """Return the number of bytes of an upload that the service has."""
    last = reply.headers.get("Range", "").rpartition("-")[2]
    return int(last) + 1 if _NUMBER.fullmatch(last) else 0


async def _progress(service: Service, write: _Write, target: str, size: int) -> Reply | Silence:
    """Query the progress of a resumable upload; a finished one returns its final reply."""
    try:
        return await service.exchange(
            "PUT", target, write.what, headers={"Content-Range": f"bytes */{size}"}, body=b""
        )
    except StorageUnavailableError as error:  # unreachable just now
        return Silence(error)


def _in_doubt(outcome: Reply | Silence) -> bool:
    """Return whether a write may have landed without an acknowledgement."""
    return isinstance(outcome, Silence) or outcome.in_doubt


async def _settle(
    service: Service, write: _Write, outcome: Reply | Silence, *, conditional: bool
) -> Version:
    """Return the version that was written, or raise the error.

    A refused precondition is read back as well: an intermediary may have sent the request twice,
    and then the second one meets the object that the first one wrote.
    """
    if isinstance(outcome, Reply) and outcome.ok:
        try:
            return version_in(outcome.document())
        except StorageError as error:
            # The status says that it landed, and something on the way changed the rest.
            outcome = Silence(error)
    refused = isinstance(outcome, Reply) and outcome.status == 412 and conditional
    if not refused and not _in_doubt(outcome):
        assert isinstance(outcome, Reply)
        key = None if outcome.status == 404 else write.key
        raise service.refusal(outcome, write.what, key)
    cause = outcome.error if isinstance(outcome, Silence) else None
    try:
        found = await _look(service, write)
    except StorageError as error:
        raise _unknown(write, "and it could not be read back") from (cause or error)
    if found is not None:
        return found
    if refused:
        raise _conflict(write)
    raise _unknown(write, "and the object is not, or no longer, the one that was sent") from cause


async def _look(service: Service, write: _Write) -> Version | None:
    """Return the version of the object if this write wrote it."""
    for pause in (*_PAUSES_SECONDS, None):
        try:
            reply = await service.ask(
                "GET",
                service.object(write.name),
                f"read back {write.key!r}",
                key=write.key,
                accept=(404,),
                query={"fields": _OBJECT_FIELDS, "prettyPrint": "false"},
            )
            break
        except StorageUnavailableError:
            if pause is None:
                raise
            await anyio.sleep(pause)
    else:
        raise AssertionError  # the last round breaks or raises
    if reply.status == 404:
        return None
    document = reply.document()
    found: object = document.get("metadata")
    metadata = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return version_in(document) if metadata.get(_WRITE_ID) == write.write_id else None


async def copy(
    service: Service,
    keys: tuple[str, str],
    names: tuple[str, str],
    expected: Version | None,
    *,
    origin: str | None = None,
) -> Version:
    """Copy an object; see `icechunk_async.storage.Storage.copy`.

    It is the one at the path ``origin`` if that is given, perhaps of another bucket. A large object
    takes several requests; it appears with the last one.
    """
    what = f"copy {keys[0]!r} to {keys[1]!r}"
    write = _Write(keys[1], names[1], what, str(uuid4()))
    refusal = _Write(keys[0], names[0], what, "", expected)
    query = {"fields": "done,rewriteToken,resource(generation)"}
    if expected is not None:
        generation = generation_of(expected)
        if generation is None:
            service.check_open()
            raise _conflict(refusal)
        query["ifSourceGenerationMatch"] = generation
    target = service.object(names[1]).removeprefix(_ROOT)
    path = f"{origin or service.object(names[0])}/rewriteTo{target}"
    body = json.dumps(write.document()).encode()
    while True:
        outcome = await service.exchange(
            "POST",
            path,
            what,
            query=query,
            headers={"Content-Type": "application/json; charset=UTF-8"},
            body=body,
        )
        if _in_doubt(outcome):
            return await _settle(service, write, outcome, conditional=False)
        assert isinstance(outcome, Reply)
        if outcome.status == 412:
            raise _conflict(refusal)
        if not outcome.ok:
            raise service.refusal(outcome, what, keys[0])
        try:
            document = outcome.document()
            if document.get("done") or not document.get("rewriteToken"):
                return version_in(document.get("resource"))
        except StorageError as error:
            return await _settle(service, write, Silence(error), conditional=False)
        query["rewriteToken"] = str(document["rewriteToken"])


_ROOT: Final = "/storage/v1"


def _conflict(write: _Write) -> PreconditionFailedError:
    return PreconditionFailedError(
        f"Could not {write.what}: {write.key!r} is in another state than {write.expected}; nothing "
        "was changed. Read it again.",
        key=write.key,
        expected=write.expected,
    )


def _unknown(write: _Write, found: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"Could not {write.what} for certain: no usable answer came, {found}. It may have landed "
        "or may still land; read the object to know.",
        key=write.key,
    )


_BATCH: Final = 100
"""The maximum number of calls in one batch request."""
_STATUS: Final = re.compile(rb"HTTP/\S+ (\d{3})")
_IDENTITY: Final = re.compile(r"<?response-([0-9]{1,9})>?")


async def delete(service: Service, location: Location, keys: Iterable[str]) -> list[DeleteFailure]:
    """Delete objects; see `icechunk_async.storage.Storage.delete`.

    Cost: one request for a hundred keys, one after the other.
    """
    names = {key: location.name(key) for key in keys}  # a key given twice is deleted once
    failures: list[DeleteFailure] = []
    unreachable: UnreachableError | None = None
    for batch in batched(names.items(), _BATCH):
        if unreachable is None:
            try:
                failures += await _delete_batch(service, batch)
                continue
            except UnreachableError as error:
                unreachable = error  # the others would only wait for the same
                error_of_batch: StorageError = error
            except StorageError as error:
                error_of_batch = error
        else:
            error_of_batch = unreachable
        failures += [DeleteFailure(key, error_of_batch) for key, _ in batch]
    return failures


async def _delete_batch(
    service: Service, batch: tuple[tuple[str, str], ...]
) -> list[DeleteFailure]:
    boundary = uuid4().hex
    payer = "" if service.project is None else f"?userProject={quote(service.project, safe='')}"
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <{index}>\r\n\r\n"
        f"DELETE {service.object(name)}{payer} HTTP/1.1\r\n\r\n\r\n"
        for index, (_, name) in enumerate(batch)
    ]
    what = f"delete {len(batch)} objects"
    reply = await service.exchange(
        "POST",
        "/batch/storage/v1",
        what,
        headers={"Content-Type": f"multipart/mixed; boundary={boundary}"},
        body=("".join(parts) + f"--{boundary}--\r\n").encode(),
    )
    if isinstance(reply, Silence) or reply.in_doubt:
        return [DeleteFailure(key, _deletion_unknown(key)) for key, _ in batch]
    if not reply.ok:
        raise service.refusal(reply, what, None)
    answers = _answers(reply)
    failures: list[DeleteFailure] = []
    for index, (key, _) in enumerate(batch):
        answer = answers.get(index)
        if answer is not None and answer.ok:
            continue
        if answer is None or answer.in_doubt:
            failures.append(DeleteFailure(key, _deletion_unknown(key)))
            continue
        error = service.refusal(answer, f"delete {key!r}", key)
        if not isinstance(error, ObjectNotFoundError):
            failures.append(DeleteFailure(key, error))
    return failures


def _deletion_unknown(key: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"Could not delete {key!r} for certain: the service did not say what became of it. It may "
        "be gone, or may still go; delete it again.",
        key=key,
    )


def _answers(reply: Reply) -> dict[int, Reply]:
    """Parse the replies in a batch by the number of their calls; those that are odd are missing."""
    kind = reply.headers.get("Content-Type", "").encode(errors="replace")
    try:
        message = BytesParser().parsebytes(b"Content-Type: " + kind + b"\r\n\r\n" + reply.body)
    except RecursionError:  # a thousand messages, one in the other
        return {}
    answers: dict[int, Reply] = {}
    for part in message.walk():
        identity = _IDENTITY.search(str(part.get("Content-ID", "")))
        content = part.get_payload(decode=True)
        if identity is None or not isinstance(content, bytes):
            continue
        status = _STATUS.match(content)
        if status is None:
            continue
        lines, _, body = content.replace(b"\r\n", b"\n").partition(b"\n\n")
        headers = BytesParser().parsebytes(lines.partition(b"\n")[2], headersonly=True)
        answers[int(identity[1])] = Reply(int(status[1]), dict(headers.items()), body)
    return answers
