"""Filters of tiles, undone: `pipeline` describes them, and the others decode a kind each.

Checksums, which change nothing, are verified by `tiles`, which applies all of them.
"""
