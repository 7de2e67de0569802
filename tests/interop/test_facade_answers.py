"""The facade's information about repositories beside the official one, with logs and versions."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import icechunk_async
import icechunk_async.sync as facade
from icechunk_async import Repository
from icechunk_async.conflicts import Resolution
from icechunk_async.engine.history.diff import Diff as NativeDiff
from icechunk_async.format import operations_log as updates
from icechunk_async.format.ids import SnapshotId
from icechunk_async.storage import DeleteFailure
from icechunk_async.sync.config import FeatureFlag
from icechunk_async.sync.official.mirrors import from_native
from icechunk_async.sync.ops import GCSummary, Update
from icechunk_async.sync.snapshots import Diff, ManifestFileInfo, SnapshotInfo
from tests.interop.facade_pair import in_their_words
from tests.interop.theirs import icechunk

# Zarr's functions have types that are not complete.
zarr: Any = import_module("zarr")
open_array: Any = import_module("zarr.api.asynchronous").open_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from icechunk_async.conflicts import Clash

WHEN = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def official(tmp_path: Path) -> Any:
    """Return an official repository with a commit, a branch, a tag and a status."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    session = repo.writable_session("main")
    array = zarr.create_group(session.store).create_array(
        "a", shape=(4,), chunks=(2,), dtype="i4", fill_value=0
    )
    array[:] = 1
    first = session.commit("first", metadata={"by": "me", "n": 1})
    repo.create_tag("v1", first)
    repo.create_branch("side", first)
    repo.delete_branch("side")
    return repo


async def test_history_is_told_alike(official: Any, tmp_path: Path) -> None:
    """Snapshots, the log of operations, and what changed between two snapshots."""
    tip = official.lookup_branch("main")
    async with Repository.open(tmp_path) as repo:
        ours = SnapshotInfo.from_native(await repo.lookup_snapshot(tip))
        theirs = official.lookup_snapshot(tip)
        for name in ("id", "parent_id", "written_at", "message", "metadata"):
            assert getattr(ours, name) == getattr(theirs, name)
        log = [Update.from_native(it) async for it in repo.ops_log()]
        wanted = list(official.ops_log())
        assert [in_their_words(repr(it.kind)) for it in log] == [repr(it.kind) for it in wanted]
        assert [it.updated_at for it in log] == [it.updated_at for it in wanted]
        assert [bool(it.backup_path) for it in log] == [bool(it.backup_path) for it in wanted]
        assert all(isinstance(it.kind, facade.UpdateType) for it in log)
        changed = official.diff(from_snapshot_id=theirs.parent_id, to_branch="main")
        found = Diff.from_native(
            await repo.diff(from_snapshot_id=theirs.parent_id, to_branch="main")
        )
        for name in Diff.__dataclass_fields__:
            assert getattr(found, name) == getattr(changed, name), name
        assert repr(found) == repr(changed)
        assert found.is_empty() is changed.is_empty() is False


SNAPSHOT = SnapshotId(bytes(range(12)))
DETAILS: dict[updates.UpdateDetail, str] = {
    updates.RepoMigrated(1, 2): "RepoMigrated(from_version=1, to_version=2)",
    updates.TagDeleted("t", SNAPSHOT): f'TagDeleted(name="t", previous_snap_id="{SNAPSHOT}")',
    updates.BranchReset("b", SNAPSHOT): f'BranchReset(name="b", previous_snap_id="{SNAPSHOT}")',
    updates.DetachedSnapshotCreated(SNAPSHOT): f'NewDetachedSnapshot(new_snap_id="{SNAPSHOT}")',
    updates.GarbageCollectionRan(): "GCRan()",
    updates.ExpirationRan(): "ExpirationRan()",
    updates.MetadataChanged(): "MetadataChanged()",
    updates.FeatureFlagChanged(1, new_value=True, is_set=True): (
        "FeatureFlagChanged(id=1, new_value=True)"
    ),
    updates.FeatureFlagChanged(1, new_value=True, is_set=False): (
        "FeatureFlagChanged(id=1, new_value=None)"
    ),
}


