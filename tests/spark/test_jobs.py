"""Upkeep as Spark jobs: each agrees with the same operation in one process."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import zarr
from zarr.api import asynchronous
from zarr.codecs import BytesCodec, Crc32cCodec

from icechunk_async.config import RepositoryConfig as NativeConfig
from icechunk_async.errors import InvalidInputError
from icechunk_async.repository import Repository as AsyncRepository
from icechunk_async.spark import (
    check_references,
    garbage_collect,
    ingest_virtual,
    rewrite_manifests,
    storage_statistics,
    verify,
)
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import run_job
from icechunk_async.sync import (
    ManifestConfig,
    ManifestSplitCondition,
    ManifestSplitDimCondition,
    ManifestSplittingConfig,
    Repository,
    RepositoryConfig,
)
from tests.spark.here import session_here
from tests.spark.sources import make_newer, open_for, write_netcdf

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from icechunk_async.engine.upkeep.check import ReferenceReport

DATA = np.arange(40 * 20, dtype="f8").reshape(40, 20)


@pytest.fixture(params=[1, 2], ids=["format-1", "format-2"])
def repo(request: pytest.FixtureRequest, url: str) -> Repository:
    """A repository with history, an abandoned session's chunks, and chunks of all kinds."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repo = Repository.create(url, config, spec_version=request.param)
    repo.save_config()
    for number in range(3):
        session = repo.writable_session("main")
        array = zarr.create_array(
            session.store, name="a", shape=DATA.shape, chunks=(4, 5), dtype="f8", overwrite=True
        )
        array[:] = DATA + number
        session.commit(f"state {number}")
    repo.create_tag("v1", repo.lookup_branch("main"))
    abandoned = repo.writable_session("main")
    zarr.open_array(abandoned.store, path="a")[:8] = -1
    return repo


def summary(result: Any) -> list[int]:
    """Return the numbers of a report on garbage."""
    names = ("chunks", "manifests", "snapshots", "transaction_logs", "bytes")
    return [getattr(result, f"{name}_deleted") for name in names]


def check(repo: Repository) -> ReferenceReport:
    """Check in one process."""
    return SharedRepository.of(repo).ask(lambda it: it.check_references())


def test_collection_spares_what_leased_sessions_and_their_forks_wrote(repo: Repository) -> None:
    """With any cutoff, as collection in one process does."""
    session = repo.writable_session("main", lease=True)
    array = zarr.open_array(session.store, path="a")
    array[:4] = 7
    fork = session.fork()
    zarr.open_array(fork.store, path="a")[4:8] = 8
    fork.publish()
    assert not any(summary(garbage_collect(session_here(), repo, datetime.now(UTC)).result)[:1])
    session.commit("spared")
    found = np.asarray(zarr.open_array(repo.readonly_session("main").store, path="a")[:8])
    assert np.array_equal(found, np.repeat([7.0, 8.0], 4)[:, None] * np.ones((1, 20)))
    assert garbage_collect(session_here(), repo, datetime.now(UTC)).result.chunks_deleted == 8


def test_statistics_are_those_of_one_process(spark: SparkSession, repo: Repository) -> None:
    """Chunks that several manifests share count once; each manifest has a row."""
    session = repo.writable_session("main")
    zarr.open_array(session.store, path="a")[:4] = 7
    session.commit("one row of chunks")
    made = storage_statistics(spark, repo, tasks=3)
    expected = repo.chunk_storage_stats()
    assert made.result.native_bytes == expected.native_bytes
    assert made.result.total_bytes() == expected.total_bytes()
    assert made.frame.columns == [
        *("manifest_id", "size_bytes", "references"),
        *("native_bytes", "virtual_bytes", "inlined_bytes"),
    ]
    assert made.table.column("references").to_pylist() == [40] * 4
    assert sum(made.table.column("native_bytes").to_pylist()) > expected.native_bytes


def test_garbage_is_what_one_process_finds(spark: SparkSession, repo: Repository) -> None:
    """The dry run agrees before, one process finds nothing afterwards, data stays."""
    repo.expire_snapshots(datetime.now(UTC))
    moment = datetime.now(UTC)
    expected = repo.garbage_collect(moment, dry_run=True)
    planned = garbage_collect(spark, repo, moment, dry_run=True)
    assert summary(planned.result) == summary(expected)
    assert summary(expected)[0] >= 8
    assert not any(planned.table.column("deleted").to_pylist())
    done = garbage_collect(spark, repo, moment, tasks=2)
    assert summary(done.result) == summary(expected)
    assert done.frame.filter("deleted and folder = 'chunks'").count() == summary(expected)[0]
    assert summary(repo.garbage_collect(moment)) == [0] * 5
    store = repo.readonly_session("main").store
    np.testing.assert_array_equal(zarr.open_array(store, path="a", mode="r")[:], DATA + 2)


