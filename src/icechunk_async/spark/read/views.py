"""Temporary views of a repository for SQL: one for each table of a group, and each about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async.arrow.sql import free_name, group_name, word
from icechunk_async.arrow.table import open_group, table_kinds
from icechunk_async.errors import (
    BranchNotFoundError,
    InvalidInputError,
    SnapshotNotFoundError,
    TagNotFoundError,
)
from icechunk_async.spark.options import ReadOptions
from icechunk_async.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession

    from icechunk_async.repository import Repository

__all__ = ["register_views"]


def register_views(
    spark: SparkSession,
    url: str,
    *,
    ref: str = "main",
    prefix: str | None = None,
    tables: Iterable[str] = TABLES,
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make temporary views for SQL of all groups of a repository, and of the tables about it.

    All views of arrays are of one snapshot, the one that `ref` names now; call this again to see
    later commits. Where the arrays of a group have several sets of dimensions, there is a view for
    each: the one with the most dimensions is named like the group, others also by their
    dimensions. Arrays of types that Spark does not have are left out. The views of two refs, under
    two prefixes, can be joined.

    Args:
        spark: the session; the format `icechunk` is registered with it.
        url: URL of the repository.
        ref: name of a branch or tag, or the id of a snapshot.
        prefix: name of the view of the root group, and what other names begin with; by default
            the last part of the URL. The group `a/b` is `prefix_a_b`, and the table `snapshots` is
            `prefix__snapshots`.
        tables: the tables about the repository to make views of; by default all.
        options: options of the source for all views, such as `storage.region`. No statement of SQL
            shows them.

    Returns:
        What each view holds, by its name. Views of these names are replaced.

    Raises:
        InvalidInputError: there is no such ref or table, or a branch and a tag are both called so.

    Cost: reads the metadata of all arrays, and asks Spark for the columns of each view.
    """
    from icechunk_async.spark.source import register  # noqa: PLC0415 -- it imports this package

    register(spark)
    given = dict(options or {})
    read = ReadOptions.parse({"path": url, **given})
    snapshot_id, groups = read.repository.ask(lambda it: _contents(it, ref))
    start = word(url.rstrip("/").rpartition("/")[2] if prefix is None else prefix)
    made: dict[str, str] = {}
    for group in groups:
        pinned = {"snapshot-id": snapshot_id, "group": group}
        kinds = table_kinds(open_group(ReadOptions.parse({"path": url, **given, **pinned})))
        for number, (dims, arrays) in enumerate(kinds.items()):
            name = group_name(start, group, dims, first=not number)
            columns = {**given, **pinned, "arrays": ",".join(arrays)}
            made[_view(spark, url, free_name(name, made), columns)] = (
                f"group {group or '/'!r}: {', '.join(arrays)}"
            )
    for table in tables:
        about = {"table": table}
        if table not in _OF_ALL:
            about["snapshot-id"] = snapshot_id
        name = free_name(f"{start}__{table}", made)
        made[_view(spark, url, name, {**given, **about})] = f"table {table!r}"
    return made


_OF_ALL: Final = frozenset({"refs", "ops"})
"""Tables about the repository, not one snapshot."""


def _view(spark: SparkSession, url: str, name: str, options: Mapping[str, str]) -> str:
    spark.read.format("icechunk").options(**options).load(url).createOrReplaceTempView(name)
    return name


async def _contents(repository: Repository, ref: str) -> tuple[str, list[str]]:
    """Return the snapshot that a ref names, and the groups that have arrays."""
    found = [it for it in (await _branch(repository, ref), await _tag(repository, ref)) if it]
    found = found or [it for it in [await _snapshot(repository, ref)] if it]
    if len(found) != 1:
        raise InvalidInputError(
            f"A branch and a tag are both called {ref!r}. Give the id of the snapshot."
            if found
            else f"No branch, tag or snapshot of the repository is called {ref!r}. list_branches "
            "and list_tags list their names."
        )
    session = await repository.readonly_session(snapshot_id=found[0])
    nodes = session.workspace.base.nodes
    arrays = [path for path in nodes if nodes[path].array is not None]
    return found[0], sorted({path.rpartition("/")[0].strip("/") for path in arrays})


async def _branch(repository: Repository, name: str) -> str | None:
    try:
        return str(await repository.lookup_branch(name))
    except BranchNotFoundError:
        return None


async def _tag(repository: Repository, name: str) -> str | None:
    try:
        return str(await repository.lookup_tag(name))
    except TagNotFoundError:
        return None


async def _snapshot(repository: Repository, snapshot_id: str) -> str | None:
    try:
        return str((await repository.lookup_snapshot(snapshot_id)).id)
    except (SnapshotNotFoundError, InvalidInputError):
        return None
