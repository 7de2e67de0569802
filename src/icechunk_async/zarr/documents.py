"""Metadata documents of arrays as snapshots hold them.

What a store writes was parsed before. What a snapshot holds was written by anybody, and may be
damaged.
"""

from __future__ import annotations

import json
from typing import Any

from icechunk_async.errors import FormatError, InvalidMetadataError
from icechunk_async.format.json.values import is_object
from icechunk_async.format.zarr_document import parse_document

__all__ = ["array_members"]


def array_members(document: bytes, path: str, rank: int) -> dict[str, Any]:
    """Return the members of the document of an array.

    Args:
        document: its ``zarr.json``.
        path: the array, for messages.
        rank: the axes that the snapshot lists beside the document.

    Raises:
        FormatError: it is no document of an array of this rank, with a map of attributes.
    """
    damaged = FormatError(
        f"The metadata document of {path!r} is not that of an array of {rank} axes with a map of "
        "attributes. The repository is damaged."
    )
    try:
        found = parse_document(document, path).array
    except InvalidMetadataError as error:
        raise damaged from error
    if found is None or len(found.dimensions) != rank:
        raise damaged
    members: dict[str, Any] = json.loads(document)
    if not is_object(members.get("attributes") or {}):
        raise damaged
    return members
