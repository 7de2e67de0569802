"""Where the nodes of a snapshot's file lie in it: what writes the next file copies them unread."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.flatbuffers.splicing import Spans
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.snapshot.node import ARRAY, kinds_of, no_length

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.flatbuffers.buffer import Bytes
    from icechunk_async.format.flatbuffers.reading import Tables

__all__ = ["Layout"]

_LAST_NODE_SLOT: Final = 5
_LAST_ARRAY_SLOT: Final = 3


class Layout:
    """Where the nodes of a file lie in it, checked; and which manifests they use.

    All that nodes refer to is followed once, so that nodes can be copied unread afterwards.
    """

    def __init__(self, tables: Tables, spec_version: int, *, vtables: bool) -> None:
        """Look at all nodes of a file.

        Args:
            tables: the nodes.
            spec_version: of the file.
            vtables: whether the vtables of a node are among its bytes.

        Raises:
            FormatError: one of them is damaged.
        """
        # Read for its check alone, as other fields below: what is copied unread must be as sound as
        # what is decoded.
        tables.struct(0, NodeId.size_bytes, field="id")
        self.spans = Spans(tables, vtables=vtables)
        self.spans.cover(tables.vector(1, 1, 1, required="path"), ended=True)
        self.spans.cover(tables.vector(2, 1, 1, required="user_data"))
        self.spans.cover(tables.vector(_LAST_NODE_SLOT, 1, 1))
        is_array = kinds_of(tables) == ARRAY
        rows = np.flatnonzero(is_array)
        arrays = tables.select(rows).tables(4, required="node_data")
        self.foreign = tables.reaches(_LAST_NODE_SLOT + 1).copy()
        """Nodes with fields that this version does not know, or in the form of another one."""
        # Unknown fields may refer to bytes that are not copied, and the shape must be that of the
        # version of the new file.
        self.foreign[rows[_is_foreign(arrays, spec_version)]] = True
        self._cover_groups(tables, np.flatnonzero(~is_array), vtables=vtables)
        self._cover_arrays(arrays, rows, vtables=vtables)

    @cached_property
    def manifest_heads(self) -> npt.NDArray[np.uint64]:
        """The first eight bytes of `manifest_ids`, as little-endian numbers."""
        heads: npt.NDArray[np.uint64] = np.ascontiguousarray(self.manifest_ids[:, :8]).view("<u8")
        return heads.ravel()

    def _cover_groups(self, tables: Tables, rows: npt.NDArray[np.int64], *, vtables: bool) -> None:
        chosen = tables.select(rows)
        rows = rows[chosen.has(4)]  # nobody misses the table of a group, which is empty
        groups = tables.select(rows).tables(4, required="node_data")
        self.foreign[rows[groups.reaches(0)]] = True
        self.spans.cover_tables(rows, Spans(groups, vtables=vtables))

    def _cover_arrays(self, tables: Tables, rows: npt.NDArray[np.int64], *, vtables: bool) -> None:
        spans = Spans(tables, vtables=vtables)
        shapes = tables.vector(0, 16, 8, required="shape")
        spans.cover(shapes)
        lengths = shapes.structs().view("<u8").reshape(-1, 2)
        if np.any((lengths[:, 1] == 0) & (lengths[:, 0] > 0)):
            raise no_length()
        foreign = np.zeros(len(tables), bool)
        for slot, known in ((1, 1), (2, 2), (3, 2)):
            vectors = tables.vector(slot, 4, 4, required="manifests" if slot == 2 else None)
            spans.cover(vectors)
            items = vectors.tables()
            of_items = Spans(items, vtables=vtables)
            if slot == 1:
                names = items.vector(0, 1, 1)
                of_items.cover(names, ended=True)
                names.check_text()
            if slot == 2:
                self.manifest_ids: Bytes = items.struct(0, ManifestId.size_bytes, field="object_id")
                """Of every reference to a manifest, ``(n, 12)``."""
                self.manifest_rows = rows[np.repeat(np.arange(len(tables)), vectors.counts)]
                """The node that has each of these references."""
                of_items.cover(items.vector(1, 8, 4, required="extents"))
            if slot == 3:
                # For their alignment and bounds.
                items.scalar(0, 8)
                items.scalar(1, 4)
            spans.cover_items(vectors.counts, of_items)
            # An unknown field of an item may refer to bytes outside of the span, which would not be
            # copied.
            unknown = items.reaches(known)
            if unknown.any():
                foreign[np.repeat(np.arange(len(tables)), vectors.counts)[unknown]] = True
        self.foreign[rows[foreign]] = True
        self.spans.cover_tables(rows, spans)


def _is_foreign(arrays: Tables, spec_version: int) -> npt.NDArray[np.bool_]:
    """Return which arrays have unknown fields, or the shape of another version of the format."""
    found = arrays.reaches(_LAST_ARRAY_SLOT + 1).copy()
    found |= arrays.has(3) != (spec_version > 1)
    return found
