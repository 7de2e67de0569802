"""The five kinds of people who come here: for each, the pages that are the script of the task.

`test_pages` runs every block of these pages, in an empty directory and without a warning. Here is
shown that together they cover the task, step by step, and that somebody finds them.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.run_page import REPOSITORY, blocks
from tests.docs.test_pages import PAGES

DOCS = REPOSITORY / "docs"

# By person: what is done, in order, and on which page a block does it that runs.
TASKS: dict[str, list[tuple[str, str, str]]] = {
    "climate scientist": [
        ("creates a repository", "tutorial/first-repository.md", "Repository.create("),
        ("commits with a message", "tutorial/first-repository.md", ".commit("),
        ("goes back in time", "tutorial/first-repository.md", "as_of="),
        ("writes a dataset", "how-to/zarr-and-xarray.md", "to_icechunk("),
        ("reads it lazily", "how-to/zarr-and-xarray.md", "xr.open_zarr("),
        ("appends what is new", "how-to/append.md", ".append("),
        ("refers to NetCDF files", "how-to/virtual-data.md", "Virtual"),
        ("undoes a mistake", "how-to/restore.md", "undo"),
    ],
    "service developer": [
        ("keeps a repository open", "how-to/open-by-url.md", "await"),
        ("commits beside others", "how-to/several-writers.md", "rebase"),
        ("bounds the memory of caches", "how-to/caching.md", "CacheOptions("),
        ("mounts arrays in FastAPI", "how-to/serve-over-http.md", "FastAPI("),
        ("says who may read", "how-to/serve-over-http.md", "[[grant]]"),
        ("publishes files", "how-to/serve-over-http.md", "publish_static("),
        ("watches requests", "how-to/observe.md", "TracerProvider("),
        ("follows commits", "how-to/changes.md", "watch("),
    ],
    "data engineer": [
        ("asks in SQL", "how-to/sql.md", "duckdb.sql("),
        ("reads with Spark", "how-to/spark.md", "spark.read"),
        ("writes with Spark", "how-to/spark-writing.md", ".write"),
        ("streams into a branch", "how-to/spark-streaming.md", "readStream"),
        ("runs a pipeline", "how-to/spark-pipeline.md", "icechunk"),
        ("chooses sizes", "how-to/choose-sizes.md", "chunks="),
        ("works on a cluster, in one commit", "how-to/several-writers.md", ".fork("),
    ],
    "operator": [
        ("makes it read-only", "how-to/administer.md", "RepoAvailability.READ_ONLY"),
        ("copies it", "how-to/back-up-and-copy.md", "icechunk-async copy"),
        ("drops old snapshots", "how-to/upkeep.md", "expire_snapshots("),
        ("collects garbage, dry first", "how-to/upkeep.md", "dry_run=True"),
        ("checks and mends it", "how-to/verify-and-repair.md", "verify"),
        ("restores a state", "how-to/restore.md", "icechunk-async"),
        ("tries a storage", "how-to/without-compare-and-set.md", "probe"),
    ],
    "somebody who migrates": [
        ("changes one import", "how-to/from-icechunk.md", "icechunk_async.sync"),
        ("brings format 1 to 2", "how-to/migrate.md", "migrate"),
        ("opens older layouts", "how-to/old-layouts.md", "Repository.open("),
        ("reads TileDB arrays", "how-to/tiledb.md", "tiledb"),
    ],
}
STEPS = [
    pytest.param(page, words, id=f"{who}: {what}")
    for who, steps in TASKS.items()
    for what, page, words in steps
]


@pytest.mark.parametrize(("name", "words"), STEPS)
def test_a_step_of_a_task_is_a_block_that_runs(name: str, words: str) -> None:
    """A page that only tells it would not be tried by anybody before a reader is."""
    page = DOCS / name
    assert page in PAGES
    assert [text for _, _, text in blocks(page) if words in text], f"no block of {name} has {words}"


def test_pages_of_tasks_are_in_the_navigation() -> None:
    """All of them, so that people find the next one."""
    _, _, navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")
    shown = set(re.findall(r"[\w/-]+\.md", navigation))
    assert {page for steps in TASKS.values() for _, page, _ in steps} <= shown
