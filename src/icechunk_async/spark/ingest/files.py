"""The files of an ingest: the URLs that are stored, their sizes, and which task scans which.

Sizes come with a listing, and are never asked for. They are estimates of what a scan takes: a
wrong one makes a task longer, and changes no result.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import field
from fnmatch import fnmatch
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Self, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.spark.ingest.tasks import reads_whole
from icechunk_async.spark.shared import SharedRepository
from icechunk_async.tiledb.arrays.folder import is_tiledb_url, storage_location
from icechunk_async.zarr.virtual.kerchunk import location_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from icechunk_async.repository import Repository as AsyncRepository
    from icechunk_async.spark.ingest.tasks import Kind, ScanOptions
    from icechunk_async.sync import Repository

__all__ = ["Files", "divide", "list_sources"]

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What is lost when a task is, and what `progress` counts in.
_MOST_FILES: Final = 50
_SCANS_PER_CORE: Final = 16
_FILE_COST: Final = 256 << 20
"""Opening a file takes as long as the places of about a thousand chunks, of some 256 kB each."""
_PARSED_COST: Final = 4 << 10
"""A reference in JSON is some 50 bytes, and takes as long as a chunk of some 200 kB."""


def list_sources(repository: Repository | str, prefix: str, pattern: str = "*") -> dict[str, int]:
    """Return the URLs of objects below a prefix, in ascending order, each with its size in bytes.

    Args:
        repository: a repository that is authorised to read the container of the prefix.
        prefix: a URL, or an absolute path ending in `/`.
        pattern: pattern for keys below the prefix, such as `"*.nc"`; `*` also matches `/`.

    Raises:
        VirtualContainerError, VirtualAccessError: no container covers the prefix, or it may not
            be read.
        StorageError: the store failed, or cannot list.

    Cost: one request for about 1000 objects.
    """
    start = _location(prefix)

    async def found(native: AsyncRepository) -> list[tuple[str, int]]:
        virtual = native.engine.virtual
        return [
            (location, info.size_bytes)
            async for location, info in virtual.entries(start)
            if fnmatch(location.removeprefix(virtual.locations.expand(start)), pattern)
        ]

    return dict(sorted(SharedRepository.of(repository).ask(found)))


@dataclass(frozen=True)
class Files:
    """The files that are given to an ingest."""

    locations: list[str]
    """URLs in the form that is stored, in the order that was given."""
    kind: Kind
    sizes: dict[str, int] = field(default_factory=dict["str", "int"])
    """Bytes of those of which the size was given, by location."""

    @classmethod
    def given(
        cls, shared: SharedRepository, files: Iterable[str] | Mapping[str, int | None], kind: Kind
    ) -> Self:
        """Return the files that a caller gave.

        Raises:
            InvalidInputError: a path is relative, a file is given twice, or a size is not one.
        """
        if isinstance(files, str):
            raise InvalidInputError("files= is a single text. Give a list of URLs.")
        urls = list(files)
        # Before URLs are normalized, which knows no `tiledb+` in front of a scheme.
        urls, kind = _of_tiledb(urls, kind)
        urls = [_location(it) for it in urls]

        async def normalized(native: AsyncRepository) -> list[str]:
            locations = native.engine.virtual.locations
            return [
                # A local folder is told from a file by its slash, which normalizing removes.
                locations.normalize(it) + ("/" if it.endswith("/") and it[:5] == "file:" else "")
                for it in urls
            ]

        found = shared.ask(normalized)
        known: dict[str, int] = {}
        if isinstance(files, Mapping):
            sizes = cast("Mapping[str, int | None]", files).values()
            pairs = zip(found, sizes, strict=True)
            known = {location: _size(location, it) for location, it in pairs if it is not None}
        locations = list(dict.fromkeys(found))
        if len(locations) < len(found):
            twice = len(found) - len(locations)
            raise InvalidInputError(f"{twice} of the files are given twice.")
        return cls(locations, kind, known)

    def costs(self, locations: Sequence[str], options: ScanOptions) -> list[int]:
        """Return estimates of what scanning files takes, in no unit.

        Files of unknown size count as the average of the others.
        """
        known = {
            it: _FILE_COST + self.sizes[it] * (_PARSED_COST if reads_whole(it, options) else 1)
            for it in locations
            if it in self.sizes
        }
        average = sum(known.values()) // len(known) if known else 1
        return [known.get(it, average) for it in locations]


def divide[T](
    files: Sequence[T], costs: Sequence[int], cores: int, files_per_task: int | None = None
) -> list[tuple[T, ...]]:
    """Divide files into tasks, of which those that take longest come first.

    A task has files that follow each other: `files_per_task` of them, or as many as take a
    sixteenth of the share of a core, at least one and at most 50. Starting a task takes Spark as
    long as scanning a small file, so tasks have several; with 16 for each core, and the long ones
    first, no core waits long for another at the end.

    Args:
        files: the files.
        costs: what each takes, in any unit.
        cores: number of tasks that run at a time.
        files_per_task: number of files of a task, whatever they cost.
    """
    tasks = 0 if files_per_task else cores * _SCANS_PER_CORE
    most = files_per_task or _MOST_FILES
    total = sum(costs)
    found: list[tuple[int, tuple[T, ...]]] = []
    part: list[T] = []
    spent = 0
    for file, cost in zip(files, costs, strict=True):
        # Multiplied, not divided, so that integers decide: `(spent + cost) / total > 1 / tasks`.
        if part and (len(part) == most or (spent + cost) * tasks > total):
            found.append((spent, tuple(part)))
            part, spent = [], 0
        part.append(file)
        spent += cost
    if part:
        found.append((spent, tuple(part)))
    # Spark starts tasks in their order. A long one that starts last is waited for by all cores.
    found.sort(key=operator.itemgetter(0), reverse=True)
    return [it for _, it in found]


def _of_tiledb(urls: list[str], kind: Kind) -> tuple[list[str], Kind]:
    """Return files and their kind, where URLs say that they are TileDB arrays."""
    named = [is_tiledb_url(it) for it in urls]
    if not any(named):
        return urls, kind
    if kind not in ("auto", "tiledb") or not all(named):
        raise InvalidInputError(
            f"files= has URLs of TileDB arrays, such as tiledb+s3://bucket/array, beside others or "
            f"with kind={kind!r}. Ingest TileDB arrays by themselves."
        )
    return [storage_location(it) for it in urls], "tiledb"


def _location(given: str) -> str:
    """Return a URL for a URL or a path."""
    if _SCHEME.match(given):
        return given
    if not PurePath(given).is_absolute():
        raise InvalidInputError(f"{given!r} is relative. Give absolute paths or URLs.")
    return location_of(given, {})


def _size(location: str, given: int) -> int:
    """Return a size as an integer of Python, also of one of NumPy."""
    try:
        # An inventory as a data frame has integers of NumPy, and may have floats, which are not
        # sizes.
        size = operator.index(given)
    except TypeError:
        size = -1
    if size < 0:
        raise InvalidInputError(f"The size of {location!r} is {given!r}, not a number of bytes.")
    return size
