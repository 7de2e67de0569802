"""Apache Spark reads versioned arrays as tables, and writes to them.

:func:`register` makes the format ``icechunk`` known to a Spark session::

    icechunk_async.spark.register(spark)
    spark.read.format("icechunk").option("branch", "main").load("s3://bucket/climate")

Importing this package starts nothing, and needs PySpark only once something of it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.spark.ingest.ingest import (
        Ingested,
        ingest_virtual,
        ingested_files,
        list_sources,
    )
    from icechunk_async.spark.jobs.check import check_references
    from icechunk_async.spark.jobs.garbage import garbage_collect
    from icechunk_async.spark.jobs.job import JobReport
    from icechunk_async.spark.jobs.manifests import rewrite_manifests, storage_statistics
    from icechunk_async.spark.read.reader import PlannedRead, watch_reads
    from icechunk_async.spark.source import IcechunkSource, register
    from icechunk_async.spark.write.by_chunk import repartition_by_chunk
    from icechunk_async.spark.write.compute import Input, NewArray, map_chunks, write_region
    from icechunk_async.spark.write.cooperative import Answer, CooperativeWrite, run_tasks
    from icechunk_async.spark.write.rows import write_rows
    from icechunk_async.spark.write.transactions import (
        Published,
        Transaction,
        publish,
        published_version,
    )

__all__ = [
    "Answer",
    "CooperativeWrite",
    "IcechunkSource",
    "Ingested",
    "Input",
    "JobReport",
    "NewArray",
    "PlannedRead",
    "Published",
    "Transaction",
    "check_references",
    "garbage_collect",
    "ingest_virtual",
    "ingested_files",
    "list_sources",
    "map_chunks",
    "publish",
    "published_version",
    "register",
    "repartition_by_chunk",
    "rewrite_manifests",
    "run_tasks",
    "storage_statistics",
    "watch_reads",
    "write_region",
    "write_rows",
]

_HOMES: Final = {
    "Answer": "icechunk_async.spark.write.cooperative",
    "CooperativeWrite": "icechunk_async.spark.write.cooperative",
    "IcechunkSource": "icechunk_async.spark.source",
    "Input": "icechunk_async.spark.write.compute",
    "NewArray": "icechunk_async.spark.write.compute",
    "PlannedRead": "icechunk_async.spark.read.reader",
    "Published": "icechunk_async.spark.write.transactions",
    "Transaction": "icechunk_async.spark.write.transactions",
    "map_chunks": "icechunk_async.spark.write.compute",
    "publish": "icechunk_async.spark.write.transactions",
    "published_version": "icechunk_async.spark.write.transactions",
    "Ingested": "icechunk_async.spark.ingest.ingest",
    "JobReport": "icechunk_async.spark.jobs.job",
    "check_references": "icechunk_async.spark.jobs.check",
    "garbage_collect": "icechunk_async.spark.jobs.garbage",
    "ingest_virtual": "icechunk_async.spark.ingest.ingest",
    "ingested_files": "icechunk_async.spark.ingest.ingest",
    "list_sources": "icechunk_async.spark.ingest.ingest",
    "register": "icechunk_async.spark.source",
    "repartition_by_chunk": "icechunk_async.spark.write.by_chunk",
    "run_tasks": "icechunk_async.spark.write.cooperative",
    "watch_reads": "icechunk_async.spark.read.reader",
    "write_region": "icechunk_async.spark.write.compute",
    "write_rows": "icechunk_async.spark.write.rows",
    "rewrite_manifests": "icechunk_async.spark.jobs.manifests",
    "storage_statistics": "icechunk_async.spark.jobs.manifests",
}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
