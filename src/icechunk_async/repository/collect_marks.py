"""What garbage collection must keep, and what is old enough to go."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.id_set import IdSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from icechunk_async.format.manifest import Manifest

__all__ = ["are_older", "chunk_ids", "id_set", "is_older"]

_ONE_SECOND: Final = timedelta(seconds=1)
_ONE_MICROSECOND: Final = timedelta(microseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def chunk_ids(manifest: Manifest) -> npt.NDArray[np.uint8]:
    """Answer the chunk objects that a manifest refers to, ``(n, 12)``, of whatever array and rank.

    The official engine keeps references of a wrong rank, so what they name is not garbage.
    """
    refs = [*manifest.arrays.values(), *manifest.strays.values()]
    return np.concatenate([np.empty((0, 12), np.uint8), *(it.chunk_ids for it in refs)])


def id_set(ids: Iterable[bytes]) -> IdSet:
    """Answer a set of ids that are few enough to be objects."""
    found = IdSet()
    found.add(np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 12))
    return found


def are_older(modified_us: npt.NDArray[np.int64], cutoff: datetime) -> npt.NDArray[np.bool_]:
    """Tell of many objects what :func:`is_older` tells of one; times are since 1970."""
    cutoff_us = (cutoff - _EPOCH) // _ONE_MICROSECOND
    latest = np.where(modified_us % 1_000_000 == 0, modified_us + 999_999, modified_us)
    return latest < cutoff_us


def is_older(written_at: datetime, cutoff: datetime) -> bool:
    """Tell whether an object was surely written before a cutoff, by the store's clock.

    Many stores list whole seconds: such a time may be anything up to the next one.
    """
    if written_at.microsecond == 0:
        return written_at + _ONE_SECOND <= cutoff
    return written_at < cutoff