@pytest.mark.parametrize(("detail", "shown"), DETAILS.items())
def test_every_kind_of_update_is_converted(detail: updates.UpdateDetail, shown: str) -> None:
    """With its particulars; a flag that went back to its default has no value."""
    update = Update.from_native(updates.Update(detail, 1_000_000))
    assert repr(update.kind) == f"icechunk_async.sync.ops.UpdateType.{shown}"
    assert update.updated_at == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    status = updates.RepoStatus(updates.Availability.OFFLINE, 0, "gone")
    changed = updates.Update(updates.RepoStatusChanged(status), 0)
    kind = Update.from_native(changed).kind
    assert isinstance(kind, facade.UpdateType.RepoStatusChanged)
    assert kind.status.availability == facade.RepoAvailability.read_only


def test_a_diff_of_many_chunks_shows_some() -> None:
    """It says how many there are more; the card counts them."""
    coords = np.arange(50, dtype=np.uint32).reshape(50, 1)
    diff = Diff.from_native(NativeDiff(updated_chunks={"/a": coords}))
    assert diff.updated_chunks["/a"][49] == [49]
    assert "... and 30 more" in str(diff)
    html: Any = getattr(diff, "_repr_html_")  # noqa: B009 - as notebooks ask
    assert "50 chunks" in html()
    assert Diff().is_empty()


def test_summaries_are_shown_as_the_official_ones(official: Any) -> None:
    """Garbage, bytes of chunks, flags and manifests."""
    stats = official.chunk_storage_stats()
    ours = facade.ChunkStorageStats(stats.native_bytes, stats.virtual_bytes, stats.inlined_bytes)
    assert str(ours).splitlines()[1:] == str(stats).splitlines()[1:]
    assert (ours.total_bytes(), ours.non_virtual_bytes()) == (
        stats.total_bytes(),
        stats.non_virtual_bytes(),
    )
    assert (ours + ours).inlined_bytes == 2 * stats.inlined_bytes
    flag = official.feature_flags()[0]
    assert in_their_words(str(FeatureFlag.from_native(flag))) == str(flag)
    summary = official.garbage_collect(WHEN)
    report = SimpleNamespace(
        **{name: 0 for name in GCSummary.__dataclass_fields__ if name.endswith("_deleted")},
        failures=(),
        skipped_phases=(),
    )
    assert in_their_words(str(GCSummary.from_native(report))) == str(summary)
    report.failures = (DeleteFailure("chunks/x", facade.StorageError("denied")),)
    failed = GCSummary.from_native(report)
    assert (failed.objects_failed_to_delete, failed.delete_errors) == (1, ["chunks/x: denied"])
    info = official.list_manifest_files(official.lookup_branch("main"))[0]
    assert in_their_words(str(ManifestFileInfo.from_native(info))) == str(info)


def test_a_status_converts_both_ways() -> None:
    """To the microsecond; without a time it is now."""
    status = facade.RepoStatus(facade.RepoAvailability.read_only, WHEN, "moving")
    assert facade.RepoStatus.from_native(status.to_native()) == status
    assert from_native(status.to_native()) == status
    assert facade.RepoStatus(facade.RepoAvailability.online).set_at > WHEN


class Theirs(facade.ConflictSolver):
    """Takes this session's changes back; a plain function, which runs on a thread."""

    def solve(self, clash: Clash) -> Sequence[Resolution]:
        """Return so for every conflict."""
        return [Resolution.THEIRS] * len(clash.conflicts)


class Patient(facade.ConflictSolver):
    """The same, asynchronously."""

    async def solve(self, clash: Clash) -> Sequence[Resolution]:
        """Return so for every conflict."""
        return [Resolution.THEIRS] * len(clash.conflicts)


