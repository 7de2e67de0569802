"""Lets PySpark find the data source ``icechunk`` by itself.

It looks for ``DefaultSource`` in installed packages whose names begin with ``pyspark_``.
"""

from icechunk_async.spark.source import IcechunkSource as DefaultSource

__all__ = ["DefaultSource"]
