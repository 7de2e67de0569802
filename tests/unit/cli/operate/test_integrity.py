"""`verify` and `repair` from the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from icechunk_async.upkeep import VerifyReport
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def test_exit_code_says_healthy_damaged_or_could_not_look(
    sample: Sample, repository: Path, tmp_path: Path
) -> None:
    """0, 1 and 2; the JSON document is a report."""
    fine = run("verify", repository, "--json")
    assert fine.exit_code == 0
    report = VerifyReport.from_json(fine.json)
    assert (report.level, report.snapshots, report.is_healthy) == ("decode", 3, True)
    shown = run("verify", repository, "--level", "structure").stdout
    assert "Not looked at: whether the objects exist that manifests refer to" in shown
    assert shown.rstrip().endswith("Level structure: Nothing that was looked at is damaged.")
    (repository / "transactions" / sample.tip).unlink()
    damaged = run("verify", repository)
    assert damaged.exit_code == 1
    assert f"missing transaction log: transactions/{sample.tip}" in damaged.stdout
    assert run("verify", tmp_path / "nothing").exit_code == 2
    assert run("verify", repository, "--ref", "nobody").exit_code == 2


def test_damaged_repo_object_is_damage_and_not_a_failure(repository: Path) -> None:
    """The repository cannot be opened; the command says why, with exit code 1."""
    stored = repository / "repo"
    for left in (stored.read_bytes()[:50], None):
        stored.unlink()
        if left is not None:
            stored.write_bytes(left)
        done = run("verify", repository, "--json")
        assert done.exit_code == 1
        (found,) = done.json["findings"]
        assert (found["kind"], found["location"]) == ("repo", "repo")
        assert "cannot be opened" in done.json["not_looked_at"][0]["what"]


def test_verify_takes_a_share_or_a_number_and_refuses_other_files_as_state(
    repository: Path, tmp_path: Path
) -> None:
    """A share, a number, nonsense; a state is removed at the end."""
    state = tmp_path / "state.json"
    for sample in ("50%", "0.5", "1"):
        done = run("verify", repository, "--sample", sample, "--state", state, "--json")
        assert (done.exit_code, state.exists()) == (0, False)
    assert run("verify", repository, "--sample", "some").exit_code == 2
    state.write_text(json.dumps({"schema": "mine"}), "utf-8")
    refused = run("verify", repository, "--state", state)
    assert refused.exit_code == 2
    assert "not the state of a verification" in " ".join(refused.stderr.split())
    state.write_bytes(b"\xff\xfe")
    assert run("verify", repository, "--state", state).exit_code == 2
    for place in (tmp_path / "nowhere" / "state.json", tmp_path):
        refused = run("verify", repository, "--state", place)
        assert refused.exit_code == 2  # 1 would be damage
        assert "cannot be kept at" in " ".join(refused.stderr.split())


def test_repair_shows_its_plan_and_applies_it_when_told(
    sample: Sample, repository: Path, tmp_path: Path
) -> None:
    """A log is made anew, from a report or without one; then nothing is left to repair."""
    log = repository / "transactions" / sample.tip
    log.write_bytes(b"damaged")
    report = tmp_path / "report.json"
    report.write_text(run("verify", repository, "--json").stdout, encoding="utf-8")
    planned = run("repair", repository, "--report", report, "--json").json
    assert planned["applied"] is False
    assert [(it["action"], it["target"]) for it in planned["steps"]] == [
        ("rebuild log", f"transactions/{sample.tip}")
    ]
    assert log.read_bytes() == b"damaged"
    done = run("repair", repository, "--apply")
    assert done.exit_code == 0
    assert "1 step(s) done." in done.stdout
    assert run("verify", repository).exit_code == 0
    assert "There is nothing to repair." in run("repair", repository).stdout
    assert run("repair", repository, "--report", tmp_path / "none").exit_code == 2
    assert run("repair", repository, "--moved", "x").exit_code == 2


def test_repair_takes_a_report_or_a_level(repository: Path, tmp_path: Path) -> None:
    """The level of a report is that which it was made at; another one would be ignored."""
    report = tmp_path / "report.json"
    report.write_text(run("verify", repository, "--json").stdout, encoding="utf-8")
    refused = run("repair", repository, "--report", report, "--level", "decode")
    assert refused.exit_code == 2
    assert "Leave one of them out" in " ".join(refused.stderr.replace("│", "").split())
    assert run("repair", repository, "--level", "existence").exit_code == 0
    assert run("repair", repository, "--report", report).exit_code == 0


def test_repair_restores_the_repo_object(repository: Path) -> None:
    """From its newest backup, when told."""
    run("tag", "create", repository, "newest", "main")
    (repository / "repo").unlink()
    shown = run("repair", repository).stdout
    assert "restore repo repo: from 'overwritten/repo." in shown
    assert not (repository / "repo").exists()
    done = run("repair", repository, "--apply")
    assert done.exit_code == 0
    assert "1 step(s) done. Repair again" in done.stdout
    assert run("verify", repository).exit_code == 0


@pytest.mark.parametrize("left", [None, b"damaged"])
def test_repair_without_a_backup_of_the_repo_object_says_so(
    repository: Path, left: bytes | None
) -> None:
    """It does not advise to create a repository where one was; a place without one is refused."""
    for it in (repository / "overwritten").iterdir():
        it.unlink()
    (repository / "repo").unlink()
    if left is not None:
        (repository / "repo").write_bytes(left)
    done = run("repair", repository, "--apply")
    assert done.exit_code == 1
    assert "Not repairable" in done.stdout
    assert "Restore the repository from a backup." in " ".join(done.stdout.split())
    assert "nothing to repair" not in done.stdout
    missing = run("repair", repository / "nowhere", "--apply")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "There is no Icechunk repository" in " ".join(missing.stderr.split())
