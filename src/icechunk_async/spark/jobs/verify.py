"""Verify a repository, divided over tasks: manifests first, then the objects that they refer to."""

from __future__ import annotations

import pickle
from dataclasses import astuple, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.check import CHECK, ReferenceReport, find_leftovers
from icechunk_async.engine.upkeep.integrity.objects import Contents
from icechunk_async.engine.upkeep.integrity.pieces import NeededObjects, Pieces, VirtualPieces
from icechunk_async.engine.upkeep.integrity.report import Level, as_level
from icechunk_async.engine.upkeep.integrity.structure import uncached
from icechunk_async.engine.upkeep.integrity.verify import (
    Drawn,
    Looked,
    Outcome,
    VerifyOptions,
    draw,
    examine,
    located,
    look,
    prepare,
    read,
    report_of,
)
from icechunk_async.format.ids import ALPHABET
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.spark.tasks import (
    columns_of,
    default_tasks,
    reported,
    run_job,
    shares,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.upkeep.integrity.report import Finding, VerifyReport
    from icechunk_async.engine.upkeep.integrity.structure import ManifestUse
    from icechunk_async.engine.upkeep.integrity.verify import Prepared
    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.sync import Repository

__all__ = ["check_references", "verify"]

_EXAMINED: Final = "needed binary, findings binary, counts binary"
_LOOKED: Final = "looked binary, counts binary"
_BROKEN: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("location", pa.string()),
        ("problem", pa.string()),
        ("detail", pa.string()),
        ("references", pa.int64()),
    ]
)
_FINDINGS: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("location", pa.string()),
        ("problem", pa.string()),
        ("level", pa.string()),
        ("detail", pa.string()),
        ("references", pa.int64()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("array", pa.string()),
        ("coordinates", pa.list_(pa.int64())),
    ]
)


