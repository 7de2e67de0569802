"""``expire``, ``gc``, ``compact``, ``rewrite-manifests`` and ``migrate``."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from icechunk_async import Packing, Repository, RepositoryConfig
from tests.helpers import make_array, write
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome, Sample


def test_older_than_takes_ages_and_times(sample: Sample) -> None:
    """An age counts back from the time when the command runs."""

    def expire(older_than: str) -> Outcome:
        return run("expire", sample.path, f"--older-than={older_than}", "--dry-run", "--json")

    for text, age in {
        "90d": timedelta(days=90),
        "12h": timedelta(hours=12),
        "30m": timedelta(minutes=30),
        "2w": timedelta(weeks=2),
    }.items():
        before = datetime.now(UTC)
        found = datetime.fromisoformat(expire(text).json["older_than"])
        assert before <= found + age <= datetime.now(UTC)
    assert expire("2026-01-31").json["older_than"] == "2026-01-31T00:00:00.000000+00:00"
    for wrong in ("90", "d", "-1d", "999999999w", "soon"):
        assert expire(wrong).exit_code == 2


def test_expire_refuses_a_time_to_come(repository: Path) -> None:
    """A year that was misspelt would drop all of history."""
    before = run("log", repository, "--json").json
    to_come = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for more in ([], ["--dry-run"]):
        refused = run("expire", repository, "--older-than", to_come, *more)
        assert refused.exit_code == 1
        assert "is in the future" in " ".join(refused.stderr.split())
        assert "Warning" not in refused.stderr
    assert run("log", repository, "--json").json == before
    assert "Warning" not in run("gc", repository, "--older-than", to_come).stderr


def _age(repository: Path) -> None:
    """Make every object look old."""
    for path in repository.rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))


def test_expire_and_gc_delete_what_their_dry_runs_name(sample: Sample, repository: Path) -> None:
    """Old snapshots go from history first, then what only they used."""
    run("tag", "delete", repository, "v1")
    run("branch", "delete", repository, "dev")
    dry = run("expire", repository, "--older-than", "0m", "--dry-run", "--json").json
    assert dry["snapshots"] == [sample.v1]
    assert len(run("log", repository, "--json").json["snapshots"]) == 3
    done = run("expire", repository, "--older-than", "0m", "--json").json
    assert (done["snapshots"], done["dry_run"]) == ([sample.v1], False)
    assert len(run("log", repository, "--json").json["snapshots"]) == 2
    _age(repository)
    stored = sorted(repository.rglob("*"))
    dry = run("gc", repository, "--older-than", "1m", "--dry-run", "--json").json
    assert sorted(repository.rglob("*")) == stored
    assert (dry["snapshots_deleted"], dry["dry_run"], dry["failures"]) == (1, True, [])
    done = run("gc", repository, "--older-than", "1m", "--json").json
    assert done == dry | {"dry_run": False, "older_than": done["older_than"]}
    assert not (repository / "snapshots" / sample.v1).exists()
    assert run("tree", repository).exit_code == 0
    again = run("gc", repository, "--older-than", "1m").stdout
    assert "0 bytes freed." in again


async def _pack(directory: Path) -> None:
    """Make a repository of two objects, of which one is used for a tenth."""
    packing = Packing(target_bytes=10_000, max_chunk_bytes=1_000)
    async with Repository.create(directory, packing=packing) as repository:
        async with repository.transaction("main", message="whole") as store:
            await make_array(store.session, "a", (20,), (1,))
            for number in range(20):
                await write(store.session, f"a/c/{number}", bytes(1_000))
        async with repository.transaction("main", message="sparse") as store:
            for number in range(9):
                await store.delete(f"a/c/{number}")


def test_gc_counts_checksums(tmp_path: Path) -> None:
    """Those of manifests and snapshots that are gone; they are shown only if there are some."""
    asyncio.run(_summed(tmp_path))
    run("expire", tmp_path, "--older-than", "0m")
    _age(tmp_path)
    dry = run("gc", tmp_path, "--older-than", "1m", "--dry-run", "--json").json
    assert dry["sums_deleted"] == 2  # the sidecar of a manifest, the list of a snapshot
    assert "checksums" in run("gc", tmp_path, "--older-than", "1m").stdout
    again = run("gc", tmp_path, "--older-than", "1m", "--json").json
    assert again["sums_deleted"] == 0
    assert "checksums" not in run("gc", tmp_path, "--older-than", "1m").stdout


async def _summed(directory: Path) -> None:
    """Make two commits with checksums; the second replaces all of the first."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    async with Repository.create(directory, sums=True, config=config) as repository:
        for number in range(2):
            async with repository.transaction("main", message=str(number)) as store:
                if not number:
                    await make_array(store.session, "a", (1,), (1,))
                await write(store.session, "a/c/0", bytes([number]))


def test_compact_writes_chunks_of_sparse_objects_anew_once(tmp_path: Path) -> None:
    """Chunks leave sparse objects, after a dry run; a second run has nothing to do."""
    asyncio.run(_pack(tmp_path))
    dry = run("compact", tmp_path, "--dry-run", "--json").json
    assert dry == {
        "dry_run": True,
        "branch": "main",
        "objects": 1,
        "chunks": 1,
        "bytes_written": 1_000,
        "bytes_released": 10_000,
        "snapshot_id": None,
    }
    shown = run("compact", tmp_path, "--dry-run", "--min-live-share", "1").stdout
    assert "1 chunk(s), 1.0 kB, of 1 object(s) would be written anew" in shown
    done = run("compact", tmp_path, "-m", "tidy").stdout
    assert "the objects take 10.0 kB" in done
    assert "main is at " in done
    newest = run("log", tmp_path, "--json").json["snapshots"][0]
    assert newest["message"] == "tidy"
    again = run("compact", tmp_path, "--json").json
    assert (again["objects"], again["snapshot_id"]) == (0, None)
    assert "No commit was made." in run("compact", tmp_path).stdout
    assert run("log", tmp_path, "--json").json["snapshots"][0] == newest


