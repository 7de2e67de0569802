"""Geometry of arrays, without I/O: boxes of cells, chunk grids, and the cells of coordinates.

Reading and streams divide work by `boxes`; writing places rows by `axes` and `chunks`.
"""
