"""Golden dense arrays on a disk, and repositories that refer to them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.credentials import LocalFileSystemAccess
from tests.helpers import memory_url
from tests.unit.tiledb.archives import files_below

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from icechunk_async.tiledb import Schema

__all__ = ["access_to", "expressible", "placed", "referring", "referring_config"]


def placed(archive: str, folder: str, root: Path, *, name: str = "with a space") -> Path:
    """Write the files of a golden array below a folder; return that of the array."""
    place = root / name
    for path, data in files_below(archive, folder).items():
        file = place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return place


def _container(place: Path) -> VirtualChunkContainer:
    return VirtualChunkContainer(
        f"{place.as_uri()}/", LocalFileSystemStore(str(place)), name="tiledb"
    )


def referring_config(place: Path) -> RepositoryConfig:
    """Return the configuration of a repository that refers to the files below a folder."""
    return RepositoryConfig(virtual_chunk_containers=(_container(place),))


def access_to(place: Path) -> dict[str, Any]:
    """Return the access to the files below a folder."""
    return {_container(place).url_prefix: LocalFileSystemAccess()}


@asynccontextmanager
async def referring(place: Path) -> AsyncGenerator[Repository]:
    """Open a new repository that may refer to files below a folder."""
    async with Repository.create(
        memory_url(),
        config=referring_config(place),
        authorize_virtual_chunk_access=access_to(place),
    ) as repository:
        yield repository


def expressible(schema: Schema) -> list[str]:
    """Return the attributes that can be arrays of Zarr."""
    return [
        it.name
        for it in schema.attributes
        if not (it.is_variable or it.is_nullable)
        and it.datatype.name != "CHAR"
        and not it.datatype.name.startswith("STRING")
    ]
