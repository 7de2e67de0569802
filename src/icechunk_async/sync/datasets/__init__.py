"""Datasets of other libraries over what this one reads: of pyarrow, and of xarray.

`rows` is what all datasets of pyarrow share; `tiledb` has those of sparse TileDB arrays, and
`icechunk_async.arrow` those of Zarr arrays. `cube` has xarray's dataset of many versions.
"""
