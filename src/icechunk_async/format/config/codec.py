"""The configuration to bytes and back: YAML in version 1, FlexBuffers in version 2.

Both hold the same document. A choice that carries a value is a tag in YAML and a map of one
entry in FlexBuffers.

Documents are read lenient in shape and strict in values. Unknown keys are passed over, and any key
may be missing or null. Unusable containers are skipped with a line in the log, as are splitting
rules over no chunk; any other value of a wrong type or out of range raises ``FormatError``, because
guessing would change how data are written.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async.errors import (
    FormatError,
    InvalidConfigError,
    InvalidInputError,
    UnsupportedSpecVersionError,
)
from icechunk_async.format.config.conditions import (
    ManifestPreloadCondition,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    PreloadAll,
    PreloadAlways,
    PreloadAny,
    PreloadName,
    PreloadNever,
    PreloadPath,
    PreloadRefs,
    SplitAll,
    SplitAny,
    SplitAnyArray,
    SplitDimCondition,
    SplitName,
    SplitPath,
    SplitSizes,
)
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
from icechunk_async.format.config.document import (
    Variant,
    as_json,
    is_null,
    read_boolean,
    read_choice,
    read_integer,
    read_list,
    read_map,
    read_pair,
    read_text,
    read_variant,
    wrong,
)
from icechunk_async.format.config.fields import Instance, Integer, Section
from icechunk_async.format.config.settings import RepositoryConfig, StorageSettings
from icechunk_async.format.json.flexbuffers import decode_flexbuffer
from icechunk_async.format.json.values import SignedInt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from icechunk_async.format.config.document import Document
    from icechunk_async.format.json.values import JSON

__all__ = [
    "config_from_json",
    "config_to_json",
    "decode_config",
    "encode_config",
    "splitting_from_json",
    "splitting_to_json",
]

_log = logging.getLogger(__name__)
_MAX_U32: Final = 2**32 - 1
_KEPT_BYTES: Final = 1 << 14
"""Longer configurations are decoded each time. Usual ones have about a kilobyte, and YAML takes
milliseconds: most of the time of opening a repository of version 1."""
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


def encode_config(config: RepositoryConfig, spec_version: int) -> bytes:
    """Write the configuration as ``config.yaml`` (version 1) or ``Repo.config`` (version 2).

    Every key is written, null where the field is unset, in the order of the official engine.
    Containers are in the order of their prefixes; the official engine's come in any.

    Raises:
        InvalidInputError: the version is neither 1 nor 2.
    """
    document = section_document(config)
    match spec_version:
        case 1:
            from icechunk_async.format.config.yaml import dump_yaml  # noqa: PLC0415 -- slow

            return dump_yaml(document)
        case 2:
            from icechunk_async.format.json.flexbuffers_writing import encode_flexbuffer  # noqa: PLC0415 -- needs NumPy

            return encode_flexbuffer(as_json(document))
        case _:
            raise InvalidInputError(
                f"spec version {spec_version} has no configuration format; use 1 or 2"
            )


def decode_config(data: bytes | memoryview, spec_version: int) -> RepositoryConfig:
    """Read the configuration from bytes that need not be trusted.

    Unknown keys are ignored and missing ones unset. Virtual chunk containers that cannot serve
    are skipped with a warning in the log, when this process first reads such bytes.

    Raises:
        FormatError: the bytes are damaged, or a value has a wrong type or is out of range.

    Cost: none for the bytes of a configuration that was read a short time ago.
    """
    if len(data) > _KEPT_BYTES:
        return _decode(data, spec_version)
    return _decode_or_recall(bytes(data), spec_version)


# Values are frozen, so that all who open such a repository can share one.
@lru_cache(maxsize=16)
def _decode_or_recall(data: bytes, spec_version: int) -> RepositoryConfig:
    return _decode(data, spec_version)


def _decode(data: bytes | memoryview, spec_version: int) -> RepositoryConfig:
    match spec_version:
        case 1:
            from icechunk_async.format.config.yaml import load_yaml  # noqa: PLC0415 -- slow

            return read_section(RepositoryConfig, load_yaml(data), "config")
        case 2:
            return read_section(RepositoryConfig, decode_flexbuffer(data), "config")
        case _:
            raise UnsupportedSpecVersionError(
                f"a configuration of spec version {spec_version} cannot be read; known are 1 and 2",
                found=spec_version,
            )


def config_to_json(config: RepositoryConfig) -> dict[str, JSON]:
    """Return the document that is stored: every key, null where the field is unset."""
    document = as_json(section_document(config))
    assert isinstance(document, dict)
    return document


def config_from_json(value: JSON) -> RepositoryConfig:
    """Read what ``config_to_json`` returns; unknown keys are ignored.

    Raises:
        FormatError: a value has a wrong type or is out of range.
    """
    return read_section(RepositoryConfig, value, "config")


def splitting_to_json(config: ManifestSplittingConfig) -> JSON:
    """Return the effective rules as commits that rewrite manifests record them.

    The value belongs under ``splitting_config`` in the property ``__icechunk``.
    """
    return as_json(split_sizes_document(config.effective_split_sizes))


def splitting_from_json(value: JSON) -> ManifestSplittingConfig:
    """Read what ``splitting_to_json`` returns.

    Raises:
        FormatError: the value has not the shape of rules.
    """
    return read_splitting(value, "splitting_config")


def read_section[S: Section](cls: type[S], value: object, where: str) -> S:
    """Read a map of fields; null, like an empty map, leaves all of them unset.

    Args:
        cls: the section.
        value: from YAML or FlexBuffers.
        where: what messages call it.

    Raises:
        FormatError: a field has a wrong type or is out of range.
    """
    # Unknown keys are passed over: a newer version may have added them, and they are lost if this
    # one saves.
    entries = read_map(value, where)
    found: dict[str, Any] = {}
    for spec in fields(cls):
        raw = entries.get(spec.name)
        if not is_null(raw):
            found[spec.name] = _field(spec.metadata["kind"], raw, f"{where}.{spec.name}")
    try:
        return cls(**found)
    except InvalidConfigError as error:
        raise FormatError(f"{where} cannot be used: {error.message}") from error


def _field(kind: Integer | Instance, raw: object, where: str) -> object:
    if isinstance(kind, Integer):
        return read_integer(raw, where)
    cls = kind.cls
    if cls is bool:
        return read_boolean(raw, where)
    if cls is str:
        return read_text(raw, where)
    if cls is tuple:
        return _containers(raw, where)
    if cls is ManifestPreloadCondition:
        return _preload(raw, where)
    if cls is ManifestSplittingConfig:
        return read_splitting(raw, where)
    if issubclass(cls, StrEnum):
        return read_choice(cls, raw, where)
    return read_section(cast("type[Section]", cls), raw, where)


def _regex(raw: object, where: str) -> str:
    return read_text(read_map(raw, where).get("regex"), f"{where}.regex")


def _preload(raw: object, where: str) -> ManifestPreloadCondition:
    name, value = read_variant(raw, where)
    match name:
        case "or" | "and":
            # Recursion is bounded by the depth of the document, `MAX_DEPTH`.
            inner = tuple(_preload(item, where) for item in read_list(value, where))
            return _combined(PreloadAny if name == "or" else PreloadAll, inner, where)
        case "path_matches":
            return PreloadPath(_regex(value, where))
        case "name_matches":
            return PreloadName(_regex(value, where))
        case "num_refs":
            return _num_refs(read_map(value, where), where)
        case "true":
            return PreloadAlways()
        case "false":
            return PreloadNever()
        case _:
            raise wrong(where, raw, "a known condition")


def _num_refs(bounds: Mapping[str, object], where: str) -> ManifestPreloadCondition:
    lowest = _bound(bounds.get("from"), f"{where}.from", "excluded")
    end = _bound(bounds.get("to"), f"{where}.to", "included")
    # "More than the largest count": no manifest has as many.
    if lowest is not None and lowest > _MAX_U32:
        return PreloadNever()
    return PreloadRefs(lowest, None if end is not None and end > _MAX_U32 else end)


def _bound(raw: object, where: str, one_further: str) -> int | None:
    """Read one end of a range; the kind ``one_further`` counts from the next integer."""
    if is_null(raw):
        return None
    name, value = read_variant(raw, where)
    if name == "unbounded":
        return None
    if name not in ("included", "excluded"):
        raise wrong(where, raw, "Included, Excluded or Unbounded")
    bound = read_integer(value, where)
    if not 0 <= bound <= _MAX_U32:
        raise wrong(where, raw, f"from 0 to {_MAX_U32}")
    return bound + (name == one_further)


def read_splitting(raw: object, where: str) -> ManifestSplittingConfig:
    """Read the splitting section, of a configuration or of a commit's properties.

    Raises:
        FormatError: it has not the shape of rules.
    """
    sizes = read_map(raw, where).get("split_sizes")
    if is_null(sizes):
        return ManifestSplittingConfig()
    rules: list[tuple[ManifestSplitCondition, tuple[tuple[SplitDimCondition, int], ...]]] = []
    for rule in read_list(sizes, f"{where}.split_sizes"):
        arrays, dimensions = read_pair(rule, where, "a pair of condition and sizes")
        spans = [_span(item, where) for item in read_list(dimensions, where)]
        kept = tuple((dimension, size) for dimension, size in spans if size)
        rules.append((_split(arrays, where), kept))
        if len(kept) < len(spans):
            _log.warning("%s: passed over a splitting rule with manifests of no chunk", where)
    try:
        return ManifestSplittingConfig(tuple(rules))
    except InvalidConfigError as error:
        raise FormatError(f"{where} cannot be used: {error.message}") from error


def _span(raw: object, where: str) -> tuple[SplitDimCondition, int]:
    if isinstance(raw, dict):
        entries = read_map(cast("object", raw), where)
        condition, num_chunks = entries.get("condition"), entries.get("num_chunks")
    else:
        # Versions before 1.0 wrote pairs.
        condition, num_chunks = read_pair(raw, where, "a map or pair of condition and num_chunks")
    return _dimension(condition, where), read_integer(num_chunks, where)


def _split(raw: object, where: str) -> ManifestSplitCondition:
    name, value = read_variant(raw, where)
    match name:
        case "or" | "and":
            inner = tuple(_split(item, where) for item in read_list(value, where))
            return _combined(SplitAny if name == "or" else SplitAll, inner, where)
        case "path_matches":
            return SplitPath(_regex(value, where))
        case "name_matches":
            return SplitName(_regex(value, where))
        case "any_array":
            return SplitAnyArray()
        case _:
            raise wrong(where, raw, "a known condition")


def _dimension(raw: object, where: str) -> SplitDimCondition:
    name, value = read_variant(raw, where)
    try:
        match name:
            case "axis":
                return ManifestSplitDimCondition.Axis(read_integer(value, where))
            case "dimension_name":
                return ManifestSplitDimCondition.DimensionName(read_text(value, where))
            case "any":
                return ManifestSplitDimCondition.Any()
            case _:
                raise wrong(where, raw, "Axis, DimensionName or Any")
    except InvalidConfigError as error:
        raise FormatError(f"{where} cannot be used: {error.message}") from error


def _combined[I, C](make: Callable[[tuple[I, ...]], C], inner: tuple[I, ...], where: str) -> C:
    try:
        return make(inner)
    except InvalidConfigError as error:
        raise FormatError(f"{where} cannot be used: {error.message}") from error


def _containers(raw: object, where: str) -> tuple[VirtualChunkContainer, ...]:
    kept: list[VirtualChunkContainer] = []
    prefixes: set[str] = set()
    names: set[str] = set()
    for place, item in enumerate(read_map(raw, where).values()):
        try:
            container = _container(read_map(item, where), where)
        # As the official engine does: a container that this version cannot serve must not close the
        # repository to those who read nothing from it.
        except (FormatError, InvalidConfigError) as error:
            _log.warning("%s: skipped entry %d: %s", where, place, error.message)
            continue
        if container.name in names or container.url_prefix in prefixes:
            _log.warning("%s: skipped entry %d: its name or prefix is taken", where, place)
            continue
        kept.append(container)
        prefixes.add(container.url_prefix)
        if container.name is not None:
            names.add(container.name)
    return tuple(kept)


def _container(entries: Mapping[str, object], where: str) -> VirtualChunkContainer:
    prefix = read_text(entries.get("url_prefix"), f"{where}.url_prefix")
    name = entries.get("name")
    return VirtualChunkContainer(
        # Versions before 1.0 wrote prefixes without the slash.
        url_prefix=prefix if prefix.endswith("/") else f"{prefix}/",
        store=_store(entries.get("store"), f"{where}.store"),
        name=None if is_null(name) else read_text(name, f"{where}.name"),
    )


def _store(raw: object, where: str) -> ObjectStoreConfig:
    name, value = read_variant(raw, where)
    match name:
        case "in_memory":
            return InMemoryStore()
        case "local_file_system":
            return LocalFileSystemStore(read_text(value, where))
        case "s3":
            return S3Store(read_section(S3Options, value, where))
        case "s3_compatible":
            return S3CompatibleStore(read_section(S3Options, value, where))
        case "tigris":
            return TigrisStore(read_section(S3Options, value, where))
        case "gcs":
            return GcsStore(_texts(read_map(value, where), where))
        case "azure":
            return AzureStore(_texts(read_map(value, where), where))
        case "http":
            entries = dict(read_map(value, where))
            headers = _texts(read_map(entries.pop("headers", None), where), where)
            return HttpStore(_texts(entries, where), headers)
        case _:
            raise wrong(where, raw, "a known kind of store")


def _texts(entries: Mapping[str, object], where: str) -> dict[str, str]:
    return {str(key): read_text(value, f"{where}.{key}") for key, value in entries.items()}


def section_document(section: Section) -> dict[str, Document]:
    """Return a section as a map of all its fields."""
    kinds = {spec.name: spec.metadata["kind"] for spec in fields(section)}
    document: dict[str, Document] = {}
    for name in _FILE_ORDER.get(type(section), kinds):
        value, kind = _value(getattr(section, name)), kinds[name]
        # FlexBuffers tell signed numbers from unsigned ones, and the file is to be that of the
        # official engine to the byte.
        if isinstance(value, int) and isinstance(kind, Integer) and kind.low < 0:
            value = SignedInt(value)
        document[name] = value
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
            return _preload_document(value)
        case Section():
            return section_document(value)
        case tuple():
            return _containers_document(cast("tuple[VirtualChunkContainer, ...]", value))
        case _:
            raise TypeError(f"{type(value).__name__} is no part of a configuration")


def _preload_document(condition: ManifestPreloadCondition) -> Document:
    match condition:
        case PreloadAny(conditions):
            return Variant("or", [_preload_document(item) for item in conditions])
        case PreloadAll(conditions):
            return Variant("and", [_preload_document(item) for item in conditions])
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
    """Return splitting rules as a section: pairs of a condition and its sizes."""
    rules: list[Document] = []
    for arrays, dimensions in sizes:
        spans: list[Document] = [
            {"condition": _dimension_document(dimension), "num_chunks": num_chunks}
            for dimension, num_chunks in dimensions
        ]
        rules.append([_split_document(arrays), spans])
    return {"split_sizes": rules}


def _split_document(condition: ManifestSplitCondition) -> Document:
    match condition:
        case SplitAny(conditions):
            return Variant("or", [_split_document(item) for item in conditions])
        case SplitAll(conditions):
            return Variant("and", [_split_document(item) for item in conditions])
        case SplitPath(regex):
            return Variant("path_matches", {"regex": regex})
        case SplitName(regex):
            return Variant("name_matches", {"regex": regex})
        case SplitAnyArray():
            return "any_array"
        case _:
            raise TypeError(f"{type(condition).__name__} has no stored form")


def _dimension_document(condition: SplitDimCondition) -> Document:
    match condition:
        case ManifestSplitDimCondition.Axis(axis):
            return Variant("Axis", axis)
        case ManifestSplitDimCondition.DimensionName(regex):
            return Variant("DimensionName", regex)
        case ManifestSplitDimCondition.Any():
            return "Any"


def _containers_document(containers: tuple[VirtualChunkContainer, ...]) -> Document:
    return {
        container.url_prefix: {
            "name": container.name,
            "url_prefix": container.url_prefix,
            "store": _store_document(container.store),
        }
        for container in containers
    }


def _store_document(store: ObjectStoreConfig) -> Document:
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
