"""Chunk references as NumPy columns, and the manifest files that hold them. Pure, no I/O.

`refs.ChunkRefs` are the columns of one array, with `locations` as their strings and `row_index` to
find rows. `writing` encodes a manifest, `reading` decodes one. `held.HeldManifest` is the interface
to a manifest of which only some form is in memory: its file or its bytes (`packed`), pieces of it
(`seekable`), or the decoded `reading.Manifest`.
"""
