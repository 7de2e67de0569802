"""Deletions and copies, which aiobotocore sends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import (
    IcechunkError,
    OutcomeUnknownError,
    PreconditionFailedError,
)
from icechunk_async.storage import DeleteFailure, Version
from icechunk_async_s3.failures import LostReplyError, Refusal, explain
from icechunk_async_s3.transport import RefusedError, condition, is_etag, version_of

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
_NO_BATCHES: Final = frozenset({"NotImplemented", "MethodNotAllowed", "UnsupportedOperation"})
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
        alone = [full for full in keys if _NOT_IN_XML.search(full)]
        together = [full for full in keys if not _NOT_IN_XML.search(full)]
        for batch in _batches(together):
            failures += await self._delete_batch(batch, keys)
        for full in alone:
            failures += await self._delete_one(full, keys[full])
        return failures

    async def _delete_batch(self, batch: list[str], keys: dict[str, str]) -> list[DeleteFailure]:
        asked = f"deleting {len(batch)} objects in"
        wanted = {"Objects": [{"Key": full} for full in batch], "Quiet": True}
        try:
            answer = await self._delete("delete_objects", asked, Delete=wanted)
        except RefusedError as error:
            refusal = error.refusal
            if refusal.code in _NO_BATCHES or refusal.status in (405, 501):
                return [it for full in batch for it in await self._delete_one(full, keys[full])]
            failure = explain(refusal, asked, self._transport.place)
            return [DeleteFailure(keys[full], failure) for full in batch]
        except IcechunkError as failure:
            self._transport.check_open()
            return [DeleteFailure(keys[full], failure) for full in batch]
        return list(self._failures(answer, keys))

    def _failures(self, answer: dict[str, Any], keys: dict[str, str]) -> Iterator[DeleteFailure]:
        for item in answer.get("Errors", ()):
            code, message = str(item.get("Code", "")), str(item.get("Message", ""))[:300]
            if code in _GONE or item.get("Key") not in keys:
                continue
            key = keys[item["Key"]]
            status = 403 if code == "AccessDenied" else 200
            refusal = Refusal(status, code, message)
            error = explain(refusal, f"deleting {key!r} in", self._transport.place, key=key)
            yield DeleteFailure(key, error)

    async def _delete_one(self, full: str, key: str) -> list[DeleteFailure]:
        asked = f"deleting {key!r} in"
        try:
            await self._delete("delete_object", asked, Key=full)
        except RefusedError as error:
            if error.refusal.code in _GONE:
                return []
            failure = explain(error.refusal, asked, self._transport.place, key=key)
            return [DeleteFailure(key, failure)]
        except IcechunkError as failure:
            self._transport.check_open()
            return [DeleteFailure(key, failure)]
        return []

    async def _delete(self, operation: str, asked: str, **parameters: object) -> dict[str, Any]:
        """Send once, because a late repetition could delete an object written in between."""
        try:
            return await self._transport.call(operation, asked, **parameters)
        except LostReplyError as error:
            raise self._in_doubt(asked, str(error)) from error
        except RefusedError as error:
            refusal = error.refusal
            if refusal.is_doubtful and refusal.status != 501:
                raise self._in_doubt(asked, f"the server answered {refusal.said}") from error
            raise

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
        parameters: dict[str, Any] = {
            "Key": target[1],
            "CopySource": {"Bucket": self._transport.place.bucket, "Key": full},
        }
        if version is not None:
            if not is_etag(version):
                raise self._other_version(key, version)
            quoted = condition(version, quoted=self._options.quote_etags)
            parameters["CopySourceIfMatch"] = quoted
        if self._options.storage_class is not None:
            parameters["StorageClass"] = self._options.storage_class
        if full == target[1]:  # S3 refuses a copy onto itself that changes nothing
            parameters["MetadataDirective"] = "REPLACE"
        try:
            done = await self._transport.call("copy_object", asked, **parameters)
        except LostReplyError as error:
            raise self._unknown(asked, str(error)) from error
        except RefusedError as error:
            refusal = error.refusal
            if refusal.status == 412 or refusal.code == "PreconditionFailed":
                assert version is not None  # else there was no condition
                raise self._other_version(key, version) from error
            if refusal.is_doubtful:
                raise self._unknown(asked, refusal.said) from error
            raise explain(refusal, asked, self._transport.place, key=key) from error
        headers = {"etag": done["CopyObjectResult"].get("ETag", "")}
        return version_of(headers, asked, self._transport.place)

    async def copy_from(self, key: str, origin: Mapping[str, str], target: str) -> bool:
        """Copy an object of another bucket; return False if it is too large for one request."""
        asked = f"copying {key!r} of bucket {origin['Bucket']!r} to"
        parameters: dict[str, Any] = {"Key": target, "CopySource": origin}
        if self._options.storage_class is not None:
            parameters["StorageClass"] = self._options.storage_class
        try:
            done = await self._transport.call("copy_object", asked, **parameters)
        except LostReplyError as error:
            raise self._unknown(asked, str(error)) from error
        except RefusedError as error:
            if error.refusal.code in _TOO_LARGE:
                return False
            if error.refusal.is_doubtful:
                raise self._unknown(asked, error.refusal.said) from error
            raise explain(error.refusal, asked, self._transport.place, key=key) from error
        # The status is sent before the work, so it alone proves nothing.
        headers = {"etag": done["CopyObjectResult"].get("ETag", "")}
        version_of(headers, asked, self._transport.place)
        return True

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


def _batches(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + KEYS_A_DELETION] for start in range(0, len(keys), KEYS_A_DELETION))
