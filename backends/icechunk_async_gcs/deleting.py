"""Deletions: a hundred in one request, each with an answer of its own."""

from __future__ import annotations

import re
from email.parser import BytesParser
from itertools import batched
from typing import TYPE_CHECKING, Final
from urllib.parse import quote
from uuid import uuid4

from icechunk_async.errors import (
    ObjectNotFoundError,
    OutcomeUnknownError,
    StorageError,
    UnreachableError,
)
from icechunk_async.storage import DeleteFailure
from icechunk_async_gcs.service import Reply, Silence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async_gcs.options import Location
    from icechunk_async_gcs.service import Service

__all__ = ["delete"]

_BATCH: Final = 100
"""The most calls that the service takes in one request."""
_STATUS: Final = re.compile(rb"HTTP/\S+ (\d{3})")
_IDENTITY: Final = re.compile(r"<?response-(\d+)>?")


async def delete(service: Service, location: Location, keys: Iterable[str]) -> list[DeleteFailure]:
    """Delete objects; see :meth:`icechunk_async.storage.Storage.delete`.

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
        return [DeleteFailure(key, _unknown(key)) for key, _ in batch]
    if not reply.ok:
        raise service.refusal(reply, what, None)
    answers = _answers(reply)
    failures: list[DeleteFailure] = []
    for index, (key, _) in enumerate(batch):
        answer = answers.get(index)
        if answer is not None and answer.ok:
            continue
        if answer is None or answer.in_doubt:
            failures.append(DeleteFailure(key, _unknown(key)))
            continue
        error = service.refusal(answer, f"delete {key!r}", key)
        if not isinstance(error, ObjectNotFoundError):
            failures.append(DeleteFailure(key, error))
    return failures


def _unknown(key: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"Could not delete {key!r} for certain: the service did not say what became of it. It may "
        "be gone, or may still go; delete it again.",
        key=key,
    )


def _answers(reply: Reply) -> dict[int, Reply]:
    """Read the answers in a batch by the number of their calls."""
    kind = reply.headers.get("Content-Type", "").encode()
    message = BytesParser().parsebytes(b"Content-Type: " + kind + b"\r\n\r\n" + reply.body)
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
