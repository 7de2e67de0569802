"""The configuration of a repository: compression, caching, manifests, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, override

from icechunk_async.format import config as native
from icechunk_async.sync.official.display import Choice, Group, public
from icechunk_async.sync.official.mirrors import from_native, mirrors, to_native
from icechunk_async.sync.official.sections import Section

if TYPE_CHECKING:
    from icechunk_async.sync.official.conditions import (
        AnyDim,
        ManifestPreloadCondition,
        ManifestSplitCondition,
        SplitSizesDict,
    )
    from icechunk_async.sync.official.containers import VirtualChunkContainer
    from icechunk_async.sync.official.sections import RepoUpdateRetryConfig, StorageSettings

    type SplitSizes = Sequence[tuple[ManifestSplitCondition, Sequence[tuple[AnyDim, int]]]]

__all__ = [
    "CachingConfig",
    "CompressionAlgorithm",
    "CompressionConfig",
    "ManifestConfig",
    "ManifestPreloadConfig",
    "ManifestSplittingConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
    "RepositoryConfig",
]


@mirrors(native.CompressionAlgorithm)
@public("config")
class CompressionAlgorithm(Choice):
    """Compression of metadata files."""

    Zstd = 0

    @staticmethod
    def default() -> CompressionAlgorithm:
        """Return zstd."""
        return CompressionAlgorithm.Zstd


class CompressionConfig(Section, of=native.CompressionConfig):
    algorithm: CompressionAlgorithm | None = None
    level: int | None = None

    @staticmethod
    def default() -> CompressionConfig:
        """Return a section without values."""
        return CompressionConfig()


class CachingConfig(Section, of=native.CachingConfig):
    num_snapshot_nodes: int | None = None
    num_chunk_refs: int | None = None
    num_transaction_changes: int | None = None
    num_bytes_attributes: int | None = None
    num_bytes_chunks: int | None = None

    @staticmethod
    def default() -> CachingConfig:
        """Return a section without values."""
        return CachingConfig()


class ManifestPreloadConfig(Section, of=native.ManifestPreloadConfig):
    _shown_as_is: ClassVar = frozenset({"preload_if"})

    max_total_refs: int | None = None
    preload_if: ManifestPreloadCondition | None = None
    max_arrays_to_scan: int | None = None


class ManifestVirtualChunkLocationCompressionConfig(
    Section, of=native.ManifestVirtualChunkLocationCompressionConfig
):
    min_num_chunks: int | None = None
    dictionary_max_training_samples: int | None = field(default=None, kw_only=True)
    dictionary_max_size_bytes: int | None = field(default=None, kw_only=True)
    compression_level: int | None = field(default=None, kw_only=True)


class ManifestSplittingConfig(Section, of=native.ManifestSplittingConfig):
    """The division of an array's references among manifests.

    Rules are pairs: a condition on arrays, and a sequence of pairs of a condition on dimensions
    and a number of chunks.
    """

    _shown_as_is: ClassVar = frozenset({"split_sizes"})

    split_sizes: SplitSizes | None = None

    @staticmethod
    def from_dict(split_sizes: SplitSizesDict) -> ManifestSplittingConfig:
        """Make rules from nested dicts, in their order."""
        return ManifestSplittingConfig(
            tuple((arrays, tuple(sizes.items())) for arrays, sizes in split_sizes.items())
        )

    def to_dict(self) -> SplitSizesDict:
        """Return the rules as nested dicts; of equal conditions the last remains.

        Raises:
            TypeError: there are no rules.
        """
        return {arrays: dict(sizes) for arrays, sizes in cast("SplitSizes", self.split_sizes)}

    @override
    def _checked(self, name: str, value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(
                f"ManifestSplittingConfig.split_sizes is of type {type(value).__name__}; allowed: "
                "pairs of ManifestSplitCondition and sizes, or None."
            )
        rules = cast("SplitSizes", value)
        # Lists of pairs, as the official property returns them, whatever sequences were given.
        return [(arrays, list(sizes)) for arrays, sizes in rules]


class ManifestConfig(Section, of=native.ManifestConfig):
    preload: ManifestPreloadConfig | None = None
    splitting: ManifestSplittingConfig | None = None
    virtual_chunk_location_compression: ManifestVirtualChunkLocationCompressionConfig | None = None
    max_concurrent_manifest_fetches_during_commit: int | None = None

    @override
    def _effective(self, name: str) -> object:
        if name == "splitting" and self.splitting is None:
            rules = native.ManifestSplittingConfig(native.DEFAULT_SPLIT_SIZES)
            return ManifestSplittingConfig.from_native(rules)
        return super()._effective(name)


class RepositoryConfig(Section, of=native.RepositoryConfig):
    """The configuration of a repository; a field that is None has its default.

    `virtual_chunk_containers` holds the containers by their URL prefix.
    """

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
    _previous_file: ClassVar[str | None] = None

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

    @staticmethod
    def default() -> RepositoryConfig:
        """Return a configuration without values."""
        return RepositoryConfig()

    @property
    def previous_file(self) -> str | None:
        """Carried along from the stored configuration; not used."""
        return self._previous_file

    # The argument is a prefix, and is called `name` by the official package.
    def get_virtual_chunk_container(self, name: str) -> VirtualChunkContainer | None:
        """Return the container with this URL prefix."""
        return (self.virtual_chunk_containers or {}).get(name)

    def set_virtual_chunk_container(self, cont: VirtualChunkContainer) -> None:
        """Add a container, in place of those with its name or its prefix.

        Raises:
            InvalidConfigError: the prefix does not fit the store, or the name is invalid; the
                configuration is unchanged.
        """
        # The engine's class checks it, before anything is changed.
        cont.to_native()
        others = {
            prefix: other
            for prefix, other in (self.virtual_chunk_containers or {}).items()
            if cont.name is None or other.name != cont.name
        }
        # The official mapping is by prefix. A name may be given once only, so its old holder goes.
        self.virtual_chunk_containers = others | {cont.url_prefix: cont}

    def clear_virtual_chunk_containers(self) -> None:
        """Remove all containers, also those that are stored with the repository."""
        self.virtual_chunk_containers = {}

    def merge(self, other: RepositoryConfig) -> RepositoryConfig:
        """Return this configuration with the values of another laid over it.

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
            # Not a field: the official constructor has none of this name.
            object.__setattr__(made, "_previous_file", stored.previous_file)
        return made
