"""Groups that a process has open: the tasks that a worker runs mostly read the same one."""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.arrow import table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray

    from icechunk_async.spark.options import ReadOptions
    from icechunk_async.spark.shared import SharedRepository

__all__ = ["arrays_of", "open_group"]

_KEPT: Final = 4


@dataclass(frozen=True, slots=True)
class _Group:
    """The key of an open group: a snapshot never changes."""

    repository: SharedRepository
    snapshot_id: str | None
    group: str
    decode: bool
    # Not a part of the key: queries of one snapshot that differ in conditions or columns share the
    # open group.
    options: ReadOptions = field(compare=False)

    @classmethod
    def of(cls, options: ReadOptions) -> _Group:
        return cls(options.repository, options.snapshot_id, options.group, options.decode, options)


def open_group(options: ReadOptions) -> xarray.Dataset:
    """Return the group of a pinned request as a lazy dataset, for reading alone.

    Cost: the first request of a process opens all arrays of the group, about a millisecond each;
    the last few groups stay open.

    Raises:
        NodeNotFoundError: there is no such group.
    """
    return _dataset(_Group.of(options))


def arrays_of(options: ReadOptions) -> Mapping[str, Any]:
    """Return the Zarr arrays of the group of a pinned request, by name.

    Cost: as `open_group`.

    Raises:
        NodeNotFoundError: there is no such group.
    """
    return _arrays(_Group.of(options))


@lru_cache(maxsize=_KEPT)
def _dataset(group: _Group) -> xarray.Dataset:
    return table.open_group(group.options)


@lru_cache(maxsize=_KEPT)
def _arrays(group: _Group) -> Mapping[str, Any]:
    return table.arrays_of(group.options)
