"""Groups of arrays as Arrow tables: for DuckDB, Polars, DataFusion, pandas and Dask.

`dataset` and `connect` are what users call. `table` maps a group to columns, `boxes` divides its
cells, `rows` plans and reads them; Spark's source stands on these three as well. `guarantees`
decides from an expression of Arrow which cells cannot be among the rows. Needs `pyarrow` and
`xarray`, and SQL needs `duckdb`.
"""

from icechunk_async.arrow.datasets import ArrayDataset, ArrayFragment, PlannedRows, dataset
from icechunk_async.arrow.sql import connect

__all__ = ["ArrayDataset", "ArrayFragment", "PlannedRows", "connect", "dataset"]
