"""`changes`, `diff-values` and `blame`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.cli.conftest import HOSTILE_MESSAGE, run

if TYPE_CHECKING:
    from pathlib import Path

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


def test_blame_lists_commits_with_their_chunks(repository: Path, sample: Sample) -> None:
    """Newest first, each with how many chunks it wrote last."""
    document = json.loads(run("tree", repository, "--json").stdout)
    path = next(it["path"] for it in document["nodes"] if it.get("shape"))
    found = run("blame", repository, path, "--json").json
    assert {it["snapshot_id"] for it in found["commits"]} <= {sample.v1, sample.tip}
    assert sum(it["chunks"] for it in found["commits"]) > 0
    assert "CHUNKS" in run("blame", repository, path).stdout
    assert run("blame", repository, "nowhere").exit_code == 1


@pytest.mark.parametrize("dark", [(), ("--dark",)])
def test_changes_and_authors_are_drawn(sample: Sample, tmp_path: Path, dark: tuple[str]) -> None:
    """As PNG; a file that cannot be written is named."""
    pytest.importorskip("matplotlib", reason="pictures need the extra demo")
    path = run("diff-values", sample.path, "v1", "main", "--json").json["arrays"][0]["path"]
    for number, command in enumerate(
        (("diff-values", sample.path, "v1"), ("blame", sample.path, path))
    ):
        file = tmp_path / f"{number}.png"
        assert run(*command, "--png", file, *dark).exit_code == 0
        assert file.read_bytes().startswith(b"\x89PNG")
        refused = run(*command, "--png", tmp_path / "none" / "x.png")
        assert refused.exit_code == 1
        assert "cannot be written" in " ".join(refused.stderr.split())


def test_values_that_changed_are_counted(sample: Sample) -> None:
    """A row for each array; with --json numbers; --path takes some of them."""
    document = run("diff-values", sample.path, "v1", "main", "--json").json
    assert (document["from_ref"], document["to_ref"]) == ("v1", "main")
    assert document["arrays"]
    for array in document["arrays"]:
        assert 0 <= array["changed"] <= array["cells"]
        assert len(array["first"]) == min(array["changed"], 10)
    changed = next(it for it in document["arrays"] if it["changed"])
    shown = run("diff-values", sample.path, "v1").stdout
    assert changed["path"] in shown
    assert f"{changed['changed']:,}" in shown
    one = run("diff-values", sample.path, "v1", "--path", changed["path"], "--json").json
    assert one["arrays"] == [changed]
    assert run("diff-values", sample.path, "main", "main").stdout == "No values changed.\n"
    assert run("diff-values", sample.path, "nobody").exit_code == 1
