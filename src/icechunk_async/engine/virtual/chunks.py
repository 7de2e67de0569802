"""Read virtual chunks, whose bytes are in objects outside of the repository.

A repository declares containers: URL prefixes under which its virtual chunks may lie. Declaring one
gives no access. The reader who opens the repository authorises containers one by one.

A grant is a URL prefix with the access to use there. It opens the container with that prefix, and
those below it. Both sides end in ``/`` before they are compared, so that ``s3://bucket`` opens
``s3://bucket/`` and ``s3://bucket/data/``, but never ``s3://bucket-of-somebody-else/``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn
from urllib.parse import quote, unquote, urlsplit

from icechunk_async._runtime.concurrency import closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.credentials._refresh import Credential
from icechunk_async.errors import (
    IcechunkError,
    InvalidInputError,
    InvalidObjectKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.format.config.secrets import veiled_url
from icechunk_async.format.json.values import utf8
from icechunk_async.storage import BlockingStorage, ByteRange, ObjectInfo, open_storage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence

    from icechunk_async.format.config import VirtualChunkContainer
    from icechunk_async.format.manifest.chunk import VirtualChunk
    from icechunk_async.storage import RangeRequest, Retrieved, Storage

    type VirtualAccess = Credential | Storage | Mapping[str, object] | None

__all__ = ["Grant", "VirtualChunks", "VirtualLocations", "as_code", "open_virtual", "settle_grants"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_NAMED: Final = "vcc"
_LITERAL: Final = "/!$&'()*+,;=:@~"
"""Characters that are literal in the path of a URL, besides letters, digits and ``-._``."""
_CREDENTIALS: Final = {
    "s3": "S3FromEnvironment()",
    "tigris": "S3FromEnvironment()",
    "gs": "GcsFromEnvironment()",
    "gcs": "GcsFromEnvironment()",
    "az": "AzureFromEnvironment()",
    "azure": "AzureFromEnvironment()",
    "abfs": "AzureFromEnvironment()",
    "http": "HttpAccess()",
    "https": "HttpAccess()",
    "file": "LocalFileSystemAccess()",
}


class VirtualLocations:
    """Checks and resolves locations against the containers of a repository. Pure."""

    def __init__(self, containers: Sequence[VirtualChunkContainer]) -> None:
        """Look among ``containers``."""
        self.prefixes = frozenset(it.url_prefix for it in containers)
        self._names = {it.name: it.url_prefix for it in containers if it.name is not None}
        # The longest prefix that fits decides.
        self._prefixes = sorted((it.url_prefix for it in containers), key=len, reverse=True)
        self._decoded = [(unquote(prefix), prefix) for prefix in self._prefixes]

    def normalize(self, location: str, *, validate_container: bool = True) -> str:
        """Return a location in the form that is stored (spec, "Virtual chunk locations").

        Raises:
            InvalidInputError: it is no absolute URL.
            VirtualContainerError: no container covers it.
        """
        match = _URL.fullmatch(location)
        scheme = match[1].lower() if match else ""
        rest = match[2] if match else ""
        # As the official engine stores them: only URLs of files are normalised (spec, "Virtual
        # chunk locations"). Elsewhere `a//b` and `a/b` are two objects.
        if scheme == "file":
            path = _path_here(location)
            if path is None:
                match = None
            else:
                location = f"file:///{posixpath.normpath(path).lstrip('/')}"
        elif not rest.startswith("//") or not rest[2:].partition("/")[0]:
            match = None
        else:
            location = f"{scheme}:{rest}"
        if match is None:
            raise InvalidInputError(
                f"{veiled_url(location)[:200]!r} cannot be the location of a virtual chunk: give "
                "an absolute URL such as 's3://bucket/file.nc', 'file:///data/file.nc' or "
                "'vcc://container-name/file.nc'.",
                location=veiled_url(location),
                code="invalid-virtual-ref",
            )
        # Python gives names of files that are no UTF-8 as such text, and no commit can store it.
        if utf8(location) is None:
            raise InvalidInputError(
                f"{veiled_url(location)[:200]!r} cannot be the location of a virtual chunk: it has "
                "lone surrogates, which have no UTF-8 form. Give the object another name.",
                location=veiled_url(location),
                code="invalid-virtual-ref",
            )
        if validate_container:
            self.resolve(location)
        return location

    def resolve(self, location: str) -> tuple[str, str]:
        """Return the container's prefix and the object's key below it.

        Raises:
            VirtualContainerError: no container covers the location.
        """
        # Cut before decoding: `%3F` is part of a name.
        url = re.split(r"[?#]", self.expand(location), maxsplit=1)[0]
        decoded = unquote(url)
        # Both decoded, so that a prefix with `%20` covers locations with a space.
        for start, prefix in self._decoded:
            if decoded.startswith(start):
                return prefix, decoded[len(start) :]
        raise self._uncovered(location)

    def expand(self, location: str) -> str:
        """Return an absolute URL for ``vcc://name/...``, where there is a container so named."""
        if location.startswith(f"{_NAMED}://"):
            name, _, rest = location[len(_NAMED) + 3 :].partition("/")
            if name in self._names:
                return self._names[name] + rest
        return location

    def absolute(self, location: str) -> str:
        """Return the absolute URL of a location.

        Raises:
            VirtualContainerError: it names a container that does not exist.
        """
        url = self.expand(location)
        if url.startswith(f"{_NAMED}://"):
            raise self._uncovered(location)
        return url

    def _uncovered(self, location: str) -> VirtualContainerError:
        known = (
            ", ".join(
                [*map(veiled_url, self._prefixes), *(f"vcc://{name}/" for name in self._names)]
            )
            or "none"
        )
        return VirtualContainerError(
            f"No virtual chunk container covers {veiled_url(location)[:200]!r}. Containers: "
            f"{known}. Add one to the repository's configuration.",
            location=veiled_url(location),
        )


