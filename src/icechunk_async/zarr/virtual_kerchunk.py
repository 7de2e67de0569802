"""Writing kerchunk's references into a session, in columns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import anyio.to_thread
import numpy as np

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import InvalidInputError, NodeExistsError
from icechunk_async.format.locations import Strings
from icechunk_async.repository.paths import ancestors, check_path
from icechunk_async.zarr.virtual_documents import group_document
from icechunk_async.zarr.virtual_references import read_references
from icechunk_async.zarr.virtual_refs import column_refs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Any

    from icechunk_async.format.chunk_refs import ChunkRefs
    from icechunk_async.repository.session import Session
    from icechunk_async.repository.workspace import Workspace
    from icechunk_async.zarr.virtual_references import References

__all__ = ["write_kerchunk_references"]

_AT_ONCE: Final = 32


async def write_kerchunk_references(
    session: Session,
    references: Mapping[str, Any] | str | bytes,
    *,
    path: str = "/",
    checksum: str | datetime | None = None,
    validate_containers: bool = True,
) -> int:
    """Write a hierarchy that kerchunk described into a session; chunks stay where they are.

    Groups are made or get other attributes; arrays take the place of arrays of the same path.
    Metadata is turned from Zarr format 2 to 3, and inline data is copied. Templates that are
    plain names are filled in.

    Args:
        session: a writable session.
        references: version 0 or 1, as a mapping or JSON; for each chunk text, ``[url]`` or
            ``[url, offset, length]``. URLs are those of fsspec: for files absolute paths.
        path: group below which the hierarchy is put; made where it is missing.
        checksum: guards all sources: a time after which none of them was modified, or the ETag
            of the only one.
        validate_containers: refuse locations that no container covers.

    Returns:
        How many virtual chunks there are now.

    Raises:
        InvalidInputError: the references cannot be understood; nothing was changed.
        InvalidMetadataError: an array has a codec or type that Zarr format 3 has not; likewise.
        VirtualContainerError: no container covers a location; likewise.
        VirtualChunkError, StorageError: the length of a ``[url]`` could not be asked for, which
            needs access to its container; likewise.
        NodeExistsError: a group is where an array is to be, or the other way round; likewise.

    Cancellation: some nodes may have been written.

    Cost: a request for each distinct object in a ``[url]``, and one for each inline chunk above
    the inline threshold. No object is made per reference, beyond those in ``references``.
    """
    workspace = session.workspace
    workspace.check_writable()
    root = check_path(path)
    # Looking at every entry takes long where there are many: the event loop goes on meanwhile.
    found = await anyio.to_thread.run_sync(partial(read_references, references, path=root))
    columns = await _columns(
        workspace, found, checksum=checksum, validate_containers=validate_containers
    )
    with workspace.lock:  # no await: readers of this session see all or nothing, but inline chunks
        workspace.check_writable()
        _check_places(workspace, found, root)
        for group in _groups(found, root):
            workspace.set_node(group, group_document({}), None, if_absent=True)
        for node in found.nodes:
            if node.chunks is not None:
                workspace.delete_node(node.path)
            workspace.set_node(node.path, node.document, node.array)
            refs = columns.get(node.path)
            if refs is not None:
                workspace.set_refs(node.path, refs)
    inline = [
        (node.path, coords, data)
        for node in found.nodes
        if node.chunks is not None
        for coords, data in node.chunks.inline.items()
    ]
    await bounded_map(lambda it: workspace.write_chunk(*it), inline, limit=_AT_ONCE)
    return sum(map(len, columns.values()))


async def _columns(
    workspace: Workspace,
    found: References,
    *,
    checksum: str | datetime | None,
    validate_containers: bool,
) -> dict[str, ChunkRefs]:
    """Answer the references of each array that has any."""
    locations = workspace.virtual.locations
    whole: set[int] = set()
    for node in found.nodes:
        if node.chunks is not None:
            codes = node.chunks.codes
            whole.update(codes[row] for row in node.chunks.whole)
    for code in whole:  # ask nobody whom the repository does not know
        locations.normalize(found.urls[code])
    order = sorted(whole)
    sizes = dict(
        zip(
            order,
            await bounded_map(
                lambda code: workspace.virtual.size(found.urls[code]), order, limit=_AT_ONCE
            ),
            strict=True,
        )
    )
    columns: dict[str, ChunkRefs] = {}
    for node in found.nodes:
        chunks = node.chunks
        if chunks is None or not chunks.codes:
            continue
        for row in chunks.whole:
            chunks.lengths[row] = sizes[chunks.codes[row]]
        lengths = np.frombuffer(chunks.lengths, np.uint64)
        if not lengths.all():
            row = int(np.argmin(lengths != 0))
            raise InvalidInputError(
                f"The references have a chunk of {node.path!r} without any bytes, in "
                f"{found.urls[chunks.codes[row]]!r}."
            )
        columns[node.path] = column_refs(
            locations,
            chunks.coordinates().astype(np.uint32),
            Strings(found.urls),
            np.frombuffer(chunks.codes, np.uint32),
            offsets=np.frombuffer(chunks.offsets, np.uint64),
            lengths=lengths,
            checksum=checksum,
            validate_containers=validate_containers,
        )
    return columns


def _groups(found: References, root: str) -> list[str]:
    """Answer the groups that must be there and are not among the references, upper ones first."""
    groups = {root, *ancestors(root)}
    for node in found.nodes:
        groups.update(ancestors(node.path))
    return sorted(groups - {node.path for node in found.nodes})


def _check_places(workspace: Workspace, found: References, root: str) -> None:
    """Refuse to put an array where a group is, or the other way round."""
    new = {node.path: node.chunks is not None for node in found.nodes}
    for path in (*_groups(found, root), *new):
        node = workspace.node(path)
        is_array = new.get(path, False)
        if node is not None and (node.array is not None) != is_array:
            there = "an array" if node.array is not None else "a group"
            raise NodeExistsError(
                f"The references have {'an array' if is_array else 'a group'} {path!r}, where "
                f"there is {there} already. Delete that, or give another path. Nothing was "
                "changed.",
                path=path,
            )
