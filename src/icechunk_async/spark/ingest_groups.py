"""Which group each file becomes: no two files share one, and none lies within another's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidInputError
from icechunk_async.repository.paths import ancestors, check_path
from icechunk_async.spark.ingest_catalog import CATALOG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from icechunk_async.spark.ingest_catalog import Entry

__all__ = ["check_apart", "groups_of"]


def groups_of(
    root: str,
    locations: Sequence[str],
    group_of: Callable[[str], str] | None,
    others: Iterable[Entry],
) -> dict[str, str]:
    """Answer the group of each file.

    Args:
        root: what all of them are put into.
        locations: the files.
        group_of: answers the group for a file, relative to ``root``.
        others: files that were ingested before and stay.

    Raises:
        InvalidInputError: one would be the root or hold the catalog, or see :func:`check_apart`.
    """
    found = {it: check_path(f"{root}/{(group_of or _stem)(it).strip('/')}") for it in locations}
    catalog = check_path(f"{root}/{CATALOG}")
    for location, path in found.items():
        if path == root or catalog in (path, *ancestors(path)):
            raise InvalidInputError(f"{location!r} cannot become the group {path!r}.")
    kept = [(it.location, it.group) for it in others if it.location not in found]
    check_apart([*kept, *found.items()])
    return found


def check_apart(groups: Iterable[tuple[str, str]]) -> None:
    """Refuse groups that hold each other: who replaces the outer one would delete the inner one.

    Args:
        groups: files and the path of the group of each.

    Raises:
        InvalidInputError: two are the same, or one lies within the other; the message names both.
    """
    taken: dict[str, str] = {}
    for location, group in groups:
        path = check_path(group)
        if path in taken:
            raise _refused(location, path, taken[path], path)
        taken[path] = location
    for path, location in taken.items():
        outer = next((it for it in ancestors(path) if it in taken), None)
        if outer is not None:
            raise _refused(location, path, taken[outer], outer)


def _refused(location: str, path: str, other: str, outer: str) -> InvalidInputError:
    return InvalidInputError(
        f"{location!r} and {other!r} would be the groups {path!r} and {outer!r}, one within the "
        "other or the same, so that neither could be replaced alone. Nothing was changed. Give "
        "group_of= that keeps them apart."
    )


def _stem(location: str) -> str:
    name = location.rstrip("/").rpartition("/")[2]
    return name.rpartition(".")[0] or name
