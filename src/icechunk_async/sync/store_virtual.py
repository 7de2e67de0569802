"""Virtual references of the store, with the official engine's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icechunk_async.errors import VirtualContainerError
from icechunk_async.sync.errors import translated
from icechunk_async.sync.iterators import AsyncCloseableIterator
from icechunk_async.sync.store_direct import DirectAccess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from datetime import datetime

    from icechunk_async.sync.virtual import VirtualChunkSpec
    from icechunk_async.zarr.store import IcechunkStore as AsyncStore

    type Indices = list[tuple[int, ...]]
    type Batch = tuple[
        np.ndarray[tuple[int, int], np.dtype[np.uint32]],
        np.ndarray[tuple[int], np.dtype[np.uint8]],
        list[str],
        np.ndarray[tuple[int], np.dtype[np.uint64]],
        np.ndarray[tuple[int], np.dtype[np.uint64]],
        dict[int, bytes],
    ]

__all__ = ["VirtualWrites"]


class VirtualWrites(DirectAccess):
    """A base of the store. Nothing here waits for storage, but for opening an unpickled store."""

    def set_virtual_ref(
        self,
        key: str,
        location: str,
        *,
        offset: int,
        length: int,
        checksum: str | datetime | None = None,
        validate_container: bool = True,
    ) -> None:
        """Make a chunk refer to bytes ``[offset, offset + length)`` of another object.

        Args:
            key: the chunk, such as ``temperature/c/0/0``.
            location: absolute URL of the object, or ``vcc://container-name/path``.
            offset: first byte.
            length: bytes.
            checksum: ETag of the object, or a time after which it was not modified; reading is
                refused once it changed.
            validate_container: refuse a location that no container covers.

        Raises:
            InvalidInputError: none does, or the key or the location cannot be; nothing was stored.
            NodeNotFoundError: there is no such array.
        """
        with translated():
            self._writable(self._now()).set_virtual_ref(
                key,
                location,
                offset=offset,
                length=length,
                checksum=checksum,
                validate_container=validate_container,
            )

    async def set_virtual_ref_async(
        self,
        key: str,
        location: str,
        *,
        offset: int,
        length: int,
        checksum: str | datetime | None = None,
        validate_container: bool = True,
    ) -> None:
        """Await what :meth:`set_virtual_ref` does."""
        await self._native()
        self.set_virtual_ref(
            key,
            location,
            offset=offset,
            length=length,
            checksum=checksum,
            validate_container=validate_container,
        )

    def set_virtual_refs(
        self,
        array_path: str,
        chunks: list[VirtualChunkSpec],
        *,
        validate_containers: bool = True,
    ) -> list[tuple[int, ...]] | None:
        """Set many virtual chunks of one array.

        Returns: the indices of chunks that were left out since no container covers their
            location; None if there are none.

        Raises:
            InvalidInputError: a chunk cannot be; nothing was stored.
        """
        with translated():
            store = self._writable(self._now())
            refused = _uncovered(store, [it.location for it in chunks], validate_containers)
            kept: list[Any] = [it for it in chunks if it.location not in refused]
            store.set_virtual_refs(array_path, kept, validate_containers=False)
        return [tuple(it.index) for it in chunks if it.location in refused] or None

    async def set_virtual_refs_async(
        self,
        array_path: str,
        chunks: list[VirtualChunkSpec],
        *,
        validate_containers: bool = True,
    ) -> list[tuple[int, ...]] | None:
        """Await what :meth:`set_virtual_refs` does."""
        await self._native()
        return self.set_virtual_refs(array_path, chunks, validate_containers=validate_containers)

    def set_virtual_refs_arr(
        self,
        array_path: str,
        chunk_grid_shape: tuple[int, ...],
        locations: list[str],
        offsets: np.ndarray[Any, np.dtype[np.uint64]],
        lengths: np.ndarray[Any, np.dtype[np.uint64]],
        *,
        validate_containers: bool = True,
        arr_offset: tuple[int, ...] | None = None,
        checksum: datetime | str | None = None,
    ) -> list[tuple[int, ...]] | None:
        """Set a box of virtual chunks of one array from columns.

        Args:
            array_path: the array.
            chunk_grid_shape: chunks of the box along each axis.
            locations: URL of each chunk, row-major; empty ones are left out.
            offsets: first byte of each chunk.
            lengths: bytes of each chunk.
            validate_containers: leave out locations that no container covers.
            arr_offset: chunk coordinates at which the box begins; the origin if None.
            checksum: one for all, as for :meth:`set_virtual_ref`.

        Returns: as :meth:`set_virtual_refs`.
        """

        def put(store: AsyncStore, kept: list[str], *, validate: bool) -> None:
            store.set_virtual_refs_arr(
                array_path,
                tuple(chunk_grid_shape),
                kept,
                offsets,
                lengths,
                validate_containers=validate,
                arr_offset=arr_offset,
                checksum=checksum,
            )

        with translated():
            store = self._writable(self._now())
            try:
                put(store, locations, validate=validate_containers)
            except VirtualContainerError:  # which is rare: nothing was stored
                refused = _uncovered(store, locations, validate_containers)
                kept = ["" if it in refused else it for it in locations]
                put(store, kept, validate=False)
            else:
                return None
        where = np.flatnonzero([it in refused for it in locations])
        first = np.array(arr_offset or (0,) * len(chunk_grid_shape), np.int64)
        rows = np.stack(np.unravel_index(where, chunk_grid_shape), axis=1) + first
        return [tuple(row) for row in rows.tolist()]

    async def set_virtual_refs_arr_async(
        self,
        array_path: str,
        chunk_grid_shape: tuple[int, ...],
        locations: list[str],
        offsets: np.ndarray[Any, np.dtype[np.uint64]],
        lengths: np.ndarray[Any, np.dtype[np.uint64]],
        *,
        validate_containers: bool = True,
        arr_offset: tuple[int, ...] | None = None,
        checksum: datetime | str | None = None,
    ) -> list[tuple[int, ...]] | None:
        """Await what :meth:`set_virtual_refs_arr` does."""
        await self._native()
        return self.set_virtual_refs_arr(
            array_path,
            chunk_grid_shape,
            locations,
            offsets,
            lengths,
            validate_containers=validate_containers,
            arr_offset=arr_offset,
            checksum=checksum,
        )

    def array_chunk_iterator(
        self, array_path: str, batch_size: int = 100_000
    ) -> AsyncCloseableIterator[Batch]:
        """Iterate over the chunks of an array that exist, in columns.

        Each batch is a tuple of coordinates ``(n, rank)``, kinds (see ``ChunkType``), ids or
        URLs, first bytes, lengths, and by row the bytes of inline chunks.
        """
        return AsyncCloseableIterator(self._batches(array_path, batch_size), parts=batch_size)

    async def _batches(self, array_path: str, batch_size: int) -> AsyncIterator[Batch]:
        with translated():
            session = await self._store.session()
            async for it in session.array_chunk_iterator(array_path, batch_size):
                inlined = {row: bytes(data) for row, data in it.inlined.items()}
                yield it.coords, it.kinds, it.path_list(), it.offsets, it.lengths, inlined


def _uncovered(store: AsyncStore, locations: Sequence[str], validate: bool) -> set[str]:  # noqa: FBT001
    """Return the distinct locations that no container covers.

    Raises:
        InvalidInputError: one can be no location at all.
    """
    refused: set[str] = set()
    known = store.session.workspace.virtual.locations
    for location in set(locations) - {""}:
        try:
            known.normalize(location, validate_container=validate)
        except VirtualContainerError:
            refused.add(location)
    return refused