def _path_here(url: str) -> str | None:
    """Return the path in the URL of a file; None for a file of another machine, and for no URL."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets around what is no address
        return None
    is_here = parts.netloc.lower() in {"", "localhost"}
    return parts.path if is_here and parts.path.startswith("/") else None


@dataclass(frozen=True, slots=True)
class Grant[A]:
    """The access to one container."""

    given: str
    """The prefix as the reader wrote it."""
    access: A
    below: str
    """The decoded path from the grant to the container; empty, or ending in ``/``."""


def settle_grants[A](prefixes: Collection[str], granted: Mapping[str, A]) -> dict[str, Grant[A]]:
    """Return the grant of each container by the container's prefix. The longest grant decides.

    Args:
        prefixes: the URL prefixes of the containers, each ending in ``/``.
        granted: access by URL prefix.

    Raises:
        VirtualContainerError: grants open no container; ``context["url_prefixes"]`` has all.
        InvalidInputError: two grants differ only in the slash at the end.
    """
    by_start: dict[str, str] = {}
    for given in granted:
        # The official engine adds the slash as well (2.3.0).
        start = given if given.endswith("/") else f"{given}/"
        if start in by_start:
            raise InvalidInputError(
                f"Access was given twice for {veiled_url(start)!r}: with the slash at its end and "
                "without. Give it once.",
                url_prefix=veiled_url(given),
            )
        by_start[start] = given
    found: dict[str, Grant[A]] = {}
    for prefix in prefixes:
        nearest = max((it for it in by_start if _opens(it, prefix)), key=len, default=None)
        if nearest is not None:
            given = by_start[nearest]
            found[prefix] = Grant(given, granted[given], unquote(prefix[len(nearest) :]))
    idle = [given for start, given in by_start.items() if not _opens_any(start, prefixes)]
    if idle:
        known = ", ".join(map(veiled_url, sorted(prefixes))) or "none"
        raise VirtualContainerError(
            f"Access was given for {', '.join(repr(veiled_url(it)) for it in idle)}, but the "
            f"repository has no virtual chunk container there. Containers: {known}.",
            url_prefix=veiled_url(idle[0]),
            url_prefixes=tuple(map(veiled_url, idle)),
        )
    return found


def as_code(prefixes: Iterable[str]) -> str:
    """Return the argument that authorises containers, as Python code to copy."""
    entries = [
        f"{veiled_url(prefix)!r}: {_CREDENTIALS.get(urlsplit(prefix).scheme, None)}"
        for prefix in sorted(prefixes)
    ]
    return f"authorize_virtual_chunk_access={{{', '.join(entries)}}}"


def _opens_any(start: str, prefixes: Iterable[str]) -> bool:
    return any(_opens(start, prefix) for prefix in prefixes)


def _opens(start: str, prefix: str) -> bool:
    if start == prefix:
        return True
    if not prefix.startswith(start) or not _is_place(start):
        return False
    # The containers are the repository's words. A path that climbs (`file:///d/../etc/`) begins
    # like the grant and leads out of it, so it needs a separate grant.
    below = unquote(prefix[len(start) :]).replace("\\", "/")
    return not {".", ".."} & {unquote(it) for it in below.split("/")}


def _is_place(start: str) -> bool:
    """Return whether a prefix names a host, a bucket or a directory: ``s3://`` is everybody's."""
    try:
        url = urlsplit(start)
    except ValueError:
        return False
    return bool(url.path.strip("/") if url.scheme == "file" else url.netloc)


