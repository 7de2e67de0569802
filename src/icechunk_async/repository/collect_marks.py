"""What garbage collection must keep, and what is old enough to go."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async.format.id_set import IdSet

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    import numpy.typing as npt

    from icechunk_async.format.manifest import Manifest

__all__ = ["chunk_ids", "id_set", "is_older"]

_ONE_SECOND: Final = timedelta(seconds=1)


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


def is_older(written_at: datetime, cutoff: datetime) -> bool:
    """Tell whether an object was surely written before a cutoff, by the store's clock.

    Many stores list whole seconds: such a time may be anything up to the next one.
    """
    if written_at.microsecond == 0:
        return written_at + _ONE_SECOND <= cutoff
    return written_at < cutoff
