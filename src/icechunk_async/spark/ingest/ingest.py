"""Ingest files as virtual references: scanned in tasks, written in one commit.

An ingest can be repeated: unchanged files cost one request each, and without changes there is no
commit. The catalog of ingested files and their states is part of each commit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import IngestError, InvalidInputError
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.spark.ingest.catalog import Catalog, Entry
from icechunk_async.spark.ingest.files import Files, divide
from icechunk_async.spark.ingest.plan import Answered, groups_of, plan_concat, plan_groups
from icechunk_async.spark.ingest.scan import Scanned
from icechunk_async.spark.ingest.tasks import (
    COLUMNS,
    FileWork,
    ScanOptions,
    can_be_looked_at,
    look_at_files,
    scan_files,
)
from icechunk_async.spark.ingest.write import (
    existing_groups,
    existing_template,
    has_output,
    missing_arrays,
    write_concatenated,
    write_groups,
)
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import default_looks, run_job, total_cores
from icechunk_async.spark.write.cooperative import Published, publish
from icechunk_async.sync import Repository

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from typing import Literal

    from pyspark.sql import DataFrame, SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.ingest.plan import Mode, Placed, Plan, Template
    from icechunk_async.spark.ingest.scan import Guard
    from icechunk_async.spark.ingest.tasks import Kind
    from icechunk_async.sync import Session
    from icechunk_async.sync.conflicts import ConflictSolver

__all__ = [
    "REPORT",
    "Ingested",
    "check_report",
    "ingest_virtual",
    "ingested_files",
    "references_of",
    "report_of",
]


REPORT: Final = pa.schema(
    [
        ("location", pa.string()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("group", pa.string()),
        ("start", pa.int64()),
        ("count", pa.int64()),
        ("references", pa.int64()),
        ("milliseconds", pa.int64()),
    ]
)


def references_of(entry: Entry | None) -> int:
    """Return the number of references that a file had before."""
    return 0 if entry is None else entry.references


def report_of(plan: Plan, answers: Mapping[str, Answered], files: Sequence[str]) -> pa.Table:
    """Return a row for each file: its status, the reason, and its place."""
    rows: list[tuple[Any, ...]] = []
    placed = {it.location: it for it in plan.placed}
    # Given files first, in their order. Those that only the catalog names follow.
    for location in dict.fromkeys([*files, *placed]):
        it, answer = placed.get(location), answers.get(location)
        reason = plan.refused.get(location) or (answer.reason if answer is not None else None)
        duration = None if answer is None else answer.milliseconds
        if it is None:
            rows.append((location, "failed", reason, None, None, None, None, duration))
            continue
        status = "unchanged" if reason is None else "kept"
        count = references_of(it.old)
        if it.scanned is not None:
            status, count = "ingested", it.scanned.num_references
        rows.append((location, status, reason, it.group, it.start, it.count, count, duration))
    rows += [(it.location, "removed", None, it.group, *(None,) * 4) for it in plan.removed]
    columns = list(zip(*rows, strict=True)) or [()] * len(REPORT)
    arrays = [pa.array(list(it), kind) for it, kind in zip(columns, REPORT.types, strict=True)]
    return pa.Table.from_batches([pa.RecordBatch.from_arrays(arrays, schema=REPORT)], REPORT)


def check_report(report: pa.Table, on_error: str) -> None:
    """Raise IngestError if a file failed and `on_error` is `"fail"`."""
    if on_error != "fail":
        return
    failed = [row for row in report.to_pylist() if row["reason"] is not None]
    if failed:
        raise IngestError(
            f"{len(failed)} of {report.num_rows} files could not be ingested; the first, "
            f"{failed[0]['location']!r}: {failed[0]['reason']} Nothing was committed.",
            report=report,
        )


@dataclass(frozen=True)
class Ingested:
    """The result of an ingest.

    Attributes:
        published: the snapshot; `committed` is False if nothing had changed.
        report: one row for each file: `location`, `status`, `reason`, `group`, `start` and `count`
            along the dimension of concatenation, `references` (chunks), and the `milliseconds`
            of its scan. The status is `ingested`, `unchanged`, `failed` (not part of the output),
            `kept` (it cannot be ingested now, and its earlier references stay) or `removed`.
        frame: the report as a data frame.
    """

    published: Published
    report: pa.Table
    frame: DataFrame

    @property
    def counts(self) -> dict[str, int]:
        """The number of files with each status."""
        return dict(Counter(self.report.column("status").to_pylist()))


def ingest_virtual(
    spark: SparkSession,
    repository: Repository | str,
    files: Iterable[str] | Mapping[str, int | None],
    *,
    branch: str = "main",
    group: str = "/",
    concat_dim: str | None = None,
    group_of: Callable[[str], str] | None = None,
    mode: Mode = "append",
    kind: Kind = "auto",
    skip: Sequence[str] = (),
    load: Sequence[str] | None = None,
    guard: Guard = "auto",
    grib_codec: Mapping[str, Any] | None = None,
    on_error: Literal["report", "fail"] = "report",
    files_per_task: int | None = None,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    rebase_with: ConflictSolver | None = None,
    progress: ProgressCallback | None = None,
) -> Ingested:
    """Write references to the chunks of many files, which stay in place, in one commit.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository that is authorised to read the files' containers, or its
            URL if they need no credentials. Its configuration declares the containers.
        files: URLs or absolute paths of HDF5 and NetCDF files, Zarr stores (`.zarr`), kerchunk
            references (`.json`, `.parq`), indexes of GRIB files (`.idx`, `.index`), and dense
            TileDB arrays, with `kind="tiledb"` or as `tiledb+s3://bucket/array`. Given with
            their sizes in bytes, as `list_sources` returns them and as an inventory of a bucket
            has them, they are divided among tasks by size and number, otherwise by number.
        branch: the branch to commit to.
        group: the group of the output; created if it is missing.
        concat_dim: concatenate the files along this dimension, in their order. Chunks keep their
            shape, so each file but the last must end at the end of a chunk. Without it each file
            becomes a group.
        group_of: returns the group for a file, relative to `group`; by default the name of the
            file without its suffix.
        mode: `"append"` adds new files after those ingested before, and updates changed ones in
            place. `"overwrite"` makes these files the whole output, in this order, and removes
            others.
        kind: format of the files; by default known from their names, otherwise HDF5 or NetCDF.
        skip: paths of arrays and groups within the files to leave out.
        load: paths of arrays to copy instead of referring to them. By default, with `concat_dim`,
            those that have no other dimension, and their bounds.
        guard: what references record so that readers notice a changed file: its ETag, or the time
            of its last change in whole seconds. The latter is used for `"last-modified"`, and
            where readers would not see the same ETag, as for local files.
        grib_codec: the Zarr codec that decodes GRIB messages, as in `zarr.json`; by default
            that of the package `gribberish`.
        on_error: leave out files that cannot be read (`"report"`), or commit nothing
            (`"fail"`).
        files_per_task: files of one task; by default up to 50, as many as take a sixteenth of the
            share of a core. What a file takes is estimated from its size, and the same for all
            files of unknown size. Give 1 if each takes minutes to scan. Up to 1,000 files that were
            ingested before are looked at in one task.
        message: message of the commit.
        metadata: properties of the commit.
        rebase_with: decides conflicts with commits made since the start.
        progress: called with the number of finished tasks, from a thread: of those that look for
            changes, if many files were ingested before, and of those that scan.

    Raises:
        VirtualContainerError: no container covers a location.
        InvalidInputError: arguments contradict each other or earlier ingests, or the group of a
            file would be inside of another file's.
        IngestError: with `on_error="fail"`, some files cannot be ingested.
        NodeExistsError: a node that was not ingested is in the place of the output.
        ConflictError: another writer was first.
        PySparkException: a task failed too often.

    After an error nothing is visible. Cost: one request for each unchanged file, one more for each
    that changed, and for kerchunk references one for each object that they refer to. The driver
    holds all new references in columns, about 30 bytes each.
    """
    if files_per_task is not None and files_per_task < 1:
        raise InvalidInputError(f"files_per_task must be at least 1, not {files_per_task}.")
    repo = Repository.open(repository) if isinstance(repository, str) else repository
    shared = SharedRepository.of(repo)
    given = Files.given(shared, files, kind)
    loaded = None if load is None else tuple(load)
    options = ScanOptions(given.kind, concat_dim, tuple(skip), loaded, grib_codec)
    root = check_path(group)
    session = repo.writable_session(branch)
    ingest = _Ingest(spark, shared, session, given, root, options, files_per_task, progress)
    catalog = ingest.catalog()
    plan, answers = ingest.plan(catalog, mode, group_of)
    report = report_of(plan, answers, given.locations)
    check_report(report, on_error)
    # Before anything is published: an error of Spark must not hide that the commit landed.
    frame = spark.createDataFrame(report)
    if plan.is_unchanged:
        return Ingested(Published(session.snapshot_id, committed=False), report, frame)
    ingest.write(plan, catalog, guard)
    published = publish(
        repo,
        session,
        message or f"Ingested {sum(it.scanned is not None for it in plan.placed)} files",
        metadata=metadata,
        rebase_with=rebase_with,
    )
    return Ingested(published, report, frame)


def ingested_files(repository: Repository, *, group: str = "/", branch: str = "main") -> pa.Table:
    """Return the files that were ingested into a group, in the order of their data.

    Columns: `location`, `stamp` (of its state), `group`, `start`, `count`, `references`, and
    `arrays` (their paths within the group; null if files were concatenated).
    """
    session = repository.readonly_session(branch)
    return Catalog.read(session.store, check_path(group)).table()


@dataclass
class _Ingest:
    """One ingest, on the driver."""

    spark: SparkSession
    shared: SharedRepository
    session: Session
    files: Files
    group: str
    options: ScanOptions
    files_per_task: int | None
    progress: ProgressCallback | None
    template: Template | None = None
    """The arrays to which files were concatenated before."""

    @property
    def concat_dim(self) -> str | None:
        """The dimension along which files are concatenated."""
        return self.options.concat_dim

    def catalog(self) -> Catalog:
        """Return the catalog, without entries whose output does not exist any more."""
        for above in ancestors(self.group):
            self._check_outside(above)
        found = Catalog.read(self.session.store, self.group)
        if found.entries and found.concat_dim != self.concat_dim:
            raise InvalidInputError(
                f"Into {self.group!r} files were ingested with concat_dim={found.concat_dim!r}, "
                f"not {self.concat_dim!r}. Ingest into another group."
            )
        if self.concat_dim is None:
            return replace(found, entries=existing_groups(self.session, found))
        self.template = existing_template(self.session, found, self.group)
        # The output was deleted by hand: all is ingested anew, as the first time.
        if self.template is None and not has_output(self.session, found, self.group):
            return replace(found, entries=(), loaded=())
        return found

    def _check_outside(self, above: str) -> None:
        """Refuse to write into a group that belongs to a file of an ingest further up."""
        outer = Catalog.read(self.session.store, above)
        # An ingest that concatenates replaces its own arrays only, and no group.
        for it in outer.entries if outer.concat_dim is None else ():
            if check_path(it.group) in (self.group, *ancestors(self.group)):
                raise InvalidInputError(
                    f"{self.group!r} is inside of the group {it.group!r}, which was ingested from "
                    f"{it.location!r} and is replaced as a whole when that file changes. Ingest "
                    "into another group."
                )

    def plan(
        self, catalog: Catalog, mode: Mode, group_of: Callable[[str], str] | None
    ) -> tuple[Plan, dict[str, Answered]]:
        """Scan files, and decide where each goes; return also the result for each location."""
        dim, locations = self.concat_dim, self.files.locations
        groups: dict[str, str] = {}
        if dim is None:
            stay = catalog.entries if mode == "append" else ()
            groups = groups_of(self.group, locations, group_of, stay)
        answers = self._scan_first(catalog, mode)

        def decide() -> Plan:
            if dim is None:
                return plan_groups(catalog, locations, answers, groups, mode=mode)
            return plan_concat(
                catalog,
                locations,
                answers,
                dim=dim,
                group=self.group,
                mode=mode,
                existing=self.template,
            )

        plan = decide()
        # Scanning a file again can change the plan, and so move other files.
        # Each turn ends with fewer files that may move: one that was scanned has contents, or a
        # reason why it cannot.
        while plan.moved:
            answers.update(self._scan([(it, None) for it in plan.moved]))
            plan = decide()
        return plan, answers

    def _scan_first(self, catalog: Catalog, mode: Mode) -> dict[str, Answered]:
        """Scan files; those of which an array was deleted by hand even if they are unchanged.

        In the mode `"append"` these are scanned also if they are not listed.
        """
        missing = missing_arrays(self.session, catalog, self.group)
        wanted = [*self.files.locations]
        # A file that nobody lists stays in the output, and so do its missing arrays unless it is
        # scanned.
        if mode == "append":
            listed = set(wanted)
            wanted += [it for it in missing if it not in listed]
        answers = self._scan(
            [(it, None if it in missing else catalog.by_location.get(it)) for it in wanted]
        )
        for location, place in missing.items():
            answer = answers.get(location)
            if answer is not None and answer.reason is not None:
                reason = f"Its array {place!r} is missing and cannot be ingested again: "
                answers[location] = replace(answer, reason=reason + answer.reason)
        return answers

    def _scan(self, wanted: Sequence[tuple[str, Entry | None]]) -> dict[str, Answered]:
        """Scan files that have no entry or changed since; return the result for each location.

        Scanning a few is divided over many tasks. Most files of a rerun need no more than a look,
        which takes less time than Spark takes to start a task: one task looks at many. Kerchunk
        references are scanned at once.
        """
        files = [(location, None if it is None else it.stamp) for location, it in wanted]
        listed = [it for it in files if it[1] is not None and can_be_looked_at(it[0], self.options)]
        answers: dict[str, Answered] = {}
        # For few files a second job would take longer than a task for each.
        if len(listed) > total_cores(self.spark):
            size = default_looks(self.spark, len(listed))
            parts = [tuple(listed[at : at + size]) for at in range(0, len(listed), size)]
            looked = self._run(look_at_files, parts, "looking for changes")
            answers = {location: it for location, it in looked.items() if it.stamp is not None}
        rest = [it for it in files if it[0] not in answers]
        costs = self.files.costs([location for location, _ in rest], self.options)
        parts = divide(rest, costs, total_cores(self.spark), self.files_per_task)
        return answers | self._run(scan_files, parts, "scanning files")

    def _run(
        self,
        work: Callable[[AsyncRepository, FileWork], Awaitable[Mapping[str, Sequence[Any]]]],
        parts: Sequence[tuple[tuple[str, str | None], ...]],
        phase: str,
    ) -> dict[str, Answered]:
        """Run a task for each part of the files; return the result for each location."""
        table = run_job(
            self.spark,
            self.shared,
            [FileWork(self.options, it) for it in parts],
            work,
            COLUMNS,
            phase=phase,
            progress=self.progress,
        )
        answers: dict[str, Answered] = {}
        for batch in table.to_batches():
            for row in batch.to_pylist():
                data = row["scanned"]
                answers[row["location"]] = Answered(
                    row["stamp"],
                    row["reason"],
                    None if data is None else Scanned.from_bytes(data),
                    row["milliseconds"],
                )
        return answers

    def write(self, plan: Plan, catalog: Catalog, guard: Guard) -> None:
        """Write the files and the new catalog to the session."""
        arrays: tuple[str, ...] = ()
        loaded: tuple[str, ...] = ()
        attributes: Mapping[str, Sequence[str]] = {}
        if self.concat_dim is None:
            write_groups(self.session, plan, guard)
        else:
            assert plan.template is not None  # a plan with changes has one
            attributes = write_concatenated(
                self.session,
                plan,
                catalog,
                self.group,
                fresh=plan.template is not self.template,
                guard=guard,
            )
            arrays, loaded = tuple(plan.template.documents), tuple(sorted(plan.template.loaded))
        entries = tuple(
            Entry(
                it.location,
                it.stamp,
                it.group,
                it.start,
                it.count,
                it.scanned.num_references if it.scanned is not None else references_of(it.old),
                self._arrays_of(it),
            )
            for it in plan.placed
        )
        # In the same session as the data, so that no snapshot has one without the other.
        after = Catalog(entries, self.concat_dim, arrays, loaded, attributes)
        after.write(self.session.store, self.group)

    def _arrays_of(self, placed: Placed) -> tuple[str, ...] | None:
        """Return the arrays that a file has in its group."""
        if self.concat_dim is not None:
            return None
        if placed.scanned is not None:
            return tuple(sorted(placed.scanned.arrays))
        return None if placed.old is None else placed.old.arrays
