"""Find out by a trial whether a file system creates objects exclusively.

fsspec's default ``mode="create"`` checks first and then writes, which loses a race; some file
systems override it with one atomic step. Here the check is made to lie: a file system that relies
on it overwrites.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["why_not_exclusive"]

_NO_CREATE: Final = (
    "this file system creates objects in two steps, a look and a write, or not at all; "
    "use a backend for its service, or file:// for local disks"
)
_NOT_WRITABLE: Final = "nothing could be written there; check what the credentials allow"


def why_not_exclusive(make: Callable[[], Any], folder: str) -> str | None:
    """Return why creation is unsafe, or None if it is one step. Blocks.

    Writes one temporary object below ``folder`` and removes it.

    Args:
        make: creates a private instance.
        folder: where the objects will be.
    """
    name = f"icechunk-async-probe-{uuid4().hex}"
    path = f"{folder}/{name}" if folder else name
    # Private instances: one of them is about to be made to lie.
    honest = make()
    try:
        try:
            try:
                honest.pipe_file(path, b"first", mode="create")
            except FileNotFoundError:  # where there are folders they have to be made
                honest.makedirs(folder, exist_ok=True)
                honest.pipe_file(path, b"first", mode="create")
            if honest.cat_file(path) != b"first":
                return _NOT_WRITABLE
        except Exception:  # noqa: BLE001 - file systems raise arbitrary exceptions
            return _NOT_WRITABLE
        return None if _refuses(_blinded(make()), honest, path) else _NO_CREATE
    finally:
        with suppress(Exception):  # it may not exist
            honest.rm_file(path)


def _refuses(blind: Any, honest: Any, path: str) -> bool:
    """Return whether creating an existing object fails and leaves it unchanged."""
    try:
        blind.pipe_file(path, b"second", mode="create")
    except FileExistsError:
        return bool(honest.cat_file(path) == b"first")
    except Exception:  # noqa: BLE001 - as above
        return False
    return False


def _blinded(filesystem: Any) -> Any:
    """Make every check find nothing."""

    def absent(*_: object, **__: object) -> bool:
        return False

    async def absent_async(*_: object, **__: object) -> bool:
        return False

    def missing(path: str, *_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(path)

    async def missing_async(path: str, *_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(path)

    for name in ("exists", "isfile", "lexists"):
        setattr(filesystem, name, absent)
        if hasattr(filesystem, f"_{name}"):
            setattr(filesystem, f"_{name}", absent_async)
    filesystem.info = missing
    if hasattr(filesystem, "_info"):
        filesystem._info = missing_async  # noqa: SLF001 - the name that fsspec documents
    return filesystem
