"""Datasets of other libraries over what this one reads: of pyarrow, and of xarray.

`rows` is shared by all datasets of pyarrow: those of sparse TileDB arrays, in
`icechunk_async.sync.tiledb`, and those of Zarr arrays, in `icechunk_async.arrow`. `cube` has
xarray's dataset of many versions.
"""
