"""The sections of the configuration, and the whole, with the official names and defaults."""

from __future__ import annotations

import os
from dataclasses import field, replace
from enum import StrEnum
from typing import Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidConfigError
from icechunk_async.format.config.conditions import ManifestPreloadConfig, ManifestSplittingConfig
from icechunk_async.format.config.containers import VirtualChunkContainer
from icechunk_async.format.config.fields import (
    BOOL,
    TEXT,
    U8,
    U16,
    U32,
    U64,
    Effective,
    Section,
    at_least_one,
    merge,
    of_type,
    optional_integer,
)
from icechunk_async.format.config.secrets import veiled_url

__all__ = [
    "CachingConfig",
    "CompressionAlgorithm",
    "CompressionConfig",
    "ManifestConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "RepoUpdateRetryConfig",
    "RepositoryConfig",
    "StorageConcurrencySettings",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
]


_POSITIVE_U16: Final = optional_integer(1, 2**16 - 1)
_POSITIVE_U64: Final = optional_integer(1, 2**64 - 1)
_I32: Final = optional_integer(-(2**31), 2**31 - 1)


# The stored form has 8 bits for one level and 32 for the other, so files of other writers may hold
# levels that zstd refuses.
def _zstd_level(value: int) -> int:
    """Keep to the levels that zstd has; it takes 0 for its default, 3."""
    return min(max(value, -(2**17)), 22) or 3


class CompressionAlgorithm(StrEnum):
    """Compression of metadata files."""

    Zstd = "zstd"


@dataclass(frozen=True, slots=True)
class CompressionConfig(Section):
    """How metadata files are compressed; chunks are the business of Zarr's codecs.

    Attributes:
        algorithm: zstd.
        level: zstd level (3).
    """

    algorithm: CompressionAlgorithm | None = field(
        default=None, metadata=of_type(CompressionAlgorithm)
    )
    level: int | None = field(default=None, metadata=U8)

    effective_algorithm = Effective(CompressionAlgorithm.Zstd)
    effective_level = Effective(3, _zstd_level)


@dataclass(frozen=True, slots=True)
class CachingConfig(Section):
    """Sizes of the caches in memory; 0 keeps nothing.

    Attributes:
        num_snapshot_nodes: nodes of snapshots (500,000).
        num_chunk_refs: chunk references of manifests (15,000,000).
        num_transaction_changes: changes of transaction logs (0).
        num_bytes_attributes: bytes of attributes (0).
        num_bytes_chunks: bytes of chunks (0).
    """

    num_snapshot_nodes: int | None = field(default=None, metadata=U64)
    num_chunk_refs: int | None = field(default=None, metadata=U64)
    num_transaction_changes: int | None = field(default=None, metadata=U64)
    num_bytes_attributes: int | None = field(default=None, metadata=U64)
    num_bytes_chunks: int | None = field(default=None, metadata=U64)

    effective_num_snapshot_nodes = Effective(500_000)
    effective_num_chunk_refs = Effective(15_000_000)
    effective_num_transaction_changes = Effective(0)
    effective_num_bytes_attributes = Effective(0)
    effective_num_bytes_chunks = Effective(0)


@dataclass(frozen=True, slots=True)
class StorageConcurrencySettings(Section):
    """How the read of one object is split into ranges.

    Attributes:
        max_concurrent_requests_for_object: ranges at most (18).
        ideal_concurrent_request_size: bytes per range (12 MiB).
    """

    max_concurrent_requests_for_object: int | None = field(default=None, metadata=_POSITIVE_U16)
    ideal_concurrent_request_size: int | None = field(default=None, metadata=_POSITIVE_U64)

    effective_max_concurrent_requests_for_object = Effective(18)
    effective_ideal_concurrent_request_size = Effective(12 * 2**20)


@dataclass(frozen=True, slots=True)
class StorageRetriesSettings(Section):
    """How failed requests are tried again.

    Attributes:
        max_tries: tries in all, the first included (10).
        initial_backoff_ms: pause after the first failure (100).
        max_backoff_ms: longest pause (180,000).
    """

    max_tries: int | None = field(default=None, metadata=_POSITIVE_U16)
    initial_backoff_ms: int | None = field(default=None, metadata=U32)
    max_backoff_ms: int | None = field(default=None, metadata=U32)

    effective_max_tries = Effective(10)
    effective_initial_backoff_ms = Effective(100)
    effective_max_backoff_ms = Effective(180_000)


@dataclass(frozen=True, slots=True)
class StorageTimeoutSettings(Section):
    """Time limits of the storage client; None leaves them to it.

    Attributes:
        connect_timeout_ms: for a connection.
        read_timeout_ms: for the first byte of an answer.
        operation_timeout_ms: for an operation with its retries.
        operation_attempt_timeout_ms: for one attempt.
    """

    connect_timeout_ms: int | None = field(default=None, metadata=U32)
    read_timeout_ms: int | None = field(default=None, metadata=U32)
    operation_timeout_ms: int | None = field(default=None, metadata=U32)
    operation_attempt_timeout_ms: int | None = field(default=None, metadata=U32)


