"""Lets Spark's daemons import NumPy, Zarr and the format, which Python does before they start.

Spark plans each reading and writing in a new process, a fork of a daemon. Where the daemon has not
imported what it needs, each fork does, for a second. Python imports a module of this name when it
starts; only the daemons have use for it. The pipeline and the pages of the docs run without it.
"""

from __future__ import annotations

import sys
from importlib import import_module

if "pyspark.daemon" in sys.orig_argv:
    for name in (
        "icechunk_async.spark.read.reader",
        "icechunk_async.spark.source",
        "icechunk_async.spark.write.commit",
        "icechunk_async.spark.write.task",
        "icechunk_async.sync",
        "pyspark.worker",
        "zarr",
    ):
        import_module(name)
