"""``changes``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.cli.conftest import HOSTILE_MESSAGE, run

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Sample


def lines(*arguments: object) -> list[dict[str, Any]]:
    """Run the command and return its documents, one a line."""
    outcome = run("changes", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_cells_come_with_their_values(sample: Sample) -> None:
    """Only the one that differs, of all in its chunk."""
    assert lines(sample.path, "v1", "--level", "cell") == [
        {
            "snapshot_id": sample.tip,
            "what": "cell",
            "change": "changed",
            "path": "/small",
            "previous_path": None,
            "index": [0, 0],
            "before": 7,
            "after": 8,
        }
    ]
    shown = run("changes", sample.path, "v1", "main", "--level", "cell").stdout
    assert shown == "changed cell /small [0, 0]: 7 -> 8\n"


def test_chunks_and_nodes_are_listed(sample: Sample) -> None:
    """Nodes first, with chunks array by array."""
    found = lines(sample.path, sample.first, "v1")
    assert [(it["what"], it["change"], it["path"]) for it in found[:5]] == [
        ("group", "created", "/"),
        ("group", "created", "/deep"),
        ("array", "created", "/deep/large"),
        ("array", "created", "/outside"),
        ("array", "created", "/small"),
    ]
    assert all((it["what"], it["change"]) == ("chunk", "added") for it in found[5:])
    chunks = [(it["path"], it["index"]) for it in found[5:]]
    assert ("/small", [0, 1]) in chunks
    assert ("/deep/large", [1]) in chunks


def test_each_commit_can_be_told(sample: Sample) -> None:
    """With the snapshot that has the change; the net change is all of the last."""
    each = lines(sample.path, sample.first, "main", "--each-commit")
    assert {it["snapshot_id"] for it in each} == {sample.v1, sample.tip}
    assert {it["snapshot_id"] for it in lines(sample.path, sample.first)} == {sample.tip}


def test_a_limit_ends_it(sample: Sample) -> None:
    """In the middle of an array as well."""
    assert len(lines(sample.path, sample.first, "v1", "--limit", "6")) == 6
    assert len(lines(sample.path, sample.first, "v1", "--level", "cell", "--limit", "9")) == 9


@pytest.mark.parametrize("level", ["row", ""])
def test_a_wrong_level_is_wrong_usage(sample: Sample, level: str) -> None:
    """The choices are named."""
    outcome = run("changes", sample.path, "v1", "--level", level)
    assert outcome.exit_code == 2
    assert "cell" in outcome.stderr
    assert HOSTILE_MESSAGE not in outcome.stdout
