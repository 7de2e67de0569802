"""The whole configuration of a repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, override

from icechunk_async.format import config as native
from icechunk_async.sync._display import Group, public
from icechunk_async.sync._mirrors import from_native, to_native
from icechunk_async.sync._section import Section

if TYPE_CHECKING:
    from icechunk_async.sync._settings import RepoUpdateRetryConfig, StorageSettings
    from icechunk_async.sync.config._sections import (
        CachingConfig,
        CompressionConfig,
        ManifestConfig,
    )
    from icechunk_async.sync.config._stores import VirtualChunkContainer

__all__ = ["RepositoryConfig"]


@public("config")
@dataclass(repr=False)
class RepositoryConfig(Section):
    """What a repository is told about itself; a field that is None has its default.

    Attributes:
        inline_chunk_threshold_bytes: chunks of this length or less live in manifests (512).
        get_partial_values_concurrency: requests at a time for one batch of partial reads (10).
        compression: compression of metadata files.
        max_concurrent_requests: requests at a time in all (256).
        caching: what is kept in memory.
        storage: how the object store is used.
        virtual_chunk_containers: where virtual chunks may live, by URL prefix.
        manifest: how manifests are read and written.
        repo_update_retries: how often lost races are run again.
        num_updates_per_repo_info_file: entries of the log of operations per file (1000).
        max_concurrent_decodes: metadata files decompressed at a time (processors available).
    """

    native_class: ClassVar = native.RepositoryConfig
    _shown_as_is: ClassVar = frozenset({"storage", "virtual_chunk_containers"})
    _display_order: ClassVar = (
        "inline_chunk_threshold_bytes",
        "get_partial_values_concurrency",
        "max_concurrent_requests",
        "max_concurrent_decodes",
        "num_updates_per_repo_info_file",
        "compression",
        "caching",
        "storage",
        "manifest",
        "repo_update_retries",
        "virtual_chunk_containers",
    )

    inline_chunk_threshold_bytes: int | None = None
    get_partial_values_concurrency: int | None = None
    compression: CompressionConfig | None = None
    max_concurrent_requests: int | None = None
    caching: CachingConfig | None = None
    storage: StorageSettings | None = None
    virtual_chunk_containers: dict[str, VirtualChunkContainer] | None = None
    manifest: ManifestConfig | None = None
    repo_update_retries: RepoUpdateRetryConfig | None = None
    num_updates_per_repo_info_file: int | None = None
    max_concurrent_decodes: int | None = None

    _previous_file: ClassVar[str | None] = None

    @staticmethod
    def default() -> RepositoryConfig:
        """Return one where nothing is set."""
        return RepositoryConfig()

    @property
    def previous_file(self) -> str | None:
        """Carried along from what is stored; nothing reads it."""
        return self._previous_file

    def get_virtual_chunk_container(self, name: str) -> VirtualChunkContainer | None:
        """Return the container with this URL prefix."""
        return (self.virtual_chunk_containers or {}).get(name)

    def set_virtual_chunk_container(self, cont: VirtualChunkContainer) -> None:
        """Add a container, in place of those with its name or its prefix.

        Raises:
            InvalidConfigError: the prefix does not fit the store, or the name cannot be one; the
                configuration is as it was.
        """
        cont.to_native()
        others = {
            prefix: other
            for prefix, other in (self.virtual_chunk_containers or {}).items()
            if cont.name is None or other.name != cont.name
        }
        self.virtual_chunk_containers = others | {cont.url_prefix: cont}

    def clear_virtual_chunk_containers(self) -> None:
        """Remove all containers, also those that are stored with the repository."""
        self.virtual_chunk_containers = {}

    def merge(self, other: RepositoryConfig) -> RepositoryConfig:
        """Return this configuration with what is set in another laid over it.

        Raises:
            InvalidConfigError: a value of one of both cannot be stored.
        """
        return RepositoryConfig.from_native(native.merge(self.to_native(), other.to_native()))

    @override
    def _checked(self, name: str, value: object) -> object:
        if name != "virtual_chunk_containers" or value is None:
            return super()._checked(name, value)
        if not isinstance(value, dict):
            raise TypeError(
                f"RepositoryConfig.virtual_chunk_containers is of type {type(value).__name__}; "
                "allowed: dict or None."
            )
        return cast("dict[str, VirtualChunkContainer]", value)

    @override
    def _effective(self, name: str) -> object:
        if name == "virtual_chunk_containers" and self.virtual_chunk_containers:
            return Group(self.virtual_chunk_containers)
        return super()._effective(name)

    @override
    def to_native(self) -> Any:
        values = {name: to_native(getattr(self, name)) for name in self._names()}
        containers = self.virtual_chunk_containers
        if containers is not None:
            values["virtual_chunk_containers"] = to_native(list(containers.values()))
        return native.RepositoryConfig(**values, previous_file=self._previous_file)

    @classmethod
    @override
    def from_native(cls, value: object) -> Self:
        stored = cast("native.RepositoryConfig", value)
        simple = [name for name in cls._display_order if name != "virtual_chunk_containers"]
        made = cls(**{name: from_native(getattr(stored, name)) for name in simple})
        if stored.virtual_chunk_containers is not None:
            made.virtual_chunk_containers = {
                it.url_prefix: from_native(it) for it in stored.virtual_chunk_containers
            }
        if stored.previous_file is not None:
            object.__setattr__(made, "_previous_file", stored.previous_file)
        return made
