"""Where TileDB data is: URLs such as `tiledb+s3://bucket/array`, and folders of a storage.

A folder is the part of the storage contract that reading needs, below a prefix.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import (
    FormatError,
    InvalidObjectKeyError,
    InvalidURLError,
    ObjectNotFoundError,
)
from icechunk_async.storage import CommonPrefix, check_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.storage import ListEntry, RangeRequest, Retrieved

__all__ = ["Entries", "Folder", "Objects", "is_tiledb_url", "storage_location"]

_URL: Final = re.compile(r"tiledb(\+[^:/]*)?:(.*)", re.IGNORECASE | re.DOTALL)
_INNER: Final = re.compile(r"\+([a-z][a-z0-9.-]*(\+[a-z0-9.-]+)*)", re.IGNORECASE)
_FORMS: Final = (
    "Give the URL of its storage, such as 'tiledb+s3://bucket/array' or "
    "'tiledb+file:///data/array', or a path as 'tiledb:///data/array'."
)


def is_tiledb_url(location: str) -> bool:
    """Return whether a location is a URL whose scheme is TileDB, alone or before another."""
    return _URL.fullmatch(location) is not None


def storage_location(location: str) -> str:
    """Return the location that the storage knows: without `tiledb+`, or of a file.

    Anything but a URL of TileDB is returned unchanged. Errors do not repeat what may be secret.

    Raises:
        InvalidURLError: it begins as a URL of TileDB, and is not one that names a storage.
    """
    found = _URL.fullmatch(location)
    if found is None:
        return location
    inner, rest = found[1], found[2]
    if not rest.startswith("//"):
        raise InvalidURLError(f"A URL of a TileDB array has no '//' after its scheme. {_FORMS}")
    if inner is None:
        # Only a path has three slashes. TileDB's cloud service has names such as
        # `tiledb://namespace/array`.
        if not rest.startswith("///") or rest == "///":
            raise InvalidURLError(
                "A URL 'tiledb://...' with a name behind it is one of TileDB's cloud service, "
                f"which is not served here. {_FORMS}"
            )
        return f"file:{rest}"
    scheme = _INNER.fullmatch(inner)
    if scheme is None or scheme[1].lower().partition("+")[0] == "tiledb":
        raise InvalidURLError(
            f"The scheme 'tiledb{inner[:40]}' of a TileDB array names no storage. {_FORMS}"
        )
    return f"{scheme[1]}:{rest}"


class Objects(Protocol):
    """The operations of a storage that reading needs; contracts as in `Storage`."""

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or a part of it."""
        ...

    def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects whose keys begin with a prefix."""
        ...


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a folder, by name."""

    files: dict[str, int]
    """Bytes of each file."""
    folders: frozenset[str]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a storage."""

    objects: Objects
    prefix: str = ""
    """Its path; empty, or ending in ``/``."""
    url: str | None = None
    """The URL of the storage, without a slash at its end; None if it is not known."""

    @property
    def shown(self) -> str:
        """The location of the folder, for messages."""
        path = self.prefix.rstrip("/")
        return path if self.url is None else f"{self.url}/{path}".rstrip("/")

    def below(self, path: str) -> Folder:
        """Return a folder in this one.

        Raises:
            FormatError: the path leaves this folder.
        """
        return replace(self, prefix=self.key(path) + "/")

    def key(self, path: str) -> str:
        """Return the key of a file in this folder.

        Raises:
            FormatError: the path, which other files state, leaves this folder or cannot exist.
        """
        try:
            check_key(path)
            return check_key(self.prefix + path)
        except InvalidObjectKeyError as error:
            raise FormatError(
                f"A TileDB file refers to {path!r:.200}, which is not a path below {self.shown!r}: "
                "it is damaged, or leads elsewhere on purpose."
            ) from error

    def member(self, uri: str, *, is_relative: bool) -> Folder | None:
        """Return the folder at a URI, relative to this one or absolute; None if it is elsewhere.

        Raises:
            FormatError: a relative one leaves this folder.
        """
        if is_relative:
            return self.below(uri.strip("/"))
        if self.url is None:
            return None
        # The open storage, and its credentials, reach nothing outside of it.
        path = uri.rstrip("/").removeprefix(f"{self.url}/")
        if path == uri.rstrip("/"):
            return None
        return replace(self, prefix="").below(path)

    async def get(self, path: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read a file or a part of it; as `Storage.get`."""
        return await self.objects.get(self.key(path), byte_range)

    async def read(self, path: str) -> bytes:
        """Return the contents of a file that was listed, or that another file names.

        Raises:
            FormatError: it does not exist.
        """
        try:
            return bytes((await self.get(path)).data)
        except ObjectNotFoundError as error:
            raise FormatError(
                f"The file {path!r} of the TileDB data at {self.shown!r} is gone. It was vacuumed "
                "while it was read, or lost: open the array or group again."
            ) from error

    async def entries(self, path: str = "") -> Entries:
        """Return the files and folders in a folder; empty if there is no such folder.

        Cost: one request for about 1000 entries.
        """
        prefix = f"{self.prefix}{path}/" if path else self.prefix
        files: dict[str, int] = {}
        folders: set[str] = set()
        listed = self.objects.list_prefix(prefix, delimiter="/")
        async with closing(listed):
            async for entry in listed:
                if isinstance(entry, CommonPrefix):
                    folders.add(entry.prefix.removeprefix(prefix).rstrip("/"))
                else:
                    files[entry.key.removeprefix(prefix)] = entry.size_bytes
        return Entries(files, frozenset(folders))
