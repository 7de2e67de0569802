"""``branch`` and ``tag``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def test_branch_list_sorts_by_name_and_shows_tips(sample: Sample) -> None:
    """Branches are sorted by name and shown with their tips."""
    document = run("branch", "list", sample.path, "--json").json
    assert document["kind"] == "branch"
    found = [(it["name"], it["snapshot_id"]) for it in document["refs"]]
    assert found == [("dev", sample.v1), ("main", sample.tip)]
    assert set(document["refs"][0]) == {"name", "snapshot_id", "written_at", "message"}
    lines = run("branch", "list", sample.path).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["BRANCH", "dev", "main"]


def test_tag_list_shows_tags_with_their_snapshots(sample: Sample) -> None:
    """Tags are sorted by name and shown with their snapshots."""
    document = run("tag", "list", sample.path, "--json").json
    assert document["kind"] == "tag"
    assert [(it["name"], it["snapshot_id"]) for it in document["refs"]] == [("v1", sample.v1)]


def test_empty_list_prints_a_sentence(tmp_path: Path) -> None:
    """A sentence for people, an empty list in JSON."""
    run("init", tmp_path / "new")
    assert run("tag", "list", tmp_path / "new").stdout == "There are no tags.\n"
    assert run("tag", "list", tmp_path / "new", "--json").json == {"kind": "tag", "refs": []}


@pytest.mark.parametrize("kind", ["branch", "tag"])
def test_create_and_delete(sample: Sample, repository: Path, kind: str) -> None:
    """At any ref; deleting tells what it named."""
    created = run(kind, "create", repository, "new", sample.first, "--json").json
    assert created == {
        "action": "created",
        "kind": kind,
        "name": "new",
        "snapshot_id": sample.first,
        "previous_snapshot_id": None,
    }
    assert run("log", repository, "new", "--json").json["snapshot_id"] == sample.first
    deleted = run(kind, "delete", repository, "new", "--json").json
    assert deleted == created | {
        "action": "deleted",
        "snapshot_id": None,
        "previous_snapshot_id": sample.first,
    }
    assert run("log", repository, "new").exit_code == 1


@pytest.mark.parametrize("kind", ["branch", "tag"])
def test_create_at_main_unless_told_otherwise(sample: Sample, repository: Path, kind: str) -> None:
    """And says so."""
    text = run(kind, "create", repository, "new").stdout
    assert text == f"Created {kind} new at {sample.tip}.\n"
    assert run(kind, "delete", repository, "new").stdout == (
        f"Deleted {kind} new; it was at {sample.tip}.\n"
    )


def test_tag_create_takes_what_was_the_tip_at_a_time(sample: Sample, repository: Path) -> None:
    """A tag for what was the tip then."""
    moment = run("show", repository, "v1", "--json").json["snapshot"]["written_at"]
    created = run("tag", "create", repository, "then", "--as-of", moment, "--json").json
    assert created["snapshot_id"] == sample.v1


def test_branch_reset_moves_to_any_ref_and_tells_where_it_was(
    sample: Sample, repository: Path
) -> None:
    """To any ref; what it was before is told."""
    moved = run("branch", "reset", repository, "main", "v1", "--json").json
    assert moved == {
        "action": "reset",
        "kind": "branch",
        "name": "main",
        "snapshot_id": sample.v1,
        "previous_snapshot_id": sample.tip,
    }
    back = run("branch", "reset", repository, "main", sample.tip).stdout
    assert back == f"Reset branch main at {sample.tip}; it was at {sample.v1}.\n"


def test_a_branch_hides_a_tag_of_its_name(sample: Sample, repository: Path) -> None:
    """Branches are looked for first, as the help says."""
    run("tag", "create", repository, "dev", sample.first)
    assert run("log", repository, "dev", "--json").json["snapshot_id"] == sample.v1


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("branch", "create", "dev"), "branch-exists"),
        (("tag", "create", "v1"), "tag-exists"),
        (("branch", "delete", "main"), "invalid-ref-name"),
        (("branch", "delete", "none"), "branch-not-found"),
        (("tag", "delete", "none"), "tag-not-found"),
        (("branch", "reset", "none", "main"), "branch-not-found"),
        (("branch", "create", "new", "none"), "not-found"),
    ],
)
def test_refused_ref_changes_change_nothing(
    repository: Path, arguments: tuple[str, ...], kind: str
) -> None:
    """The exit code is 1 and the error's kind is printed. Branches and tags are unchanged."""
    before = run("branch", "list", repository).stdout + run("tag", "list", repository).stdout
    outcome = run(*arguments[:2], repository, *arguments[2:])
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith(f"Error ({kind}): ")
    after = run("branch", "list", repository).stdout + run("tag", "list", repository).stdout
    assert after == before
