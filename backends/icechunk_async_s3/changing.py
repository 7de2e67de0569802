"""Deletions and copies."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING, Any, Final
from xml.etree.ElementTree import ParseError
from xml.sax.saxutils import escape

from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageError,
)
from icechunk_async.storage import DeleteFailure, Version
from icechunk_async_s3.documents import fields_of, parse, tag_of
from icechunk_async_s3.failures import LostReplyError, Refusal, explain
from icechunk_async_s3.signing import checksum_header, encode_key
from icechunk_async_s3.transport import (
    COPY_SOURCE,
    RefusedError,
    condition,
    is_etag,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from icechunk_async_s3.options import Options
    from icechunk_async_s3.transport import Transport

__all__ = ["KEYS_A_DELETION", "Changer"]

_TOO_LARGE: Final = frozenset({"InvalidRequest", "EntityTooLarge"})
"""The refusals of a copy of more than 5 GiB in one request; the first has other reasons, too."""

KEYS_A_DELETION: Final = 1000
"""As many as the service deletes in one request."""
_NOT_IN_XML: Final = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")
_NAMESPACE: Final = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_CHECKSUM: Final = "crc32"
_NO_BATCHES: Final = frozenset({"NotImplemented", "MethodNotAllowed", "UnsupportedOperation"})
_ETAG_OF_COPY: Final = re.compile(rb"<ETag>([^<]{0,600})</ETag>")
_GONE: Final = frozenset({"NoSuchKey", "NoSuchVersion"})


class Changer:
    """Deletes and copies objects of one storage."""

    def __init__(self, transport: Transport, options: Options) -> None:
        """Use `open_s3`."""
        self._transport = transport
        self._options = options

    async def delete(self, keys: dict[str, str]) -> list[DeleteFailure]:
        """Delete objects, 1000 with each request.

        Args:
            keys: by the key in the bucket, the key in the storage.
        """
        failures: list[DeleteFailure] = []
        # The request is XML, which has no form for most of these characters, and changes the
        # others.
        alone = [full for full in keys if _NOT_IN_XML.search(full)]
        together = [full for full in keys if not _NOT_IN_XML.search(full)]
        for batch in _batches(together):
            failures += await self._delete_batch(batch, keys)
        for full in alone:
            failures += await self._delete_one(full, keys[full])
        return failures

    async def _delete_batch(self, batch: list[str], keys: dict[str, str]) -> list[DeleteFailure]:
        asked = f"deleting {len(batch)} objects in"
        body = _wanted(batch)
        # S3 demands a checksum of what is to be deleted, however the request is signed.
        name, value = checksum_header(_CHECKSUM, body)
        headers = {"content-type": "application/xml", name: value}
        try:
            answer = await self._delete(
                "POST", "", asked, query=(("delete", ""),), headers=headers, body=body
            )
        except RefusedError as error:
            refusal = error.refusal
            # Some servers that speak S3 have no request for many objects.
            if refusal.code in _NO_BATCHES or refusal.status in (405, 501):
                return [it for full in batch for it in await self._delete_one(full, keys[full])]
            failure = explain(refusal, asked, self._transport.place)
            return [DeleteFailure(keys[full], failure) for full in batch]
        except IcechunkError as failure:
            self._transport.check_open()
            return [DeleteFailure(keys[full], failure) for full in batch]
        # With <Quiet> the answer lists failures only. A missing object is not one of them.
        return list(self._failures(answer, keys))

    def _failures(
        self, answer: list[dict[str, str]], keys: dict[str, str]
    ) -> Iterator[DeleteFailure]:
        for item in answer:
            code, message = item.get("Code", ""), item.get("Message", "")[:300]
            # A failure of a key that was not asked for is a server's mistake, and is no failure of
            # ours.
            key = keys.get(item.get("Key", ""))
            if code in _GONE or key is None:
                continue
            status = 403 if code == "AccessDenied" else 200
            refusal = Refusal(status, code, message)
            error = explain(refusal, f"deleting {key!r} in", self._transport.place, key=key)
            yield DeleteFailure(key, error)

    async def _delete_one(self, full: str, key: str) -> list[DeleteFailure]:
        asked = f"deleting {key!r} in"
        try:
            await self._delete("DELETE", full, asked)
        except RefusedError as error:
            if error.refusal.code in _GONE:
                return []
            failure = explain(error.refusal, asked, self._transport.place, key=key)
            return [DeleteFailure(key, failure)]
        except IcechunkError as failure:
            self._transport.check_open()
            return [DeleteFailure(key, failure)]
        return []

    async def _delete(
        self, method: str, full: str, asked: str, **request: Any
    ) -> list[dict[str, str]]:
        """Send once, because a late repetition could delete an object written in between.

        Returns: what the server could not delete, in its words.
        """
        try:
            reply = await self._transport.send(method, full, asked=asked, **request)
        except LostReplyError as error:
            raise self._in_doubt(asked, str(error)) from error
        refusal = await self._transport.refusal(reply)
        if 200 <= reply.status < 300:
            try:
                return _errors(bytes(reply.body))
            except (ParseError, ValueError) as error:
                why = f"the server answered {refusal.said}, which is no result ({error})"
                raise self._in_doubt(asked, why) from error
        if refusal.is_doubtful and refusal.status != 501:
            raise self._in_doubt(asked, f"the server answered {refusal.said}")
        raise RefusedError(refusal)

    def _in_doubt(self, asked: str, why: str) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{asked} {self._transport.place.url!r}: {why}; they may be gone. Delete them again.",
            url=self._transport.place.url,
        )

    async def copy(
        self, source: tuple[str, str], target: tuple[str, str], version: Version | None
    ) -> Version:
        """Copy an object; the server does it, in one request."""
        key, full = source
        asked = f"copying {key!r} to {target[0]!r} in"
        origin = {"Bucket": self._transport.place.bucket, "Key": full}
        headers: dict[str, str] = {}
        if version is not None:
            if not is_etag(version):
                raise self._other_version(key, version)
            quoted = condition(version, quoted=self._options.quote_etags)
            headers["x-amz-copy-source-if-match"] = quoted
        if full == target[1]:  # S3 refuses a copy onto itself that changes nothing
            headers["x-amz-metadata-directive"] = "REPLACE"
        try:
            etag = await self._copy(asked, origin, target[1], headers)
        except LostReplyError as error:
            raise self._unknown(asked, str(error)) from error
        except RefusedError as error:
            refusal = error.refusal
            # Without a condition of ours it is about another one, such as a policy of the bucket.
            unmet = refusal.status == 412 or refusal.code == "PreconditionFailed"
            if unmet and version is not None:
                raise self._other_version(key, version) from error
            if refusal.is_doubtful:
                raise self._unknown(asked, refusal.said) from error
            raise explain(refusal, asked, self._transport.place, key=key) from error
        return self._copied(etag, asked)

    async def copy_from(self, key: str, origin: Mapping[str, str], target: str) -> bool:
        """Copy an object of another bucket; return False if it is too large for one request."""
        asked = f"copying {key!r} of bucket {origin['Bucket']!r} to"
        try:
            etag = await self._copy(asked, origin, target, {})
        except LostReplyError as error:
            raise self._unknown(asked, str(error)) from error
        except RefusedError as error:
            if error.refusal.code in _TOO_LARGE:
                return False
            if error.refusal.is_doubtful:
                raise self._unknown(asked, error.refusal.said) from error
            raise explain(error.refusal, asked, self._transport.place, key=key) from error
        self._copied(etag, asked)
        return True

    def _copied(self, etag: str, asked: str) -> Version:
        try:
            return version_of({"etag": etag}, asked, self._transport.place)
        except StorageError as error:
            # The status is sent before the work, so it alone proves nothing.
            raise self._unknown(asked, "the answer has no ETag") from error

    async def _copy(
        self, asked: str, origin: Mapping[str, str], target: str, headers: Mapping[str, str]
    ) -> str:
        """Let the server copy an object; return the copy's ETag, empty if it names none.

        It is sent once: a copy that was repeated could be refused by its own condition, although it
        landed.

        Raises:
            LostReplyError: no complete reply came; the copy may exist.
            RefusedError: the server said no, in a reply that may begin as a success.
            IcechunkError: nothing was sent.
        """
        named = {COPY_SOURCE: encode_key(f"{origin['Bucket']}/{origin['Key']}"), **headers}
        if self._options.storage_class is not None:
            named["x-amz-storage-class"] = self._options.storage_class
        reply = await self._transport.send("PUT", target, headers=named, asked=asked)
        body = bytes(reply.body)
        # S3 sends 200 before it copies, to keep the connection alive, and may report an error after
        # that.
        if reply.status != 200 or b"<Error>" in body:
            raise RefusedError(await self._transport.refusal(reply))
        etag = _ETAG_OF_COPY.search(body)
        return "" if etag is None else unescape(etag[1].decode("utf-8", "replace"))

    def _other_version(self, key: str, version: Version) -> PreconditionFailedError:
        return PreconditionFailedError(
            f"{key!r} in {self._transport.place.url!r} is not at {version}; nothing was copied. "
            "Read it again.",
            key=key,
            expected=version,
        )

    def _unknown(self, asked: str, why: str) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{asked} {self._transport.place.url!r}: {why}; the copy may exist. Read it to know.",
            url=self._transport.place.url,
        )


def _wanted(keys: Iterable[str]) -> bytes:
    """Return the document that asks to delete objects, and to be told only of failures."""
    objects = "".join([f"<Object><Key>{escape(key)}</Key></Object>" for key in keys])
    return f"<Delete {_NAMESPACE}>{objects}<Quiet>true</Quiet></Delete>".encode()


def _errors(body: bytes) -> list[dict[str, str]]:
    """Return the failures in a result.

    Raises:
        ParseError, ValueError: it is not a result.
    """
    if not body.strip():
        return []
    root = parse(body)
    if tag_of(root) == "Error":  # inside a success
        raise ValueError("it is an error")
    return [fields_of(child) for child in root if tag_of(child) == "Error"]


def _batches(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + KEYS_A_DELETION] for start in range(0, len(keys), KEYS_A_DELETION))
