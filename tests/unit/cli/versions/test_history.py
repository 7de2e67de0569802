"""``init``, ``log``, ``show``, ``diff``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.conftest import HOSTILE_MESSAGE, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


@pytest.mark.parametrize("spec_version", [1, 2])
def test_init_creates_a_repository(tmp_path: Path, spec_version: int) -> None:
    """In the format version asked for; log then lists the first snapshot."""
    url = tmp_path / "new"
    created = run("init", url, "--spec-version", spec_version, "--json")
    assert created.exit_code == 0
    assert created.json["url"] == url.as_uri()
    assert created.json["spec_version"] == spec_version
    assert created.json["branch"] == "main"
    snapshots = run("log", url, "--json").json["snapshots"]
    assert [it["id"] for it in snapshots] == [created.json["snapshot_id"]]


def test_init_tells_what_it_did(tmp_path: Path) -> None:
    """It prints one sentence with version, place and branch."""
    outcome = run("init", tmp_path / "new")
    assert outcome.exit_code == 0
    assert "format version 2" in outcome.stdout
    assert (tmp_path / "new").as_uri() in outcome.stdout


def test_commands_work_over_memory() -> None:
    """Any storage URL will do; memory lives as long as the process."""
    assert run("init", "memory://command-line").exit_code == 0
    assert run("tag", "create", "memory://command-line", "start").exit_code == 0
    assert "start" in run("log", "memory://command-line").stdout


def test_log_lists_newest_first(sample: Sample) -> None:
    """With parents, times, messages, properties, and the branches and tags of each."""
    document = run("log", sample.path, "--json").json
    assert document["ref"] == "main"
    assert document["snapshot_id"] == sample.tip
    newest, filled, first = document["snapshots"]
    assert [newest["id"], filled["id"], first["id"]] == [sample.tip, sample.v1, sample.first]
    assert newest["parent_id"] == sample.v1
    assert first["parent_id"] is None
    assert newest["message"] == HOSTILE_MESSAGE
    assert filled["metadata"] == {"author": "Anna"}
    assert (newest["branches"], newest["tags"]) == (["main"], [])
    assert (filled["branches"], filled["tags"]) == (["dev"], ["v1"])
    assert datetime.fromisoformat(newest["written_at"]) >= datetime.fromisoformat(
        filled["written_at"]
    )


def test_log_shows_one_line_a_snapshot_without_control_characters(sample: Sample) -> None:
    """One line a snapshot; what a message holds is neither markup nor steers the terminal."""
    lines = run("log", sample.path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "SNAPSHOT",
        sample.tip,
        sample.v1,
        sample.first,
    ]
    assert r"Change one chunk [red]\x1b[31m" in lines[1]
    assert "dev, v1" in lines[2]


def test_log_stops_after_a_number(sample: Sample) -> None:
    """-n limits the list."""
    document = run("log", sample.path, "-n", 2, "--json").json
    assert [it["id"] for it in document["snapshots"]] == [sample.tip, sample.v1]


@pytest.mark.parametrize("ref", ["v1", "dev"])
def test_log_begins_at_a_ref(sample: Sample, ref: str) -> None:
    """A tag or another branch."""
    document = run("log", sample.path, ref, "--json").json
    assert [it["id"] for it in document["snapshots"]] == [sample.v1, sample.first]


def test_the_first_snapshot_is_shown_in_each_format(tmp_path: Path, spec: int) -> None:
    """In format 1 it has no transaction log, in format 2 an empty one; neither is asked for."""
    run("init", tmp_path / "new", "--spec-version", spec)
    shown = run("show", tmp_path / "new", "main", "--json").json
    assert shown["snapshot"]["parent_id"] is None
    assert shown["touched"] is None


def test_log_begins_at_a_snapshot(sample: Sample) -> None:
    """An id; also one in small letters."""
    document = run("log", sample.path, sample.v1.lower(), "--json").json
    assert document["snapshot_id"] == sample.v1


def test_log_begins_at_the_tip_of_a_time(sample: Sample) -> None:
    """The tip of the branch at that time; a time without offset is UTC."""
    filled = run("show", sample.path, "v1", "--json").json["snapshot"]
    for text in (filled["written_at"], filled["written_at"].removesuffix("+00:00")):
        document = run("log", sample.path, "--as-of", text, "--json").json
        assert document["snapshot_id"] == sample.v1


def test_show_tells_what_a_snapshot_touched(sample: Sample) -> None:
    """With the numbers of chunks, the box that they lie in, and the first of them."""
    document = run("show", sample.path, "v1", "--max-chunks", 1, "--json").json
    assert document["ref"] == "v1"
    assert document["snapshot"]["id"] == sample.v1
    touched = document["touched"]
    assert touched["new_groups"] == ["/", "/deep"]
    assert touched["new_arrays"] == ["/deep/large", "/outside", "/small"]
    assert touched["moved_nodes"] == []
    assert touched["updated_chunks"] == [
        {"path": "/deep/large", "count": 2, "bounds": [[0, 2]], "coords": [[0]]},
        {"path": "/outside", "count": 1, "bounds": [[0, 1]], "coords": [[0]]},
        {"path": "/small", "count": 2, "bounds": [[0, 1], [0, 2]], "coords": [[0, 0]]},
    ]


def test_show_the_first_snapshot(sample: Sample) -> None:
    """It has no parent, so it touched nothing."""
    document = run("show", sample.path, sample.first, "--json").json
    assert document["touched"] is None
    assert "it is the first" in run("show", sample.path, sample.first).stdout


def test_show_as_text(sample: Sample) -> None:
    """Properties and touched nodes, one a line."""
    text = run("show", sample.path, "v1", "--max-chunks", 1).stdout
    assert '"Anna"' in text
    assert "+ new array" in text
    assert "2 in [0:1, 0:2]: 0/0, ..." in text


def test_diff_tells_what_commits_touched(sample: Sample) -> None:
    """From the older to the newer; both may be any ref."""
    document = run("diff", sample.path, "v1", "main", "--json").json
    assert (document["from_ref"], document["from_snapshot_id"]) == ("v1", sample.v1)
    assert (document["to_ref"], document["to_snapshot_id"]) == ("main", sample.tip)
    assert document["touched"]["new_arrays"] == []
    assert document["touched"]["updated_chunks"] == [
        {"path": "/small", "count": 1, "bounds": [[0, 1], [0, 1]], "coords": [[0, 0]]}
    ]
    assert "/small" in run("diff", sample.path, "v1", "main").stdout


def test_diff_of_equal_refs_says_that_nothing_was_touched(sample: Sample) -> None:
    """Nothing was touched, and that is said."""
    assert "Nothing was touched." in run("diff", sample.path, "v1", "dev").stdout
