"""``status``, ``config`` and ``ops``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from icechunk_async import Repository, RepositoryConfig, SnapshotId
from icechunk_async.cli.commands.operate.administration import in_words, operation_of
from icechunk_async.format.config import (
    AzureStore,
    GcsStore,
    HttpStore,
    S3Options,
    S3Store,
    VirtualChunkContainer,
)
from icechunk_async.format.config.codec import config_to_json
from icechunk_async.format.operations_log import (
    BranchReset,
    CommitAmended,
    ConfigChanged,
    DetachedSnapshotCreated,
    FeatureFlagChanged,
    RepoInitialized,
    RepoMigrated,
    Update,
)
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.operations_log import UpdateDetail
    from tests.unit.cli.conftest import Sample


def test_ops_lists_what_was_done(sample: Sample) -> None:
    """Newest first, with what it was done to."""
    found = run("ops", sample.path, "--json").json["operations"]
    assert [it["kind"] for it in found] == [
        "new commit",
        "branch created",
        "tag created",
        "new commit",
        "repo initialized",
    ]
    assert found[0]["detail"] == {"branch": "main", "new_snapshot_id": sample.tip}
    assert found[2]["detail"] == {"name": "v1"}
    lines = run("ops", sample.path, "-n", "2").stdout.splitlines()
    assert len(lines) == 3
    assert sample.tip in lines[1]


def test_ops_of_format_version_1_says_that_it_keeps_no_log(tmp_path: Path) -> None:
    """And not that it lacks something else, which the command needs as well."""
    assert run("init", tmp_path / "one", "--spec-version", "1").exit_code == 0
    refused = run("ops", tmp_path / "one")
    assert refused.exit_code == 1
    assert "operations log" in " ".join(refused.stderr.split())


def test_ops_prints_words(repository: Path) -> None:
    """No reprs of the library's classes, and names where the log has numbers."""
    run("status", repository, "--read-only", "moving")
    run("status", repository, "--online")
    run("tag", "delete", repository, "v1")
    asyncio.run(_set_flags(repository))
    lines = run("ops", repository, "-n", "5").stdout.splitlines()[1:]
    words = [" ".join(line.split()[2:]) for line in lines]
    assert words[:2] == [
        "feature flag changed move_node is as by default",
        "feature flag changed move_node is off",
    ]
    assert words[2].startswith("tag deleted v1, which was at ")
    assert words[3:] == ["repo status changed online", "repo status changed read only: moving"]
    found = run("ops", repository, "--json").json["operations"]
    assert found[1]["detail"] == {
        "flag": 3,
        "new_value": False,
        "is_set": True,
        "name": "move_node",
    }
    status = found[4]["detail"]["status"]
    assert (status["availability"], status["reason"]) == ("read_only", "moving")
    assert status["set_at"].endswith("+00:00")


async def _set_flags(directory: Path) -> None:
    async with Repository.open(directory) as repository:
        await repository.set_feature_flag("move_node", setting=False)
        await repository.set_feature_flag("move_node", setting=None)


def test_every_kind_of_operation_has_words() -> None:
    """Values, without names of Python."""
    one, other = SnapshotId(bytes(12)), SnapshotId(bytes([1] * 12))
    details: dict[UpdateDetail, str] = {
        RepoInitialized(): "",
        RepoMigrated(1, 2): "from format version 1 to 2",
        BranchReset("dev", one): f"dev, which was at {one}",
        CommitAmended("dev", one, other): f"dev is at {other}, which replaced {one}",
        DetachedSnapshotCreated(one): f"{one}, on no branch",
        FeatureFlagChanged(99, new_value=True, is_set=True): "number 99 is on",
        ConfigChanged(): "",
    }
    for detail, words in details.items():
        assert in_words(operation_of(Update(detail, 0), {})) == words


def test_effective_configuration_has_no_gaps(repository: Path) -> None:
    """Defaults where nothing is stored; what is stored counts; nothing is stored by looking."""
    run("config", repository, "--set", "caching.num_chunk_refs=7")
    stored = run("config", repository, "--json").json["config"]
    assert stored["compression"] is None
    found = run("config", repository, "--effective", "--json").json["config"]
    assert found["inline_chunk_threshold_bytes"] == 512
    assert found["compression"] == {"algorithm": "zstd", "level": 3}
    assert found["caching"]["num_chunk_refs"] == 7
    assert found["caching"]["num_snapshot_nodes"] == 500_000
    assert found["storage"]["retries"]["max_tries"] == 10
    assert found["manifest"]["virtual_chunk_location_compression"] is None
    assert run("config", repository, "--json").json["config"] == stored


def test_config_is_shown_and_changed(repository: Path) -> None:
    """Settings are stored for all who open the repository later. Other settings stay."""
    before = run("config", repository, "--json").json
    assert before["changed"] is False
    changed = run(
        "config",
        repository,
        "--set",
        "inline_chunk_threshold_bytes=128",
        "--set",
        "caching.num_chunk_refs=1000",
        "--json",
    ).json
    assert changed["changed"] is True
    after = run("config", repository, "--json").json["config"]
    assert after == changed["config"]
    expected = before["config"] | {"inline_chunk_threshold_bytes": 128}
    expected["caching"] = after["caching"]
    assert after == expected
    assert after["caching"]["num_chunk_refs"] == 1000
    assert run("config", repository).stdout.startswith("{")


def test_config_asks_for_statistics_of_chunks(repository: Path) -> None:
    """And takes that back; other settings stay."""
    before = run("config", repository, "--json").json
    assert before["statistics"] is False
    on = run("config", repository, "--statistics", "--json").json
    assert (on["changed"], on["statistics"], on["config"]) == (True, True, before["config"])
    assert "Statistics of chunks are made" in run("config", repository).stdout
    both = run("config", repository, "--no-statistics", "--set", "inline_chunk_threshold_bytes=9")
    assert "Statistics" not in both.stdout
    after = run("config", repository, "--json").json
    assert (after["statistics"], after["config"]["inline_chunk_threshold_bytes"]) == (False, 9)


