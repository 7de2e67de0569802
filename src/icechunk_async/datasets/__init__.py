"""Datasets of other libraries over what this one reads: of pyarrow, and of xarray.

`rows` is shared by all datasets of pyarrow: those of sparse TileDB arrays, in
`icechunk_async.sync.tiledb`, and those of Zarr arrays, in `icechunk_async.arrow`. Those of xarray
are lazy: `cube` has many versions of an array, `cells` those that fulfil conditions, and
`aggregates` computes when values are asked for.
"""
