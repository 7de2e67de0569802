"""Files as other writers lay them out: table by table, with the fields and oddities asked for."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tests.unit.format.table_builder import Offset, Scalar, Struct, TableBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.format.ids import ManifestId, NodeId
    from icechunk_async.format.manifest.chunk import Coordinates
    from tests.unit.format.table_builder import Field

__all__ = ["OtherManifest"]


class OtherManifest:
    """A manifest whose references are written one by one."""

    def __init__(self) -> None:
        """Begin without arrays."""
        self.out = TableBuilder()
        self._arrays: list[Offset] = []

    def ref(self, index: Coordinates | None, fields: Mapping[int, Field]) -> Offset:
        """Write a ChunkRef; ``fields`` are all slots but the index."""
        vector = None
        if index is not None:
            vector = self.out.structs(b"".join(struct.pack("<I", at) for at in index), 4, 4)
        return self.out.table({**fields, 0: vector})

    def native(self, index: Coordinates, chunk_id: bytes = bytes(12), **more: int) -> Offset:
        """Write a native ChunkRef; ``more`` are ``offset`` and ``length``."""
        fields = {2: Scalar(more.get("offset", 0), 8), 3: Scalar(more.get("length", 1), 8)}
        return self.ref(index, {**fields, 4: Struct(chunk_id)})

    def array(self, node: NodeId, refs: Sequence[Offset]) -> None:
        """Add an array."""
        vector = self.out.offsets(refs)
        self._arrays.append(self.out.table({0: Struct(node), 1: vector}))

    def finish(
        self,
        identifier: ManifestId,
        *,
        dictionary: bytes | None = None,
        algorithm: int | None = None,
    ) -> bytes:
        """Return the FlatBuffer; ``algorithm`` is written even where it is the default."""
        fields: dict[int, Field] = {
            0: Struct(identifier),
            1: self.out.offsets(self._arrays),
            2: None if dictionary is None else self.out.blob(dictionary),
            3: None if algorithm is None else Scalar(algorithm, 1, default=255),
        }
        return self.out.finish(self.out.table(fields))
