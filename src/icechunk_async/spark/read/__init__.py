"""Reading: groups as tables of rows, chunks as rows, and tables about the repository.

The data source uses `reader`, which stands on `icechunk_async.arrow`. `chunks` has the layout of
chunks, `sql` makes views and functions for SQL, `pushdown` has the conditions that select rows
before chunks are read.
"""