@pytest.mark.parametrize(
    ("solver", "value"),
    [
        (facade.BasicConflictSolver(), 2),
        (
            facade.BasicConflictSolver(on_chunk_conflict=facade.VersionSelection.UseTheirs),
            1,
        ),
        (facade.ConflictDetector(), None),
        (Theirs(), 1),
        (Patient(), 1),
    ],
)
async def test_solvers_decide_for_the_engine(
    official: Any, tmp_path: Path, solver: facade.ConflictSolver, value: int | None
) -> None:
    """The stock ones, and subclasses in Python, which the official package has not."""
    del official
    async with Repository.open(tmp_path) as repo:
        first, second = [await repo.writable_session("main") for _ in range(2)]
        for session, data in ((first, 1), (second, 2)):
            array = await open_array(store=session.store, path="a")
            await array.setitem(0, data * 10 + data)
        await first.commit("first")
        native = solver.to_native()
        if value is None:
            with pytest.raises(facade.ConflictError), facade_errors():
                await second.commit("second", rebase_with=native)
            return
        await second.commit("second", rebase_with=native, allow_empty=True)
        array = await open_array(store=second.store, path="a", mode="r")
        assert np.asarray(await array.getitem(0)) == value * 11


def facade_errors() -> Any:
    """Translate what the engine raises."""
    from icechunk_async.sync.errors import translated

    return translated()


def test_a_solver_without_a_decision_is_refused() -> None:
    """The base has no instances; a subclass must define its answer."""

    class Undecided(facade.ConflictSolver):
        pass

    with pytest.raises(NotImplementedError, match="Undecided defines no solve"):
        Undecided().solve(None)  # type: ignore[arg-type]


def test_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """This library's, and that of the official release whose names it has."""
    assert facade.user_agent() == f"icechunk-async-{icechunk_async.__version__}"
    facade.print_debug_info()
    printed = capsys.readouterr().out
    assert f"icechunk-async:  {icechunk_async.__version__}, with the names of icechunk " in printed
    assert facade.__version__ == icechunk.__version__
    assert f"zarr:  {zarr.__version__}\n" in printed


@pytest.mark.parametrize(("level", "told"), [("debug", True), ("", False)])
def test_the_log_is_written_from_the_import_on_where_the_environment_says_so(
    level: str, *, told: bool
) -> None:
    """As with the official package; otherwise logging is left alone."""
    script = (
        "import logging, icechunk_async.sync;logging.getLogger('icechunk_async').debug('heard')"
    )
    environment = {name: it for name, it in os.environ.items() if name != "ICECHUNK_NO_LOGS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "ICECHUNK_LOG": level},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert ("heard" in done.stderr) is told


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Restore the settings of logging."""
    loggers = [logging.getLogger(name) for name in ("icechunk_async", "icechunk_async.storage")]
    before = [(it.level, list(it.handlers)) for it in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("_quiet")
def test_logs_are_filtered_as_the_official_directives_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To standard error, once; a level for all, and others by name."""
    monkeypatch.delenv("ICECHUNK_LOG", raising=False)
    monkeypatch.delenv("ICECHUNK_NO_LOGS", raising=False)
    facade.initialize_logs()
    assert not logging.getLogger("icechunk_async").handlers
    facade.set_logs_filter("icechunk=info,icechunk::storage=debug,[span]=nonsense")
    facade.set_logs_filter(None)
    facade.set_logs_filter("info")
    logging.getLogger("icechunk_async.repository").debug("too quiet")
    logging.getLogger("icechunk_async.repository").info("heard once")
    logging.getLogger("icechunk_async.storage").debug("in detail")
    told = capsys.readouterr().err
    assert told.count("heard once") == 1
    assert "in detail" in told
    assert "too quiet" not in told
    monkeypatch.setenv("ICECHUNK_LOG", "error")
    facade.initialize_logs()
    assert logging.getLogger("icechunk_async").level == logging.ERROR
    facade.shutdown_telemetry()
