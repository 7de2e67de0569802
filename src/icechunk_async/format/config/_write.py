"""The configuration as a document: every key present, in the order of the official engine."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final, cast

from icechunk_async.format.config._fields import Integer, Section
from icechunk_async.format.config._yaml import Document, Variant
from icechunk_async.format.config.containers import (
    AzureStore,
    GcsStore,
    HttpStore,
    InMemoryStore,
    LocalFileSystemStore,
    ObjectStoreConfig,
    S3CompatibleStore,
    S3Options,
    S3Store,
    TigrisStore,
    VirtualChunkContainer,
)
from icechunk_async.format.config.preload import (
    ManifestPreloadCondition,
    PreloadAll,
    PreloadAlways,
    PreloadAny,
    PreloadName,
    PreloadNever,
    PreloadPath,
    PreloadRefs,
)
from icechunk_async.format.config.repository_config import RepositoryConfig
from icechunk_async.format.config.settings import StorageSettings
from icechunk_async.format.config.splitting import (
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    SplitAll,
    SplitAny,
    SplitAnyArray,
    SplitDimCondition,
    SplitName,
    SplitPath,
    SplitSizes,
)
from icechunk_async.format.flexbuffers import SignedInt

if TYPE_CHECKING:
    from icechunk_async.format.values import JSON

__all__ = ["as_json", "section_document", "split_sizes_document"]

# Where the stored order is not that of the official constructors, which the classes keep.
_FILE_ORDER: Final[dict[type[Section], tuple[str, ...]]] = {
    RepositoryConfig: (
        "inline_chunk_threshold_bytes",
        "get_partial_values_concurrency",
        "compression",
        "max_concurrent_requests",
        "max_concurrent_decodes",
        "caching",
        "storage",
        "virtual_chunk_containers",
        "manifest",
        "previous_file",
        "repo_update_retries",
        "num_updates_per_repo_info_file",
    ),
    StorageSettings: (
        "concurrency",
        "retries",
        "timeouts",
        "unsafe_use_conditional_update",
        "unsafe_use_conditional_create",
        "unsafe_use_metadata",
        "storage_class",
        "metadata_storage_class",
        "chunks_storage_class",
        "minimum_size_for_multipart_upload",
    ),
    S3Options: (
        "region",
        "endpoint_url",
        "anonymous",
        "allow_http",
        "force_path_style",
        "network_stream_timeout_seconds",
        "requester_pays",
        "checksum_algorithm",
    ),
}


def section_document(section: Section) -> dict[str, Document]:
    """Answer a section as a map of all its fields."""
    kinds = {spec.name: spec.metadata["kind"] for spec in fields(section)}
    document: dict[str, Document] = {}
    for name in _FILE_ORDER.get(type(section), kinds):
        value, kind = _value(getattr(section, name)), kinds[name]
        if isinstance(value, int) and isinstance(kind, Integer) and kind.low < 0:
            value = SignedInt(value)
        document[name] = value
    return document


def as_json(document: Document) -> JSON:
    """Answer the document without tags: a choice becomes a map of one entry."""
    match document:
        case Variant(name, value):
            return {name: as_json(value)}
        case dict():
            return {key: as_json(value) for key, value in document.items()}
        case list():
            return [as_json(item) for item in document]
        case _:
            return document


def _value(value: object) -> Document:
    match value:
        case None | bool() | int():
            return value
        case str():
            # Also of the enumerations, whose members are text.
            return str(value)
        case ManifestSplittingConfig():
            sizes = value.split_sizes
            return {"split_sizes": None} if sizes is None else split_sizes_document(sizes)
        case ManifestPreloadCondition():
            return _preload(value)
        case Section():
            return section_document(value)
        case tuple():
            return _containers(cast("tuple[VirtualChunkContainer, ...]", value))
        case _:
            raise TypeError(f"{type(value).__name__} is no part of a configuration")


def _preload(condition: ManifestPreloadCondition) -> Document:
    match condition:
        case PreloadAny(conditions):
            return Variant("or", [_preload(item) for item in conditions])
        case PreloadAll(conditions):
            return Variant("and", [_preload(item) for item in conditions])
        case PreloadPath(regex):
            return Variant("path_matches", {"regex": regex})
        case PreloadName(regex):
            return Variant("name_matches", {"regex": regex})
        case PreloadRefs(from_refs, to_refs):
            return Variant(
                "num_refs",
                {
                    "from": "Unbounded" if from_refs is None else Variant("Included", from_refs),
                    "to": "Unbounded" if to_refs is None else Variant("Excluded", to_refs),
                },
            )
        case PreloadAlways():
            return "true"
        case PreloadNever():
            return "false"
        case _:
            raise TypeError(f"{type(condition).__name__} has no stored form")


def split_sizes_document(sizes: SplitSizes) -> dict[str, Document]:
    """Answer splitting rules as a section: pairs of a condition and its sizes."""
    rules: list[Document] = []
    for arrays, dimensions in sizes:
        spans: list[Document] = [
            {"condition": _dimension(dimension), "num_chunks": num_chunks}
            for dimension, num_chunks in dimensions
        ]
        rules.append([_split(arrays), spans])
    return {"split_sizes": rules}


def _split(condition: ManifestSplitCondition) -> Document:
    match condition:
        case SplitAny(conditions):
            return Variant("or", [_split(item) for item in conditions])
        case SplitAll(conditions):
            return Variant("and", [_split(item) for item in conditions])
        case SplitPath(regex):
            return Variant("path_matches", {"regex": regex})
        case SplitName(regex):
            return Variant("name_matches", {"regex": regex})
        case SplitAnyArray():
            return "any_array"
        case _:
            raise TypeError(f"{type(condition).__name__} has no stored form")


def _dimension(condition: SplitDimCondition) -> Document:
    match condition:
        case ManifestSplitDimCondition.Axis(axis):
            return Variant("Axis", axis)
        case ManifestSplitDimCondition.DimensionName(regex):
            return Variant("DimensionName", regex)
        case ManifestSplitDimCondition.Any():
            return "Any"


def _containers(containers: tuple[VirtualChunkContainer, ...]) -> Document:
    return {
        container.url_prefix: {
            "name": container.name,
            "url_prefix": container.url_prefix,
            "store": _store(container.store),
        }
        for container in containers
    }


def _store(store: ObjectStoreConfig) -> Document:
    match store:
        case InMemoryStore():
            return "in_memory"
        case LocalFileSystemStore(path):
            return Variant("local_file_system", path)
        case S3Store(options):
            return Variant("s3", section_document(options))
        case S3CompatibleStore(options):
            return Variant("s3_compatible", section_document(options))
        case TigrisStore(options):
            return Variant("tigris", section_document(options))
        case GcsStore(options):
            return Variant("gcs", dict(options))
        case AzureStore(options):
            return Variant("azure", dict(options))
        case HttpStore(options, headers):
            entries: dict[str, Document] = dict(options)
            if headers:
                entries["headers"] = dict(headers)
            return Variant("http", entries)
