"""Datasets of other libraries over what this one reads: of pyarrow, and of xarray.

`rows` is shared by all datasets of pyarrow: those of sparse TileDB arrays, `tiledb.dataset`, and
those of Zarr arrays, `arrow.datasets`. Those of xarray are lazy: `cube` has many versions of an
array, `cells` those that fulfil conditions, and `aggregates` computes when values are asked for.
"""
