"""Serve repositories to readers that know only Zarr: plain Zarr v3 over HTTP.

`app` is an ASGI application, which any server of ASGI runs and FastAPI or Starlette mount;
`icechunk-async serve` runs it with uvicorn. `requests`, `replies` and `access` decide, `contents`
reads.
"""

from icechunk_async.gateway.access import Grant, read_grants
from icechunk_async.gateway.app import Gateway, app

__all__ = ["Gateway", "Grant", "app", "read_grants"]
