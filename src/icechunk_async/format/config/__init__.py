"""The configuration that a repository stores: values, defaults, merging, and stored forms.

Every field may be None, which stands for its default; ``effective_<field>`` returns the value in
effect. `settings`, `conditions` and `containers` declare the sections. `codec` makes a `document`
of them and reads it back; YAML and FlexBuffers are the two forms in which that is stored.
"""

from icechunk_async.format.config.conditions import (
    DEFAULT_PRELOAD_CONDITION,
    DEFAULT_SPLIT_SIZES,
    ManifestPreloadCondition,
    ManifestPreloadConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    SplitDimCondition,
    SplitSizes,
)
from icechunk_async.format.config.containers import (
    AzureStore,
    ChecksumAlgorithm,
    GcsStore,
    HttpStore,
    InMemoryStore,
    LocalFileSystemStore,
    ObjectStoreConfig,
    S3CompatibleStore,
    S3Options,
    S3Store,
    TigrisStore,
    VirtualChunkContainer,
)
from icechunk_async.format.config.fields import merge
from icechunk_async.format.config.settings import (
    CachingConfig,
    CompressionAlgorithm,
    CompressionConfig,
    ManifestConfig,
    ManifestVirtualChunkLocationCompressionConfig,
    RepositoryConfig,
    RepoUpdateRetryConfig,
    StorageConcurrencySettings,
    StorageRetriesSettings,
    StorageSettings,
    StorageTimeoutSettings,
)

__all__ = [
    "DEFAULT_PRELOAD_CONDITION",
    "DEFAULT_SPLIT_SIZES",
    "AzureStore",
    "CachingConfig",
    "ChecksumAlgorithm",
    "CompressionAlgorithm",
    "CompressionConfig",
    "GcsStore",
    "HttpStore",
    "InMemoryStore",
    "LocalFileSystemStore",
    "ManifestConfig",
    "ManifestPreloadCondition",
    "ManifestPreloadConfig",
    "ManifestSplitCondition",
    "ManifestSplitDimCondition",
    "ManifestSplittingConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "ObjectStoreConfig",
    "RepoUpdateRetryConfig",
    "RepositoryConfig",
    "S3CompatibleStore",
    "S3Options",
    "S3Store",
    "SplitDimCondition",
    "SplitSizes",
    "StorageConcurrencySettings",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
    "TigrisStore",
    "VirtualChunkContainer",
    "merge",
]
