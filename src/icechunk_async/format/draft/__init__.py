"""The layout of the first draft: one state file in JSON, all else in Parquet.

`state` has the state file, `structure` the files of nodes (with `metadata` of arrays) and of
attributes, `manifests` those of chunks (with `pieces` of large ones and `coordinates`). `names` has
the names of files. `parquet` reads files that need not be trusted, after `pages` has checked their
metadata, which is in `thrift`. Only the modules for Parquet import pyarrow.
"""
