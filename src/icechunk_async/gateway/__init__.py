"""Serve repositories to readers that know only Zarr: plain Zarr v3 over HTTP.

`app` is an ASGI application, which any server of ASGI runs and FastAPI or Starlette mount;
`icechunk-async serve` runs it with uvicorn (`server`). `publish_static` writes the same as files.
`requests`, `replies` and `access` decide; `contents` reads, and `page` draws what people look at.
"""

from icechunk_async.gateway.access import Grant, read_grants
from icechunk_async.gateway.app import Gateway, app
from icechunk_async.gateway.publishing import Published, PublishedRef, publish_static

__all__ = [
    "Gateway",
    "Grant",
    "Published",
    "PublishedRef",
    "app",
    "publish_static",
    "read_grants",
]
