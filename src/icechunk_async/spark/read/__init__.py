"""Reading: groups as tables of rows, chunks as rows, and tables about the repository.

The data source uses `reader`. `table` maps a group to columns, `chunks` has the layout of chunks,
`views` makes temporary views of all groups, `pushdown` has the conditions that select rows before
chunks are read.
"""
