"""``ingest``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from icechunk_async import Repository
from tests.unit.cli.conftest import run
from tests.unit.tiledb.archives import ARCHIVES, golden_jobs
from tests.unit.tiledb.virtual_arrays import placed, referring_config

if TYPE_CHECKING:
    from pathlib import Path


async def _create(url: Path, place: Path) -> None:
    async with Repository.create(str(url), config=referring_config(place)):
        pass


def test_ingest_adds_an_array_once_and_refuses_a_sparse_one(tmp_path: Path) -> None:
    """A dense array becomes a group; a second run finds nothing to do; a sparse one is refused."""
    place = placed(ARCHIVES[-1], "features-0", tmp_path)
    repository = tmp_path / "repository"
    asyncio.run(_create(repository, place))
    names = ["--attribute", "a0", "--attribute", "a1"]
    first = run("ingest", repository, place, "--path", "grid", *names, "--history", "--json")
    assert first.exit_code == 0, first.stderr
    (snapshot,) = first.json["snapshots"]
    assert snapshot["referenced"] == 4
    assert snapshot["copied"] == 0
    log = run("log", repository, "--json").json["snapshots"]
    assert log[0]["id"] == snapshot["snapshot_id"]
    assert "grid" in run("tree", repository).stdout
    again = run("ingest", repository, place, "--path", "grid", *names)
    assert "grid was up to date." in again.stdout
    by_url = run("ingest", repository, f"tiledb+{place.as_uri()}", "--path", "grid", *names)
    assert "grid was up to date." in by_url.stdout
    cloud = run("ingest", repository, "tiledb://KEY:SECRET@namespace/array", "--path", "grid")
    assert cloud.exit_code == 1
    assert "'tiledb+s3://bucket/array'" in " ".join(cloud.stderr.split())
    assert "SECRET" not in cloud.stderr
    job = next(it for it in golden_jobs(ARCHIVES[-1]) if it["sparse"])
    sparse = placed(ARCHIVES[-1], job["number"], tmp_path, name="sparse")
    refused = run("ingest", repository, sparse, "--path", "other")
    assert refused.exit_code == 1
    assert "is sparse" in " ".join(refused.stderr.split())


def test_ingest_copies_text_and_writes_where_cells_are_null_on_request(tmp_path: Path) -> None:
    """By `--copy` and `--validity`; each is refused without its option."""
    for number, name, option, made in (
        ("dense-0", "a0", "--copy", ["a0"]),
        ("features-1", "a", "--validity", ["a", "a_validity"]),
    ):
        place = placed(ARCHIVES[-1], number, tmp_path, name=number)
        repository = tmp_path / f"repository-{number}"
        asyncio.run(_create(repository, place))
        options = ["--path", "grid", "--attribute", name, "--copy", "--validity"]
        without = [it for it in options if it != option]
        assert run("ingest", repository, place, *without).exit_code == 1
        done = run("ingest", repository, place, *options)
        assert done.exit_code == 0, done.stderr
        tree = run("tree", repository).stdout.split()
        assert set(made) <= set(tree), tree
