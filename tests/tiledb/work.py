"""Let versions of TileDB's library write and read arrays.

`python work.py WRITER READER JOBS OUT`: ``WRITER`` and ``READER`` are libraries, which may be of
different versions, ``JOBS`` is a JSON file with a list of jobs. Arrays go to ``OUT/<number>``, the
results of queries to ``OUT/<number>-<query>.npz``, and errors to ``OUT/errors.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.tiledb.engine import Engine, EngineError, Raw
from tests.tiledb.jobs import make_cells

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = 30


def perform(engine: Engine, uri: str, job: dict[str, Any]) -> None:
    """Carry out the steps of a job."""
    engine.create(uri, job)
    attrs = list(job["attrs"])
    for step in job["steps"]:
        match step["op"]:
            case "write":
                now = {**job, "attrs": attrs}
                cells = make_cells(job, step, attrs)
                engine.write(uri, now, cells, region=step.get("region"), time=step["time"])
                if engine.version < (2, 3):
                    time.sleep(0.003)  # the library takes the clock
            case "consolidate":
                settings = {"mode": step["mode"], **step.get("settings", {})}
                engine.consolidate(uri, settings, time=step.get("time"))
            case "vacuum":
                engine.vacuum(uri, step["mode"])
            case "delete":
                engine.delete(uri, step["condition"], {**job, "attrs": attrs}, time=step["time"])
            case "evolve":
                engine.evolve(uri, step)
                attrs = [it for it in attrs if it["name"] not in step.get("drop", ())]
                attrs += step.get("add", [])
            case "metadata":
                engine.put_metadata(uri, step)
            case other:
                raise ValueError(other)


def save(path: Path, found: dict[str, Raw]) -> None:
    """Write what was read."""
    arrays: dict[str, Any] = {}
    for name, raw in found.items():
        arrays[f"{name}/values"] = raw.values
        if raw.offsets is not None:
            arrays[f"{name}/offsets"] = raw.offsets
        if raw.valid is not None:
            arrays[f"{name}/valid"] = raw.valid
    np.savez_compressed(path, **arrays)


def schema_at(job: dict[str, Any], query: dict[str, Any]) -> dict[str, Any]:
    """Return the specification that holds at the end of a query."""
    attrs = list(job["attrs"])
    for step in job["steps"]:
        if step["op"] == "evolve" and ("end" not in query or step["time"] <= query["end"]):
            attrs = [it for it in attrs if it["name"] not in step.get("drop", ())]
            attrs += step.get("add", [])
    return {**job, "attrs": attrs}


def write(library: str, uri: str, job: dict[str, Any]) -> dict[str, str]:
    """Carry out the steps of a job; return the error of the library, if there was one."""
    engine = Engine(library)
    try:
        perform(engine, uri, job)
    except EngineError as error:
        return {"": str(error)}
    return {}


def read(library: str, uri: str, job: dict[str, Any]) -> dict[str, str]:
    """Carry out the queries of a job; return errors of the library by query."""
    engine = Engine(library)
    errors: dict[str, str] = {}
    for place, query in enumerate(job["queries"]):
        try:
            found = engine.read(uri, schema_at(job, query), **query)
        except EngineError as error:
            errors[f"-{place}"] = str(error)
        else:
            save(Path(f"{uri}-{place}.npz"), found)
    return errors


def apart(work: Callable[[], dict[str, str]], note: Path) -> dict[str, str]:
    """Do some work in another process, since the library crashes or hangs on some of it."""
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        note.write_text(json.dumps(work()), encoding="utf-8")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return {"": f"crashed with status {status}"}
    found: dict[str, str] = json.loads(note.read_text(encoding="utf-8"))
    return found


def main(writer: str, reader: str, jobs_file: str, out: str) -> None:
    """Work on all jobs."""
    jobs = json.loads(Path(jobs_file).read_text(encoding="utf-8"))
    errors: dict[str, str] = {}
    folder = Path(out)
    note = folder / "errors-of-one.json"
    for number, job in enumerate(jobs):
        uri = str(folder / str(number))
        found = apart(partial(write, writer, uri, job), note)
        if not found:
            found = apart(partial(read, reader, uri, job), note)
        errors |= {f"{number}{place}": error for place, error in found.items()}
    (folder / "errors.json").write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
