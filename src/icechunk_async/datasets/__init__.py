"""Datasets of other libraries over what this one reads: of pyarrow, and of xarray.

`rows` is shared by all datasets of pyarrow: those of sparse TileDB arrays, `tiledb.dataset`, and
those of Zarr arrays, `arrow.datasets`. Those of xarray are lazy: `cube` has many versions of an
array, and `queries` has answers that are computed when values are asked for.
"""
