"""Streams: the commits of a branch as a source, and a sink that writes each batch exactly once.

The data source uses `source` and `sink`. `commits` walks a branch's history; `changes` finds the
rows and chunks that a commit changed.
"""
