"""How the object store is used, and how S3 is reached: parts of the configuration and of storages.

They are found under ``icechunk_async.sync.storage``, and written here so that configuration and
storages need not import each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from icechunk_async.format import config as native
from icechunk_async.sync._display import Choice, public
from icechunk_async.sync._mirrors import mirrors
from icechunk_async.sync._section import Section

__all__ = [
    "ChecksumAlgorithm",
    "RepoUpdateRetryConfig",
    "S3Options",
    "StorageConcurrencySettings",
    "StorageRetriesSettings",
    "StorageSettings",
    "StorageTimeoutSettings",
]


@mirrors(native.ChecksumAlgorithm)
@public("storage")
class ChecksumAlgorithm(Choice):
    """Checksums that S3 clients can be told to send."""

    Crc32 = 0
    Crc32c = 1
    Crc64Nvme = 2
    Sha1 = 3
    Sha256 = 4


@public("storage")
@dataclass(repr=False)
class S3Options(Section):
    """How to reach a store that speaks S3.

    Attributes:
        region: region of the bucket.
        endpoint_url: service other than the provider's own.
        allow_http: whether connections may be unencrypted.
        anonymous: whether requests go unsigned.
        force_path_style: whether the bucket is part of the path instead of the host name.
        network_stream_timeout_seconds: longest pause within a transfer; 0 for no limit.
        requester_pays: whether to agree to pay for requests.
        checksum_algorithm: checksum on writes; None for the client's choice.
    """

    native_class: ClassVar = native.S3Options

    region: str | None = None
    endpoint_url: str | None = None
    allow_http: bool = False
    anonymous: bool = False
    force_path_style: bool = False
    network_stream_timeout_seconds: int | None = None
    requester_pays: bool = False
    checksum_algorithm: ChecksumAlgorithm | None = None


@public("storage")
@dataclass(repr=False)
class StorageConcurrencySettings(Section):
    """How the read of one object is split into ranges.

    Attributes:
        max_concurrent_requests_for_object: ranges at most (18).
        ideal_concurrent_request_size: bytes per range (12 MiB).
    """

    native_class: ClassVar = native.StorageConcurrencySettings

    max_concurrent_requests_for_object: int | None = None
    ideal_concurrent_request_size: int | None = None


@public("storage")
@dataclass(repr=False)
class StorageRetriesSettings(Section):
    """How failed requests are tried again.

    Attributes:
        max_tries: tries in all, the first included (10).
        initial_backoff_ms: pause after the first failure (100).
        max_backoff_ms: longest pause (180,000).
    """

    native_class: ClassVar = native.StorageRetriesSettings

    max_tries: int | None = None
    initial_backoff_ms: int | None = None
    max_backoff_ms: int | None = None


@public("storage")
@dataclass(repr=False)
class StorageTimeoutSettings(Section):
    """Time limits of the storage client; None leaves them to it.

    Attributes:
        connect_timeout_ms: for a connection.
        read_timeout_ms: for the first byte of an answer.
        operation_timeout_ms: for an operation with its retries.
        operation_attempt_timeout_ms: for one attempt.
    """

    native_class: ClassVar = native.StorageTimeoutSettings

    connect_timeout_ms: int | None = None
    read_timeout_ms: int | None = None
    operation_timeout_ms: int | None = None
    operation_attempt_timeout_ms: int | None = None


@public("storage")
@dataclass(repr=False)
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

    native_class: ClassVar = native.StorageSettings
    _shown_as_is: ClassVar = frozenset({"timeouts"})
    _display_order: ClassVar = (
        "unsafe_use_conditional_create",
        "unsafe_use_conditional_update",
        "unsafe_use_metadata",
        "storage_class",
        "metadata_storage_class",
        "chunks_storage_class",
        "minimum_size_for_multipart_upload",
        "concurrency",
        "retries",
        "timeouts",
    )

    concurrency: StorageConcurrencySettings | None = None
    retries: StorageRetriesSettings | None = None
    unsafe_use_conditional_create: bool | None = None
    unsafe_use_conditional_update: bool | None = None
    unsafe_use_metadata: bool | None = None
    storage_class: str | None = None
    metadata_storage_class: str | None = None
    chunks_storage_class: str | None = None
    minimum_size_for_multipart_upload: int | None = None
    timeouts: StorageTimeoutSettings | None = None


@public("config")
@dataclass(repr=False)
class RepoUpdateRetryConfig(Section):
    """How often a lost race for a reference or the repo info object is run again.

    Attributes:
        default: for all operations (100 tries, pauses from 50 to 30,000 ms).
    """

    native_class: ClassVar = native.RepoUpdateRetryConfig

    default: StorageRetriesSettings | None = None
