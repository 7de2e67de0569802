"""The adapter for URL pipelines of Zarr, which zarr-python will find through an entry point.

It serves the step ``|icechunk-async:``; ``|icechunk:`` is left to the official package, so that
both can be installed. `open_url` reads both, with any version of Zarr.
"""

# No release of Zarr has the contract yet.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio.to_thread
from zarr.abc import url_pipeline  # type: ignore[attr-defined]  # in later versions

from icechunk_async.sync.urls import open_url

if TYPE_CHECKING:
    _Base = object
else:
    _Base = url_pipeline.URLPipelineAdapter

__all__ = ["IcechunkAdapter"]


class IcechunkAdapter(_Base):
    """Opens what a pipeline such as ``s3://bucket/repo|icechunk-async:@tag.v1/group`` names."""

    @classmethod
    async def open_pipeline_segment(cls, segment: Any, context: Any) -> Any:
        """Return a store and a path in it; with a mode that writes, the store of a new session."""
        url = f"{context.preceding_url}|{segment.raw}"
        writable = context.mode not in {None, "r"}

        def opened() -> Any:
            return open_url(url, writable=writable, storage_options=context.storage_options)

        # Opening blocks, and this coroutine runs on Zarr's loop.
        found = await anyio.to_thread.run_sync(opened)
        return url_pipeline.AdapterResolution(store=found.store, path=found.path)
