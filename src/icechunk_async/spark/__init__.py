"""Apache Spark: read versioned arrays as tables, write to them, stream commits, run upkeep.

`register` makes the format `icechunk` known to a Spark session::

    icechunk_async.spark.register(spark)
    spark.read.format("icechunk").option("branch", "main").load("s3://bucket/climate")

Importing this package starts nothing, and imports PySpark only once a public name is used.

`source` is the data source, with the rooms `read`, `write` and `stream` behind it. `jobs` and
`ingest` run upkeep and ingestion as Spark jobs. All of them use `options` (what users may ask for),
`shared` (the repository in the driver and in tasks), `tasks` (work divided over a job) and `grid`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from icechunk_async.spark.ingest.files import list_sources
    from icechunk_async.spark.ingest.ingest import Ingested, ingest_virtual, ingested_files
    from icechunk_async.spark.jobs.analyze import analyze
    from icechunk_async.spark.jobs.garbage import garbage_collect
    from icechunk_async.spark.jobs.manifests import rewrite_manifests, storage_statistics
    from icechunk_async.spark.jobs.verify import check_references, verify
    from icechunk_async.spark.read.reader import PlannedRead
    from icechunk_async.spark.read.sql import register_functions, register_views
    from icechunk_async.spark.source import IcechunkSource, register, watch_reads
    from icechunk_async.spark.tasks import JobReport
    from icechunk_async.spark.write.by_chunk import repartition_by_chunk
    from icechunk_async.spark.write.compute import Input, NewArray, map_chunks, write_region
    from icechunk_async.spark.write.cooperative import (
        Answer,
        CooperativeWrite,
        Published,
        Transaction,
        publish,
        published_version,
        run_tasks,
    )
    from icechunk_async.spark.write.rows import write_rows

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
    "analyze",
    "check_references",
    "garbage_collect",
    "ingest_virtual",
    "ingested_files",
    "list_sources",
    "map_chunks",
    "publish",
    "published_version",
    "register",
    "register_functions",
    "register_views",
    "repartition_by_chunk",
    "rewrite_manifests",
    "run_tasks",
    "storage_statistics",
    "verify",
    "watch_reads",
    "write_region",
    "write_rows",
]

_NAMES: Final = {
    "ingest.files": ("list_sources",),
    "ingest.ingest": ("Ingested", "ingest_virtual", "ingested_files"),
    "jobs.analyze": ("analyze",),
    "jobs.garbage": ("garbage_collect",),
    "jobs.manifests": ("rewrite_manifests", "storage_statistics"),
    "jobs.verify": ("check_references", "verify"),
    "read.sql": ("register_functions", "register_views"),
    "read.reader": ("PlannedRead",),
    "source": ("IcechunkSource", "register", "watch_reads"),
    "tasks": ("JobReport",),
    "write.by_chunk": ("repartition_by_chunk",),
    "write.compute": ("Input", "NewArray", "map_chunks", "write_region"),
    "write.cooperative": (
        "Answer",
        "CooperativeWrite",
        "Published",
        "Transaction",
        "publish",
        "published_version",
        "run_tasks",
    ),
    "write.rows": ("write_rows",),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would accept any name otherwise

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
