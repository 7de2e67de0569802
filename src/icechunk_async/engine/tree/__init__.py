"""The hierarchy of one session: look up, list, read and write nodes and chunks.

`workspace.Workspace` is the hierarchy itself, and reads and writes chunks on an event loop;
`blocking.BlockingChunks` does so on the calling thread. `listing` iterates over the chunks of an
array in columns, `reshape` moves them in the grid.
"""
