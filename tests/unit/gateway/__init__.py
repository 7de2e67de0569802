"""The gateway: plain Zarr over HTTP."""
