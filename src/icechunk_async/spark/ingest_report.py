"""What became of each file of an ingest, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from icechunk_async.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.spark.ingest_catalog import Entry
    from icechunk_async.spark.ingest_plan import Answered, Plan

__all__ = ["REPORT", "check_report", "references_of", "report_of"]

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
    """Answer how many references a file had."""
    return 0 if entry is None else entry.references


def report_of(plan: Plan, answers: Mapping[str, Answered], files: Sequence[str]) -> pa.Table:
    """Answer what became of each file."""
    rows: list[tuple[Any, ...]] = []
    placed = {it.location: it for it in plan.placed}
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
    """Raise IngestError if some files failed and that is not to be only reported."""
    if on_error != "fail":
        return
    failed = [row for row in report.to_pylist() if row["reason"] is not None]
    if failed:
        raise IngestError(
            f"{len(failed)} of {report.num_rows} files could not be ingested; the first, "
            f"{failed[0]['location']!r}: {failed[0]['reason']} Nothing was committed.",
            report=report,
        )
