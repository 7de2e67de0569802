"""The contenders: repositories of both engines, and stores of others that hold the same arrays."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import icechunk
import numpy as np
import obstore
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, ObjectStore

import icechunk_async.sync
from icechunk_async import Repository

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

__all__ = [
    "FUSED",
    "ICECHUNK",
    "PACKAGES",
    "PREFIX",
    "SOURCE",
    "IdleStore",
    "chunked",
    "create",
    "native_store",
    "numbers",
    "open_repository",
    "other_stores",
    "pipeline",
    "tip_store",
]

SOURCE: Final = tempfile.gettempdir()
PREFIX: Final = f"file://{SOURCE}/"
"""Of the container of virtual chunks."""
PACKAGES: Final[dict[str, Any]] = {"ours": icechunk_async.sync, "official": icechunk}
FUSED: Final = "zarr.core.codec_pipeline.FusedCodecPipeline"
ICECHUNK: Final = "icechunk_async.codec_pipeline.IcechunkCodecPipeline"


class IdleStore(MemoryStore):
    """Forgets chunks that are written, and answers all with the same bytes.

    What time is left is Zarr's.
    """

    def __init__(self, chunk_bytes: int) -> None:
        """Make a store whose chunks are zeros."""
        super().__init__()
        self._answer = default_buffer_prototype().buffer.from_bytes(bytes(chunk_bytes))

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if "/c/" in key:
            return self._answer
        return super().get_sync(key, prototype=prototype, byte_range=byte_range)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if "/c/" in key:
            return self._answer
        return await super().get(key, prototype, byte_range)

    def set_sync(self, key: str, value: Buffer) -> None:
        if "/c/" not in key:
            super().set_sync(key, value)

    async def set(self, key: str, value: Buffer, byte_range: tuple[int, int] | None = None) -> None:
        if "/c/" not in key:
            await super().set(key, value, byte_range)


def create(
    engine: str, storage: Any, *, spec: int = 2, inline: int = 512, split: int | None = None
) -> Any:
    """Create a repository with a virtual container.

    Args:
        engine: ``ours`` or ``official``.
        storage: a directory, or a storage of that engine.
        spec: version of the format.
        inline: largest chunk, in bytes, that is stored in the manifest.
        split: references per manifest, along the first axis; None is not to split.
    """
    package = PACKAGES[engine]
    config = package.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = inline
    store = package.local_filesystem_store(SOURCE)
    config.set_virtual_chunk_container(package.VirtualChunkContainer(PREFIX, store))
    if split is not None:
        sizes = {
            package.ManifestSplitCondition.AnyArray(): {
                package.ManifestSplitDimCondition.Any(): split
            }
        }
        config.manifest = package.ManifestConfig(
            splitting=package.ManifestSplittingConfig.from_dict(sizes)
        )
    return package.Repository.create(_storage(package, storage), config, spec_version=spec)


def open_repository(engine: str, storage: Any) -> Any:
    """Open a repository that either engine wrote."""
    package = PACKAGES[engine]
    return package.Repository.open(
        _storage(package, storage),
        authorize_virtual_chunk_access={PREFIX: package.credentials.LocalFileSystemAccess},
    )


def _storage(package: Any, storage: Any) -> Any:
    return package.local_filesystem_storage(storage) if isinstance(storage, str) else storage


def tip_store(engine: str, storage: Any) -> Store:
    """Open a repository and return the store of its main branch."""
    store: Store = open_repository(engine, storage).readonly_session("main").store
    return store


@contextmanager
def native_store(runner: asyncio.Runner, directory: str) -> Iterator[Store]:
    """Open a repository with our asynchronous classes, and return the store of its main branch."""
    stack = AsyncExitStack()

    async def opened() -> Store:
        repository = await stack.enter_async_context(Repository.open(f"file://{directory}"))
        return (await repository.readonly_session("main")).store

    store = runner.run(opened())
    try:
        yield store
    finally:
        runner.run(stack.aclose())


def other_stores(directory: str) -> dict[str, Store]:
    """Return zarr's own stores of files in a directory, by name."""
    files = obstore.store.LocalStore(directory, mkdir=True)
    return {
        "zarr LocalStore": LocalStore(directory),
        "zarr ObjectStore (obstore)": ObjectStore(files),
    }


def chunked(store: Store, count: int, chunk_bytes: int, name: str = "a") -> Any:
    """Make an array of ``count`` chunks of random-looking bytes, uncompressed."""
    length = chunk_bytes // 8
    return zarr.create_array(
        store,
        name=name,
        shape=(count * length,),
        chunks=(length,),
        dtype="f8",
        # Uncompressed: else the contest would be one of codecs, which all contenders share.
        compressors=None,
        fill_value=0,
    )


def numbers(count: int, chunk_bytes: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return random values for such an array."""
    # Random, so that no file system or engine saves bytes that are equal; and the same in each run.
    return np.random.default_rng(0).random(count * (chunk_bytes // 8))


@contextmanager
def pipeline(name: str) -> Iterator[None]:
    """Let zarr use its ``default`` or its ``fused`` pipeline of codecs, or ``icechunk``, ours.

    Other stores than ours are used by the fused pipeline then.
    """
    paths = {"fused": FUSED, "icechunk": ICECHUNK}
    with zarr.config.set({"codec_pipeline.path": paths[name]} if name in paths else {}):
        yield
