"""Whether changes can be those of a session on its base: forks come back from anywhere. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from icechunk_async.errors import FormatError, InvalidMetadataError
from icechunk_async.format.chunk_refs import Kind

if TYPE_CHECKING:
    from icechunk_async.format.snapshot import Node, Nodes
    from icechunk_async.repository.changes import ChangeSet
    from icechunk_async.repository.chunk_changes import ArrayChanges

__all__ = ["check_fits"]


def check_fits(changes: ChangeSet, base: Nodes) -> None:
    """Refuse changes that no session can have made.

    Raises:
        FormatError: they create a node where there is one, change one that there is not, or say
            something else of an array than its document says.

    Cost: reads the document of each node that was changed, and looks at each chunk of arrays
    that stayed.
    """
    known: dict[bytes, Node] = {node.id: node for node in changes.new.values()}
    for path, node in changes.new.items():
        there = base.get(path)
        if there is not None and there.id not in changes.deleted:
            raise _impossible(f"creates {path!r}, where there is a node")
        if base.path_of(node.id) is not None:
            raise _impossible(f"creates {path!r} with the id of another node")
        _check_document(node)
    for node_id, node in changes.updated.items():
        was = base.get(node.path)
        if was is None or was.id != node_id or (was.array is None) != (node.array is None):
            raise _impossible(f"changes {node.path!r}, which is another node, or none")
        _check_document(node)
        known[node_id] = node
    for node_id, gone in changes.deleted.items():
        was = base.get(gone.path)
        if was is None or was.id != node_id or (was.array is not None) != gone.is_array:
            raise _impossible(f"deletes {gone.path!r}, which is another node, or none")
    for node_id, chunks in changes.chunks.items():
        if not chunks.is_empty() or chunks.kept_grid is not None:
            place = base.path_of(node_id)
            _check_chunks(chunks, known.get(node_id) or (None if place is None else base[place]))


def _check_document(node: Node) -> None:
    # Only the layer above knows Zarr's documents.
    from icechunk_async.zarr.documents import parse_document  # noqa: PLC0415

    try:
        array = parse_document(node.user_data, node.path).array
    except InvalidMetadataError as error:
        raise _impossible(f"brings a document that no array or group can have: {error}") from error
    if array != node.array:
        raise _impossible(f"says another shape or grid of {node.path!r} than its document")


def _check_chunks(chunks: ArrayChanges, node: Node | None) -> None:
    if node is None or node.array is None:
        raise _impossible("changes chunks of an array that there is not")
    grid = node.array.grid
    if chunks.rank != len(grid):
        raise _impossible(f"changes chunks of {chunks.rank} axes of {node.path!r}")
    refs = chunks.columns()
    outside = ~refs.inside(tuple((0, size) for size in grid))
    if np.any(outside & (refs.kinds != Kind.DELETED)):
        raise _impossible(f"sets chunks outside of the grid of {node.path!r}")


def _impossible(what: str) -> FormatError:
    return FormatError(
        f"A fork {what}: its bytes were damaged or made by somebody else. Nothing was merged."
    )
