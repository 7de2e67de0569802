"""The directory of an array: its schemas, commits, consolidated footers and metadata files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import FormatError, NotFoundError, ObjectNotFoundError
from icechunk_async.storage import SuffixRange
from icechunk_async.tiledb.format.commits import decode_consolidated, decode_lines
from icechunk_async.tiledb.format.conditions import decode_condition
from icechunk_async.tiledb.format.history import (
    LEGACY_SCHEMA,
    NAMELESS_VERSION,
    Commits,
    parse_name,
    schema_at,
)
from icechunk_async.tiledb.format.schema import decode_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.tiledb.arrays.folder import Entries, Folder
    from icechunk_async.tiledb.format.conditions import Condition
    from icechunk_async.tiledb.format.history import Deletion, TimedName, Window
    from icechunk_async.tiledb.format.schema import Schema

__all__ = ["AT_ONCE", "FRAGMENT_METADATA", "GROUP_FILE", "ArrayDirectory", "read_timed"]

AT_ONCE: Final = 128
"""Files of metadata that are read at a time."""
FRAGMENT_METADATA: Final = "__fragment_metadata.tdb"
GROUP_FILE: Final = "__tiledb_group.tdb"
_SCHEMAS: Final = "__schema"
_COMMITS: Final = "__commits"
_FOOTERS: Final = "__fragment_meta"
_MARKED_SINCE: Final = 5
"""From this version on a file marks fragments that were committed."""


@dataclass(frozen=True, slots=True)
class ArrayDirectory:
    """The listed directory of an array; made by `load`."""

    folder: Folder
    schema_files: tuple[str, ...]
    commits: Commits
    footer_files: tuple[TimedName, ...]
    """Files of consolidated footers, the latest first."""
    _schemas: dict[str, Schema]
    _conditions: dict[str, Condition]

    @classmethod
    async def load(cls, folder: Folder) -> ArrayDirectory:
        """List an array.

        Raises:
            NotFoundError: there is no array.
            FormatError: a file about commits is damaged.

        Cost: four listings at a time, of which a page is a request; then a request for each file of
        consolidated commits or of vacuumed fragments.
        """
        # Files of several versions stand side by side where several releases wrote one array.
        root, schemas, commits, footers = await gather(
            folder.entries(),
            folder.entries(_SCHEMAS),
            folder.entries(_COMMITS),
            folder.entries(_FOOTERS),
        )
        names = [name for name in schemas.files if parse_name(name) is not None]
        if LEGACY_SCHEMA in root.files:
            names.append(LEGACY_SCHEMA)
        if not names:
            raise _no_array(folder, root)
        conditions: dict[str, Condition] = {}
        found = await _read_commits(folder, root, commits, conditions)
        metas = [
            timed
            for entries in (footers, root)
            for name in entries.files
            if name.endswith(".meta")
            and (timed := parse_name(name.removesuffix(".meta"))) is not None
        ]
        # The latest first: it has the footers of the most fragments, often of all.
        metas.sort(key=lambda it: (it.end, it.text), reverse=True)
        return cls(folder, tuple(names), found, tuple(metas), {}, conditions)

    @property
    def known_schemas(self) -> dict[str, Schema]:
        """The schemas that were loaded, by the names of their files."""
        return dict(self._schemas)

    async def schema(self, name: str) -> Schema:
        """Load a schema by the name of its file; each is read once.

        Raises:
            FormatError: it is damaged, or a fragment names it and it does not exist.
        """
        known = self._schemas.get(name)
        if known is not None:
            return known
        path = name if name == LEGACY_SCHEMA else f"{_SCHEMAS}/{name}"
        if name not in self.schema_files:
            raise FormatError(
                f"A fragment of the TileDB array at {self.folder.shown!r} was written with the "
                f"schema {name!r:.100}, which does not exist. Restore it; without it the fragment "
                "cannot be read."
            )
        # Two tasks may read one schema at a time. They find the same, and either may stay.
        found = self._schemas[name] = decode_schema(await self.folder.read(path))
        return found

    async def schema_at(self, end: int) -> tuple[str, Schema]:
        """Return the schema that holds at a time, and the name of its file."""
        name = schema_at(self.schema_files, end)
        assert name is not None  # by `load`
        return name, await self.schema(name)

    async def conditions(self, deletions: Iterable[Deletion]) -> list[Condition]:
        """Load delete conditions. Cost: one request for each that is not known yet."""

        async def load(it: Deletion) -> Condition:
            known = self._conditions.get(it.name)
            if known is None:
                data = await self.folder.read(f"{_COMMITS}/{it.name}")
                known = self._conditions[it.name] = decode_condition(data)
            return known

        return await bounded_map(load, list(deletions), limit=AT_ONCE)

    def footers_path(self, name: TimedName) -> str:
        """Return the path of a file of consolidated footers."""
        folder = f"{_FOOTERS}/" if (name.version or NAMELESS_VERSION) >= 12 else ""
        return f"{folder}{name.text}.meta"


def _no_array(folder: Folder, root: Entries) -> NotFoundError:
    if GROUP_FILE in root.files:
        return NotFoundError(
            f"There is a TileDB group at {folder.shown!r}, and not an array. Open it as a group, "
            "or name one of its members."
        )
    return NotFoundError(
        f"There is no TileDB array at {folder.shown!r}: no schema is there. Check the URL, which "
        "must be that of the array's own folder."
    )


async def _read_commits(
    folder: Folder, root: Entries, listed: Entries, conditions: dict[str, Condition]
) -> Commits:
    """Find out which fragments are committed, which are vacuumed, and what was deleted."""
    paths = [f"{_COMMITS}/{name}" for name in listed.files]
    paths += [name for name in root.files if name.endswith((".ok", ".vac", ".con", ".ign"))]
    wanted = [it for it in paths if it.endswith((".con", ".ign", ".vac"))]
    contents = dict(zip(wanted, await bounded_map(folder.read, wanted, limit=AT_ONCE), strict=True))
    # Releases before 2.8 put these files beside the schema, so both folders count.
    entries: set[str] = {it.rpartition("/")[2] for it in paths}
    ignored: set[str] = set()
    vacuumed: dict[str, list[str]] = {}
    for path, data in contents.items():
        name = path.rpartition("/")[2]
        if name.endswith(".con"):
            consolidated = decode_consolidated(data)
            entries.update(consolidated.commits)
            conditions.update(consolidated.conditions)
        elif name.endswith(".ign"):
            ignored.update(decode_lines(data))
        else:
            vacuumed[name.removesuffix(".vac")] = decode_lines(data)
    entries -= ignored
    # What `.ign` files list still stands in consolidated files, and no longer holds.
    committed = {it.rpartition(".")[0] for it in entries if it.endswith((".wrt", ".ok"))}
    committed |= await _unmarked(folder, root)
    return Commits(
        frozenset(committed),
        vacuumed,
        {it: None for it in entries if it.endswith(".del")},
        frozenset(it for it in entries if it.endswith(".upd")),
    )


async def _unmarked(folder: Folder, root: Entries) -> set[str]:
    """Return the fragments of old versions, which are committed if they have metadata."""
    old = [
        name
        for name in root.folders
        if (timed := parse_name(name)) is not None
        and (timed.version or NAMELESS_VERSION) < _MARKED_SINCE
    ]

    async def is_there(name: str) -> bool:
        try:
            # The storage contract has no look without a read; a byte is the least.
            await folder.get(f"{name}/{FRAGMENT_METADATA}", SuffixRange(1))
        except ObjectNotFoundError:
            return False
        return True

    known = await bounded_map(is_there, old, limit=AT_ONCE)
    return {name for name, there in zip(old, known, strict=True) if there}


async def read_timed(folder: Folder, path: str, window: Window) -> list[bytes]:
    """Return the contents of files with times in a folder, in the order of writing.

    Files outside of the window are left out, and those that vacuum files in it list.

    Cost: a listing, and a request for each file.
    """
    listed = await folder.entries(path)
    hidden: set[str] = set()
    for name in listed.files:
        merged = parse_name(name.removesuffix(".vac")) if name.endswith(".vac") else None
        if merged is not None and merged.is_within(window.start, window.end):
            # One by one: there is one for each consolidation that was not vacuumed.
            hidden.update(decode_lines(await folder.read(f"{path}/{name}")))
    timed: list[TimedName] = []
    for name in listed.files:
        known = parse_name(name)
        if known is not None and name not in hidden and known.is_within(window.start, window.end):
            timed.append(known)
    timed.sort(key=lambda it: it.key)
    paths = [f"{path}/{it.text}" for it in timed]
    return await bounded_map(folder.read, paths, limit=AT_ONCE)
