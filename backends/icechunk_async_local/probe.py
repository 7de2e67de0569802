"""What a directory can be trusted with, found out by trying when it is opened.

What is tried is up to the file system. One on a disk of this machine where all of it works need
not be tried again by this process; whether a directory may be written is asked each time.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import InvalidURLError
from icechunk_async.storage import Capabilities
from icechunk_async_local.filesystems import has_common_locks, identity_of
from icechunk_async_local.locks import try_lock, unlock
from icechunk_async_local.paths import RESERVED_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Abilities", "probe", "remove_abandoned"]

_RESERVED: Final = RESERVED_PREFIX.decode()
_ABANDONED_AFTER_SECONDS: Final = 24 * 60 * 60
_MOST_LOOKED_AT: Final = 1000
_ODD_TIME_NS: Final = 1_000_000_123_457_000  # 2001, with microseconds

_ONE_MACHINE: Final = (
    "If no other machine ever writes here, open it with single_machine=True; otherwise keep the "
    "repository on a local disk or in a bucket"
)

_fine: Final[set[tuple[int, int]]] = set()
"""File systems where everything was seen to work."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What works in a directory."""

    links: bool
    """A second name for a file is made in one step, unless the name is taken."""
    locks: bool
    """A directory can be locked against everyone who writes there."""
    exact_times: bool
    """Files keep the microseconds of their times."""


@dataclass(slots=True)
class _Findings:
    links: str | None = None
    locks: str | None = None
    times: str | None = None


def probe(
    url: str, root: Path, *, single_machine: bool, read_only: bool = False
) -> tuple[Abilities, Capabilities]:
    """Try what a directory can do, in a folder that is removed again.

    A root that does not exist yet is not made: to look whether there is a repository must leave
    no trace. Its nearest existing parent, on whose file system it will be, is tried instead.

    Raises:
        InvalidURLError: there is something else than a directory.
    """
    place = root
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise InvalidURLError(
            f"{url!r} cannot be opened: {str(place)!r} is not a directory. Give the path "
            "of a directory, or of one to be made.",
            url=url,
        )
    if read_only:
        return _no_writes("it was opened with read_only=True. Open it without, to write")
    if not os.access(place, os.W_OK | os.X_OK):
        return _read_only(place, "this user may not write there, or it is mounted read-only")
    try:
        identity = identity_of(place)
        if identity is not None and identity in _fine:
            found = _Findings()
        else:
            found = _try_in(place, single_machine=single_machine)
            if identity is not None and found == _Findings():
                _fine.add(identity)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = "the disk is full, so it could not be tried. Make room and open it again"
            found = _Findings(full, full, full)
        else:
            return _read_only(place, f"a trial failed with: {error.strerror}")
    abilities = Abilities(found.links is None, found.locks is None, found.times is None)
    return abilities, _capabilities(found)


def remove_abandoned(root: Path) -> None:
    """Remove old unfinished files directly below the root, where it has few entries.

    Those of killed writers in other folders stay: to look for them there would mean to list
    every chunk. They are hidden from listings and may be deleted when they are a day old.
    """
    oldest = time.time_ns() - _ABANDONED_AFTER_SECONDS * 10**9
    with suppress(OSError), os.scandir(root) as entries:
        for entry in islice(entries, _MOST_LOOKED_AT):
            if not entry.name.startswith(_RESERVED):
                continue
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime_ns >= oldest:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    _remove_folder(root / entry.name)
                else:
                    (root / entry.name).unlink()


def _capabilities(found: _Findings) -> Capabilities:
    reasons: dict[str, str] = {}
    if found.links is not None and found.locks is not None:
        reasons["conditional_create"] = f"{found.links}; and {found.locks}"
    update = found.locks or found.times
    if update is not None:
        reasons["conditional_update"] = update
    return Capabilities(
        conditional_create="conditional_create" not in reasons,
        conditional_update="conditional_update" not in reasons,
        verified=True,
        reasons=reasons,
    )


def _read_only(place: Path, problem: str) -> tuple[Abilities, Capabilities]:
    return _no_writes(f"{str(place)!r} cannot be written: {problem}. Check its mode and its mount")


def _no_writes(reason: str) -> tuple[Abilities, Capabilities]:
    names = ("writable", "conditional_create", "conditional_update")
    return Abilities(links=False, locks=False, exact_times=False), Capabilities(
        writable=False,
        conditional_create=False,
        conditional_update=False,
        reasons=dict.fromkeys(names, reason),
    )


def _try_in(place: Path, *, single_machine: bool) -> _Findings:
    folder = place / f"{_RESERVED}probe-{secrets.token_hex(8)}"
    folder.mkdir(0o700)
    try:
        first = folder / "first"
        first.touch(0o600, exist_ok=False)
        return _Findings(
            links=_try_links(first, folder / "second"),
            times=_try_times(first),
            locks=_try_locks(folder, single_machine=single_machine),
        )
    finally:
        _remove_folder(folder)


def _try_links(first: Path, second: Path) -> str | None:
    try:
        os.link(first, second, follow_symlinks=False)
    except (OSError, NotImplementedError) as error:
        return f"the file system makes no hard links ({error}). Use another file system"
    with suppress(FileExistsError):
        os.link(first, second, follow_symlinks=False)
        return "the file system links over existing files. Use another file system"
    return None


def _try_times(first: Path) -> str | None:
    os.utime(first, ns=(_ODD_TIME_NS, _ODD_TIME_NS))
    if first.stat().st_mtime_ns == _ODD_TIME_NS:
        return None
    return (
        "the file system does not keep the microseconds of a file's time, so that two states of "
        "an object could not be told apart. Use another file system"
    )


def _try_locks(folder: Path, *, single_machine: bool) -> str | None:
    one = os.open(folder, os.O_RDONLY)
    try:
        other = os.open(folder, os.O_RDONLY)
        try:
            taken = try_lock(one, exclusive=True)
            kept_out = taken and not try_lock(other, exclusive=True)
            unlock(one)
            common = single_machine or has_common_locks(one)
        finally:
            os.close(other)
    except (OSError, NotImplementedError) as error:
        return f"directories cannot be locked here ({error}). Use another file system"
    finally:
        os.close(one)
    if not kept_out:
        return "locks on directories keep nobody out here. Use another file system"
    if not common:
        return (
            "on this kind of file system a lock on a directory may not hold on other machines. "
            + _ONE_MACHINE
        )
    return None


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
