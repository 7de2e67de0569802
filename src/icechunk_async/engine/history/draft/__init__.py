"""The first draft: all snapshots and references are in one state file, replaced by compare-and-set.

`layout` names and encodes all other files, which are Parquet. `state_file` reads and replaces the
state, `history` says what that means for branches and tags.
"""
