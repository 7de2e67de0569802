"""Virtual chunks: their containers, references to them, and writing many of these.

`write_virtual_dataset` stands in for ``dataset.vz.to_icechunk`` of VirtualiZarr, which takes only
stores of the official engine.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, cast

from icechunk_async._runtime.blocking.portal import run
from icechunk_async.errors import WrongTypeError
from icechunk_async.sync.errors import translated
from icechunk_async.sync.official.containers import VirtualChunkContainer, VirtualChunkSpec
from icechunk_async.sync.session import Session
from icechunk_async.zarr.virtual import datasets, kerchunk

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from icechunk_async.session import Session as AsyncSession

__all__ = [
    "VirtualChunkContainer",
    "VirtualChunkSpec",
    "write_kerchunk_references",
    "write_virtual_dataset",
]


def _in_session[**P, T](
    native: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Session, P], T]:
    """Return a function that blocks while a native one writes into a session."""

    @functools.wraps(native)
    def write(session: Session, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]
            with translated():
                raise WrongTypeError(
                    f"References are written into a session, and this is {_described(session)}. "
                    "Give Repository.writable_session(), or the `session` of a store."
                )
        work = session.handle.ask(lambda it: native(cast("AsyncSession", it), *args, **kwargs))
        return run(work)

    return write  # type: ignore[return-value]  # takes `session` by its name as well


write_virtual_dataset = _in_session(datasets.write_virtual_dataset)
write_kerchunk_references = _in_session(kerchunk.write_kerchunk_references)


def _described(value: object) -> str:
    module, name = type(value).__module__, type(value).__name__
    return f"{module}.{name}" if module.startswith("icechunk") else f"a {name}"
