"""Arrays that releases of TileDB wrote, with the cells that TileDB reads from them."""