def test_young_objects_are_kept_and_future_cutoffs_refused(
    spark: SparkSession, repo: Repository
) -> None:
    """An open session is protected by its age alone."""
    before = garbage_collect(spark, repo, datetime(2020, 1, 1, tzinfo=UTC))
    assert summary(before.result) == [0] * 5
    assert before.table.num_rows == 0
    with pytest.raises(InvalidInputError, match="in the future"):
        garbage_collect(spark, repo, datetime.now(UTC) + timedelta(hours=1))


def test_manifests_are_split_as_in_one_process(spark: SparkSession, repo: Repository) -> None:
    """By the configuration in force; one commit, the same chunks."""
    split: dict[Any, Any] = {
        ManifestSplitCondition.AnyArray(): {ManifestSplitDimCondition.Any(): 3},
    }
    config = RepositoryConfig(
        manifest=ManifestConfig(splitting=ManifestSplittingConfig.from_dict(split))
    )
    again = repo.reopen(config)
    made = rewrite_manifests(spark, again, "split", manifests_per_task=3)
    tip = next(iter(again.ancestry(branch="main")))
    assert (str(made.result), tip.message) == (tip.id, "split")
    counts = sorted(made.table.column("references").to_pylist())
    single = again.rewrite_manifests("split again", branch="main")
    files = again.list_manifest_files(single)
    assert sorted(it.num_chunk_refs for it in files) == counts
    assert len(counts) == 8
    store = again.readonly_session(snapshot_id=tip.id).store
    np.testing.assert_array_equal(zarr.open_array(store, path="a", mode="r")[:], DATA + 2)
    with pytest.raises(Exception, match="commit"):
        rewrite_manifests(spark, again, "no", commit_method="neither")  # type: ignore[arg-type]


def test_few_chunks_in_a_large_grid_are_few_tasks(spark: SparkSession, url: str) -> None:
    """Parts of the grid without chunks, of which there are 62,500, need no task."""
    split: dict[Any, Any] = {
        ManifestSplitCondition.AnyArray(): {ManifestSplitDimCondition.Any(): 4},
    }
    repo = Repository.create(url)
    session = repo.writable_session("main")
    array = zarr.create_array(
        session.store, name="a", shape=(1000, 1000), chunks=(1, 1), dtype="i4"
    )
    for at in (0, 500, 999):
        array[at, at] = at + 1
    session.commit("sparse")
    again = repo.reopen(
        RepositoryConfig(
            manifest=ManifestConfig(splitting=ManifestSplittingConfig.from_dict(split))
        )
    )
    totals: set[int | None] = set()
    made = rewrite_manifests(
        spark, again, "split", manifests_per_task=2, progress=lambda it: totals.add(it.total)
    )
    assert totals == {2}
    assert made.table.column("references").to_pylist() == [1, 1, 1]
    store = again.readonly_session("main").store
    found = zarr.open_array(store, path="a", mode="r")
    assert [found[at, at] for at in (0, 500, 999)] == [1, 501, 1000]


def test_missing_objects_are_found(spark: SparkSession, repo: Repository, tmp_path: Path) -> None:
    """The job and one process name the same objects, of every kind."""
    assert check(repo).is_whole
    root = tmp_path / "repo"
    chunks = sorted((root / "chunks").iterdir())
    whole = check_references(spark, repo)
    assert whole.result == check(repo)
    assert (whole.result.chunk_objects, whole.table.num_rows) == (120, 0)
    needed = {it.location for it in _broken_without(root, chunks, repo)}
    assert len(needed) == 120
    tip = repo.lookup_branch("main")
    (root / "transactions" / tip).unlink()
    manifest = min((root / "manifests").iterdir())
    manifest.unlink()
    key = min(needed)
    victim = root / key
    victim.write_bytes(victim.read_bytes()[:5])
    made = check_references(spark, repo)
    assert made.result == check(repo)
    kinds = made.table.column("kind").to_pylist()
    assert kinds[:2] == ["transaction log", "manifest"]
    assert made.frame.filter("problem = 'missing'").count() == 2


def _broken_without(root: Path, chunks: list[Path], repo: Repository) -> Any:
    """Return the broken references while all chunk objects are away."""
    kept = {it: it.read_bytes() for it in chunks}
    for it in chunks:
        it.unlink()
    try:
        return check(repo).broken
    finally:
        for it, data in kept.items():
            it.write_bytes(data)


def test_contents_are_verified(spark: SparkSession, tmp_path: Path) -> None:
    """A byte that was flipped is found by its sum or by decoding, as in one process."""
    asyncio.run(_write_checked(tmp_path / "repo"))
    repo = Repository.open(f"file://{tmp_path}/repo")
    opened = SharedRepository.of(repo)
    levels: tuple[Literal["sums", "decode"], ...] = ("sums", "decode")
    for level in levels:
        made = verify(spark, repo, level, tasks=3)
        assert made.result.findings == ()
        assert made.result.chunks_read > 0
        assert made.result == opened.ask(partial(AsyncRepository.verify, level=level))
    for path in (tmp_path / "repo" / "chunks").iterdir():
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    length = verify(spark, repo, "length", tasks=3)
    assert length.result.is_healthy
    for level, arrays in zip(levels, ({"/summed"}, {"/summed", "/plain"}), strict=True):
        made = verify(spark, repo, level, tasks=3)
        assert made.result == opened.ask(partial(AsyncRepository.verify, level=level))
        assert set(made.table.column("array").to_pylist()) == arrays
        assert made.table.num_rows == 5 * len(arrays)
    problems = {(it.array, it.problem) for it in made.result.findings}
    assert problems == {("/summed", "wrong sum"), ("/plain", "undecodable")}


