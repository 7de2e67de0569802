"""Where repositories are, in the classes and functions of the official package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.sync._settings import (
        ChecksumAlgorithm,
        S3Options,
        StorageConcurrencySettings,
        StorageRetriesSettings,
        StorageSettings,
        StorageTimeoutSettings,
    )
    from icechunk_async.sync._states import ChunkType, StorageObjectInfo
    from icechunk_async.sync.config._stores import ObjectStoreConfig
    from icechunk_async.sync.storage._buckets import (
        azure_storage,
        gcs_storage,
        s3_object_store_storage,
        s3_storage,
    )
    from icechunk_async.sync.storage._places import (
        AnyObjectStoreConfig,
        azure_store,
        gcs_store,
        http_storage,
        http_store,
        in_memory_storage,
        local_filesystem_storage,
        local_filesystem_store,
        redirect_storage,
        s3_store,
    )
    from icechunk_async.sync.storage._storage import Storage
    from icechunk_async.sync.storage._vendors import hf_storage, r2_storage, tigris_storage

__all__ = [
    "AnyObjectStoreConfig",
    "ChecksumAlgorithm",
    "ChunkType",
    "ObjectStoreConfig",
    "S3Options",
    "Storage",
    "StorageConcurrencySettings",
    "StorageObjectInfo",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
    "azure_storage",
    "azure_store",
    "gcs_storage",
    "gcs_store",
    "hf_storage",
    "http_storage",
    "http_store",
    "in_memory_storage",
    "local_filesystem_storage",
    "local_filesystem_store",
    "r2_storage",
    "redirect_storage",
    "s3_object_store_storage",
    "s3_storage",
    "s3_store",
    "tigris_storage",
]

# Imported at first use: most programs know one kind of storage.
_NAMES: Final = {
    "_settings": (
        "ChecksumAlgorithm",
        "S3Options",
        "StorageConcurrencySettings",
        "StorageRetriesSettings",
        "StorageSettings",
        "StorageTimeoutSettings",
    ),
    "_states": ("ChunkType", "StorageObjectInfo"),
    "config._stores": ("ObjectStoreConfig",),
    "storage._buckets": ("azure_storage", "gcs_storage", "s3_object_store_storage", "s3_storage"),
    "storage._places": (
        "AnyObjectStoreConfig",
        "azure_store",
        "gcs_store",
        "http_storage",
        "http_store",
        "in_memory_storage",
        "local_filesystem_storage",
        "local_filesystem_store",
        "redirect_storage",
        "s3_store",
    ),
    "storage._storage": ("Storage",),
    "storage._vendors": ("hf_storage", "r2_storage", "tigris_storage"),
}
_HOMES: Final = {name: home for home, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"icechunk_async.sync.{_HOMES[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
