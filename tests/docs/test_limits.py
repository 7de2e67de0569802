"""The page of limits has the numbers of the code."""

from __future__ import annotations

import re

import pytest

from icechunk_async.config import RepositoryConfig
from icechunk_async.errors import InvalidInputError
from icechunk_async.format import envelope, zarr_document
from icechunk_async.format.config import yaml
from icechunk_async.format.json import values
from icechunk_async.format.manifest import MAX_RANK
from tests.docs.run_page import REPOSITORY


def _largest_inline_threshold() -> int:
    largest = 2**16 - 1
    RepositoryConfig(inline_chunk_threshold_bytes=largest)
    with pytest.raises(InvalidInputError):
        RepositoryConfig(inline_chunk_threshold_bytes=largest + 1)
    return largest


def test_limits_are_those_of_the_code() -> None:
    """Each row of the first table, in order."""
    page = (REPOSITORY / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d+) \|", page, re.MULTILINE)
    assert list(map(int, rows)) == [
        zarr_document._MAX_CHUNKS,
        zarr_document._MAX_LENGTH,
        MAX_RANK,
        envelope.MAX_PAYLOAD_BYTES,
        _largest_inline_threshold(),
        values.MAX_DEPTH,
        yaml._MAX_BYTES,
    ]
    assert f"{RepositoryConfig().effective_max_concurrent_requests} for each open" in page
