"""Listing and deleting by key prefix."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.paths import ancestors
from icechunk_async.zarr.keys import chunk_prefix, metadata_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import Node

__all__ = ["delete_below", "key_pages", "names", "total_size"]

_PAGE_KEYS: Final = 1000


async def key_pages(workspace: Workspace, prefix: str) -> AsyncIterator[list[str]]:
    """Iterate over all keys that begin with ``prefix``, node by node, several at a time."""
    page: list[str] = []
    for path, has_chunks in _nodes(workspace, prefix):
        key = metadata_key(path)
        if key.startswith(prefix):
            page.append(key)
        start = chunk_prefix(path)
        # A prefix may end within the name of the array, or within the coordinates of its chunks.
        if has_chunks and (start.startswith(prefix) or prefix.startswith(start)):
            if page:  # hand these out before a manifest is read
                yield page
                page = []
            coords = (await workspace.all_refs(path)).coords
            for first in range(0, len(coords), _PAGE_KEYS):
                rows = coords[first : first + _PAGE_KEYS].tolist()
                found = ["/".join([start, *map(str, row)]) for row in rows]
                yield [key for key in found if key.startswith(prefix)]
        elif len(page) >= _PAGE_KEYS:
            yield page
            page = []
    if page:
        yield page


async def names(workspace: Workspace, prefix: str) -> list[str]:
    """Return the names directly below a path: documents, ``c``, child nodes, chunk segments."""
    path = f"/{prefix.strip('/')}"
    with workspace.lock:
        node = workspace.tree.get(path)
        children = workspace.tree.child_names(path)
    found: list[str] = []
    if node is not None:
        found.append(metadata_key("/"))
        # Only a chunk makes the directory `c` exist, which costs a look into the manifests.
        if node.array is not None and len(await workspace.all_refs(path)):
            found.append("c")
    elif not children:
        found += await _chunk_segments(workspace, path)
    return found + [name for name in children if name not in found]


async def total_size(workspace: Workspace, prefix: str) -> int:
    """Return the bytes of all values below a path."""
    inside = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    total = 0
    for path, has_chunks in _nodes(workspace, inside):
        if metadata_key(path).startswith(inside):
            node = workspace.node(path)
            total += 0 if node is None else len(node.user_data)
        start = f"{chunk_prefix(path)}/"
        if has_chunks and (start.startswith(inside) or inside.startswith(start)):
            refs = await workspace.all_refs(path)
            chosen = refs if start.startswith(inside) else _below(refs, inside[len(start) :])
            total += int(chosen.lengths.sum())
    return total


async def delete_below(workspace: Workspace, prefix: str) -> None:
    """Delete all nodes at and below a path; else the chunks of an array below a prefix."""
    from icechunk_async.format.manifest.refs import ChunkRefs  # noqa: PLC0415 -- on use

    path = f"/{prefix.strip('/')}"
    with workspace.lock:
        doomed = [path, *workspace.tree.paths(path)]
        doomed = [it for it in doomed if workspace.tree.get(it) is not None]
        # Under one lock: another task of this session sees all of these nodes, or none.
        for target in doomed:
            workspace.delete_node(target)
    if doomed:
        return
    found = _array_above(workspace, path)
    if found is not None:
        array_path, rest = found
        refs = _below(await workspace.all_refs(array_path), rest)
        # Only chunks that were found are marked. One that is written meanwhile at another place
        # stays.
        if len(refs):
            workspace.set_refs(array_path, ChunkRefs.build(refs.coords, Kind.DELETED))


def _nodes(workspace: Workspace, prefix: str) -> list[tuple[str, bool]]:
    """Return the paths of nodes, and whether one may have chunks.

    They are all that have keys which begin with ``prefix``, and perhaps some others.
    """
    # Not `/a/` and what is below: a prefix of a key may end in the middle of a name.
    start = f"/{prefix}"
    with workspace.lock:
        nodes = workspace.tree.edited()
        paths = nodes.paths
        first = stop = bisect_left(paths, start)
        while stop < len(paths) and paths[stop].startswith(start):
            stop += 1
        above = [node for path in ancestors(start)[::-1] if (node := nodes.get(path)) is not None]
        found = [*above, *nodes.at(first, stop)]
        return [(node.path, _may_have_chunks(workspace, node)) for node in found]


def _may_have_chunks(workspace: Workspace, node: Node) -> bool:
    if node.array is None:
        return False
    base = workspace.tree.base_node(node)
    # A guess without reading a manifest: all of its chunks may have been deleted since.
    stored = base is not None and base.array is not None and bool(base.array.manifests)
    return stored or node.id in workspace.changes.chunks


def _array_above(workspace: Workspace, path: str) -> tuple[str, str] | None:
    """Return the array that a path inside ``c`` belongs to, and the part after ``c``."""
    for parent in ancestors(path):
        node = workspace.node(parent)
        if node is not None:
            rest = path[len(parent.rstrip("/")) + 1 :]
            if node.array is not None and (rest == "c" or rest.startswith("c/")):
                return parent, rest[2:]
            return None
    return None


def _below(refs: ChunkRefs, rest: str) -> ChunkRefs:
    """Return the references whose leading coordinates are those of ``rest``, such as ``0/1``."""
    segments = [segment for segment in rest.split("/") if segment]
    if len(segments) > refs.rank or not all(
        segment.isdecimal() and str(int(segment)) == segment for segment in segments
    ):
        return refs.take(np.zeros(len(refs), bool))
    wanted = np.array([int(segment) for segment in segments], np.int64)
    return refs.take(np.all(refs.coords[:, : len(segments)] == wanted, axis=1))


async def _chunk_segments(workspace: Workspace, path: str) -> list[str]:
    found = _array_above(workspace, path)
    if found is None:
        return []
    array_path, rest = found
    refs = _below(await workspace.all_refs(array_path), rest)
    depth = len([segment for segment in rest.split("/") if segment])
    if len(refs) == 0 or depth >= refs.rank:
        return []
    return [str(value) for value in np.unique(refs.coords[:, depth]).tolist()]
