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
    from icechunk_async.spark.source import IcechunkSource, register

__all__ = ["IcechunkSource", "register"]

_HOMES: Final = {
    "IcechunkSource": "icechunk_async.spark.source",
    "register": "icechunk_async.spark.source",
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
