"""The storage: checks keys and promises, and delegates to reader, writer and changer."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import Absent, ByteRange, Capabilities, StorageDescription
from icechunk_async_s3.changing import Changer
from icechunk_async_s3.connections import Connections
from icechunk_async_s3.listing import walk
from icechunk_async_s3.options import make_options, place_of
from icechunk_async_s3.reading import Reader
from icechunk_async_s3.transport import Transport, as_bytes, is_etag
from icechunk_async_s3.writing import Writer, upload_copy

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
    )

    from icechunk_async.storage import (
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )
    from icechunk_async_s3.credentials import S3Credentials
    from icechunk_async_s3.options import Options, Place

__all__ = ["S3Storage", "open_s3"]

_READS: Final = "the storage was opened with read_only=True; open it without to write"
_READ_ONLY: Final = Capabilities(
    writable=False,
    conditional_create=False,
    conditional_update=False,
    reasons=dict.fromkeys(("writable", "conditional_create", "conditional_update"), _READS),
)


@asynccontextmanager
async def open_s3(
    url: str,
    *,
    preset: Literal["r2", "tigris", "minio", "ceph"] | None = None,
    endpoint_url: str | None = None,
    region: str | None = None,
    force_path_style: bool | None = None,
    allow_http: bool | None = None,
    anonymous: bool | None = None,
    requester_pays: bool | None = None,
    checksum_algorithm: Literal["crc32", "crc32c", "sha1", "sha256"] | None = None,
    storage_class: str | None = None,
    extra_headers: Mapping[str, str] | None = None,
    read_headers: Mapping[str, str] | None = None,
    write_headers: Mapping[str, str] | None = None,
    access_key_id: str | None = None,
    secret_access_key: str | None = None,
    session_token: str | None = None,
    credentials: Callable[[], Awaitable[S3Credentials]] | None = None,
    profile: str | None = None,
    quote_etags: bool | None = None,
    connect_timeout_seconds: float | None = None,
    network_stream_timeout_seconds: float | None = None,
    multipart_threshold_bytes: int | None = None,
    conditional_multipart: bool | None = None,
    read_only: bool | None = None,
    user_agent: str | None = None,
) -> AsyncGenerator[S3Storage]:
    """Open a bucket, or a prefix of one: ``s3://bucket/prefix``.

    Nothing is sent until the storage is used. Without ``access_key_id``, ``credentials``,
    ``profile`` and ``anonymous`` credentials come from the usual chain: environment, AWS
    configuration files, the role of the machine. All other settings that AWS tools know
    (``AWS_REGION``, ``AWS_ENDPOINT_URL_S3``, ``AWS_CA_BUNDLE``, ``HTTPS_PROXY``, ...) are followed.

    Args:
        url: ``s3://bucket`` or ``s3://bucket/prefix``; the prefix is taken literally.
        preset: defaults for a kind of server; other options override them.
        endpoint_url: a server other than AWS.
        region: where the bucket is.
        force_path_style: put the bucket into the path of URLs instead of the host name; servers
            given by ``endpoint_url`` get it so in any case.
        allow_http: accept an endpoint that is not encrypted, also one of the environment.
        anonymous: do not sign requests.
        requester_pays: agree to pay for the requests.
        checksum_algorithm: sent with each body, for the server to check and keep. Without it
            the signature covers the body. With it and TLS the body is not hashed for the signature.
        storage_class: of the objects that are written. It must be one that can be read at once.
        extra_headers: sent and signed with each request.
        read_headers: the same, only with requests that read or list.
        write_headers: the same, only with requests that write, copy or delete.
        access_key_id: fixed credentials, with ``secret_access_key`` and perhaps ``session_token``.
        secret_access_key: see ``access_key_id``.
        session_token: see ``access_key_id``.
        credentials: an asynchronous function that returns `S3Credentials`; it is called when the
            first are needed, five minutes before they expire, and when the server calls them
            expired.
        profile: of the AWS configuration files.
        quote_etags: whether versions are sent in quotes; False for servers that then find none.
        connect_timeout_seconds: for a connection; 0 for no limit.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        multipart_threshold_bytes: writes of more bytes are sent in parts, conditional ones where
            the server honours conditions then; elsewhere in one request, of up to 5 GiB.
        conditional_multipart: whether the server honours ``If-None-Match`` and ``If-Match`` when
            it joins the parts of an upload. AWS does; other servers are assumed not to unless this
            is True. True for a server that does not would lose commits.
        read_only: promise no writes.
        user_agent: the header ``User-Agent`` of each request, which access logs of buckets keep.

    Raises:
        InvalidURLError: the URL names no bucket, or a prefix that no key can have.
        InvalidInputError: an option has a value that it cannot have; the error names it.
    """
    # Before any other name is bound: the locals are the parameters.
    given = {name: value for name, value in locals().items() if name not in ("url", "preset")}
    options = make_options(preset, given)
    place = replace(place_of(url), is_signed=not options.anonymous)
    kept: dict[str, object] = {n: value for n, value in given.items() if value is not None}
    if preset is not None:
        kept["preset"] = preset
    connections = Connections(place, options)
    storage = S3Storage(place, options, connections, StorageDescription(url, kept))
    try:
        yield storage
    finally:
        await connections.close()


class S3Storage:
    """A `Storage` in a bucket; made by `open_s3`."""

    def __init__(
        self,
        place: Place,
        options: Options,
        connections: Connections,
        description: StorageDescription,
    ) -> None:
        """Make a handle; use `open_s3`."""
        self._place = place
        self._options = options
        self._connections = connections
        self._description = description
        self._transport = Transport(place, options, connections)
        self._reader = Reader(self._transport, options)
        self._writer = Writer(self._transport, options)
        self._changer = Changer(self._transport, options)

    def __repr__(self) -> str:
        """Show the URL."""
        return f"S3Storage({self._place.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """All promises, of a server that keeps the protocol; none to write when read-only."""
        if self._options.read_only:
            return _READ_ONLY
        if not self._options.quote_etags:
            return _UNQUOTED
        return _DOCUMENTED if self._connections.is_documented else _ALL

    @property
    def description(self) -> StorageDescription:
        """The URL and the options that were given; it carries secrets only if they were given."""
        return self._description

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or part of it."""
        return await self._reader.get(key, self._full(key), byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole object unless it is still at ``version``."""
        return await self._reader.get_if_changed(key, self._full(key), version)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole object."""
        full = self._full(key)
        self._check_writable("write")
        body = as_bytes(data)
        if if_version is None:
            return await self._writer.put(key, full, body)
        if not isinstance(if_version, Absent) and not is_etag(if_version):
            raise self._writer.precondition_failed(key, if_version)  # no server answered it
        return await self._writer.put_if(key, full, body, if_version)

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete objects, 1000 with each request."""
        # All keys are checked before the first is deleted.
        doomed = {self._full(key): key for key in keys}
        self._connections.check_open()
        self._check_writable("delete")
        return await self._changer.delete(doomed)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List objects, 1000 with each request."""
        self._connections.check_open()
        async for entry in walk(self._transport, prefix, start_after, delimiter):
            yield entry

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy an object of up to 5 GB on the server, in one request."""
        places = (source, self._full(source)), (target, self._full(target))
        self._check_writable("copy")
        return await self._changer.copy(*places, if_version)

    @property
    def endpoint(self) -> tuple[str | None, str | None]:
        """The server that was named, and the profile, which may name another one."""
        return self._options.endpoint_url, self._options.profile

    def origin_of(self, key: str) -> dict[str, str]:
        """Return the bucket of an object and its key there, as copies name them."""
        return {"Bucket": self._place.bucket, "Key": self._full(key)}

    def copies_from(self, source: Storage) -> bool:
        """Return whether the source is a bucket of the same service."""
        if not isinstance(source, S3Storage):
            return False
        # Credentials may differ: if those of the target may not read the source, the service
        # refuses, and the caller reads and writes.
        return source.endpoint == self.endpoint

    async def copy_from(self, source: Storage, key: str) -> None:
        """Copy an object of another bucket, on the server; above 5 GiB in parts."""
        assert isinstance(source, S3Storage)
        origin, ours = source.origin_of(key), self._full(key)
        self._check_writable("copy")
        if await self._changer.copy_from(key, origin, ours):
            return
        # Its size, asked with the credentials of the source.
        found = await source.get(key, ByteRange(0, 0))
        await upload_copy(
            self._transport, self._options, key, ours, origin=origin, size_bytes=found.size_bytes
        )

    async def sync(self) -> None:
        """Return at once: a write is durable when the server acknowledges it."""
        self._connections.check_open()

    def _full(self, key: str) -> str:
        self._connections.check_open()
        return self._place.full(key)

    def _check_writable(self, what: str) -> None:
        if self._options.read_only:
            raise UnsafeStorageError(
                f"{self._place.url!r} was asked to {what}, and was opened with read_only=True. "
                "Open it without.",
                url=self._place.url,
            )


_ALL: Final = Capabilities()
_DOCUMENTED: Final = Capabilities(documented=True)
_UNQUOTED: Final = Capabilities(
    final_deletion=False,
    reasons={
        "final_deletion": "Ceph's gateway, which finds only versions without quotes, writes an "
        "object again where an update races its deletion"
    },
)
