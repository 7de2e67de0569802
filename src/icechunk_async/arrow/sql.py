"""SQL over the arrays of a repository, by DuckDB."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.arrow.datasets import ArrayGroup, dataset, open_repository
from icechunk_async.arrow.table import open_group, table_kinds
from icechunk_async.errors import InvalidInputError, MissingDriverError
from icechunk_async.tables import read_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    import duckdb

    from icechunk_async.session import AnySession
    from icechunk_async.sync import Repository, Session

__all__ = ["ABOUT", "ROOT", "connect", "free_name", "group_name", "word"]

ROOT: Final = "data"
"""The table of the arrays of the root group."""
ABOUT: Final = "icechunk_"
"""The beginning of names of tables about a repository."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


def connect(
    source: str | PathLike[str] | Repository,
    *,
    ref: str = "main",
    at: Mapping[str, str] | None = None,
    named_in: str | None = None,
    tables: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> duckdb.DuckDBPyConnection:
    """Return a connection of DuckDB, in memory, in which the groups of a repository are tables.

    The arrays of the root group are the table `data`, those of the group `a/b` are `a_b`. Where the
    arrays of a group have several sets of dimensions, there is a table for each; others than the
    one with the most dimensions are named by theirs, such as `data_by_time`. Tables about the
    repository begin with `icechunk_`, such as `icechunk_snapshots`, and are read into memory when
    this is called. Rows of arrays are read when a statement asks for them.

    Args:
        source: the path or URL of a repository, or one that is open.
        ref: a branch, a tag, the id of a snapshot, or steps back such as `main~2`. Later commits do
            not change the tables.
        at: other refs, by a name: with `{"old": "main~1"}` there are `old_data` and so on, too.
        named_in: a statement; tables whose names are not in it are left out.
        tables: which tables about the repository to make, of `icechunk_async.tables.TABLES`.
        storage_options: for the storage, with a URL.

    Raises:
        MissingDriverError: DuckDB is not installed.
        NotFoundError: there is no such repository or ref.
        InvalidInputError: a name in `at` is not one, or a table is unknown.

    Cost: opens the repository, and reads the metadata of the arrays of the groups.
    """
    try:
        import duckdb  # noqa: PLC0415 -- an extra
    except ImportError:
        raise MissingDriverError(
            "SQL needs DuckDB, which is not installed. Install it with: pip install "
            "'icechunk-async[sql]'",
            module="duckdb",
        ) from None
    refs = {"": ref, **(at or {})}
    # They begin names that statements use without quotes.
    for name in at or ():
        if not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"{name!r} cannot begin the names of tables. Give small letters, digits and _, "
                "such as old=main~1."
            )
    repository = open_repository(source, storage_options)
    # In memory: nothing is written, and the tables vanish with it.
    connection = duckdb.connect()
    made: list[str] = []
    for name, wanted in refs.items():
        start = f"{name}_" if name else ""
        session = repository.readonly_session(ref=wanted)
        for table in tables:
            found = f"{start}{ABOUT}{table}"
            if named_in is None or _has_word(named_in, found):
                connection.register(found, _read(repository, session, table))
                made.append(found)
        for found, group, arrays in _groups(session, name, made, named_in):
            # DuckDB holds the dataset and asks it for the columns and filters of each statement.
            connection.register(found, dataset(session, group, arrays=arrays))
            made.append(found)
    return connection


def _read(repository: Repository, session: Session, table: str) -> Any:
    """Return a table about the repository."""
    snapshot_id = session.snapshot_id
    return run(repository.handle.ask(lambda it: read_table(it, table, snapshot_id=snapshot_id)))


def _groups(
    session: Session, start: str, taken: Sequence[str], named_in: str | None
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return the name, the group and the arrays of each table of arrays."""
    names = set(taken)
    for group in run(session.handle.ask(_groups_with_arrays)):
        name = group_name(start, group or ROOT, (), first=True)
        # To open a group takes long, so not for those that the statement cannot be about. Its other
        # tables begin with this name: a part of a word will do here.
        if named_in is not None and name.lower() not in named_in.lower():
            continue
        kinds = table_kinds(open_group(ArrayGroup(session, group)))
        for number, (dims, arrays) in enumerate(kinds.items()):
            # Groups `a/b` and `a_b` have one name in SQL.
            found = free_name(group_name(start, group or ROOT, dims, first=not number), names)
            names.add(found)
            if named_in is None or _has_word(named_in, found):
                yield found, group, arrays


async def _groups_with_arrays(session: AnySession) -> list[str]:
    nodes = session.workspace.base.nodes
    arrays = [path for path in nodes if nodes[path].array is not None]
    return sorted({path.rpartition("/")[0].strip("/") for path in arrays})


def _has_word(statement: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", statement, re.IGNORECASE) is not None


def word(text: str) -> str:
    """Return text as a part of a name that SQL takes without quotes."""
    found = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return f"_{found}" if found[:1].isdigit() else found


def group_name(start: str, group: str, dims: Sequence[str], *, first: bool) -> str:
    """Return the name of a table of a group, of those of its arrays that have some dimensions.

    Args:
        start: what names begin with, and the name of the root group.
        group: path of the group; empty for the root.
        dims: the dimensions of the arrays.
        first: whether they are those with the most dimensions, which are named like the group.
    """
    name = "_".join(it for it in (start, word(group)) if it)
    return name if first else f"{name}_by_{'_'.join(map(word, dims)) or 'nothing'}"


def free_name(name: str, taken: Collection[str] | Iterable[str]) -> str:
    """Return a name, with a number if it is taken; SQL knows no upper and lower case of names."""
    known = {it.lower() for it in taken}
    number, found = 1, name
    while found.lower() in known:
        number += 1
        found = f"{name}_{number}"
    return found
