"""The layout of the first draft: one state file in JSON, all else in Parquet.

`state` has the state file, `structure` the files of nodes and of attributes, `manifests` those of
chunks (with `coordinates`). `metadata` of arrays is apart from `structure`, as a session checks
documents before any file is written. `names` has the names of files. `parquet` reads files that
need not be trusted, after `pages` has checked their metadata. Only `structure`, `manifests` and
`parquet` import pyarrow.
"""