def test_a_wrong_setting_changes_nothing(repository: Path) -> None:
    """Names and values are checked before anything is stored."""
    before = run("config", repository, "--json").json["config"]
    for wrong, kind in [
        ("no_such_thing=1", "invalid-input"),
        ("caching.nothing=1", "invalid-input"),
        ("inline_chunk_threshold_bytes.more=1", "invalid-input"),
        ("inline_chunk_threshold_bytes=many", "invalid-input"),
    ]:
        failed = run("config", repository, "--set", wrong)
        assert failed.exit_code == 1
        assert f"({kind})" in failed.stderr
    assert run("config", repository, "--json").json["config"] == before


def test_config_sets_values_by_path(repository: Path) -> None:
    """Null restores the default, and sections that do not exist yet are created."""

    def caching(*values: str) -> Any:
        options = [option for value in values for option in ("--set", value)]
        return run("config", repository, *options, "--json").json["config"]["caching"]

    nothing = {
        "num_snapshot_nodes": None,
        "num_chunk_refs": None,
        "num_transaction_changes": None,
        "num_bytes_attributes": None,
        "num_bytes_chunks": None,
    }
    assert caching("caching.num_chunk_refs=5") == nothing | {"num_chunk_refs": 5}
    assert caching("caching.num_chunk_refs=null") in (None, nothing)
    assert caching("caching.num_chunk_refs=5", "caching=null") is None
    unknown = run("config", repository, "--set", "caching.x=1")
    assert "'caching.x'" in unknown.stderr
    assert "(invalid-input)" in run("config", repository, "--set", "caching=1").stderr


def test_status_forbids_and_allows_changes(repository: Path) -> None:
    """A reason is kept and shown; branches cannot be changed meanwhile."""
    found = run("status", repository, "--json").json
    assert (found["availability"], found["reason"]) == ("online", None)
    assert (found["branches"], found["tags"]) == (2, 1)
    closed = run("status", repository, "--read-only", "moving to another bucket", "--json").json
    assert closed["availability"] == "read_only"
    assert closed["reason"] == "moving to another bucket"
    refused = run("branch", "create", repository, "b")
    assert refused.exit_code == 1
    assert "moving to another bucket" in refused.stderr
    assert "read only" in run("status", repository).stdout
    assert run("status", repository, "--online", "--json").json["availability"] == "online"
    assert run("branch", "create", repository, "b").exit_code == 0
    assert run("status", repository, "--online", "--read-only", "x").exit_code == 2


def test_status_is_refused_for_a_repository_of_version_1(tmp_path: Path) -> None:
    """It has no status, which is said when one is to be set."""
    run("init", tmp_path / "old", "--spec-version", "1")
    found = run("status", tmp_path / "old", "--json").json
    assert (found["spec_version"], found["availability"], found["set_at"]) == (1, "online", None)
    refused = run("status", tmp_path / "old", "--read-only", "x")
    assert refused.exit_code == 1
    assert "migrate" in refused.stderr


async def _with_secrets(directory: Path) -> None:
    stores: dict[str, HttpStore | GcsStore | AzureStore | S3Store] = {
        "https://hush:hush@host/": HttpStore({"timeout": "3s"}, {"Authorization": "Bearer hush"}),
        "gs://bucket/": GcsStore({"google_service_account_key": '{"private_key": "hush"}'}),
        "az://blobs/": AzureStore({"account": "mine", "sas_token": "hush"}),
        "s3://bucket/": S3Store(S3Options(endpoint_url="https://hush:hush@host")),
    }
    config = RepositoryConfig(
        virtual_chunk_containers=tuple(
            VirtualChunkContainer(prefix, store) for prefix, store in stores.items()
        )
    )
    async with Repository.create(directory, config=config):
        pass


async def _stored(directory: Path) -> str:
    async with Repository.open(directory) as repository:
        return json.dumps(config_to_json(repository.config))


def test_config_veils_secrets_and_keeps_them(tmp_path: Path) -> None:
    """Output is pasted and logged. A marker says that there is a value, and is never stored."""
    place = tmp_path / "r"
    asyncio.run(_with_secrets(place))
    before = asyncio.run(_stored(place))
    assert before.count("hush") == 9
    changed = ("config", place, "--set", "inline_chunk_threshold_bytes=9")
    for command in [("config", place), ("config", place, "--json"), changed, (*changed, "--json")]:
        found = run(*command)
        assert found.exit_code == 0
        assert "hush" not in found.stdout + found.stderr
    containers = run("config", place, "--json").json["config"]["virtual_chunk_containers"]
    assert {prefix: it["store"] for prefix, it in containers.items()} | {"s3://bucket/": None} == {
        "https://****@host/": {"http": {"timeout": "3s", "headers": {"Authorization": "****"}}},
        "gs://bucket/": {"gcs": {"google_service_account_key": "****"}},
        "az://blobs/": {"azure": {"account": "mine", "sas_token": "****"}},
        "s3://bucket/": None,
    }
    after = asyncio.run(_stored(place))
    assert after == before.replace(
        '"inline_chunk_threshold_bytes": null', '"inline_chunk_threshold_bytes": 9'
    )
    refused = run("config", place, "--set", f"virtual_chunk_containers={json.dumps(containers)}")
    assert refused.exit_code == 1
    assert "stands for a secret" in refused.stderr
    assert asyncio.run(_stored(place)) == after
