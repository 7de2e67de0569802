"""Write virtual references.

`references` makes columns of references, `kerchunk` and `datasets` take over the hierarchies of
kerchunk and VirtualiZarr, and `zarr2` turns metadata of Zarr format 2 into format 3.
"""
