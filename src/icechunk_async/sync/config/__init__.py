"""The configuration of a repository, in the classes of the official package.

Names are imported when they are first used: most programs configure nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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

_HOMES: Final = {
    "Attribution": "_states",
    "CachingConfig": "config._sections",
    "CompressionAlgorithm": "config._sections",
    "CompressionConfig": "config._sections",
    "FeatureFlag": "_states",
    "ManifestConfig": "config._sections",
    "ManifestPreloadCondition": "config._conditions",
    "ManifestPreloadConfig": "config._sections",
    "ManifestSplitCondition": "config._conditions",
    "ManifestSplitDimCondition": "config._conditions",
    "ManifestSplittingConfig": "config._splitting",
    "ManifestVirtualChunkLocationCompressionConfig": "config._sections",
    "ObjectStoreConfig": "config._stores",
    "RepoUpdateRetryConfig": "_settings",
    "RepositoryConfig": "config._repository",
    "initialize_logs": "_logs",
    "set_logs_filter": "_logs",
    "shutdown_telemetry": "_logs",
}

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
