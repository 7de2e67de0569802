"""A standalone cluster of Spark on loopback: one process for the master, one for each worker."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["standalone_cluster"]

_PATIENCE_SECONDS = 120


@contextmanager
def standalone_cluster(directory: Path, workers: int) -> Generator[str]:
    """Run a master and workers of one core each; answer its address for drivers."""
    port = _free_port()
    master = f"spark://127.0.0.1:{port}"
    running: list[subprocess.Popen[bytes]] = []
    logs = [directory / f"{name}.log" for name in ("master", *map(str, range(workers)))]
    try:
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        running.append(_start("master.Master", arguments, logs[0]))
        _wait_for(running[0], logs[0], "Starting Spark master")
        for number, log in enumerate(logs[1:]):
            # Spark runs no second try of a slow task on the host of the first.
            host = f"127.0.0.{number + 1}"
            arguments = ["--host", host, "--webui-port", "0", "--cores", "1"]
            arguments += ["--memory", "1g", "--work-dir", str(directory / f"work-{number}"), master]
            running.append(_start("worker.Worker", arguments, log))
        for process, log in zip(running[1:], logs[1:], strict=True):
            _wait_for(process, log, "Successfully registered")
        yield master
    finally:
        for process in running:
            process.kill()
            process.wait()


def _start(name: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    import pyspark

    home = Path(pyspark.__file__).parent
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        # It would listen on a port that another cluster of this machine may have.
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
    }
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _wait_for(process: subprocess.Popen[bytes], log: Path, words: str) -> None:
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while words not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"{log.stem} of the cluster did not start:\n{text[-2000:]}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
