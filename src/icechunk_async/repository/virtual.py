"""Virtual chunks: bytes that live in other people's objects, and who may read them.

A repository declares containers, URL prefixes under which its virtual chunks may lie. That alone
gives nobody access: whoever opens the repository authorises containers one by one.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urlsplit

from icechunk_async.errors import (
    InvalidInputError,
    ObjectNotFoundError,
    VirtualAccessError,
    VirtualContainerError,
    VirtualSourceChangedError,
)
from icechunk_async.repository.direct import DirectStorage
from icechunk_async.storage import BlockingStorage, ByteRange, open_storage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from icechunk_async.format.chunk_refs import VirtualChunk
    from icechunk_async.format.config import VirtualChunkContainer
    from icechunk_async.repository.assets import AssetStorage
    from icechunk_async.storage import Retrieved, Storage

    type VirtualAccess = Storage | Mapping[str, object] | None

__all__ = ["VirtualChunks", "VirtualLocations", "open_virtual"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_NAMED: Final = "vcc"


class VirtualLocations:
    """Checks and resolves locations against the containers of a repository. Pure."""

    def __init__(self, containers: Sequence[VirtualChunkContainer]) -> None:
        """Look among ``containers``."""
        self._names = {it.name: it.url_prefix for it in containers if it.name is not None}
        # The longest prefix that fits decides.
        self._prefixes = sorted((it.url_prefix for it in containers), key=len, reverse=True)
        self._decoded = [(unquote(prefix), prefix) for prefix in self._prefixes]

    def normalize(self, location: str, *, validate_container: bool = True) -> str:
        """Answer a location as it is stored (spec, "Virtual chunk locations").

        Raises:
            InvalidInputError: it is no absolute URL.
            VirtualContainerError: no container covers it.
        """
        match = _URL.fullmatch(location)
        scheme = match[1].lower() if match else ""
        rest = match[2] if match else ""
        if scheme == "file":
            parts = urlsplit(location)
            if parts.path.startswith("/") and parts.netloc.lower() in {"", "localhost"}:
                location = f"file:///{posixpath.normpath(parts.path).lstrip('/')}"
            else:
                match = None  # a file of another machine is none of ours
        elif not rest.startswith("//") or not rest[2:].partition("/")[0]:
            match = None
        else:
            location = f"{scheme}:{rest}"
        if match is None:
            raise InvalidInputError(
                f"{location[:200]!r} cannot be the location of a virtual chunk: give an absolute "
                "URL such as 's3://bucket/file.nc', 'file:///data/file.nc' or "
                "'vcc://container-name/file.nc'.",
                location=location,
            )
        if validate_container:
            self.resolve(location)
        return location

    def resolve(self, location: str) -> tuple[str, str]:
        """Answer the container's prefix and the object's key below it.

        Raises:
            VirtualContainerError: no container covers the location.
        """
        url = location
        if location.startswith(f"{_NAMED}://"):
            name, _, rest = location[len(_NAMED) + 3 :].partition("/")
            if name not in self._names:
                raise self._uncovered(location)
            url = self._names[name] + rest
        decoded = unquote(re.split(r"[?#]", url, maxsplit=1)[0])
        for start, prefix in self._decoded:
            if decoded.startswith(start):
                return prefix, decoded[len(start) :]
        raise self._uncovered(location)

    def _uncovered(self, location: str) -> VirtualContainerError:
        known = ", ".join([*self._prefixes, *(f"vcc://{name}/" for name in self._names)]) or "none"
        return VirtualContainerError(
            f"No virtual chunk container covers {location[:200]!r}. Containers: {known}. Add one "
            "to the repository's configuration.",
            location=location,
        )


@dataclass(frozen=True, slots=True)
class _Source:
    storage: Storage
    direct: DirectStorage | None


class VirtualChunks:
    """Reads virtual chunks from the containers that the reader authorised."""

    def __init__(self, locations: VirtualLocations, sources: Mapping[str, _Source]) -> None:
        """Use :func:`open_virtual`."""
        self.locations = locations
        self._sources = sources

    @property
    def authorized_prefixes(self) -> frozenset[str]:
        """Prefixes of the containers that may be read."""
        return frozenset(self._sources)

    @property
    def can_read_directly(self) -> bool:
        """Tell whether every source answers without an event loop."""
        return all(source.direct is not None for source in self._sources.values())

    async def read(
        self, chunk: VirtualChunk, start: int, stop: int, *, direct: bool = False
    ) -> bytes | memoryview:
        """Read bytes ``[start, stop)`` of a virtual chunk.

        Raises:
            VirtualContainerError: no container covers the location.
            VirtualAccessError: the container was not authorised.
            VirtualSourceChangedError: the source was modified since it was referenced, is
                gone, or is too short.

        Cost: one request.
        """
        prefix, key = self.locations.resolve(chunk.location)
        source = self._sources.get(prefix)
        if source is None:
            raise VirtualAccessError(
                f"Reading {chunk.location!r} is not authorised: its container {prefix!r} is not "
                "among those given when the repository was opened. If you trust it, open the "
                f"repository with authorize_virtual_chunk_access={{{prefix!r}: None}}.",
                location=chunk.location,
                url_prefix=prefix,
            )
        storage: AssetStorage = source.storage
        if direct:
            assert source.direct is not None  # see can_read_directly
            storage = source.direct
        try:
            wanted = ByteRange(chunk.offset + start, chunk.offset + stop)
            retrieved = await storage.get(key, wanted)
        except ObjectNotFoundError as error:
            raise _changed(chunk, "is gone") from error
        _check_unchanged(chunk, retrieved)
        if len(retrieved.data) != stop - start:
            raise _changed(chunk, f"has only {retrieved.size_bytes} bytes")
        return retrieved.data


def _check_unchanged(chunk: VirtualChunk, retrieved: Retrieved) -> None:
    if chunk.etag is not None:
        found = retrieved.version.token.strip('"')
        if found != chunk.etag.strip('"'):
            raise _changed(chunk, f"has ETag {found!r} now, not {chunk.etag!r}")
    limit, modified = chunk.last_modified, retrieved.last_modified
    # Whole seconds are stored: rounded up by us, rounded down by other writers.
    if limit is not None and modified is not None and math.floor(modified.timestamp()) > limit:
        raise _changed(chunk, f"was modified at {modified.isoformat()}")


def _changed(chunk: VirtualChunk, what: str) -> VirtualSourceChangedError:
    return VirtualSourceChangedError(
        f"The source of a virtual chunk, {chunk.location!r}, {what}: it changed since it was "
        "referenced, so its bytes cannot be trusted. Restore it, or reference it again.",
        location=chunk.location,
        offset=chunk.offset,
        length=chunk.length,
    )


@asynccontextmanager
async def open_virtual(
    containers: Sequence[VirtualChunkContainer],
    authorized: Mapping[str, VirtualAccess],
    wrap: Callable[[Storage], Storage],
) -> AsyncGenerator[VirtualChunks]:
    """Open the authorised containers for the length of the block.

    Args:
        containers: those that the repository declares.
        authorized: by URL prefix: an open storage, options for ``open_storage``, or None for
            no options.
        wrap: puts the repository's policies around a storage.

    Raises:
        VirtualContainerError: a prefix is authorised that no container has.
    """
    locations = VirtualLocations(containers)
    known = {container.url_prefix for container in containers}
    async with AsyncExitStack() as stack:
        sources: dict[str, _Source] = {}
        for prefix, access in authorized.items():
            if prefix not in known:
                raise VirtualContainerError(
                    f"{prefix!r} was authorised, but the repository has no such virtual chunk "
                    f"container. Containers: {', '.join(sorted(known)) or 'none'}.",
                    url_prefix=prefix,
                )
            if access is None or isinstance(access, Mapping):
                options = cast("Mapping[str, object]", access or {})
                storage = await stack.enter_async_context(
                    open_storage(prefix, read_only=True, **options)
                )
            else:
                storage = access
            direct = DirectStorage(storage) if isinstance(storage, BlockingStorage) else None
            sources[prefix] = _Source(wrap(storage), direct)
        yield VirtualChunks(locations, sources)
