"""Dense TileDB arrays as arrays of Zarr: a codec for tiles, and references to them.

Uses `arrays` to find the tiles, and sessions to write into.
"""
