"""The part of the store that sets virtual references; nothing here waits for storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidStoreKeyError
from icechunk_async.repository.paths import check_path
from icechunk_async.zarr.keys import ChunkKey, parse_key
from icechunk_async.zarr.virtual_refs import grid_refs, one_ref, spec_refs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    import numpy as np
    import numpy.typing as npt

    from icechunk_async.repository.workspace import Workspace
    from icechunk_async.zarr.virtual_refs import VirtualChunkSpec

__all__ = ["VirtualWrites"]


class VirtualWrites:
    """Sets virtual references in a workspace; a base of the store."""

    _workspace: Workspace

    if TYPE_CHECKING:

        def _check_writable(self) -> None: ...  # Zarr's own, of the store

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
            checksum: ETag of the object, or a time after which it was not modified; reading
                is refused once it changed.
            validate_container: refuse a location that no container covers.

        Raises:
            VirtualContainerError: none does; nothing was stored.
            InvalidStoreKeyError, InvalidCoordinatesError, NodeNotFoundError: likewise.
        """
        self._check_writable()
        parsed = parse_key(key)
        if not isinstance(parsed, ChunkKey):
            raise InvalidStoreKeyError(f"{key!r} is no chunk key, such as 'array/c/0/0'.", key=key)
        ref = one_ref(
            self._workspace.virtual.locations,
            location,
            offset,
            length,
            checksum,
            validate_container=validate_container,
        )
        self._workspace.set_ref(parsed.path, parsed.coords, ref)

    def set_virtual_refs(
        self,
        array_path: str,
        chunks: Sequence[VirtualChunkSpec],
        *,
        validate_containers: bool = True,
    ) -> None:
        """Set many virtual chunks of one array, all or none.

        Raises:
            VirtualContainerError: no container covers a location; nothing was stored.
            InvalidCoordinatesError: a chunk lies outside of the grid; nothing was stored.
        """
        self._check_writable()
        path, rank = self._array(array_path)
        locations = self._workspace.virtual.locations
        refs = spec_refs(locations, chunks, rank, validate_containers=validate_containers)
        self._workspace.set_refs(path, refs)

    def set_virtual_refs_arr(
        self,
        array_path: str,
        chunk_grid_shape: tuple[int, ...],
        locations: Sequence[str],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        *,
        validate_containers: bool = True,
        arr_offset: tuple[int, ...] | None = None,
        checksum: str | datetime | None = None,
    ) -> None:
        """Set a box of virtual chunks of one array from columns, all or none.

        Args:
            array_path: the array.
            chunk_grid_shape: chunks of the box along each axis.
            locations: URL of each chunk, row-major; empty ones are left out.
            offsets: first byte of each chunk.
            lengths: bytes of each chunk.
            validate_containers: refuse locations that no container covers.
            arr_offset: chunk coordinates at which the box begins; the origin if None.
            checksum: one for all, as for :meth:`set_virtual_ref`.

        Raises: as :meth:`set_virtual_refs`.

        Cost: no object is made per chunk; each distinct location is checked once.
        """
        self._check_writable()
        path, _ = self._array(array_path)
        refs = grid_refs(
            self._workspace.virtual.locations,
            chunk_grid_shape,
            locations,
            offsets,
            lengths,
            first=arr_offset,
            checksum=checksum,
            validate_containers=validate_containers,
        )
        self._workspace.set_refs(path, refs)

    def _array(self, given: str) -> tuple[str, int]:
        path = check_path(given)
        array = self._workspace.array(path).array
        assert array is not None
        return path, len(array.dimensions)
