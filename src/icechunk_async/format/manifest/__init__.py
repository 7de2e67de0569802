"""Chunk references as NumPy columns, and the manifest files that hold them. Pure, no I/O.

`chunk` has single references. `refs.ChunkRefs` are the columns of one array, with `locations` as
their strings and `row_index` to find rows. `writing` encodes a manifest, `reading` decodes one.
`held.HeldManifest` is the interface to a manifest of which only some form is in memory: its file or
its bytes (`packed`), pieces of it (`seekable`), or the decoded `reading.Manifest`.
"""

from typing import Final

__all__ = ["MAX_RANK"]

MAX_RANK: Final = 64
"""The most axes of an array: NumPy has no arrays of more, so Zarr has none either."""
