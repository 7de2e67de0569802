"""The storage: the contract's operations over the Rust client's asynchronous functions.

The client belongs to no event loop: its requests run on its own threads, and each reply is
delivered to the calling loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

import anyio
import obstore
from obstore.exceptions import AlreadyExistsError, NotModifiedError, PreconditionError

from icechunk_async.errors import (
    BucketNotFoundError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    StorageClosedError,
    StorageError,
    StorageUnavailableError,
)
from icechunk_async.storage import (
    Absent,
    Capabilities,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    RangeRequest,
    Retrieved,
    StorageDescription,
    Version,
    check_key,
)
from icechunk_async.storage.ending import Ending
from icechunk_async_obstore.failures import Reason, read_report, translate
from icechunk_async_obstore.options import Service, condition, is_possible, version_of
from icechunk_async_obstore.reading import (
    Ordered,
    first_offset,
    folder_of,
    groups_and_objects,
    is_sendable,
    look,
    read_body,
    read_range,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from obstore import GetOptions, PutMode

    from icechunk_async.errors import IcechunkError
    from icechunk_async_obstore.options import Client, Place

__all__ = ["ObstoreStorage"]

_PAGE: Final = 1000
_DELETES_AT_ONCE: Final = 16
_WRITE_ID: Final = "icechunkwriteid"
"""Metadata that identifies a writer's object, under the official engine's name."""
_CAPABILITIES: Final = Capabilities()
# The client raises ValueError for paths, FileNotFoundError, PermissionError and its own classes.
_FAILURES: Final = (Exception,)


class ObstoreStorage:
    """A `Storage` in a bucket; made by `open_obstore`.

    The client repeats nothing by itself. A copy passes through this process, because no one way to
    copy a given version and learn the new one works on all three services.
    """

    def __init__(self, client: Client, place: Place, description: StorageDescription) -> None:
        """Make a handle; use `open_obstore`."""
        self._client = client
        self._place = place
        self._description = description
        self._closed: Ending | None = None

    def __repr__(self) -> str:
        """Show the URL."""
        return f"ObstoreStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """All promises, which the three services keep; compatible servers can be probed."""
        return _CAPABILITIES

    @property
    def description(self) -> StorageDescription:
        """The URL, and the options that were given."""
        return self._description

    def close(self) -> None:
        """Refuse further use."""
        self._closed = Ending()

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        path = self._path(key)
        try:
            return await read_range(self._client, self._place.service, key, path, byte_range)
        except _FAILURES as error:
            raise self._translated(error, "read", key) from None

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        path = self._path(key)
        service = self._place.service
        options: GetOptions = {}
        if service is not Service.GS and is_possible(service, version):
            options["if_none_match"] = version.token
        try:
            answer = await obstore.get_async(self._client, path, options=options)
            if version_of(service, answer.meta, key) == version:
                return None  # GCS has no such condition; the body is not fetched
            return await read_body(service, answer, key)
        except NotModifiedError:
            return None
        except _FAILURES as error:
            raise self._translated(error, "read", key) from None

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        path = self._path(key)
        # The client reads the buffer on other threads, also after a cancellation.
        owned = data if isinstance(data, bytes) else bytes(data)
        service = self._place.service
        if if_version is None:
            return await self._put(key, path, owned, "overwrite")
        if isinstance(if_version, Version):
            if not is_possible(service, if_version):
                raise _refused(key, if_version)
            mode: PutMode = condition(service, if_version)
        else:
            mode = "create"
        write_id = uuid4().hex
        try:
            answer = await obstore.put_async(
                self._client,
                path,
                owned,
                mode=mode,
                attributes={_WRITE_ID: write_id},
                use_multipart=False,
            )
            return version_of(service, answer, key)
        except _FAILURES as error:
            failure: Exception = error
        return await self._settle(key, path, if_version, write_id, failure)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects; a missing one counts as deleted."""
        # All keys are checked before the first is deleted.
        doomed = {key: self._path(key) for key in keys}
        names = list(doomed)
        failures: list[DeleteFailure] = []
        for start in range(0, len(names), _PAGE):
            batch = names[start : start + _PAGE]
            self._check_open()
            try:
                await obstore.delete_async(self._client, [doomed[key] for key in batch])
            except _FAILURES:  # the error says neither which keys failed nor which were not tried
                failures += await self._delete_singly(doomed, batch)
        return failures

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects; with a delimiter all pages are fetched before the first entry."""
        self._check_open()
        folder = folder_of(prefix)
        if folder is None:
            return
        root = self._place.root
        where = f"{root}{folder}".rstrip("/") or None
        if delimiter:
            for entry in await self._list_folder(where, prefix, start_after):
                yield entry
                self._check_open()
            return
        offset = first_offset(prefix, start_after)
        ordered = Ordered(root, prefix, start_after)
        pages = obstore.list(  # pyright: ignore[reportUnknownMemberType] - Arrow's types are optional
            self._client,
            where,
            offset=None if offset is None else root + offset,
            chunk_size=_PAGE,
        )
        while not ordered.ended:
            try:
                page = await anext(pages, None)
            except _FAILURES as error:
                raise self._translated(error, "list", prefix, lists=True) from None
            if page is None:
                return
            for entry in ordered.entries(page):
                yield entry
                self._check_open()

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage, through this process."""
        path = self._path(target)
        # obstore's own copy has no condition on the source, and tells no version of the target.
        found = await self.get(source)
        if if_version is not None and found.version != if_version:
            raise PreconditionFailedError(
                f"{source!r} is at {found.version}, not {if_version}; nothing was copied.",
                key=source,
                expected=if_version,
            )
        return await self._put(target, path, bytes(found.data), "overwrite")

    async def sync(self) -> None:
        """Return at once: an acknowledged write is durable."""
        self._check_open()

    async def _put(self, key: str, path: str, data: bytes, mode: PutMode) -> Version:
        try:
            answer = await obstore.put_async(
                self._client, path, data, mode=mode, use_multipart=False
            )
            return version_of(self._place.service, answer, key)
        except _FAILURES as error:
            raise self._translated(error, "write", key, writes=True) from None

    async def _settle(
        self, key: str, path: str, expected: Expected, write_id: str, failure: Exception
    ) -> Version:
        """Find out whether a conditional write that was not acknowledged has landed.

        A refusal is read back as well: an intermediary may have sent the write twice.
        """
        report = read_report(failure)
        error = self._translated(failure, "write", key, writes=True)
        refused = isinstance(failure, AlreadyExistsError | PreconditionError) or report.refused
        unsettled = refused or isinstance(error, OutcomeUnknownError)
        if report.reason is Reason.NOT_SENT or not unsettled or _is_missing_bucket(error):
            raise error from None
        found: Version | None = None
        try:
            answer: Any = await look(self._client, self._place.service, path)
            found = version_of(self._place.service, answer.meta, key)
            if answer.attributes.get(_WRITE_ID) == write_id:
                return found
        except FileNotFoundError:
            pass
        except _FAILURES:
            raise OutcomeUnknownError(
                f"The write of {key!r} may have landed: its answer was {report.found}, and "
                "reading it back failed. Read it back before writing again.",
                key=key,
            ) from None
        if not refused:
            raise error from None
        holds = found is None if expected is Absent.ABSENT else found == expected
        # The object is as expected, so the condition held: another write was under way (409), and
        # was given up.
        if holds and report.status == 409:
            raise StorageUnavailableError(
                f"{key!r} was being written by someone else; nothing was changed. Try again.",
                key=key,
            )
        raise _refused(key, expected)

    async def _delete_singly(
        self, doomed: dict[str, str], batch: Sequence[str]
    ) -> list[DeleteFailure]:
        errors: dict[str, IcechunkError] = {}
        pending = iter(batch)

        async def work() -> None:
            for key in pending:  # shared: each key goes to one worker
                try:
                    await obstore.delete_async(self._client, doomed[key])
                except _FAILURES as failure:
                    error = self._translated(failure, "delete", key)
                    if not isinstance(error, ObjectNotFoundError):
                        errors[key] = error

        # A backend may not use the library's own bounded tasks; the workers raise nothing.
        async with anyio.create_task_group() as group:  # noqa: TID251
            for _ in range(min(_DELETES_AT_ONCE, len(batch))):
                group.start_soon(work)
        return [DeleteFailure(key, errors[key]) for key in batch if key in errors]

    async def _list_folder(
        self, where: str | None, prefix: str, start_after: str | None
    ) -> list[ListEntry]:
        try:
            found: Any = await obstore.list_with_delimiter_async(  # pyright: ignore[reportUnknownMemberType]
                self._client, where
            )
        except _FAILURES as error:
            raise self._translated(error, "list", prefix, lists=True) from None
        return groups_and_objects(found, self._place.root, prefix, start_after)

    def _path(self, key: str) -> str:
        check_key(key)
        self._check_open()
        # Azure takes a backslash for a slash, so that two keys would be one object.
        if not is_sendable(key) or (self._place.service is Service.AZ and "\\" in key):
            raise InvalidObjectKeyError(
                f"{key[:200]!r} cannot name an object here: it holds a control character, which "
                "the client does not send, or on Azure a backslash. Use other characters.",
                key=key,
            )
        return self._place.root + key

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.error(repr(self))

    def _translated(
        self,
        error: BaseException,
        operation: str,
        key: str,
        *,
        writes: bool = False,
        lists: bool = False,
    ) -> IcechunkError:
        if self._closed:
            return StorageClosedError(f"{self!r} was closed meanwhile. Open it again.")
        if isinstance(error, StorageError):  # our own, raised among the client's
            return error
        translated = translate(error, operation, key, self._place.bucket, writes=writes or lists)
        if lists and isinstance(translated, OutcomeUnknownError):
            return translate(error, operation, key, self._place.bucket)
        return translated


def _is_missing_bucket(error: IcechunkError) -> bool:
    return isinstance(error, BucketNotFoundError) and error.context.get("code") in (
        "NoSuchBucket",
        "ContainerNotFound",
    )


def _refused(key: str, expected: Expected) -> PreconditionFailedError:
    return PreconditionFailedError(
        f"{key!r} is not in the state expected, {expected}; nothing was changed. Read it again.",
        key=key,
        expected=expected,
    )
