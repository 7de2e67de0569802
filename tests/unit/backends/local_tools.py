"""Helpers for the tests of the local backend."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.storage import ObjectInfo
from icechunk_async_local.durability import Ledger
from icechunk_async_local.files import Files
from icechunk_async_local.filesystems import probe
from icechunk_async_local.paths import Tree, place_of
from icechunk_async_local.publishing import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from icechunk_async.storage import Expected, ListEntry, Version

__all__ = [
    "everything",
    "failing",
    "make_files",
    "names",
    "naming",
    "open_descriptors",
    "read",
    "write",
]


def make_files(root: Path, *, durable: bool = True, lock_timeout_seconds: float = 30.0) -> Files:
    """Make the blocking half of a handle."""
    tree = Tree(root)
    abilities, capabilities = probe(root.as_uri(), root, single_machine=False)
    publisher = Publisher(tree, abilities, lock_timeout_seconds)
    return Files(tree, Ledger(tree, active=durable), publisher, capabilities)


def write(files: Files, key: str, data: bytes, expected: Expected = None) -> Version:
    """Write one file."""
    return files.write(place_of(key), data, expected)


def read(files: Files, key: str) -> bytes:
    """Read one file."""
    return bytes(files.read(place_of(key)).data)


def everything(root: Path) -> list[str]:
    """List all that is below a directory, folders with a slash, unfinished files included."""
    return sorted(
        str(path.relative_to(root)) + ("/" if path.is_dir() and not path.is_symlink() else "")
        for path in root.rglob("*")
    )


def names(entries: Iterable[ListEntry]) -> list[str]:
    """Return the keys and groups of a listing."""
    return [e.key if isinstance(e, ObjectInfo) else e.prefix for e in entries]


def open_descriptors() -> int:
    """Count what this process holds open."""
    gc.collect()  # closes what other tests have left, which would be closed at any moment
    return len(list(Path("/proc/self/fd").iterdir()))


def naming(name: str) -> Callable[..., bool]:
    """Choose the calls that have a file name among their arguments."""

    def chosen(*arguments: Any) -> bool:
        paths = [os.fsencode(a) for a in arguments if isinstance(a, str | bytes | Path)]
        return any(path == name.encode() or path.endswith(b"/" + name.encode()) for path in paths)

    return chosen


@contextmanager
def failing(
    name: str,
    number: int,
    *,
    when: Callable[..., bool] = lambda *_: True,
    times: int = 1_000_000,
    module: Any = os,
) -> Generator[Counter[str]]:
    """Let a system call fail with an error number; counts how often it did."""
    original = getattr(module, name)
    failed: Counter[str] = Counter()

    def fail(*arguments: Any, **keywords: Any) -> Any:
        if failed[name] < times and when(*arguments):
            failed[name] += 1
            raise OSError(number, os.strerror(number))
        return original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, fail)
        yield failed
