"""The files of the Icechunk format: bytes to values and back. Pure, no I/O.

One module for each kind of file (`transaction_log`, `repo_info` with `operations_log`, `refs`) and
one for what they share: `envelope` (header and compression), `ids`, `paths`, `layout` (the keys of
objects), `zarr_document`. `snapshot/` finds and copies nodes, `manifest/` holds references as
columns, `config/` the stored configuration, `flatbuffers/` and `json/` the encodings.
"""
