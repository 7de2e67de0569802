"""Where repositories are, in the classes and functions of the official package."""

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
