"""Concurrent requests of a Spark job, divided by the tasks that run at once.

Tasks run in separate processes, on many machines, and no limiter reaches across them: each task
computes a fixed share from what Spark tells it. Two bounds hold at the same time. The tasks of one
executor share the budget of the repository, which spares the machine. All tasks of the job share
the budget of the job, which spares the storage.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from pyspark import TaskContext

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.sync import RepositoryConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

__all__ = [
    "JOB_REQUESTS",
    "JOB_SETTING",
    "SEEN_CORES",
    "Budget",
    "cores_of_executor",
    "seen_cores",
    "tasks_at_a_time",
    "tasks_of_job",
]

JOB_REQUESTS: Final = 4096
"""The default for requests at a time of a whole job: those of 16 executors with 256 each.

At 20 to 50 ms a request these are 80,000 to 200,000 a second. S3 begins with 5,500 reads a second
at one prefix, and divides busy prefixes."""
JOB_SETTING: Final = "spark.icechunk.maxRequests"
"""The setting of a Spark session for all of its jobs."""
SEEN_CORES: Final = "spark.icechunk.seenCores"
"""Where `register` notes how many cores the cluster had: planning has no other way to ask."""

_MASTER: Final = "spark.master"
# The scheduler sets the first for each stage, by its resource profile; the second is the session's.
_CORES: Final = ("resource.executor.cores", "spark.executor.cores")
_EXECUTORS: Final = ("spark.executor.instances", "spark.dynamicAllocation.maxExecutors")
_CLUSTER_CORES: Final = ("spark.cores.max", "spark.default.parallelism", SEEN_CORES)
_PROPERTIES: Final = (_MASTER, JOB_SETTING, *_CORES, *_EXECUTORS, *_CLUSTER_CORES)
_UNBOUNDED: Final = (1 << 31) - 1
_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)(?:,.*)?\])?$")
_LOCAL_CLUSTER: Final = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]$")


@dataclass(frozen=True, slots=True)
class Budget:
    """Concurrent requests of one executor and of the whole job, shared by tasks; plain data.

    Attributes:
        requests: of one executor: the repository's configured maximum.
        tasks: how many tasks of an executor run at once; 0 if each task has to ask Spark.
        job_requests: of the whole job; 0 for the session's setting, or else `JOB_REQUESTS`.
        cores: cores of the cluster, if the driver knows them; 0 if not.
        parts: how many tasks the job has in all; 0 if that is not known.
    """

    requests: int
    tasks: int = 0
    job_requests: int = 0
    cores: int = 0
    parts: int = 0

    def of_task(self) -> RepositoryConfig:
        """Return a configuration with the share of the calling task.

        Outside of a task, in the driver, that is all that one executor and the job may have.

        Raises:
            InvalidInputError: the session's setting is not a number.
        """
        context = TaskContext.get()
        known: Mapping[str, str] = {}
        share = self.requests // max(1, self.tasks)
        together = 1
        if context is not None:
            # A task has no session. Spark copies settings whose names begin with `spark` into its
            # local properties.
            known = {name: context.getLocalProperty(name) or "" for name in _PROPERTIES}
            cpus, machine = context.cpus(), os.cpu_count() or 1
            tasks = self.tasks or tasks_at_a_time(known, cpus, machine)
            share = self.requests // tasks
            # A cluster that says nothing has at least the tasks that run beside this one.
            together = max(tasks, tasks_of_job(known, cpus, machine, self.cores))
            together = min(together, self.parts or together)
        of_job = self.job_requests or requests_of(known.get(JOB_SETTING, "")) or JOB_REQUESTS
        # One at least, even if all tasks together then exceed the budget: without a request a task
        # would wait forever.
        return RepositoryConfig(max_concurrent_requests=max(1, min(share, of_job // together)))

    def among(self, parts: int) -> Self:
        """Return the budget of a job with `parts` tasks, which may be fewer than could run."""
        return replace(self, parts=parts)

    def in_session(self, spark: SparkSession, parts: int = 0) -> Self:
        """Return the budget with what the driver knows of a job of `parts` tasks.

        Raises:
            InvalidInputError: the session's setting is not a number.
        """
        requests_of(spark.conf.get(JOB_SETTING, None) or "")  # refused before a task runs
        return replace(self, cores=seen_cores(spark), parts=parts)


def requests_of(text: str) -> int:
    """Return the number of requests that the session's setting names; 0 if it is not set.

    Raises:
        InvalidInputError: it is no positive number.
    """
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidInputError(
            f"The setting {JOB_SETTING} of the Spark session must be a positive number of "
            f"requests, not {text!r:.50}. Set another, or unset it for {JOB_REQUESTS}."
        )
    return int(text)


def seen_cores(spark: SparkSession) -> int:
    """Return the number of cores that the driver sees now; 0 if it does not know."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # noqa: BLE001 -- Spark Connect has no context, and its errors vary
        return 0


def cores_of_executor(properties: Mapping[str, str], machine_cores: int) -> int:
    """Return the cores of an executor: those of this machine if it does not say."""
    local = _LOCAL.match(properties.get(_MASTER, ""))
    if local is not None:
        # With `local[4]` four tasks run at a time, however many cores the machine has.
        return machine_cores if local[1] == "*" else int(local[1] or "1")
    return next((it for it in map(_number(properties), _CORES) if it), machine_cores)


def tasks_at_a_time(properties: Mapping[str, str], task_cpus: int, machine_cores: int) -> int:
    """Return the number of tasks that an executor runs at once.

    Args:
        properties: local properties of a task, by Spark's names.
        task_cpus: cores that Spark reserves for each task.
        machine_cores: cores of this machine, assumed for executors that do not say.
    """
    return max(1, cores_of_executor(properties, machine_cores) // max(1, task_cpus))


def tasks_of_job(
    properties: Mapping[str, str], task_cpus: int, machine_cores: int, cores: int = 0
) -> int:
    """Return the number of tasks that the cluster runs at once.

    Of what Spark says the largest counts, since a cluster may grow while the job runs. If it says
    nothing, there is one executor.

    Args:
        properties: local properties of a task, by Spark's names.
        task_cpus: cores that Spark reserves for each task.
        machine_cores: cores of this machine, assumed for executors that do not say.
        cores: cores of the cluster as the driver saw them; 0 if it did not.
    """
    each = tasks_at_a_time(properties, task_cpus, machine_cores)
    master = properties.get(_MASTER, "")
    if _LOCAL.match(master):
        return each
    told = _number(properties)
    cluster = _LOCAL_CLUSTER.match(master)
    executors = max(int(cluster[1]) if cluster else 1, *map(told, _EXECUTORS))
    of_cores = max(cores, *map(told, _CLUSTER_CORES)) // max(1, task_cpus)
    return max(each * executors, of_cores)


def _number(properties: Mapping[str, str]) -> Callable[[str], int]:
    """Return a function for the numbers among properties; 0 for any other text."""

    def number(name: str) -> int:
        text = properties.get(name, "")
        # `spark.dynamicAllocation.maxExecutors` is 2147483647 unless somebody set it.
        return int(text) if text.isdigit() and int(text) < _UNBOUNDED else 0

    return number
