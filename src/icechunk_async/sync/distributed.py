"""Sessions of Zarr arrays, and merging what workers wrote."""

# Dask and xarray are only partly typed.
# pyright: basic

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.errors import WrongTypeError
from icechunk_async.handles import not_a_fork
from icechunk_async.sync.errors import InvalidInputError, translate, translated
from icechunk_async.sync.session import ForkSession, Session
from icechunk_async.sync.store import IcechunkStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import zarr

    type Nested = ForkSession | Iterable[Nested]

__all__ = ["extract_session", "merge_sessions"]


def extract_session(
    zarray: zarr.Array[Any], axis: object = None, keepdims: object = None
) -> Session | ForkSession:
    """Return the session that an array's store belongs to.

    Args:
        zarray: an array of an Icechunk store.
        axis: ignored; array libraries pass it to the functions of reductions.
        keepdims: ignored.

    Raises:
        InvalidInputError: it is no array, or is in another kind of store; a `TypeError`, too.
    """
    store = getattr(zarray, "store", None)
    if isinstance(store, IcechunkStore):
        session: Session = store.session
        return session
    given = f"a {type(zarray).__name__}" if store is None else f"in a {type(store).__name__}"
    with translated():
        raise WrongTypeError(
            f"The array is {given}, which has no session. Open it from Session.store."
        )


def merge_sessions(*sessions: Nested) -> ForkSession:
    """Merge forks into one, so that a session needs to merge only that.

    Args:
        sessions: forks, or lists of forks, nested as deep as a reduction left them. Duplicates
            count once.

    Returns:
        The first of them, with the changes of all.

    Raises:
        InvalidInputError: there is no fork, or a value that is not a fork; for that it is a
            `TypeError`, too.
        MergeConflictError: two of them changed the same thing differently; the first may have
            the changes of some.
    """
    forks = {id(fork): fork for fork in _flatten(sessions)}
    if not forks:
        raise InvalidInputError("There are no forks to merge; pass at least one.")
    first, *others = forks.values()
    if others:
        first.merge(*others)
    return first


def _flatten(sessions: Iterable[Nested]) -> Iterator[ForkSession]:
    for it in sessions:
        if isinstance(it, ForkSession):
            yield it
        elif isinstance(it, Session | str) or not hasattr(it, "__iter__"):
            raise translate(not_a_fork(it))
        else:
            yield from _flatten(it)
