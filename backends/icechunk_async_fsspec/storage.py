"""The storage: a folder of an fsspec file system, its states and its errors.

`Folder` blocks; `FsspecStorage` makes one hop to a thread for each operation. A trial says what may
be promised.
"""

from __future__ import annotations

import errno
import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from icechunk_async.errors import (
    IcechunkError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UnreachableError,
)
from icechunk_async.storage import (
    ABSENT,
    Capabilities,
    DeleteFailure,
    Expected,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    ThreadedStorage,
    Version,
    check_key,
    slice_range,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from icechunk_async.storage import StorageDescription

__all__ = ["Folder", "FsspecStorage", "capabilities", "modified", "size_of", "translate", "version"]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def translate(
    error: BaseException, operation: str, key: str, *, writes: bool = False
) -> IcechunkError:
    """Translate an exception of a file system.

    If ``writes``, a failure that may hide a success is an ``OutcomeUnknownError``.
    """
    asked = f"Could not {operation} {key!r}"
    match error:
        case IcechunkError():
            return error
        # A key below an object, or one that is a folder, names no object. A write that meets one
        # failed for that reason.
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError() if not writes:
            return ObjectNotFoundError(f"There is no object {key!r}.", key=key)
        case PermissionError():
            return PermissionDeniedError(
                f"{asked}: the file system refuses. Check the credentials and what they allow.",
                key=key,
            )
        case OSError(errno=number) if number in _FULL:
            return StorageFullError(f"{asked}: there is no room left. Make some.", key=key)
        case NotImplementedError() | NotADirectoryError() | IsADirectoryError():
            return StorageError(
                f"{asked}: the file system cannot do that. Use another one, or another key.",
                key=key,
            )
        case _ if writes:
            return OutcomeUnknownError(
                f"{asked}: it failed with {type(error).__name__}, and may have landed. Read it "
                "back before writing again.",
                key=key,
            )
        case ConnectionError():
            return UnreachableError(
                f"{asked}: no connection. Check the host, and the network between.", key=key
            )
        case TimeoutError():
            return StorageUnavailableError(f"{asked}: no answer in time. Try again.", key=key)
        case _:
            return StorageError(
                f"{asked}: the file system failed with {type(error).__name__}. Check its options.",
                key=key,
            )


_IDENTITIES: Final = ("generation", "ETag", "etag", "e_tag", "sha", "md5Hash", "content_md5")
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_SAY_NOTHING: Final = frozenset({"name", "size", "type", "Key", "Size", "atime", "accessed"})


def version(info: Mapping[str, Any], key: str) -> Version:
    """Return the version of an object: an ETag, or everything the file system says about it.

    Raises:
        StorageError: nothing would reveal a change.
    """
    for name in _IDENTITIES:
        if info.get(name):
            return Version(f"{name} {info[name]}")
    # Without access times, which reading changes, and without names and sizes, which are equal for
    # other bytes.
    told = sorted((name, repr(value)) for name, value in info.items() if name not in _SAY_NOTHING)
    if not any(value != "None" for _, value in told):
        raise StorageError(
            f"The file system tells only the size of {key!r}, so that a change of it could not be "
            "seen. Use one that tells when objects were modified.",
            key=key,
        )
    told.append(("size", str(size_of(info, key))))
    return Version(hashlib.sha256(repr(told).encode()).hexdigest())


def size_of(info: Mapping[str, Any], key: str) -> int:
    """Return the size of an object in bytes.

    Raises:
        StorageError: the file system does not tell.
    """
    size = info.get("size")
    if isinstance(size, int) and size >= 0:
        return size
    raise StorageError(
        f"The file system does not tell the size of {key!r}. Use one that does.", key=key
    )


def modified(info: Mapping[str, Any]) -> datetime | None:
    """Return when an object was written, if the file system says so."""
    for name in _TIMES:
        value = info.get(name)
        # Servers may tell any number: one odd time must not end a listing.
        with suppress(ValueError, OverflowError, OSError):
            if isinstance(value, int | float) and value > 0:
                return datetime.fromtimestamp(value, UTC)
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return None


_FAILURES: Final = (Exception,)
"""File systems raise arbitrary exceptions."""
_LOOKS: Final = 8
"""Tries to read an object that changes meanwhile."""


class Folder:
    """Objects below a folder of a file system."""

    def __init__(self, filesystem: Any, path: str) -> None:
        """Use an instance, and a folder without a trailing slash."""
        self._filesystem = filesystem
        self._path = path

    def get(self, key: str, byte_range: RangeRequest) -> Retrieved:
        """Read between two state checks with the same result."""
        # No call of fsspec returns bytes and their version together.
        for _ in range(_LOOKS):
            try:
                info = self._info(key)
                found = version(info, key)
                size = size_of(info, key)
                start, stop = slice_range(byte_range, size)
                data = b""
                if start < stop:
                    data = bytes(self._filesystem.cat_file(self._at(key), start=start, end=stop))
                if len(data) == stop - start and version(self._info(key), key) == found:
                    return Retrieved(data, found, size, modified(info))
            except _FAILURES as error:
                raise translate(error, "read", key) from None
        raise StorageUnavailableError(
            f"{key!r} changed {_LOOKS} times while it was read. Try again.", key=key
        )

    def get_if_changed(self, key: str, known: Version) -> Retrieved | None:
        """Check the state before reading."""
        try:
            if version(self._info(key), key) == known:
                return None
        except _FAILURES as error:
            raise translate(error, "read", key) from None
        return self.get(key, None)

    def put(self, key: str, data: bytes, expected: Expected) -> Version:
        """Write, and read the version back."""
        create = expected is ABSENT
        try:
            self._write(key, data, create=create)
        except FileExistsError as error:
            if not create:
                raise translate(error, "write", key, writes=True) from None
            raise PreconditionFailedError(
                f"{key!r} exists, and was to be created; nothing was changed.",
                key=key,
                expected=ABSENT,
            ) from None
        except _FAILURES as error:
            raise translate(error, "write", key, writes=True) from None
        try:
            # `pipe_file` returns nothing: the version is read back, and counts only beside the
            # bytes that were written. Another writer may have replaced them in between.
            found = self.get(key, None)
        except ObjectNotFoundError:
            return _gone()
        return found.version if found.data == data else _gone()

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """Delete objects one by one."""
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self._info(key)  # some remove folders as well, some fail for what is missing
                self._filesystem.rm_file(self._at(key))
            except (FileNotFoundError, NotADirectoryError, ObjectNotFoundError):
                continue
            except _FAILURES as error:
                failures.append(DeleteFailure(key, translate(error, "delete", key)))
        return failures

    def list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield objects in order; the whole folder of the prefix is listed before the first."""
        if "\0" in prefix or prefix.startswith("/") or "//" in prefix or _climbs(prefix):
            return  # no key begins like this
        folder = prefix.rpartition("/")[0]
        try:
            # An instance keeps listings, and others may have written since.
            self._filesystem.invalidate_cache()
            found: Mapping[str, Any] = self._filesystem.find(self._at(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        except _FAILURES as error:
            raise translate(error, "list", prefix) from None
        now = datetime.now(UTC)
        by_key = {self._key(path): info for path, info in found.items()}
        for key in sorted(filter(None, by_key)):
            info = by_key[key]
            if key.startswith(prefix) and key > start_after and info.get("type") != "directory":
                # An object of unknown age counts as new, so that nothing is collected for its age.
                yield ObjectInfo(key, size_of(info, key), modified(info) or now)

    def _write(self, key: str, data: bytes, *, create: bool) -> None:
        path, mode = self._at(key), "create" if create else "overwrite"
        try:
            self._filesystem.pipe_file(path, data, mode=mode)
        except FileNotFoundError:  # some file systems need folders to be created
            self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._filesystem.pipe_file(path, data, mode=mode)

    def _info(self, key: str) -> Mapping[str, Any]:
        self._filesystem.invalidate_cache()
        info: Mapping[str, Any] = self._filesystem.info(self._at(key))
        if info.get("type") == "directory":
            raise ObjectNotFoundError(f"There is no object {key!r}, but a folder.", key=key)
        return info

    def _at(self, key: str) -> str:
        return f"{self._path}/{key}".rstrip("/") if key else self._path

    def _key(self, path: str) -> str | None:
        root = self._path.strip("/")
        path = path.lstrip("/")
        if not root:
            return path
        return path[len(root) + 1 :] if path.startswith(f"{root}/") else None


def _climbs(prefix: str) -> bool:
    """Return whether the prefix has a ``.`` or ``..`` folder, which no key has."""
    return any(segment in (".", "..") for segment in prefix.split("/")[:-1])


def _gone() -> Version:
    """Return a version that matches nothing: the written object is already replaced."""
    return Version(f"gone {uuid4().hex}")


_NO_UPDATE: Final = (
    "fsspec has no way to replace an object only if it is in a known state; commit through a "
    "backend of the service itself"
)

_IN_MEMORY: Final = "these objects live in one process; use a file or a bucket to share them"


def capabilities(why_read_only: str | None, *, shared: bool) -> Capabilities:
    """Return the promises: writes if creation is exclusive, else the reason against them."""
    reasons = {"conditional_update": why_read_only or _NO_UPDATE}
    if why_read_only is not None:
        reasons |= {"writable": why_read_only, "conditional_create": why_read_only}
    if not shared:
        reasons["shared"] = _IN_MEMORY
    return Capabilities(
        writable=why_read_only is None,
        conditional_create=why_read_only is None,
        conditional_update=False,
        shared=shared,
        reasons=reasons,
    )


class FsspecStorage(ThreadedStorage):
    """A `Storage` in a file system; made by `open_fsspec`."""

    def __init__(
        self, folder: Folder, promises: Capabilities, description: StorageDescription
    ) -> None:
        """Make a handle; use `open_fsspec`."""
        super().__init__(folder, description, promises)
        self._folder = folder

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Check the state, and read a whole object unless it is still at ``version``."""
        check_key(key)
        return await self._run(partial(self._folder.get_if_changed, key, version))