async def _write_checked(place: Path) -> None:
    """Write arrays of five chunks whose codec adds checksums; one has sums beside them, too."""
    async with AsyncRepository.create(place):
        pass
    config = NativeConfig(inline_chunk_threshold_bytes=0)
    for name in ("summed", "plain"):
        opening = AsyncRepository.open(place, config=config, sums=name == "summed")
        async with opening as repository:
            session = await repository.writable_session("main")
            array = await asynchronous.create_array(
                store=session.store,
                name=name,
                shape=(20,),
                chunks=(4,),
                dtype="i4",
                serializer=BytesCodec(),
                compressors=[Crc32cCodec()],
            )
            await array.setitem(slice(None), np.arange(20))
            await session.commit(name)


def test_virtual_objects_are_looked_at(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Changed and missing ones are named; those that nobody may read are counted."""
    sources = tmp_path / "sources"
    repo = open_for(url, sources)
    for number in range(3):
        write_netcdf(sources / f"f{number}.nc", 4 * number)
    files = sorted(map(str, sources.iterdir()))
    ingest_virtual(spark, repo, files, concat_dim="time")
    assert check_references(spark, repo).result.is_whole
    (sources / "f1.nc").unlink()
    write_netcdf(sources / "f2.nc", 100)
    make_newer(sources / "f2.nc")
    made = check_references(spark, repo, tasks=2)
    assert made.result == check(repo)
    found = {(it.location[-5:], it.problem, it.references) for it in made.result.broken}
    assert found == {("f1.nc", "missing", 2), ("f2.nc", "changed", 2)}
    blind = Repository.open(url)
    unread = check_references(spark, blind).result
    assert (unread.virtual_objects, unread.virtual_not_authorized) == (3, 3)


@pytest.mark.only_spark
@pytest.mark.parametrize("own", [True, False])
def test_job_group_of_the_caller_stays(spark: SparkSession, repo: Repository, own: bool) -> None:  # noqa: FBT001
    """Else `cancelJobGroup` would not reach what the caller runs afterwards."""
    context = spark.sparkContext
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before: list[str | None] = [None, None, None]
    if own:
        before = ["nightly", "the nightly jobs", "true"]
        context.setJobGroup("nightly", "the nightly jobs", interruptOnCancel=True)
    try:
        storage_statistics(spark, repo)
        assert [context.getLocalProperty(it) for it in names] == before
    finally:
        for name in names:
            context.setLocalProperty(name, None)  # type: ignore[arg-type]


@pytest.mark.only_spark
def test_each_task_receives_its_own_part_and_nothing_of_the_others(
    spark: SparkSession, repository: Repository, tmp_path: Path
) -> None:
    """Or the work of a job would grow with the square of its size."""
    log = tmp_path / "received"

    def receive(number: int) -> int:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        return number

    class Part:
        """Notes when it is unpickled."""

        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> tuple[Any, ...]:
            return receive, (self.number,)

    async def where(_: AsyncRepository, number: Any) -> dict[str, list[int]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return {"number": [number], "partition": [context.partitionId()]}

    parts = [Part(number) for number in range(20)]
    shared = SharedRepository.of(repository)
    table = run_job(spark, shared, parts, where, "number long, partition long", phase="looking")
    expected = list(range(20))
    assert table.column("number").to_pylist() == expected
    assert table.column("partition").to_pylist() == expected
    assert sorted(map(int, log.read_text().split())) == expected


async def budget_in_a_task(native: AsyncRepository, number: int) -> dict[str, list[int]]:
    """Return the number of concurrent requests of a task."""
    return {"number": [number], "requests": [native.config.effective_max_concurrent_requests]}


def test_a_task_has_its_share_of_the_budget(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a cluster whose driver does not know how many cores executors have."""
    properties = {"spark.master": "spark://elsewhere:7077", "resource.executor.cores": "4"}

    class Task:
        """The context of a task in an executor of four cores."""

        getLocalProperty = staticmethod(properties.get)  # noqa: N815 -- Spark's

        def cpus(self) -> int:
            return 1

    monkeypatch.setattr("icechunk_async.spark.requests.TaskContext.get", Task)
    shared = SharedRepository.of(repository)
    table = run_job(
        session_here(),
        shared,
        [0, 1],
        budget_in_a_task,
        "number long, requests long",
        phase="asking",
    )
    assert table.column("requests").to_pylist() == [shared.budget().requests // 4] * 2