@dataclass(frozen=True, slots=True)
class StorageSettings(Section):
    """How the object store is used.

    Attributes:
        concurrency: splitting of reads.
        retries: repeating of failed requests.
        unsafe_use_conditional_create: whether objects are created only if absent (True).
        unsafe_use_conditional_update: whether they are replaced only if unchanged (True).
        unsafe_use_metadata: whether objects carry user metadata (True).
        storage_class: the provider's name for a class of storage, for all objects.
        metadata_storage_class: the same for metadata only.
        chunks_storage_class: the same for chunks only.
        minimum_size_for_multipart_upload: bytes from which uploads go in parts (100 MiB).
        timeouts: time limits.
    """

    concurrency: StorageConcurrencySettings | None = field(
        default=None, metadata=of_type(StorageConcurrencySettings)
    )
    retries: StorageRetriesSettings | None = field(
        default=None, metadata=of_type(StorageRetriesSettings)
    )
    unsafe_use_conditional_create: bool | None = field(default=None, metadata=BOOL)
    unsafe_use_conditional_update: bool | None = field(default=None, metadata=BOOL)
    unsafe_use_metadata: bool | None = field(default=None, metadata=BOOL)
    storage_class: str | None = field(default=None, metadata=TEXT)
    metadata_storage_class: str | None = field(default=None, metadata=TEXT)
    chunks_storage_class: str | None = field(default=None, metadata=TEXT)
    minimum_size_for_multipart_upload: int | None = field(default=None, metadata=U64)
    timeouts: StorageTimeoutSettings | None = field(
        default=None, metadata=of_type(StorageTimeoutSettings)
    )

    effective_concurrency = Effective(StorageConcurrencySettings())
    effective_retries = Effective(StorageRetriesSettings())
    effective_unsafe_use_conditional_create = Effective[bool](default=True)
    effective_unsafe_use_conditional_update = Effective[bool](default=True)
    effective_unsafe_use_metadata = Effective[bool](default=True)
    effective_minimum_size_for_multipart_upload = Effective(100 * 2**20)
    effective_timeouts = Effective(StorageTimeoutSettings())

    @property
    def effective_metadata_storage_class(self) -> str | None:
        """The class for metadata objects; None for the store's own default."""
        return self.metadata_storage_class or self.storage_class

    @property
    def effective_chunks_storage_class(self) -> str | None:
        """The class for chunk objects; None for the store's own default."""
        return self.chunks_storage_class or self.storage_class


@dataclass(frozen=True, slots=True)
class ManifestVirtualChunkLocationCompressionConfig(Section):
    """When and how the locations of virtual chunks are compressed; version 2 only.

    Attributes:
        min_num_chunks: virtual chunks in a manifest from which it is worth while (1000).
        dictionary_max_training_samples: locations that the dictionary learns from (100).
        dictionary_max_size_bytes: size of the dictionary (2048).
        compression_level: zstd level (3).
    """

    min_num_chunks: int | None = field(default=None, metadata=U16)
    dictionary_max_training_samples: int | None = field(default=None, metadata=U16)
    dictionary_max_size_bytes: int | None = field(default=None, metadata=U32)
    compression_level: int | None = field(default=None, metadata=_I32)

    effective_min_num_chunks = Effective(1000)
    effective_dictionary_max_training_samples = Effective(100)
    effective_dictionary_max_size_bytes = Effective(2048)
    effective_compression_level = Effective(3, _zstd_level)


@dataclass(frozen=True, slots=True)
class ManifestConfig(Section):
    """How manifests are read and written.

    Attributes:
        preload: which are fetched before they are needed.
        splitting: how the references of an array are divided among them.
        virtual_chunk_location_compression: how locations are compressed.
        max_concurrent_manifest_fetches_during_commit: manifests rewritten at a time (1).
    """

    preload: ManifestPreloadConfig | None = field(
        default=None, metadata=of_type(ManifestPreloadConfig)
    )
    splitting: ManifestSplittingConfig | None = field(
        default=None, metadata=of_type(ManifestSplittingConfig)
    )
    virtual_chunk_location_compression: ManifestVirtualChunkLocationCompressionConfig | None = (
        field(default=None, metadata=of_type(ManifestVirtualChunkLocationCompressionConfig))
    )
    max_concurrent_manifest_fetches_during_commit: int | None = field(default=None, metadata=U16)

    effective_preload = Effective(ManifestPreloadConfig())
    effective_splitting = Effective(ManifestSplittingConfig())
    effective_virtual_chunk_location_compression = Effective(
        ManifestVirtualChunkLocationCompressionConfig()
    )
    # The official default is one after the other, which is the memory of one manifest.
    effective_max_concurrent_manifest_fetches_during_commit = Effective(1, at_least_one)


@dataclass(frozen=True, slots=True)
class RepoUpdateRetryConfig(Section):
    """How often a lost race for the repo info object is run again.

    Attributes:
        default: for all operations (100 tries, pauses from 50 to 30,000 ms).
    """

    default: StorageRetriesSettings | None = field(
        default=None, metadata=of_type(StorageRetriesSettings)
    )

    @property
    def effective_default(self) -> StorageRetriesSettings:
        """The settings in effect, all set."""
        return merge(
            StorageRetriesSettings(max_tries=100, initial_backoff_ms=50, max_backoff_ms=30_000),
            self.default or StorageRetriesSettings(),
        )


