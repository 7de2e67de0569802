"""The storage: one method for each operation, which `reading` and `writing` implement."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Literal

from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import Capabilities
from icechunk_async_gcs import reading, writing
from icechunk_async_gcs.authority import authority_for
from icechunk_async_gcs.options import (
    CONNECT_TIMEOUT_SECONDS,
    READ_TIMEOUT_SECONDS,
    Options,
    describe,
    parse_location,
)
from icechunk_async_gcs.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from icechunk_async.storage import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        StorageDescription,
        Version,
    )
    from icechunk_async_gcs.options import Location, Token

__all__ = ["GCSStorage", "open_gcs"]

_READ_ONLY: Final = "it was opened with read_only=True. Open it without, to write"


@asynccontextmanager
async def open_gcs(
    url: str,
    *,
    token: Token = None,
    project: str | None = None,
    endpoint_url: str | None = None,
    connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
    read_timeout_seconds: float = READ_TIMEOUT_SECONDS,
    read_only: bool = False,
    user_agent: str | None = None,
    allow_http: bool = False,
) -> AsyncGenerator[GCSStorage]:
    """Open the objects below ``gs://bucket/prefix``. No request is made to the bucket.

    Every promise of the contract is made. Versions are generations. Names in Cloud Storage have at
    most 1024 bytes, the prefix included, and no line ends.

    Args:
        url: the bucket, and a prefix that is taken literally.
        token: the credentials. None: Google's default credentials; ``"anonymous"``; the path of a
            key file; its content as a dictionary; an `AccessToken`; or an asynchronous function
            that returns one, and is called again before it expires and when it is refused. To send
            the storage to other processes, the function must be importable.
        project: which project pays for requests (``userProject``), for buckets that want that.
        endpoint_url: ``http(s)://host:port`` of another server. Otherwise gcsfs decides, which
            looks at ``STORAGE_EMULATOR_HOST`` and ``GOOGLE_CLOUD_UNIVERSE_DOMAIN``.
        connect_timeout_seconds: how long to wait for a connection.
        read_timeout_seconds: how long to wait for the next bytes of a reply.
        read_only: promise no writes.
        user_agent: the header ``User-Agent`` of each request, which access logs of buckets keep.
        allow_http: accept a server that is not encrypted, such as an emulator, also one that
            ``STORAGE_EMULATOR_HOST`` names.

    Raises:
        InvalidURLError: the URL names no bucket.
        InvalidInputError: an option has a value that it cannot have.
        PermissionDeniedError: there are no default credentials.
        UnreachableError: Google's token service cannot be reached.
    """
    options = Options(
        token,
        project,
        endpoint_url,
        connect_timeout_seconds,
        read_timeout_seconds,
        read_only,
        user_agent,
        allow_http,
    )
    location = parse_location(url)
    description = describe(url, options)
    service = Service(
        f"GCSStorage({url!r})", location.bucket, options, await authority_for(options)
    )
    storage = GCSStorage(description, location, service, read_only=read_only)
    try:
        # Within the `try`: a client that is half made is closed as well.
        await service.connect()
        yield storage
    finally:
        await service.close()


class GCSStorage:
    """A `Storage` in a bucket; made by `open_gcs`."""

    def __init__(
        self,
        description: StorageDescription,
        location: Location,
        service: Service,
        *,
        read_only: bool,
    ) -> None:
        """Make a handle; use `open_gcs`."""
        self._description = description
        self._location = location
        self._service = service
        self._read_only = read_only

    def __repr__(self) -> str:
        """Show the URL."""
        return f"GCSStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """All promises, or those of a reader."""
        if self._read_only:
            return _NO_WRITES
        return _DOCUMENTED if self._service.is_documented else _ALL

    @property
    def description(self) -> StorageDescription:
        """The URL and the options that differ from their defaults."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it; one request, two where nothing is in the range."""
        return await reading.get(self._service, key, self._location.name(key), byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await reading.get_if_changed(self._service, key, self._location.name(key), version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object.

        Cost: one request up to 8 MiB, two beyond. One more after a refusal or a lost reply, to see
        whether it was this write that landed.
        """
        name = self._location.name(key)
        # After the key, so that a bad key is an error of every storage alike.
        self._check_writable()
        return await writing.put(self._service, key, name, data, if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects, a hundred with each request."""
        self._check_writable()
        return await writing.delete(self._service, self._location, keys)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects, up to a thousand with each request."""
        async for entry in reading.list_prefix(
            self._service, self._location, prefix, start_after, delimiter
        ):
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object within the storage; its bytes stay with the service."""
        names = self._location.name(source), self._location.name(target)
        self._check_writable()
        return await writing.copy(self._service, (source, target), names, if_version)

    @property
    def endpoint(self) -> str | None:
        """The service that was named; None for Google's."""
        return self._service.endpoint

    def path_of(self, key: str) -> str:
        """Return the path of an object in the API, bucket included."""
        self._service.check_open()
        return self._service.object(self._location.name(key))

    def copies_from(self, source: Storage) -> bool:
        """Return whether the source is a bucket of the same service."""
        return isinstance(source, GCSStorage) and source.endpoint == self.endpoint

    async def copy_from(self, source: Storage, key: str) -> None:
        """Copy an object of another bucket, on the server."""
        assert isinstance(source, GCSStorage)
        self._check_writable()
        # Of the source's bucket, but asked with the credentials of the target, which must be able
        # to read it.
        origin = source.path_of(key)
        name = self._location.name(key)
        await writing.copy(self._service, (key, key), (origin, name), None, origin=origin)

    async def sync(self) -> None:
        """Return at once: an acknowledged write is durable."""
        self._service.check_open()

    def _check_writable(self) -> None:
        self._service.check_open()
        if self._read_only:
            raise UnsafeStorageError(f"{self!r} cannot be written: {_READ_ONLY}.")


_ALL: Final = Capabilities()
_DOCUMENTED: Final = Capabilities(documented=True)
_NO_WRITES: Final = Capabilities(
    writable=False,
    conditional_create=False,
    conditional_update=False,
    reasons=dict.fromkeys(("writable", "conditional_create", "conditional_update"), _READ_ONLY),
)
