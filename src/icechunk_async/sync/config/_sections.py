"""Compression, caching, and how manifests are read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, override

from icechunk_async.format import config as native
from icechunk_async.sync._display import Choice, public
from icechunk_async.sync._mirrors import mirrors
from icechunk_async.sync._section import Section
from icechunk_async.sync.config._splitting import ManifestSplittingConfig

if TYPE_CHECKING:
    from icechunk_async.sync.config._conditions import ManifestPreloadCondition

__all__ = [
    "CachingConfig",
    "CompressionAlgorithm",
    "CompressionConfig",
    "ManifestConfig",
    "ManifestPreloadConfig",
    "ManifestVirtualChunkLocationCompressionConfig",
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


@public("config")
@dataclass(repr=False)
class CompressionConfig(Section):
    """How metadata files are compressed; chunks are the business of Zarr's codecs.

    Attributes:
        algorithm: zstd.
        level: zstd level (3).
    """

    native_class: ClassVar = native.CompressionConfig

    algorithm: CompressionAlgorithm | None = None
    level: int | None = None

    @staticmethod
    def default() -> CompressionConfig:
        """Return one where nothing is set."""
        return CompressionConfig()


@public("config")
@dataclass(repr=False)
class CachingConfig(Section):
    """How much is kept in memory; 0 keeps nothing.

    Attributes:
        num_snapshot_nodes: nodes of snapshots (500,000).
        num_chunk_refs: chunk references of manifests (15,000,000).
        num_transaction_changes: changes of transaction logs (0).
        num_bytes_attributes: bytes of attributes (0).
        num_bytes_chunks: bytes of chunks (0).
    """

    native_class: ClassVar = native.CachingConfig

    num_snapshot_nodes: int | None = None
    num_chunk_refs: int | None = None
    num_transaction_changes: int | None = None
    num_bytes_attributes: int | None = None
    num_bytes_chunks: int | None = None

    @staticmethod
    def default() -> CachingConfig:
        """Return one where nothing is set."""
        return CachingConfig()


@public("config")
@dataclass(repr=False)
class ManifestPreloadConfig(Section):
    """How much a session fetches before it is asked for.

    Attributes:
        max_total_refs: chunk references preloaded by one session (10,000).
        preload_if: which manifests (small ones of arrays named like coordinates).
        max_arrays_to_scan: arrays looked at in search of such manifests (50).
    """

    native_class: ClassVar = native.ManifestPreloadConfig
    _shown_as_is: ClassVar = frozenset({"preload_if"})

    max_total_refs: int | None = None
    preload_if: ManifestPreloadCondition | None = None
    max_arrays_to_scan: int | None = None


@public("config")
@dataclass(repr=False)
class ManifestVirtualChunkLocationCompressionConfig(Section):
    """When and how the locations of virtual chunks are compressed; format version 2 only.

    Attributes:
        min_num_chunks: virtual chunks in a manifest from which it is worth while (1000).
        dictionary_max_training_samples: locations that the dictionary learns from (100).
        dictionary_max_size_bytes: size of the dictionary (2048).
        compression_level: zstd level (3).
    """

    native_class: ClassVar = native.ManifestVirtualChunkLocationCompressionConfig

    min_num_chunks: int | None = None
    dictionary_max_training_samples: int | None = field(default=None, kw_only=True)
    dictionary_max_size_bytes: int | None = field(default=None, kw_only=True)
    compression_level: int | None = field(default=None, kw_only=True)


@public("config")
@dataclass(repr=False)
class ManifestConfig(Section):
    """How manifests are read and written.

    Attributes:
        preload: which are fetched before they are needed.
        splitting: how the references of an array are divided among them.
        virtual_chunk_location_compression: how locations are compressed.
        max_concurrent_manifest_fetches_during_commit: manifests rewritten at a time (1).
    """

    native_class: ClassVar = native.ManifestConfig

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
