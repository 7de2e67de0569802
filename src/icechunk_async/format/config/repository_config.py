"""The whole configuration of a repository."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from icechunk_async.errors import InvalidConfigError
from icechunk_async.format.config._fields import (
    TEXT,
    U16,
    Effective,
    Section,
    at_least_one,
    of_type,
)
from icechunk_async.format.config.containers import VirtualChunkContainer
from icechunk_async.format.config.settings import (
    CachingConfig,
    CompressionConfig,
    ManifestConfig,
    RepoUpdateRetryConfig,
    StorageSettings,
)

__all__ = ["RepositoryConfig"]


@dataclass(frozen=True, slots=True)
class RepositoryConfig(Section):
    """What a repository is told about itself; a field that is None has its default.

    Attributes:
        inline_chunk_threshold_bytes: chunks of this length or less live in manifests (512).
        get_partial_values_concurrency: requests at a time for one batch of partial reads (10).
        compression: compression of metadata files.
        max_concurrent_requests: requests at a time in all (256).
        caching: what is kept in memory.
        storage: how the object store is used.
        virtual_chunk_containers: where virtual chunks may live; names and prefixes are unique,
            and the prefixes give the order, whatever it was.
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

    effective_inline_chunk_threshold_bytes = Effective("inline_chunk_threshold_bytes", 512)
    effective_get_partial_values_concurrency = Effective(
        "get_partial_values_concurrency", 10, at_least_one
    )
    effective_compression = Effective("compression", CompressionConfig())
    effective_max_concurrent_requests = Effective("max_concurrent_requests", 256, at_least_one)
    effective_caching = Effective("caching", CachingConfig())
    effective_storage = Effective("storage", StorageSettings())
    effective_virtual_chunk_containers = Effective[tuple[VirtualChunkContainer, ...]](
        "virtual_chunk_containers", ()
    )
    effective_manifest = Effective("manifest", ManifestConfig())
    effective_repo_update_retries = Effective("repo_update_retries", RepoUpdateRetryConfig())
    effective_num_updates_per_repo_info_file = Effective(
        "num_updates_per_repo_info_file", 1000, at_least_one
    )

    def __post_init__(self) -> None:
        """Refuse containers that share a name or a prefix; put the others in order."""
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
                raise _bad_containers(f"has two with the {what} {text!r:.128}")
            seen |= marks
        if self.virtual_chunk_containers:
            # The stored form is a map: an order of its own would be lost.
            ordered = sorted(self.virtual_chunk_containers, key=lambda item: item.url_prefix)
            object.__setattr__(self, "virtual_chunk_containers", tuple(ordered))

    @property
    def effective_max_concurrent_decodes(self) -> int:
        """Metadata files decompressed at a time: what was set, or the processors available."""
        if self.max_concurrent_decodes is not None:
            return at_least_one(self.max_concurrent_decodes)
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def get_virtual_chunk_container(self, name: str) -> VirtualChunkContainer | None:
        """Answer the container of this name."""
        containers = self.effective_virtual_chunk_containers
        return next((container for container in containers if container.name == name), None)

    def with_virtual_chunk_container(self, container: VirtualChunkContainer) -> RepositoryConfig:
        """Answer a copy that has the container in place of those with its name or its prefix."""
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
