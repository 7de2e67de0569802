"""The configuration of a repository, in the classes of the official package."""

from icechunk_async.sync.official.about import initialize_logs, set_logs_filter, shutdown_telemetry
from icechunk_async.sync.official.conditions import (
    ManifestPreloadCondition,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplitValues,
    SplitSizesDict,
)
from icechunk_async.sync.official.configuration import (
    CachingConfig,
    CompressionAlgorithm,
    CompressionConfig,
    ManifestConfig,
    ManifestPreloadConfig,
    ManifestSplittingConfig,
    ManifestVirtualChunkLocationCompressionConfig,
    RepositoryConfig,
)
from icechunk_async.sync.official.containers import ObjectStoreConfig
from icechunk_async.sync.official.sections import RepoUpdateRetryConfig
from icechunk_async.sync.official.states import Attribution, FeatureFlag

__all__ = [
    "Attribution",
    "CachingConfig",
    "CompressionAlgorithm",
    "CompressionConfig",
    "FeatureFlag",
    "ManifestConfig",
    "ManifestPreloadCondition",
    "ManifestPreloadConfig",
    "ManifestSplitCondition",
    "ManifestSplitDimCondition",
    "ManifestSplitValues",
    "ManifestSplittingConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "ObjectStoreConfig",
    "RepoUpdateRetryConfig",
    "RepositoryConfig",
    "SplitSizesDict",
    "initialize_logs",
    "set_logs_filter",
    "shutdown_telemetry",
]
