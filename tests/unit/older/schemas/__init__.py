"""The JSON schemas of the alpha's specification, and validating what a repository consists of."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_document", "check_objects"]


@cache
def _validator(name: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="validating needs jsonschema")
    text = (Path(__file__).parent / f"{name}.json").read_text("utf-8")
    return jsonschema.Draft7Validator(json.loads(text))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def check_document(name: str, data: bytes) -> None:
    """Raise unless a document is strict JSON and valid against a schema."""
    _validator(name).validate(json.loads(data, parse_constant=_no_constant))


def check_objects(objects: Mapping[str, bytes]) -> dict[str, int]:
    """Validate every document of a repository; return how many there are of each kind."""
    kinds = {"r": "reference", "s": "snapshot", "m": "manifest"}
    counts = dict.fromkeys((*kinds.values(), "other"), 0)
    for key, data in objects.items():
        kind = kinds.get(key.partition("/")[0])
        counts[kind or "other"] += 1
        if kind is not None:
            check_document(kind, data)
    return counts
