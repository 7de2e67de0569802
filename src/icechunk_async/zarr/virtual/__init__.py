"""Write virtual references: one by one, as columns, from kerchunk or VirtualiZarr."""
