"""Ingesting files: their chunks become virtual references, scanned by tasks, in one commit.

`ingest` has the public functions. `tasks` scans a file by its format (`hdf5`, `netcdf3`, `grib`,
`kerchunk`, `zarr`, `tiledb`) into the model of `scan`; `plan` decides where each file goes, `write`
makes the nodes and references, and `catalog` records what was ingested.
"""
