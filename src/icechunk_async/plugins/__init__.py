"""Plugins that other libraries find through entry points.

xarray's engine ``icechunk-async`` and the accessor of its datasets, fsspec's file system, and
Zarr's adapter for URL pipelines. Each opens what a URL names with `icechunk_async.sync.urls`; see
`icechunk_async.urls` for the URLs.
"""
