"""Manifests that can be searched in pieces, without reading the whole file.

This is the most intricate part of the format rooms, and nothing else depends on how it works. It is
kept because it pays: the first chunk of an array with ten million references takes 2 MB and 0.2 s
instead of 87 MB and 2.4 s from object storage (docs/decisions/0014-seekable-manifests.md), and a
commit that changes a few references copies the rest compressed. Files stay standard: other readers
see one zstd frame and skip the index behind it.

`writing` makes such files of `pieces` and an `index`, from nothing or by changing a few references;
`reading` searches them.
"""
