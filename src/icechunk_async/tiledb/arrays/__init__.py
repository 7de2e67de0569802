"""TileDB arrays on any storage: opened at a time, dense ones read, sparse ones scanned.

`folder` and `directory` find the files of an array, `fragments` loads what fragments consist of,
`cells` holds the cells of fields, `dense` and `sparse` read them, `groups` reads groups.
"""
