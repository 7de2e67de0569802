"""How many requests a task may have under way: its share of the budget of the repository.

Spark runs the tasks of one executor in processes of their own, as many at a time as it has cores
for, and no budget reaches across processes. So each task takes its part of the whole.
"""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext

from icechunk_async.sync import RepositoryConfig
from icechunk_async.sync.handles import RepositoryHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.sync.handles import Source

__all__ = ["Budget", "shared_handle", "tasks_at_a_time"]

_MASTER: Final = "spark.master"
_CORES: Final = ("resource.executor.cores", "spark.executor.cores")
_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)(?:,.*)?\])?$")


@dataclass(frozen=True, slots=True)
class Budget:
    """Requests at a time of all tasks of one executor.

    Attributes:
        requests: how many, as the repository is configured.
        tasks: that run at a time; 0 where each task is to ask Spark.
    """

    requests: int
    tasks: int = 0

    def of_task(self) -> RepositoryConfig:
        """Return the share of the task that this runs in; outside of a task it is all."""
        context = TaskContext.get()
        tasks = self.tasks
        if context is not None and not tasks:
            known = {name: context.getLocalProperty(name) or "" for name in (_MASTER, *_CORES)}
            tasks = tasks_at_a_time(known, context.cpus(), os.cpu_count() or 1)
        return RepositoryConfig(max_concurrent_requests=max(1, self.requests // max(1, tasks)))


def tasks_at_a_time(properties: Mapping[str, str], task_cpus: int, machine_cores: int) -> int:
    """Return how many tasks an executor runs at a time, from what one of them knows.

    Args:
        properties: of the task, as Spark names them.
        task_cpus: cores that a task needs.
        machine_cores: of the machine that the task runs on; an executor has all of them where
            nobody says how many it has.
    """
    local = _LOCAL.match(properties.get(_MASTER, ""))
    given = [properties[name] for name in _CORES if properties.get(name, "").isdigit()]
    if local is not None:
        cores = machine_cores if local[1] == "*" else int(local[1] or "1")
    else:
        cores = int(given[0]) if given else machine_cores
    return max(1, cores // max(1, task_cpus))


def shared_handle(source: Source) -> RepositoryHandle:
    """Return the open repository that all tasks of this process share for equal sources."""
    # Unpickled, a handle is the one of the process.
    handle: RepositoryHandle = pickle.loads(pickle.dumps(RepositoryHandle(source)))  # noqa: S301
    return handle
