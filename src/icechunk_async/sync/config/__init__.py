"""The configuration of a repository, in the classes of the official package."""

from icechunk_async.sync._logs import initialize_logs, set_logs_filter, shutdown_telemetry
from icechunk_async.sync._settings import RepoUpdateRetryConfig
from icechunk_async.sync._states import Attribution, FeatureFlag
from icechunk_async.sync.config._conditions import (
    ManifestPreloadCondition,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
)
from icechunk_async.sync.config._repository import RepositoryConfig
from icechunk_async.sync.config._sections import (
    CachingConfig,
    CompressionAlgorithm,
    CompressionConfig,
    ManifestConfig,
    ManifestPreloadConfig,
    ManifestVirtualChunkLocationCompressionConfig,
)
from icechunk_async.sync.config._splitting import ManifestSplittingConfig
from icechunk_async.sync.config._stores import ObjectStoreConfig

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
    "ManifestSplittingConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "ObjectStoreConfig",
    "RepoUpdateRetryConfig",
    "RepositoryConfig",
    "initialize_logs",
    "set_logs_filter",
    "shutdown_telemetry",
]
