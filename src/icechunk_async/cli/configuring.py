"""The configuration as one JSON document, and changing values in it by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidInputError
from icechunk_async.format.config import config_from_json, config_to_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.cli.options import OptionPair
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.metadata import JSON

__all__ = ["as_document", "with_values"]


def as_document(config: RepositoryConfig) -> dict[str, JSON]:
    """Answer the document that is stored for a configuration."""
    return config_to_json(config)


def with_values(config: RepositoryConfig, values: Iterable[OptionPair]) -> RepositoryConfig:
    """Answer a configuration with other values at some paths, such as ``manifest.preload``.

    Raises:
        InvalidInputError: there is no such setting.
        FormatError: a value is not what the setting takes.
    """
    for path, value in values:
        document = config_to_json(config)
        place = document
        *sections, name = path.split(".")
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            below = place[section]
            if not isinstance(below, dict):
                raise _unknown(path)
            place = below
        place[name] = value  # type: ignore[assignment] # it was read from JSON
        config = config_from_json(document)
        if not _has(config_to_json(config), [*sections, name], set_=value is not None):
            raise _unknown(path)
    return config


def _has(document: JSON, names: list[str], *, set_: bool) -> bool:
    """Tell whether a setting was understood: what is unknown is left out when it is read."""
    for name in names:
        if not isinstance(document, dict) or name not in document:
            return not set_ and document is None
        document = document[name]
    return document is not None or not set_


def _unknown(path: str) -> InvalidInputError:
    return InvalidInputError(
        f"The configuration has no setting {path!r}. 'config' without --set shows them all."
    )
