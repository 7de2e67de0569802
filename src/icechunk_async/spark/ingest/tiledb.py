"""Dense arrays of TileDB: chunks refer to tiles, whose places the metadata of fragments tells.

A scan writes the array into a repository in memory, as `write_virtual_array` does, and takes from
there what was written: documents, references, and the coordinates of dimensions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

import numpy as np
from zarr.core.buffer import default_buffer_prototype

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.tree.listing import Batches
from icechunk_async.errors import InvalidInputError, ObjectNotFoundError
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.repository import Repository
from icechunk_async.spark.ingest.scan import Places, Scanned, ScannedArray, SourceState
from icechunk_async.storage import CommonPrefix
from icechunk_async.tiledb.arrays.array import TileDBArray
from icechunk_async.tiledb.arrays.folder import Folder
from icechunk_async.tiledb.zarr.virtual import write_virtual_array

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from icechunk_async.engine.virtual.chunks import VirtualChunks
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.session import Session
    from icechunk_async.spark.ingest.source import FolderListing
    from icechunk_async.storage import ListEntry, RangeRequest, Retrieved

__all__ = ["scan_tiledb"]

_PLACE: Final = "array"
_ROWS: Final = 1 << 20
_HERE: Final = (
    "In Spark, `ingest_virtual` leaves out the attributes that `skip` names; "
    "`icechunk_async.tiledb.ingest_array` is what takes `attributes`, `copy` and `validity`."
)
"""How arguments that errors name are given here."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """The objects of a listing, read through the containers of a repository."""

    virtual: VirtualChunks
    listing: FolderListing

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read an object or a part of it."""
        if key not in self.listing.urls:
            raise ObjectNotFoundError(f"{self.listing.root}{key} was not there when it was listed.")
        return await self.virtual.fetch(self.listing.urls[key], byte_range)

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncGenerator[ListEntry]:
        """List objects whose keys begin with a prefix, from the listing."""
        seen: set[str] = set()
        for key in sorted(self.listing.infos):
            if not key.startswith(prefix) or (start_after is not None and key <= start_after):
                continue
            inner, mark, _ = key.removeprefix(prefix).partition("/")
            if delimiter is None or not mark:
                info = self.listing.infos[key]
                yield replace(info, key=key)
            elif inner not in seen:
                seen.add(inner)
                yield CommonPrefix(f"{prefix}{inner}/")


async def scan_tiledb(
    virtual: VirtualChunks, listing: FolderListing, skip: Sequence[str] = ()
) -> Scanned:
    """Return the arrays of a dense TileDB array.

    Args:
        virtual: the containers of the repository.
        listing: all objects of the array.
        skip: attributes to leave out.

    Raises:
        InvalidInputError: as `write_virtual_array`; tiles are not copied.
        IcechunkError: there is no array, or it is damaged or not supported.

    Cost: requests for the schema, and two for each fragment.
    """
    array = await TileDBArray.load(Folder(_Listed(virtual, listing), url=listing.root.rstrip("/")))
    left_out = {it.strip("/") for it in skip}
    names = [it.name for it in array.schema.attributes if it.name not in left_out]
    array.grid()  # refuses sparse arrays
    # Written to a repository in memory, and read off that: one function decides what chunks are of
    # an array of TileDB, here and in `icechunk_async.tiledb.ingest_array`.
    async with Repository.create(f"memory://{uuid4()}") as scratch:
        session = await scratch.writable_session("main")
        try:
            await write_virtual_array(
                session,
                array,
                _PLACE,
                attributes=names,
                location=listing.root,
                validate_containers=False,
            )
        except InvalidInputError as error:
            raise InvalidInputError(f"{error} {_HERE}") from error
        return await _harvest(session, listing)


async def _harvest(session: Session, listing: FolderListing) -> Scanned:
    """Return the arrays and references that were written to a session."""
    infos = {url: listing.infos[key] for key, url in listing.urls.items()}
    urls: dict[str, int] = {}
    arrays: dict[str, ScannedArray] = {}
    attributes: dict[str, Any] = {}
    names = [it async for it in session.store.list_dir(_PLACE)]
    for path in (f"/{_PLACE}", *(f"/{_PLACE}/{it}" for it in names if it != "zarr.json")):
        node = session.workspace.node(path)
        assert node is not None  # it was listed
        document = json.loads(node.user_data)
        if node.array is None:
            attributes = document.get("attributes") or {}
            continue
        refs = [it async for it in Batches(session.workspace, path, _ROWS, lambda it: it)]
        rank = len(document["shape"])
        places = Places.joined([_places(it, urls) for it in refs], rank)
        inline = await _inline(session, path, refs)
        arrays[path.rpartition("/")[2]] = ScannedArray(document, places, inline)
    states = tuple(
        SourceState(it.size_bytes, "", None, clock.to_us(it.last_modified))
        for it in (infos[url] for url in urls)
    )
    return Scanned({"": attributes}, arrays, tuple(urls), states)


def _places(refs: ChunkRefs, urls: dict[str, int]) -> Places:
    """Return the virtual chunks of references, and number their URLs."""
    rows = np.flatnonzero(refs.kinds == Kind.VIRTUAL)
    objects = refs.objects[rows]
    numbers = np.zeros(int(objects.max(initial=0)) + 1, np.uint32)
    for number in np.unique(objects).tolist():
        numbers[number] = urls.setdefault(refs.locations.get(number), len(urls))
    return Places(refs.coords[rows], numbers[objects], refs.offsets[rows], refs.lengths[rows])


async def _inline(
    session: Session, path: str, refs: Sequence[ChunkRefs]
) -> dict[tuple[int, ...], bytes]:
    """Return the encoded chunks that were written: coordinates of dimensions."""
    found: dict[tuple[int, ...], bytes] = {}
    for it in refs:
        for row in np.flatnonzero(it.kinds != Kind.VIRTUAL).tolist():
            coords = tuple(map(int, it.coords[row]))
            key = "/".join([path.strip("/"), "c", *map(str, coords)])
            data = await session.store.get(key, default_buffer_prototype())
            assert data is not None  # it was listed
            found[coords] = data.to_bytes()
    return found
