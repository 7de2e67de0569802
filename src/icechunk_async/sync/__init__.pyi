# The public names of the facade, listed once: `__init__.py` reads them from here.

from icechunk_async._runtime.blocking.portal import deadline as deadline
from icechunk_async.sync import config as config
from icechunk_async.sync import conflicts as conflicts
from icechunk_async.sync import credentials as credentials
from icechunk_async.sync import errors as errors
from icechunk_async.sync import ops as ops
from icechunk_async.sync import repository as repository
from icechunk_async.sync import session as session
from icechunk_async.sync import snapshots as snapshots
from icechunk_async.sync import storage as storage
from icechunk_async.sync import store as store
from icechunk_async.sync import types as types
from icechunk_async.sync import virtual as virtual
from icechunk_async.sync.config import CachingConfig as CachingConfig
from icechunk_async.sync.config import CompressionAlgorithm as CompressionAlgorithm
from icechunk_async.sync.config import CompressionConfig as CompressionConfig
from icechunk_async.sync.config import ManifestConfig as ManifestConfig
from icechunk_async.sync.config import ManifestPreloadCondition as ManifestPreloadCondition
from icechunk_async.sync.config import ManifestPreloadConfig as ManifestPreloadConfig
from icechunk_async.sync.config import ManifestSplitCondition as ManifestSplitCondition
from icechunk_async.sync.config import ManifestSplitDimCondition as ManifestSplitDimCondition
from icechunk_async.sync.config import ManifestSplittingConfig as ManifestSplittingConfig
from icechunk_async.sync.config import (
    ManifestVirtualChunkLocationCompressionConfig as ManifestVirtualChunkLocationCompressionConfig,
)
from icechunk_async.sync.config import ObjectStoreConfig as ObjectStoreConfig
from icechunk_async.sync.config import RepositoryConfig as RepositoryConfig
from icechunk_async.sync.conflicts import BasicConflictSolver as BasicConflictSolver
from icechunk_async.sync.conflicts import Conflict as Conflict
from icechunk_async.sync.conflicts import ConflictDetector as ConflictDetector
from icechunk_async.sync.conflicts import ConflictSolver as ConflictSolver
from icechunk_async.sync.conflicts import ConflictType as ConflictType
from icechunk_async.sync.conflicts import VersionSelection as VersionSelection
from icechunk_async.sync.credentials import AnyAzureCredential as AnyAzureCredential
from icechunk_async.sync.credentials import AnyAzureStaticCredential as AnyAzureStaticCredential
from icechunk_async.sync.credentials import AnyCredential as AnyCredential
from icechunk_async.sync.credentials import AnyGcsCredential as AnyGcsCredential
from icechunk_async.sync.credentials import AnyGcsStaticCredential as AnyGcsStaticCredential
from icechunk_async.sync.credentials import AnyS3Credential as AnyS3Credential
from icechunk_async.sync.credentials import AzureCredentials as AzureCredentials
from icechunk_async.sync.credentials import AzureRefreshableCredential as AzureRefreshableCredential
from icechunk_async.sync.credentials import AzureStaticCredentials as AzureStaticCredentials
from icechunk_async.sync.credentials import Credentials as Credentials
from icechunk_async.sync.credentials import GcsBearerCredential as GcsBearerCredential
from icechunk_async.sync.credentials import GcsCredentials as GcsCredentials
from icechunk_async.sync.credentials import GcsStaticCredentials as GcsStaticCredentials
from icechunk_async.sync.credentials import S3Credentials as S3Credentials
from icechunk_async.sync.credentials import S3StaticCredentials as S3StaticCredentials
from icechunk_async.sync.credentials import (
    azure_anonymous_credentials as azure_anonymous_credentials,
)
from icechunk_async.sync.credentials import azure_credentials as azure_credentials
from icechunk_async.sync.credentials import azure_from_env_credentials as azure_from_env_credentials
from icechunk_async.sync.credentials import (
    azure_refreshable_credentials as azure_refreshable_credentials,
)
from icechunk_async.sync.credentials import azure_static_credentials as azure_static_credentials
from icechunk_async.sync.credentials import containers_credentials as containers_credentials
from icechunk_async.sync.credentials import gcs_credentials as gcs_credentials
from icechunk_async.sync.credentials import gcs_from_env_credentials as gcs_from_env_credentials
from icechunk_async.sync.credentials import (
    gcs_refreshable_credentials as gcs_refreshable_credentials,
)
from icechunk_async.sync.credentials import gcs_static_credentials as gcs_static_credentials
from icechunk_async.sync.credentials import s3_anonymous_credentials as s3_anonymous_credentials
from icechunk_async.sync.credentials import s3_credentials as s3_credentials
from icechunk_async.sync.credentials import s3_from_env_credentials as s3_from_env_credentials
from icechunk_async.sync.credentials import s3_refreshable_credentials as s3_refreshable_credentials
from icechunk_async.sync.credentials import s3_static_credentials as s3_static_credentials
from icechunk_async.sync.errors import AlreadyExistsError as AlreadyExistsError
from icechunk_async.sync.errors import ConflictError as ConflictError
from icechunk_async.sync.errors import ErrorKind as ErrorKind
from icechunk_async.sync.errors import FormatError as FormatError
from icechunk_async.sync.errors import IcechunkError as IcechunkError
from icechunk_async.sync.errors import InternalError as InternalError
from icechunk_async.sync.errors import InvalidInputError as InvalidInputError
from icechunk_async.sync.errors import NodeNotFoundError as NodeNotFoundError
from icechunk_async.sync.errors import NotFoundError as NotFoundError
from icechunk_async.sync.errors import ReadOnlyError as ReadOnlyError
from icechunk_async.sync.errors import RebaseFailedError as RebaseFailedError
from icechunk_async.sync.errors import RefNotFoundError as RefNotFoundError
from icechunk_async.sync.errors import RepositoryNotFoundError as RepositoryNotFoundError
from icechunk_async.sync.errors import SessionStateError as SessionStateError
from icechunk_async.sync.errors import SnapshotNotFoundError as SnapshotNotFoundError
from icechunk_async.sync.errors import StorageError as StorageError
from icechunk_async.sync.official.about import __version__ as __version__
from icechunk_async.sync.official.about import initialize_logs as initialize_logs
from icechunk_async.sync.official.about import print_debug_info as print_debug_info
from icechunk_async.sync.official.about import set_logs_filter as set_logs_filter
from icechunk_async.sync.official.about import shutdown_telemetry as shutdown_telemetry
from icechunk_async.sync.official.about import spec_version as spec_version
from icechunk_async.sync.official.about import supported_spec_versions as supported_spec_versions
from icechunk_async.sync.official.about import user_agent as user_agent
from icechunk_async.sync.official.containers import VirtualChunkContainer as VirtualChunkContainer
from icechunk_async.sync.official.containers import VirtualChunkSpec as VirtualChunkSpec
from icechunk_async.sync.official.states import Attribution as Attribution
from icechunk_async.sync.official.states import ChunkStorageStats as ChunkStorageStats
from icechunk_async.sync.official.states import ChunkType as ChunkType
from icechunk_async.sync.official.states import FeatureFlag as FeatureFlag
from icechunk_async.sync.official.states import RepoAvailability as RepoAvailability
from icechunk_async.sync.official.states import RepoStatus as RepoStatus
from icechunk_async.sync.official.states import SessionMode as SessionMode
from icechunk_async.sync.official.states import SpecVersion as SpecVersion
from icechunk_async.sync.ops import GCSummary as GCSummary
from icechunk_async.sync.ops import Update as Update
from icechunk_async.sync.ops import UpdateType as UpdateType
from icechunk_async.sync.repository import Repository as Repository
from icechunk_async.sync.repository import (
    upgrade_icechunk_repository as upgrade_icechunk_repository,
)
from icechunk_async.sync.session import ForkSession as ForkSession
from icechunk_async.sync.session import Session as Session
from icechunk_async.sync.snapshots import AncestryGraph as AncestryGraph
from icechunk_async.sync.snapshots import Diff as Diff
from icechunk_async.sync.snapshots import ManifestFileInfo as ManifestFileInfo
from icechunk_async.sync.snapshots import SnapshotInfo as SnapshotInfo
from icechunk_async.sync.storage import AnyObjectStoreConfig as AnyObjectStoreConfig
from icechunk_async.sync.storage import ChecksumAlgorithm as ChecksumAlgorithm
from icechunk_async.sync.storage import S3Options as S3Options
from icechunk_async.sync.storage import Storage as Storage
from icechunk_async.sync.storage import StorageConcurrencySettings as StorageConcurrencySettings
from icechunk_async.sync.storage import StorageObjectInfo as StorageObjectInfo
from icechunk_async.sync.storage import StorageRetriesSettings as StorageRetriesSettings
from icechunk_async.sync.storage import StorageSettings as StorageSettings
from icechunk_async.sync.storage import StorageTimeoutSettings as StorageTimeoutSettings
from icechunk_async.sync.storage import azure_storage as azure_storage
from icechunk_async.sync.storage import gcs_storage as gcs_storage
from icechunk_async.sync.storage import gcs_store as gcs_store
from icechunk_async.sync.storage import hf_storage as hf_storage
from icechunk_async.sync.storage import http_storage as http_storage
from icechunk_async.sync.storage import http_store as http_store
from icechunk_async.sync.storage import in_memory_storage as in_memory_storage
from icechunk_async.sync.storage import local_filesystem_storage as local_filesystem_storage
from icechunk_async.sync.storage import local_filesystem_store as local_filesystem_store
from icechunk_async.sync.storage import r2_storage as r2_storage
from icechunk_async.sync.storage import redirect_storage as redirect_storage
from icechunk_async.sync.storage import s3_storage as s3_storage
from icechunk_async.sync.storage import s3_store as s3_store
from icechunk_async.sync.storage import tigris_storage as tigris_storage
from icechunk_async.sync.store import IcechunkStore as IcechunkStore
from icechunk_async.sync.types import CommitMethod as CommitMethod
