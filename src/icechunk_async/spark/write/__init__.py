"""Writing: rows and computed chunks become arrays, written by many tasks in one commit.

`cooperative` lets tasks take part in one commit; everything else builds on it. `compute` works
chunk by chunk, `rows` takes rows of a table: `by_chunk` sends those of a chunk to one task, `plan`
looks up the arrays (`target`, `growth`), `task` brings `values` into chunks (`parts`), and `commit`
joins what tasks share.
"""