def verify(
    spark: SparkSession,
    repository: Repository | str,
    level: Literal["structure", "existence", "length", "sums", "decode"] = "decode",
    *,
    refs: Sequence[str] | None = None,
    ancestry: bool = True,
    sample: float | None = None,
    seed: int = 0,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[VerifyReport]:
    """Look whether the repository is what it should be, as closely as `level` says.

    The result is that of `Repository.verify`, and so are the arguments that both have. The table
    has a row for each finding, with the fields of `icechunk_async.upkeep.Finding`.

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, authorised to read the containers of virtual chunks to
            verify, or its URL.
        level: how closely to look.
        refs: names of branches and tags, or ids of snapshots; None: all branches and tags.
        ancestry: also look at the snapshots before those that the refs name.
        sample: the share of the chunks to look at (a float), or their number (an int).
        seed: draws another sample of the same size.
        tasks: number of tasks of each step; by default four for each core.
        progress: called with the number of finished tasks of each step, from a thread.

    Raises:
        PySparkException: a task failed too often.

    Cost: that of one process, divided; the driver reads every snapshot and transaction log. Memory
    of the driver: about 60 bytes for each different chunk, below *sums* for each chunk object.
    """
    named = None if refs is None else tuple(refs)
    options = VerifyOptions(as_level(level), named, ancestry, sample, seed)
    report = _Run(spark, SharedRepository.of(repository), options, tasks, progress).report()
    rows = [astuple(it) for it in report.findings]
    return reported(spark, report, _table(rows, _FINDINGS))


def check_references(
    spark: SparkSession,
    repository: Repository | str,
    *,
    tasks: int | None = None,
    progress: ProgressCallback | None = None,
) -> JobReport[ReferenceReport]:
    """Check that every object reachable from branches and tags exists and is long enough.

    It is `verify` at the level *length*, and the result is that of `Repository.check_references`.
    The table has a row for each object with a problem: its `kind`, `location`, `problem` and
    `detail`, and how many chunks refer to it (`references`).

    Args:
        spark: a session, also one of Spark Connect.
        repository: an open repository, authorised to read the containers of virtual chunks to
            check, or its URL.
        tasks: number of tasks of each step; by default four for each core.
        progress: called with the number of finished tasks of each step, from a thread.

    Raises:
        PySparkException: a task failed too often.

    Cost: that of one process, divided; the driver reads every snapshot and transaction log. Memory
    of the driver: about 60 bytes for each chunk object in use.
    """
    shared = SharedRepository.of(repository)
    report = _Run(spark, shared, CHECK, tasks, progress).report()
    result = ReferenceReport.of(report, shared.ask(lambda it: find_leftovers(it.engine)))
    return reported(spark, result, _table([astuple(it) for it in result.broken], _BROKEN))


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = {name: [row[at] for row in rows] for at, name in enumerate(schema.names)}
    return pa.Table.from_batches([pa.RecordBatch.from_pydict(columns, schema)], schema)


@dataclass(frozen=True, slots=True)
class _Manifests:
    """Manifests with their numbers."""

    uses: list[tuple[int, ManifestUse]]
    codecs: list[tuple[bytes, ...]]
    options: VerifyOptions


@dataclass(frozen=True, slots=True)
class _Objects:
    """Objects to look for, or chunks to read."""

    drawn: Drawn
    codecs: list[tuple[bytes, ...]]
    options: VerifyOptions
    prefix: str | None
    """Of the keys of the chunk objects to look for; None: read the chunks."""


@dataclass(slots=True)
class _Run:
    """One verification in the driver."""

    spark: SparkSession
    shared: SharedRepository
    options: VerifyOptions
    tasks: int | None
    progress: ProgressCallback | None
    codecs: list[tuple[bytes, ...]] = field(default_factory=list[tuple[bytes, ...]])
    looked: Looked = field(default_factory=Looked)

    def report(self) -> VerifyReport:
        """Read manifests, look for objects, read chunks, and put the report together."""
        options = self.options
        begun: Prepared = self.shared.ask(lambda it: prepare(it.engine, options))
        self.codecs = begun.structure.codecs
        # Only its counters are used here: the driver reads no object.
        total = Contents(None, None, options.level, [])  # type: ignore[arg-type]
        uses = list(enumerate(begun.uses))
        manifests = [_Manifests(list(it), self.codecs, options) for it in self._divided(uses)]
        # Manifests before objects: only these say which objects are needed, and how many bytes of
        # each.
        table = self._job("reading manifests", manifests, _examine, _EXAMINED, total)
        findings: list[Finding] = [it for some in _loaded(table, "findings") for it in some]
        drawn = draw(NeededObjects.joined(_loaded(table, "needed")), options)
        self._look("looking for objects", self._lookups(drawn), total)
        if options.level >= Level.SUMS:
            self._look("reading chunks", self._readings(drawn), total)
        looked = self.looked
        # Tasks end in any order, and a report must not depend on it.
        looked.findings.sort(key=lambda it: (it[1].kind, it[1].location, it[1].offset or 0))

        async def finish(opened: AsyncRepository) -> VerifyReport:
            engine = opened.engine
            found = await located(uncached(engine), begun.uses, looked.findings)
            outcome = Outcome(drawn, looked, total)
            return report_of(engine, options, begun, outcome, [*begun.findings, *findings, *found])

        return self.shared.ask(finish)

    def _divided[T](self, items: Sequence[T]) -> list[tuple[T, ...]]:
        return shares(items, self.tasks or default_tasks(self.spark, len(items)))

    def _job(
        self, phase: str, parts: Sequence[Any], work: Any, columns: str, total: Contents
    ) -> pa.Table:
        table = run_job(
            self.spark, self.shared, parts, work, columns, phase=phase, progress=self.progress
        )
        for it in _loaded(table, "counts"):
            _add(total, it)
        return table

    def _look(self, phase: str, parts: list[_Objects], total: Contents) -> None:
        table = self._job(phase, parts, _look, _LOOKED, total)
        for it in _loaded(table, "looked"):
            _join(self.looked, it)

    def _part(
        self, drawn: Drawn, native: Pieces, virtual: VirtualPieces, prefix: str | None
    ) -> _Objects:
        # A part only: what a task is given travels to it, and all would travel to each.
        some = Drawn(native, virtual, 0, drawn.chunk_objects, 0, [])
        return _Objects(some, self.codecs, self.options, prefix)

    def _lookups(self, drawn: Drawn) -> list[_Objects]:
        """Divide objects the way they are listed: by first letters, or all in one listing."""
        if self.options.level < Level.EXISTENCE:
            return []
        native, nothing = drawn.native.objects(), VirtualPieces({})
        parts: list[_Objects] = []
        if len(native) and self.shared.lists_whole_folders():
            parts = [self._part(drawn, native, nothing, "chunks/")]
        elif len(native):
            # The first letter of an id is its first five bits (base 32).
            firsts = native.ids[:, 0] >> 3
            for number in np.unique(firsts).tolist():
                some = native.take(np.flatnonzero(firsts == number))
                parts.append(self._part(drawn, some, nothing, f"chunks/{ALPHABET[number]}"))
        virtual = sorted(drawn.virtual.found.items(), key=lambda it: it[0][0])
        return [
            *parts,
            *(
                self._part(drawn, Pieces.empty(), VirtualPieces(dict(it)), "chunks/")
                for it in self._divided(virtual)
            ),
        ]

    def _readings(self, drawn: Drawn) -> list[_Objects]:
        """Divide chunks between objects, so that each object is read by one task."""
        native, nothing = drawn.native, VirtualPieces({})
        first = native.new_objects()
        # Pieces are sorted by object, and `first` marks where one begins: True False True becomes 0
        # 0 1.
        number_of = np.cumsum(first) - 1
        keys = [native.key(row) for row in np.flatnonzero(first).tolist()]
        # What is missing or too short is a finding already, and reading it would be another.
        sound = [number for number, key in enumerate(keys) if key not in self.looked.broken]
        parts: list[_Objects] = []
        for some in self._divided(sound):
            rows = np.flatnonzero(np.isin(number_of, np.array(some)))
            parts.append(self._part(drawn, native.take(rows), nothing, None))
        left = [it for it in drawn.virtual.found.items() if it[0] not in self.looked.closed]
        return [
            *parts,
            *(
                self._part(drawn, Pieces.empty(), VirtualPieces(dict(it)), None)
                for it in self._divided(left)
            ),
        ]


def _loaded(table: pa.Table, column: str) -> list[Any]:
    return [pickle.loads(it) for it in table.column(column).to_pylist()]  # noqa: S301 -- our own


def _add(
    total: Contents, counts: tuple[int, int, int, int, dict[str, int], dict[str, int]]
) -> None:
    chunks, size_bytes, without_sum, not_drawn, undecided, unread = counts
    total.not_drawn += not_drawn
    total.chunks_read += chunks
    total.bytes_read += size_bytes
    total.without_sum += without_sum
    for mine, theirs in ((total.undecided, undecided), (total.unread, unread)):
        for why, count in theirs.items():
            mine[why] = mine.get(why, 0) + count


def _join(looked: Looked, other: Looked) -> None:
    looked.findings += other.findings
    looked.broken |= other.broken
    looked.closed |= other.closed
    looked.unauthorized += other.unauthorized
    looked.unreachable += other.unreachable


def _contents(
    repository: AsyncRepository, options: VerifyOptions, codecs: list[tuple[bytes, ...]]
) -> Contents:
    from icechunk_async.zarr.decoding import ZarrDecoder  # noqa: PLC0415 -- slow to import

    engine = repository.engine
    storage = uncached(engine).storage
    return Contents(storage, engine.virtual, options.level, codecs, ZarrDecoder())


def _counted(it: Contents) -> bytes:
    numbers = (it.chunks_read, it.bytes_read, it.without_sum, it.not_drawn)
    return pickle.dumps((*numbers, it.undecided, it.unread))


async def _examine(repository: AsyncRepository, part: _Manifests) -> Mapping[str, Sequence[Any]]:
    """Return the objects that manifests refer to, and findings about the manifests."""
    contents = _contents(repository, part.options, part.codecs)
    needed, findings = await examine(uncached(repository.engine), part.uses, part.options, contents)
    row = (pickle.dumps(needed, protocol=5), pickle.dumps(findings), _counted(contents))
    return columns_of(_EXAMINED, [row])


async def _look(repository: AsyncRepository, part: _Objects) -> Mapping[str, Sequence[Any]]:
    """Return which of some objects, or chunks in them, are damaged."""
    contents = _contents(repository, part.options, part.codecs)
    if part.prefix is not None:
        looked = await look(part.drawn, part.options, contents, prefix=part.prefix)
    else:
        looked = Looked()
        await read(part.drawn, looked, contents)
    return columns_of(_LOOKED, [(pickle.dumps(looked, protocol=5), _counted(contents))])
