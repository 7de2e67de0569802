"""Sail as the engine: a server in this process, and a session of Spark Connect."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

    from pyspark.sql import SparkSession

__all__ = ["sail_session"]


@contextmanager
def sail_session() -> Generator[SparkSession]:
    """Start a server on loopback, and open a session with the settings of that of Spark."""
    from pyspark.sql import SparkSession

    # Only where the tests of Sail run is it installed.
    server: Any = import_module("pysail.spark").SparkConnectServer("127.0.0.1", 0)
    server.start(background=True)
    address, port = server.listening_address
    session = SparkSession.builder.remote(f"sc://{address}:{port}").getOrCreate()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield session
    session.stop()
    server.stop()