@dataclass(frozen=True, slots=True)
class RepositoryConfig(Section):
    """The whole configuration; a field that is None has its default.

    Attributes:
        inline_chunk_threshold_bytes: chunks of this length or less live in manifests (512).
        get_partial_values_concurrency: requests at a time for one batch of partial reads (10).
        compression: compression of metadata files.
        max_concurrent_requests: requests at a time in all (256).
        caching: what is kept in memory.
        storage: how the object store is used.
        virtual_chunk_containers: where virtual chunks may live; names and prefixes are unique, and
            they are sorted by prefix.
        manifest: how manifests are read and written.
        repo_update_retries: how often lost races are run again.
        num_updates_per_repo_info_file: entries of the log of operations per file (1000).
        max_concurrent_decodes: metadata files decompressed at a time (processors available).
        previous_file: carried along; nothing reads it.
    """

    inline_chunk_threshold_bytes: int | None = field(default=None, metadata=U16)
    get_partial_values_concurrency: int | None = field(default=None, metadata=U16)
    compression: CompressionConfig | None = field(default=None, metadata=of_type(CompressionConfig))
    max_concurrent_requests: int | None = field(default=None, metadata=U16)
    caching: CachingConfig | None = field(default=None, metadata=of_type(CachingConfig))
    storage: StorageSettings | None = field(default=None, metadata=of_type(StorageSettings))
    virtual_chunk_containers: tuple[VirtualChunkContainer, ...] | None = field(
        default=None, metadata=of_type(tuple, "a tuple of VirtualChunkContainer")
    )
    manifest: ManifestConfig | None = field(default=None, metadata=of_type(ManifestConfig))
    repo_update_retries: RepoUpdateRetryConfig | None = field(
        default=None, metadata=of_type(RepoUpdateRetryConfig)
    )
    num_updates_per_repo_info_file: int | None = field(default=None, metadata=U16)
    max_concurrent_decodes: int | None = field(default=None, metadata=U16)
    previous_file: str | None = field(default=None, metadata=TEXT)

    effective_inline_chunk_threshold_bytes = Effective(512)
    effective_get_partial_values_concurrency = Effective(10, at_least_one)
    effective_compression = Effective(CompressionConfig())
    effective_max_concurrent_requests = Effective(256, at_least_one)
    effective_caching = Effective(CachingConfig())
    effective_storage = Effective(StorageSettings())
    effective_virtual_chunk_containers = Effective[tuple[VirtualChunkContainer, ...]](())
    effective_manifest = Effective(ManifestConfig())
    effective_repo_update_retries = Effective(RepoUpdateRetryConfig())
    effective_num_updates_per_repo_info_file = Effective(1000, at_least_one)

    def __post_init__(self) -> None:
        """Validate that names and prefixes are unique; sort the containers."""
        # Zero-argument super() fails in dataclasses with slots: they are made twice.
        Section.__post_init__(self)
        seen: set[tuple[str, str]] = set()
        for container in self.virtual_chunk_containers or ():
            if not isinstance(container, VirtualChunkContainer):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _bad_containers(f"holds a {type(container).__name__}")
            marks = {("url_prefix", container.url_prefix)}
            if container.name is not None:
                marks.add(("name", container.name))
            for what, text in sorted(marks & seen):
                raise _bad_containers(f"has two with the {what} {veiled_url(text)!r:.128}")
            seen |= marks
        if self.virtual_chunk_containers:
            # The stored form is a map, so another order would be lost.
            ordered = sorted(self.virtual_chunk_containers, key=lambda item: item.url_prefix)
            object.__setattr__(self, "virtual_chunk_containers", tuple(ordered))

    @property
    def effective_max_concurrent_decodes(self) -> int:
        """Metadata files decompressed at a time: what was set, or the processors available."""
        if self.max_concurrent_decodes is not None:
            return at_least_one(self.max_concurrent_decodes)
        # In a container the machine's processors are more than those that this process may use.
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def get_virtual_chunk_container(self, name: str) -> VirtualChunkContainer | None:
        """Return the container of this name."""
        containers = self.effective_virtual_chunk_containers
        return next((container for container in containers if container.name == name), None)

    def with_virtual_chunk_container(self, container: VirtualChunkContainer) -> RepositoryConfig:
        """Return a copy that has the container in place of those with its name or its prefix."""
        others = tuple(
            other
            for other in self.effective_virtual_chunk_containers
            if other.url_prefix != container.url_prefix
            and (container.name is None or other.name != container.name)
        )
        return replace(self, virtual_chunk_containers=(*others, container))


def _bad_containers(problem: str) -> InvalidConfigError:
    name = "RepositoryConfig.virtual_chunk_containers"
    return InvalidConfigError(
        f"{name} {problem}; allowed: a tuple of VirtualChunkContainer, names and prefixes unique.",
        field=name,
    )
