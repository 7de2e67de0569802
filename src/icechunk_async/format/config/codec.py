"""The configuration to bytes and back: YAML in version 1, FlexBuffers in version 2.

Both hold the same document. A choice that carries a value is a tag in YAML and a map of one
entry in FlexBuffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidInputError, UnsupportedSpecVersionError
from icechunk_async.format.config.documents import (
    as_json,
    read_section,
    read_splitting,
    section_document,
    split_sizes_document,
)
from icechunk_async.format.config.settings import RepositoryConfig
from icechunk_async.format.json.flexbuffers import decode_flexbuffer

if TYPE_CHECKING:
    from icechunk_async.format.config.conditions import ManifestSplittingConfig
    from icechunk_async.format.json.values import JSON

__all__ = [
    "config_from_json",
    "config_to_json",
    "decode_config",
    "encode_config",
    "splitting_from_json",
    "splitting_to_json",
]


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
    are skipped with a warning in the log.

    Raises:
        FormatError: the bytes are damaged, or a value has a wrong type or is out of range.
    """
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
    """Read what ``config_to_json`` answers; unknown keys are ignored.

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
    """Read what ``splitting_to_json`` answers.

    Raises:
        FormatError: the value has not the shape of rules.
    """
    return read_splitting(value, "splitting_config")
