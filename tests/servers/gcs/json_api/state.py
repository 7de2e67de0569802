"""Buckets and objects in memory: what each documented operation does, without HTTP.

Nothing here waits, so that each method is one atomic step for the server's event loop.
"""

from __future__ import annotations

import base64
import hashlib
import time
from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import google_crc32c

from tests.servers.gcs.json_api.replies import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Bucket", "Conditions", "Listed", "State", "StoredObject", "now"]

_LAST: Final = chr(0x10FFFF)


def now() -> datetime:
    """Return the server's time."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    created: datetime
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """The caller's settings: contentType, contentEncoding, metadata, temporaryHold ..."""
    metageneration: int = 1
    updated: datetime | None = None
    crc32c: str = ""
    md5: str = ""

    def held(self) -> bool:
        """Return whether a hold keeps it from being deleted or replaced."""
        return bool(self.settings.get("temporaryHold") or self.settings.get("eventBasedHold"))


def digests(data: bytes) -> tuple[str, str]:
    """Return CRC32C and MD5 as the API writes them."""
    crc = google_crc32c.value(data).to_bytes(4, "big")
    md5 = hashlib.md5(data, usedforsecurity=False).digest()
    return base64.b64encode(crc).decode(), base64.b64encode(md5).decode()


@dataclass(frozen=True, slots=True)
class Conditions:
    """The four preconditions of a request; None where it was not asked for."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    def check(self, found: StoredObject | None, *, reading: bool = False) -> None:
        """Refuse with 412, or on reads with 304 where the client has this state already."""
        generation = found.generation if found else 0
        metageneration = found.metageneration if found else None
        if self.generation_match not in (None, generation):
            raise Refusal.condition("ifGenerationMatch")
        if self.metageneration_match is not None and self.metageneration_match != metageneration:
            raise Refusal.condition("ifMetagenerationMatch")
        for name, wanted, actual in (
            ("ifGenerationNotMatch", self.generation_not_match, generation),
            ("ifMetagenerationNotMatch", self.metageneration_not_match, metageneration),
        ):
            if wanted is not None and wanted == actual:
                raise Refusal.not_modified() if reading else Refusal.condition(name)


@dataclass(slots=True)
class Listed:
    """One page of a listing."""

    items: list[StoredObject] = field(default_factory=list[StoredObject])
    prefixes: list[str] = field(default_factory=list[str])
    next_after: str | None = None
    """Where the next page begins: after this name, or after this group."""


@dataclass(slots=True)
class Bucket:
    """Objects by name, and their names in the order of UTF-8 bytes (that of code points)."""

    name: str
    created: datetime
    objects: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])
    names: list[str] = field(default_factory=list[str])

    def list(
        self, prefix: str, delimiter: str, between: tuple[str, str], after: str | None, limit: int
    ) -> Listed:
        """Return one page; names and groups count alike."""
        page = Listed()
        start, end = between
        index = bisect_left(self.names, max(prefix, start))
        if after is not None:
            group = delimiter != "" and after.endswith(delimiter) and after != prefix
            # after "a/": behind all of "a/..."; after "a": from "a\0", the least greater name
            index = max(index, bisect_left(self.names, _beyond(after) if group else after + "\0"))
        last = after
        while index < len(self.names):
            name = self.names[index]
            if not name.startswith(prefix) or (end and name >= end):
                return page
            if len(page.items) + len(page.prefixes) >= limit:
                page.next_after = last
                return page
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                page.items.append(self.objects[name])
                last = name
                index += 1
            else:
                last = name[: cut + len(delimiter)]
                page.prefixes.append(last)
                index = bisect_left(self.names, _beyond(last))
        return page


def _beyond(prefix: str) -> str:
    """Return the least string that is greater than all that begin with ``prefix``."""
    code = ord(prefix[-1]) + 1
    if code > ord(_LAST):
        return _beyond(prefix[:-1])
    # Surrogates are no characters, and names with them could not be encoded.
    return prefix[:-1] + chr(0xE000 if 0xD800 <= code < 0xE000 else code)


class State:
    """All buckets, and the counter that generations are taken from."""

    def __init__(self, journal: Callable[[object], None] | None = None) -> None:
        """Begin empty; every change is told to ``journal`` before it is answered."""
        self.buckets: dict[str, Bucket] = {}
        self._generation = 0
        self._journal = journal

    def _next_generation(self) -> int:
        # Microseconds, as those of Cloud Storage look, and larger than any before: clients compare
        # them.
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def record(self, *change: object) -> None:
        """Tell the journal and apply the change."""
        if self._journal is not None:
            self._journal(change)
        self.replay(change)

    def replay(self, change: tuple[object, ...]) -> None:
        """Apply a change that was decided on already."""
        match change:
            case ("bucket", Bucket() as bucket):
                self.buckets[bucket.name] = replace(bucket)
            case ("store", StoredObject() as item):
                bucket = self.buckets[item.bucket]
                if item.name not in bucket.objects:
                    insort(bucket.names, item.name)
                bucket.objects[item.name] = item
                self._generation = max(self._generation, item.generation)
            case ("remove", str(name), str(key)):
                bucket = self.buckets[name]
                del bucket.objects[key]
                del bucket.names[bisect_left(bucket.names, key)]
            case ("remove-bucket", str(name)):
                del self.buckets[name]
            case _:
                raise ValueError(f"the journal holds an unknown change {change[:1]}")

    def bucket(self, name: str) -> Bucket:
        """Return a bucket, or refuse with 404."""
        found = self.buckets.get(name)
        if found is None:
            raise Refusal(404, "notFound", "The specified bucket does not exist.")
        return found

    def create_bucket(self, name: str) -> Bucket:
        """Create a bucket, or refuse with 409."""
        if name in self.buckets:
            raise Refusal(409, "conflict", "Your previous request to create the bucket succeeded.")
        self.record("bucket", Bucket(name, now()))
        return self.buckets[name]

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket."""
        if self.bucket(name).objects:
            raise Refusal(409, "conflict", "The bucket you tried to delete is not empty.")
        self.record("remove-bucket", name)

    def find(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        """Return the live object; an older generation is gone (there is no object versioning)."""
        found = self.bucket(bucket).objects.get(name)
        if found is None or generation not in (None, found.generation):
            raise Refusal(404, "notFound", f"No such object: {bucket}/{name}")
        return found

    def check_write(self, bucket: str, name: str, conditions: Conditions) -> None:
        """Refuse a write that could not be carried out now."""
        found = self.bucket(bucket).objects.get(name)
        conditions.check(found)
        if found is not None and found.held():
            raise Refusal.hold(bucket, name)

    def write(
        self,
        bucket: str,
        name: str,
        data: bytes,
        settings: Mapping[str, object],
        conditions: Conditions,
    ) -> StoredObject:
        """Write an object under the conditions, in one step."""
        self.check_write(bucket, name, conditions)
        crc32c, md5 = digests(data)
        for claimed, actual in ((settings.get("crc32c"), crc32c), (settings.get("md5Hash"), md5)):
            if claimed not in (None, actual):
                raise Refusal(
                    400, "invalid", f"Provided hash {claimed!r} doesn't match {actual!r}."
                )
        settings = {key: value for key, value in settings.items() if key not in _COMPUTED}
        generation, when = self._next_generation(), now()
        item = StoredObject(bucket, name, data, generation, when, settings, crc32c=crc32c, md5=md5)
        self.record("store", item)
        return item

    def patch(
        self, bucket: str, name: str, changes: Mapping[str, object], conditions: Conditions
    ) -> StoredObject:
        """Change settings of an object; the bytes and the generation stay."""
        found = self.find(bucket, name)
        conditions.check(found)
        settings = {**found.settings, **changes}
        settings = {key: value for key, value in settings.items() if value is not None}
        item = replace(
            found, settings=settings, metageneration=found.metageneration + 1, updated=now()
        )
        self.record("store", item)
        return item

    def delete(self, bucket: str, name: str, generation: int | None, when: Conditions) -> None:
        """Delete an object."""
        found = self.find(bucket, name, generation)
        when.check(found)
        if found.held():
            raise Refusal.hold(bucket, name)
        self.record("remove", bucket, name)

    def everything(self) -> Iterator[tuple[object, ...]]:
        """Return the changes that lead from nothing to this state."""
        for bucket in self.buckets.values():
            yield "bucket", Bucket(bucket.name, bucket.created)
            for item in bucket.objects.values():
                yield "store", item


_COMPUTED: Final = frozenset({"crc32c", "md5Hash", "name", "bucket", "size", "generation", "id"})