def test_check_names_missing_files_and_fails(sample: Sample, repository: Path) -> None:
    """The command names missing files and exits with an error code."""
    fine = run("check", repository, "--json").json
    assert (fine["snapshots"], fine["broken"]) == (3, [])
    said = run("check", repository).stdout.splitlines()[-1]
    assert said.startswith("Nothing is missing. Not looked at: ")
    assert "chunks were not compared with checksums" in said
    assert fine["left_over"] == []
    (repository / "chunks").mkdir(exist_ok=True)
    (repository / "chunks" / ".icechunk-tmp-killed").write_bytes(bytes(1234))
    (left,) = run("check", repository, "--json").json["left_over"]
    assert left.startswith("1 file(s) of killed writers, 1,234 bytes: garbage collection removes")
    shown = run("check", repository).stdout.splitlines()
    assert f"Left over: {left}." in shown
    assert shown[-1] == said
    _age(repository)
    assert run("gc", repository, "--older-than", "1m", "--json").json["unfinished_deleted"] == 1
    assert run("check", repository, "--json").json["left_over"] == []
    (repository / "transactions" / sample.tip).unlink()
    done = run("check", repository, "--json")
    assert done.exit_code == 1
    broken = done.json["broken"]
    assert [(it["kind"], it["problem"]) for it in broken] == [("transaction log", "missing")]
    assert sample.tip in run("check", repository).stdout


def test_rewrite_manifests_commits_or_replaces_the_tip(sample: Sample, repository: Path) -> None:
    """A commit with the same content, or the tip replaced."""
    _split(repository)
    planned = run("rewrite-manifests", repository, "--dry-run", "--json").json
    assert (planned["dry_run"], planned["snapshot_id"]) == (True, None)
    assert (planned["previous_manifests"], planned["manifests"]) == (2, 4)
    assert "2 manifest(s) would become at most 4. No" in _rewrite(repository, "--dry-run").stdout
    assert run("log", repository, "--json").json["snapshot_id"] == sample.tip
    made = run("rewrite-manifests", repository, "-m", "split", "--json").json
    assert made["previous_snapshot_id"] == sample.tip
    assert (made["branch"], made["dry_run"]) == ("main", False)
    assert (made["previous_manifests"], made["manifests"]) == (2, 2)
    newest = run("log", repository, "--json").json["snapshots"][0]
    assert (newest["id"], newest["message"]) == (made["snapshot_id"], "split")
    amended = run("rewrite-manifests", repository, "--amend", "--always", "--json").json
    lines = run("log", repository, "--json").json["snapshots"]
    assert [it["id"] for it in lines[:2]] == [amended["snapshot_id"], sample.tip]


def _split(repository: Path) -> None:
    """Ask for manifests of one chunk for the array 'large', which has two.

    The first of them is shared with another array.
    """
    rule = [[{"name_matches": {"regex": "large"}}, [{"condition": {"Axis": 0}, "num_chunks": 1}]]]
    value = json.dumps({"split_sizes": rule})
    outcome = run("config", repository, "--set", f"manifest.splitting={value}")
    assert outcome.exit_code == 0, outcome.stderr


def _rewrite(repository: Path, *options: str) -> Outcome:
    return run("rewrite-manifests", repository, *options)


def test_rewriting_what_is_split_so_already_makes_no_commit(
    sample: Sample, repository: Path
) -> None:
    """Neither at first nor after the rewrite; --always makes one."""
    nothing = "are split as the configuration says already. No commit was made."
    assert nothing in _rewrite(repository).stdout
    assert run("log", repository, "--json").json["snapshot_id"] == sample.tip
    _split(repository)
    made = _rewrite(repository, "--json").json["snapshot_id"]
    assert made is not None
    again = _rewrite(repository, "--json").json
    assert (again["snapshot_id"], again["previous_snapshot_id"]) == (None, made)
    assert (again["previous_manifests"], again["manifests"]) == (2, 2)
    always = _rewrite(repository, "--always", "--json").json
    assert run("log", repository, "--json").json["snapshot_id"] == always["snapshot_id"] != made


def test_migrate_changes_the_version_once_after_a_dry_run(tmp_path: Path) -> None:
    """In place, after a dry run; a repository of version 2 needs none."""
    old = tmp_path / "old"
    run("init", old, "--spec-version", "1")
    run("tag", "create", old, "v1")
    dry = run("migrate", old, "--dry-run", "--json").json
    assert (dry["branches"], dry["tags"], dry["snapshots"]) == (1, 1, 1)
    assert not (old / "repo").exists()
    done = run("migrate", old)
    assert done.exit_code == 0
    assert "format version 2 now" in done.stdout
    assert run("status", old, "--json").json["spec_version"] == 2
    assert not (old / "refs").exists() or not list((old / "refs").rglob("*.json"))
    again = run("migrate", old, "--json").json
    assert (again["already_migrated"], again["unused_files"]) == (True, [])
    assert "already" in run("migrate", old).stdout
