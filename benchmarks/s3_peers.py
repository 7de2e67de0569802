"""The contenders on S3: repositories of both engines, also over obstore, and plain stores."""

from __future__ import annotations

from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import obstore
import zarr
from zarr.storage import ObjectStore

from benchmarks.peers import PACKAGES
from benchmarks.s3_server import KEYS
from icechunk_async import Repository
from icechunk_async.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zarr.abc.store import Store

    from icechunk_async import Session

__all__ = [
    "BUCKET",
    "OBSTORE",
    "PLAIN",
    "blocking_storage",
    "plain_store",
    "s3_options",
    "session_on_zarrs_loop",
]

BUCKET: Final = "bench"
OBSTORE: Final = "ours, obstore backend"
PLAIN: Final = "zarr ObjectStore (obstore)"
_SCHEMES: Final = {"ours": "s3", OBSTORE: "obstore+s3"}


def blocking_storage(engine: str, endpoint: str, prefix: str) -> Any:
    """Return a storage for the blocking classes of an engine."""
    return PACKAGES[engine].s3_storage(
        bucket=BUCKET,
        prefix=prefix,
        region="us-east-1",
        endpoint_url=endpoint,
        allow_http=True,
        force_path_style=True,
        **KEYS,
    )


def s3_options(endpoint: str) -> dict[str, Any]:
    """Return the options that open a storage of ours at an endpoint."""
    return {"endpoint_url": endpoint, "region": "us-east-1", "allow_http": True, **KEYS}


@contextmanager
def session_on_zarrs_loop(
    contender: str, endpoint: str, prefix: str, *, writable: bool
) -> Iterator[Session]:
    """Open a session of ours with our asynchronous classes, on the loop that zarr runs."""
    stack = AsyncExitStack()

    async def opened() -> Session:
        url = f"{_SCHEMES[contender]}://{BUCKET}/{prefix}"
        storage = await stack.enter_async_context(open_storage(url, **s3_options(endpoint)))
        repository = await stack.enter_async_context(Repository.open_or_create(storage))
        if writable:
            return await repository.writable_session("main")
        return await repository.readonly_session("main")

    session = zarr.core.sync.sync(opened())
    try:
        yield session
    finally:
        zarr.core.sync.sync(stack.aclose())


def plain_store(endpoint: str, prefix: str) -> Store:
    """Return a store of chunks as zarr writes them, through obstore."""
    store = obstore.store.S3Store(
        BUCKET,
        prefix=prefix,
        endpoint=endpoint,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        access_key_id=KEYS["access_key_id"],
        secret_access_key=KEYS["secret_access_key"],
    )
    return ObjectStore(store)
