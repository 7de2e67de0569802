"""``copy`` and ``sync``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def test_copy_makes_a_backup_and_refuses_one_that_has_commits(
    sample: Sample, repository: Path, tmp_path: Path
) -> None:
    """A copy opens; a second run finds nothing to do; a copy with commits is refused."""
    target = tmp_path / "backup"
    first = run("copy", sample.path, target, "--destination-option", "durability=none", "--json")
    assert first.json["objects_copied"] > 10
    assert first.json["objects_skipped"] == 0
    assert run("log", target, "--json").json == run("log", sample.path, "--json").json
    assert "was up to date." in run("copy", sample.path, target).stdout
    run("tag", "create", target, "mine", "main")
    run("tag", "create", repository, "v2", "main")
    refused = run("copy", repository, target)
    assert refused.exit_code == 1
    assert "tag 'mine' was created" in " ".join(refused.stderr.split())


def test_copy_to_itself_is_refused(sample: Sample, tmp_path: Path) -> None:
    """It is no backup, and is not called up to date; nor is a copy that is copied to itself."""
    target = tmp_path / "backup"
    run("copy", sample.path, target)
    for place in (sample.path, target):
        for command in ("copy", "sync"):
            refused = run(command, place, place)
            assert refused.exit_code == 1
            assert "is the repository that is to be copied" in " ".join(refused.stderr.split())


def test_copy_into_itself_is_refused(sample: Sample, tmp_path: Path) -> None:
    """A folder of the repository cannot hold a copy; one beside it with a longer name can."""
    before = sorted(sample.path.rglob("*"))
    for more in ([], ["--as-zarr"]):
        refused = run("copy", sample.path, sample.path / "chunks" / "copy", *more)
        assert refused.exit_code == 1
        assert "lies within the repository" in " ".join(refused.stderr.split())
    assert sorted(sample.path.rglob("*")) == before
    assert run("copy", sample.path, tmp_path / f"{sample.path.name}-2").exit_code == 0


def test_copy_takes_only_the_refs_and_the_time_it_is_given(sample: Sample, tmp_path: Path) -> None:
    """By name, and from a snapshot, a time or an age on."""
    part = tmp_path / "part"
    run("copy", sample.path, part, "--ref", "v1")
    assert "v1" in run("tag", "list", part).stdout
    for since in (sample.tip, "2999-01-01", "0m"):
        late = tmp_path / f"since-{since}"
        run("copy", sample.path, late, "--ref=main", "--since", since)
        log = run("log", late, "--json").json["snapshots"]
        assert [it["id"] for it in log] == [sample.tip, sample.first]
    wrong = run("copy", sample.path, tmp_path / "none", "--since", "yesterday")
    assert wrong.exit_code == 2
    assert "neither an age such as 90d" in " ".join(wrong.stderr.replace("│", "").split())
    missing = run("copy", sample.path, tmp_path / "none", "--ref", "nope")
    assert missing.exit_code == 1
    assert "'nope'" in missing.stderr


def test_an_empty_path_is_not_everything(sample: Sample, tmp_path: Path) -> None:
    """As from a variable that is not set; the root is chosen by its name."""
    refused = run("copy", sample.path, tmp_path / "none", "--path", "")
    assert refused.exit_code == 1
    assert "An empty text is not the path" in refused.stderr
    assert not (tmp_path / "none").exists()
    assert run("copy", sample.path, tmp_path / "all", "--path", "/").exit_code == 0


def test_sync_names_what_changed_and_what_it_undoes(repository: Path, tmp_path: Path) -> None:
    """In words, and as JSON."""
    target = tmp_path / "mirror"
    run("sync", repository, target)
    run("branch", "delete", repository, "dev")
    run("tag", "create", target, "mine", "main")
    assert run("sync", repository, target).exit_code == 1
    done = run("sync", repository, target, "--discard-changes", "--json").json
    assert [(it["name"], it["change"], it["after"]) for it in done["refs"]] == [
        ("dev", "deleted", None),
        ("mine", "deleted", None),
    ]
    assert len(done["discarded"]) == 1
    run("tag", "create", repository, "v2", "main")
    assert "tag v2 created at " in run("sync", repository, target).stdout
    assert "was up to date." in run("sync", repository, target).stdout


def test_copy_as_zarr_writes_a_hierarchy_and_refuses_a_time(sample: Sample, tmp_path: Path) -> None:
    """Virtual chunks need --authorize; a time and a hierarchy do not go together."""
    target = tmp_path / "plain"
    done = run(
        *("copy", sample.path, target, "--as-zarr", "--ref", "main"),
        *("--authorize", sample.container, "--json"),
    )
    assert done.json["objects_copied"] > 3
    assert (target / "zarr.json").exists()
    assert not (target / "repo").exists()
    refused = run("copy", sample.path, tmp_path / "no", "--as-zarr", "--since", "1d")
    assert refused.exit_code == 1
    assert "as_zarr" in refused.stderr


def test_copy_takes_chosen_arrays_and_says_what_readers_authorize(
    sample: Sample, tmp_path: Path
) -> None:
    """The command says what readers authorize; unknown paths are named, with those like them."""
    path = "/deep/large"
    target = tmp_path / "shallow"
    done = run("copy", sample.path, target, "--path", path, "--shallow", "--json").json
    prefix = f"{sample.path.as_uri()}/"
    assert done["origin_prefix"] == prefix
    assert not (target / "chunks").exists()
    again = run("sync", sample.path, target, "--path", path, "--shallow")
    assert "was up to date." in again.stdout
    assert f"Its readers need --authorize {prefix}." in again.stdout
    assert run("verify", target, "--authorize", prefix).exit_code == 0
    missing = run("copy", sample.path, tmp_path / "none", "--path", "large")
    assert missing.exit_code == 1
    assert f"Did you mean {path!r}" in " ".join(missing.stderr.split())
    plain = tmp_path / "plain"
    run("copy", sample.path, plain, "--as-zarr", "--path", path)
    assert (plain / "deep" / "large" / "zarr.json").exists()
    assert not (plain / "small").exists()