@dataclass(frozen=True, slots=True)
class _Source:
    storage: Storage
    blocking: BlockingStorage | None
    """The backend without its policies, if it answers without an event loop."""
    base: str
    """Prepended to keys, which are relative to the container."""


class VirtualChunks:
    """Reads virtual chunks from the containers that the reader authorised."""

    def __init__(self, locations: VirtualLocations, sources: Mapping[str, _Source]) -> None:
        """Use `open_virtual`."""
        self.locations = locations
        self._sources = sources
        self._closed = locations.prefixes - sources.keys()

    @property
    def authorized_prefixes(self) -> frozenset[str]:
        """Prefixes of the containers that may be read."""
        return frozenset(self._sources)

    @property
    def can_block(self) -> bool:
        """Whether every source answers without an event loop; see `read_blocking`."""
        return all(source.blocking is not None for source in self._sources.values())

    async def read(self, chunk: VirtualChunk, start: int, stop: int) -> bytes | memoryview:
        """Read bytes ``[start, stop)`` of a virtual chunk.

        Raises:
            VirtualContainerError: no container covers the location, or its store can hold no
                such object.
            VirtualAccessError: the container was not authorised, or its store denied access.
            VirtualSourceChangedError: the source was modified since it was referenced, is
                gone, or is too short; or the store does not report enough to tell.
            StorageError: the store failed; ``context`` has the location.

        Cost: one request.
        """
        wanted = ByteRange(chunk.offset + start, chunk.offset + stop)
        return _checked(chunk, await self._get(chunk, wanted), stop - start)

    def read_blocking(self, chunk: VirtualChunk, start: int, stop: int) -> bytes | memoryview:
        """Read bytes on the calling thread; as `read`. Every source must answer like that."""
        prefix, source, key = self._find(chunk)
        assert source.blocking is not None  # see can_block
        wanted = ByteRange(chunk.offset + start, chunk.offset + stop)
        try:
            retrieved = source.blocking.get_blocking(key, wanted)
        except (StorageError, InvalidObjectKeyError) as error:
            _fail(chunk, prefix, error)
        return _checked(chunk, retrieved, stop - start)

    async def size(self, location: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            VirtualChunkError, StorageError: as `read`.

        Cost: one request.
        """
        chunk = _whole(location)
        # An empty range: each reply tells the size of the whole object.
        return (await self._get(chunk, ByteRange(0, 0))).size_bytes

    async def fetch(self, location: str, wanted: RangeRequest = None) -> Retrieved:
        """Read an object of a container, or a part of it, without a guard against changes.

        Raises:
            VirtualChunkError, StorageError: as `read`.

        Cost: one request.
        """
        return await self._get(_whole(location), wanted)

    async def entries(self, location: str) -> AsyncGenerator[tuple[str, ObjectInfo]]:
        """Iterate over the objects of a container whose location begins like this one.

        Each comes with its location.

        Raises:
            VirtualContainerError, VirtualAccessError: the container is unknown, or not authorised.
            StorageError: the store failed, or cannot list.
        """
        prefix, key = self.locations.resolve(location)
        source = self._sources.get(prefix)
        if source is None:
            raise self._unauthorized(location, prefix)
        listed = source.storage.list_prefix(source.base + key)
        async with closing(listed):
            async for entry in listed:
                if isinstance(entry, ObjectInfo):
                    yield prefix + quote(entry.key.removeprefix(source.base), safe=_LITERAL), entry

    async def _get(self, chunk: VirtualChunk, wanted: RangeRequest) -> Retrieved:
        prefix, source, key = self._find(chunk)
        try:
            return await source.storage.get(key, wanted)
        except (StorageError, InvalidObjectKeyError) as error:
            _fail(chunk, prefix, error)

    def _find(self, chunk: VirtualChunk) -> tuple[str, _Source, str]:
        """Return the container of a chunk, its source, and the object's key there."""
        prefix, key = self.locations.resolve(chunk.location)
        source = self._sources.get(prefix)
        if source is None:
            raise self._unauthorized(chunk.location, prefix)
        return prefix, source, source.base + key

    def _unauthorized(self, location: str, prefix: str) -> VirtualAccessError:
        # All that are missing at once: else a reader of many containers learns of one a run.
        needed = (
            f"{len(self._closed)} containers are" if len(self._closed) > 1 else "One container is"
        )
        return VirtualAccessError(
            f"Reading {veiled_url(location)!r} is not authorised: its container "
            f"{veiled_url(prefix)!r} is not among those given when the repository was opened. "
            f"{needed} not authorised. If you trust them, open the repository with "
            f"{as_code(self._closed)}, beside what it was opened with, or with other "
            "credentials of icechunk_async.credentials.",
            location=veiled_url(location),
            url_prefix=veiled_url(prefix),
            url_prefixes=tuple(map(veiled_url, sorted(self._closed))),
        )


def _whole(location: str) -> VirtualChunk:
    """Return a chunk that stands for a whole object."""
    from icechunk_async.format.manifest.chunk import VirtualChunk  # noqa: PLC0415 -- on use

    return VirtualChunk(location, 0, 0)


def _checked(chunk: VirtualChunk, retrieved: Retrieved, length: int) -> bytes | memoryview:
    check_unchanged(chunk, retrieved)
    if len(retrieved.data) != length:
        raise changed(chunk, f"has only {retrieved.size_bytes} bytes")
    return retrieved.data


def _fail(chunk: VirtualChunk, prefix: str, error: IcechunkError) -> NoReturn:
    """Raise what an error of a source means for the chunk that was wanted."""
    match error:
        case ObjectNotFoundError():
            raise changed(chunk, "is gone") from error
        case PermissionDeniedError():
            raise VirtualAccessError(
                f"Reading the virtual chunk at {veiled_url(chunk.location)!r} was denied: "
                f"{error} Credentials are given with authorize_virtual_chunk_access=, when the "
                "repository is opened.",
                location=veiled_url(chunk.location),
                url_prefix=veiled_url(prefix),
            ) from error
        case InvalidObjectKeyError():
            raise VirtualContainerError(
                f"The location of a virtual chunk, {veiled_url(chunk.location)!r}, names no object "
                f"that this store can hold: {error}",
                location=veiled_url(chunk.location),
            ) from error
        case _:
            error.context.setdefault("location", veiled_url(chunk.location))
            error.add_note(f"It was the source of a virtual chunk, {veiled_url(chunk.location)!r}.")
            raise error


def check_unchanged(chunk: VirtualChunk, retrieved: Retrieved) -> None:
    """Raise unless what was read has the state that its reference asks for.

    Raises:
        VirtualSourceChangedError: it has another state, or the store does not report which.
    """
    if chunk.etag is not None:
        # Of some services the version is another text than the ETag, such as a generation; and some
        # writers store ETags with their quotes.
        found = [it.strip('"') for it in (retrieved.etag, retrieved.version.token) if it]
        if chunk.etag.strip('"') not in found:
            raise changed(chunk, f"has ETag {found[0]!r} now, not {chunk.etag!r}")
    limit, modified = chunk.last_modified, retrieved.last_modified
    if limit is None:
        return
    if modified is None:
        raise changed(chunk, "does not tell when it was modified, which its reference asks for")
    # Whole seconds are stored. Where they may have been rounded down, what counts is the second.
    found_at = modified.replace(microsecond=0) if chunk.seconds_cut else modified
    if found_at > datetime.fromtimestamp(limit, UTC):
        raise changed(chunk, f"was modified at {modified.isoformat()}")


def changed(chunk: VirtualChunk, what: str) -> VirtualSourceChangedError:
    """Return the error for a source that is no longer what was referenced."""
    return VirtualSourceChangedError(
        f"The source of a virtual chunk, {veiled_url(chunk.location)!r}, {what}: it changed since "
        "it was referenced, so its bytes cannot be trusted. Restore it, or reference it again.",
        location=veiled_url(chunk.location),
        offset=chunk.offset,
        length=chunk.length,
    )


@asynccontextmanager
async def open_virtual(
    containers: Sequence[VirtualChunkContainer],
    authorized: Mapping[str, VirtualAccess],
    wrap: Callable[[Storage], Storage],
    named: Sequence[VirtualChunkContainer] = (),
) -> AsyncGenerator[VirtualChunks]:
    """Open the authorised containers for the length of the block.

    Args:
        containers: those that the repository declares.
        authorized: by URL prefix, of a container or of a place above containers: a credential;
            the backend's options; an open storage, whose keys are relative to the prefix; or
            None, for stores that need no credential, and for S3 the credentials of the
            environment.
        wrap: puts the repository's policies around a storage.
        named: containers of the reader's own configuration, whose endpoints may get credentials.

    Raises:
        VirtualContainerError: prefixes are authorised where there is no container.
        VirtualAccessError: None was given for a store that needs a credential, or the reader did
            not name an endpoint that would get credentials.
        InvalidInputError: a credential is for another kind of store, or no option fits.
        MissingDriverError: the store's backend is not installed.
    """
    locations = VirtualLocations(containers)
    known = {container.url_prefix: container for container in containers}
    own = {container.url_prefix: container for container in named}
    grants = settle_grants(known, authorized)
    async with AsyncExitStack() as stack:
        sources: dict[str, _Source] = {}
        for prefix, grant in grants.items():
            access = grant.access
            if access is None or isinstance(access, Mapping | Credential):
                from icechunk_async.engine.virtual.sources import (  # noqa: PLC0415 -- on use
                    source_options,
                    source_place,
                )

                place = source_place(prefix)
                options = await source_options(known[prefix], access, own.get(prefix))
                storage = await stack.enter_async_context(
                    # Nothing of the reader's credential is ever used to write there.
                    open_storage(place.url, **{**options, "read_only": True})
                )
                base = place.base
            else:
                storage, base = access, grant.below
            # Before the policies: none of them can wait on a thread without a loop.
            blocking = storage if isinstance(storage, BlockingStorage) else None
            sources[prefix] = _Source(wrap(storage), blocking, base)
        yield VirtualChunks(locations, sources)
