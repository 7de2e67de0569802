"""Writing: rows and computed chunks become arrays, written by many tasks in one commit.

`cooperative` lets tasks take part in one commit; everything else builds on it. `compute` works
chunk by chunk, `rows` takes rows of a table (`target` are its arrays, `by_chunk` sends the rows of
a chunk to one task).
"""
