"""Groups of arrays as Arrow tables, without Spark: for DuckDB, Polars, DataFusion, pandas and Dask.

`dataset` is what users call. `table` maps a group to columns, `boxes` divides its cells, `rows`
plans and reads them; Spark's source stands on these three as well. `guarantees` decides from an
Arrow expression which cells cannot be among the rows. Needs `pyarrow` and `xarray`.
"""
