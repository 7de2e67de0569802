"""The official engine's names, for code that blocks: change one import to use this library.

    import icechunk_async.sync as icechunk

Scripts, notebooks and Spark tasks call these as plain functions; one event loop on a thread of
its own serves the whole process. Names are imported when they are first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from icechunk_async.sync._names import HOMES, MODULES

if TYPE_CHECKING:
    from icechunk_async.sync import config as config
    from icechunk_async.sync import conflicts as conflicts
    from icechunk_async.sync import credentials as credentials
    from icechunk_async.sync import ops as ops
    from icechunk_async.sync import repository as repository
    from icechunk_async.sync import session as session
    from icechunk_async.sync import snapshots as snapshots
    from icechunk_async.sync import storage as storage
    from icechunk_async.sync import types as types
    from icechunk_async.sync import virtual as virtual
    from icechunk_async.sync._about import (
        __version__,
        print_debug_info,
        spec_version,
        supported_spec_versions,
        user_agent,
    )
    from icechunk_async.sync._logs import (
        initialize_logs,
        set_logs_filter,
        shutdown_telemetry,
    )
    from icechunk_async.sync._states import (
        Attribution,
        ChunkStorageStats,
        ChunkType,
        FeatureFlag,
        RepoAvailability,
        RepoStatus,
        SessionMode,
        SpecVersion,
    )
    from icechunk_async.sync.config import (
        CachingConfig,
        CompressionAlgorithm,
        CompressionConfig,
        ManifestConfig,
        ManifestPreloadCondition,
        ManifestPreloadConfig,
        ManifestSplitCondition,
        ManifestSplitDimCondition,
        ManifestSplittingConfig,
        ManifestVirtualChunkLocationCompressionConfig,
        ObjectStoreConfig,
        RepositoryConfig,
    )
    from icechunk_async.sync.conflicts import (
        BasicConflictSolver,
        Conflict,
        ConflictDetector,
        ConflictSolver,
        ConflictType,
        VersionSelection,
    )
    from icechunk_async.sync.credentials import (
        AnyAzureCredential,
        AnyAzureStaticCredential,
        AnyCredential,
        AnyGcsCredential,
        AnyGcsStaticCredential,
        AnyS3Credential,
        AzureCredentials,
        AzureRefreshableCredential,
        AzureStaticCredentials,
        Credentials,
        GcsBearerCredential,
        GcsCredentials,
        GcsStaticCredentials,
        S3Credentials,
        S3StaticCredentials,
        azure_anonymous_credentials,
        azure_credentials,
        azure_from_env_credentials,
        azure_refreshable_credentials,
        azure_static_credentials,
        containers_credentials,
        gcs_credentials,
        gcs_from_env_credentials,
        gcs_refreshable_credentials,
        gcs_static_credentials,
        s3_anonymous_credentials,
        s3_credentials,
        s3_from_env_credentials,
        s3_refreshable_credentials,
        s3_static_credentials,
    )
    from icechunk_async.sync.deadlines import (
        deadline,
    )
    from icechunk_async.sync.errors import (
        AlreadyExistsError,
        ConflictError,
        ErrorKind,
        FormatError,
        IcechunkError,
        InternalError,
        InvalidInputError,
        NodeNotFoundError,
        NotFoundError,
        ReadOnlyError,
        RebaseFailedError,
        RefNotFoundError,
        RepositoryNotFoundError,
        SessionStateError,
        SnapshotNotFoundError,
        StorageError,
    )
    from icechunk_async.sync.migration import (
        upgrade_icechunk_repository,
    )
    from icechunk_async.sync.ops import (
        GCSummary,
        Update,
        UpdateType,
    )
    from icechunk_async.sync.repository import (
        Repository,
    )
    from icechunk_async.sync.session import (
        ForkSession,
        Session,
    )
    from icechunk_async.sync.snapshots import (
        AncestryGraph,
        Diff,
        ManifestFileInfo,
        SnapshotInfo,
    )
    from icechunk_async.sync.storage import (
        AnyObjectStoreConfig,
        ChecksumAlgorithm,
        S3Options,
        Storage,
        StorageConcurrencySettings,
        StorageObjectInfo,
        StorageRetriesSettings,
        StorageSettings,
        StorageTimeoutSettings,
        azure_storage,
        gcs_storage,
        gcs_store,
        hf_storage,
        http_storage,
        http_store,
        in_memory_storage,
        local_filesystem_storage,
        local_filesystem_store,
        r2_storage,
        redirect_storage,
        s3_storage,
        s3_store,
        tigris_storage,
    )
    from icechunk_async.sync.store import (
        IcechunkStore,
    )
    from icechunk_async.sync.types import (
        CommitMethod,
    )
    from icechunk_async.sync.virtual import (
        VirtualChunkContainer,
        VirtualChunkSpec,
    )

__all__ = [
    "AlreadyExistsError",
    "AncestryGraph",
    "AnyAzureCredential",
    "AnyAzureStaticCredential",
    "AnyCredential",
    "AnyGcsCredential",
    "AnyGcsStaticCredential",
    "AnyObjectStoreConfig",
    "AnyS3Credential",
    "Attribution",
    "AzureCredentials",
    "AzureRefreshableCredential",
    "AzureStaticCredentials",
    "BasicConflictSolver",
    "CachingConfig",
    "ChecksumAlgorithm",
    "ChunkStorageStats",
    "ChunkType",
    "CommitMethod",
    "CompressionAlgorithm",
    "CompressionConfig",
    "Conflict",
    "ConflictDetector",
    "ConflictError",
    "ConflictSolver",
    "ConflictType",
    "Credentials",
    "Diff",
    "ErrorKind",
    "FeatureFlag",
    "ForkSession",
    "FormatError",
    "GCSummary",
    "GcsBearerCredential",
    "GcsCredentials",
    "GcsStaticCredentials",
    "IcechunkError",
    "IcechunkStore",
    "InternalError",
    "InvalidInputError",
    "ManifestConfig",
    "ManifestFileInfo",
    "ManifestPreloadCondition",
    "ManifestPreloadConfig",
    "ManifestSplitCondition",
    "ManifestSplitDimCondition",
    "ManifestSplittingConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "NodeNotFoundError",
    "NotFoundError",
    "ObjectStoreConfig",
    "ReadOnlyError",
    "RebaseFailedError",
    "RefNotFoundError",
    "RepoAvailability",
    "RepoStatus",
    "Repository",
    "RepositoryConfig",
    "RepositoryNotFoundError",
    "S3Credentials",
    "S3Options",
    "S3StaticCredentials",
    "Session",
    "SessionMode",
    "SessionStateError",
    "SnapshotInfo",
    "SnapshotNotFoundError",
    "SpecVersion",
    "Storage",
    "StorageConcurrencySettings",
    "StorageError",
    "StorageObjectInfo",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
    "Update",
    "UpdateType",
    "VersionSelection",
    "VirtualChunkContainer",
    "VirtualChunkSpec",
    "__version__",
    "azure_anonymous_credentials",
    "azure_credentials",
    "azure_from_env_credentials",
    "azure_refreshable_credentials",
    "azure_static_credentials",
    "azure_storage",
    "containers_credentials",
    "deadline",
    "gcs_credentials",
    "gcs_from_env_credentials",
    "gcs_refreshable_credentials",
    "gcs_static_credentials",
    "gcs_storage",
    "gcs_store",
    "hf_storage",
    "http_storage",
    "http_store",
    "in_memory_storage",
    "initialize_logs",
    "local_filesystem_storage",
    "local_filesystem_store",
    "print_debug_info",
    "r2_storage",
    "redirect_storage",
    "s3_anonymous_credentials",
    "s3_credentials",
    "s3_from_env_credentials",
    "s3_refreshable_credentials",
    "s3_static_credentials",
    "s3_storage",
    "s3_store",
    "set_logs_filter",
    "shutdown_telemetry",
    "spec_version",
    "supported_spec_versions",
    "tigris_storage",
    "upgrade_icechunk_repository",
    "user_agent",
]

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name, or a module that has some."""
        if name in HOMES:
            found = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
            globals()[name] = found
            return found
        if name in MODULES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__, *MODULES})


if os.environ.get("ICECHUNK_LOG"):  # as the official package, which reads it when it is imported
    import_module(f"{__name__}._logs").initialize_logs()
