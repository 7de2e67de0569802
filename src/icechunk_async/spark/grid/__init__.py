"""Geometry of arrays that are written, without I/O: chunk grids, and the cells of coordinates.

Writing places rows by `axes` and `chunks`. Reading and streams divide work by
`icechunk_async.arrow.boxes`.
"""
