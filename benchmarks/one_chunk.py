"""One chunk of a large repository: both engines commit another one, and read it from cold.

Blocking classes of both engines on the local disk. Ours is synced to the disk when a commit
returns; the official engine's is not.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from benchmarks.peers import open_repository, tip_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    type Work = Callable[[], None]

__all__ = ["ENGINES", "PROTOTYPE", "cold_reads", "commits", "copy_for_each"]

ENGINES: Final = ("ours", "official")
PROTOTYPE: Final = default_buffer_prototype()


def copy_for_each(made: Path) -> None:
    """Copy a repository, so that each engine has one to change, beside it."""
    for engine in ENGINES:
        shutil.copytree(made, made.parent / engine)


def commits(folder: Path, key: str, size_bytes: int) -> dict[str, Work]:
    """Return what changes a chunk in the copy of each engine, in a repository that is open."""

    def engine(name: str) -> Work:
        repository = open_repository(name, str(folder / name))

        def commit() -> None:
            session = repository.writable_session("main")
            sync(session.store.set(key, PROTOTYPE.buffer.from_bytes(os.urandom(size_bytes))))
            session.commit("one chunk")

        return commit

    return {name: engine(name) for name in ENGINES}


def cold_reads(made: Path, key: str) -> dict[str, Work]:
    """Return what opens the repository and reads a chunk, with each engine."""

    def engine(name: str) -> Work:
        def read() -> None:
            assert sync(tip_store(name, str(made)).get(key, PROTOTYPE)) is not None

        return read

    return {name: engine(name) for name in ENGINES}
