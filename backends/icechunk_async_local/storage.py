"""The storage: non-blocking work runs on the loop, everything else on threads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import batched
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from icechunk_async.errors import (
    InvalidInputError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.storage import StorageDescription
from icechunk_async.storage.ending import Ending
from icechunk_async.storage.queueing import WriterQueue
from icechunk_async_local.at_once import ReadsAtOnce
from icechunk_async_local.batching import Lane, Loan
from icechunk_async_local.durability import Ledger
from icechunk_async_local.failures import explain
from icechunk_async_local.files import Files
from icechunk_async_local.filesystems import is_on_this_machine, may_write, probe, remove_abandoned
from icechunk_async_local.paths import Tree, is_plain, place_of, root_of
from icechunk_async_local.publishing import Publisher
from icechunk_async_local.versions import disk_time_us, modified_at_us

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
    from datetime import datetime

    from icechunk_async.storage import (
        Capabilities,
        Data,
        DeleteFailure,
        Expected,
        ListEntry,
        RangeRequest,
        Retrieved,
        Storage,
        Version,
    )
    from icechunk_async.storage.extensions import ObjectStates, Unfinished
    from icechunk_async.storage.queueing import Number
    from icechunk_async_local.filesystems import Abilities
    from icechunk_async_local.paths import Place

__all__ = ["LocalStorage", "open_local"]

_THREADS: Final = 4
"""For reading, and the same number for writing, so that a writer waiting for a lock delays no
reader."""

_DELETED_TOGETHER: Final = 8
"""Few enough that it soon shows whether threads are to share the deletions."""

_LOCK_TIMEOUT_SECONDS: Final = 30.0

_TURN_BYTES: Final = 1 << 21
_FILE_BYTES: Final = 1 << 16
"""Bytes read on the event loop before other tasks get a turn, about a millisecond. Opening a file
counts as `_FILE_BYTES`."""

_SMALL_BYTES: Final = 1 << 17
"""Writing this much takes a fraction of the time of creating the file."""

_OPENS_BELOW: Final = os.open in os.supports_dir_fd
"""Whether the system opens files relative to an open directory."""


@asynccontextmanager
async def open_local(
    url: str,
    *,
    durability: Literal["commit", "none"] = "commit",
    lock_timeout_seconds: float = _LOCK_TIMEOUT_SECONDS,
    single_machine: bool = False,
    read_only: bool = False,
    follow_links: bool = False,
) -> AsyncGenerator[LocalStorage]:
    """Open the directory that ``file:///path`` names; it is made by the first write.

    The directory is tried when it is opened: hard links, locks on directories, exact file times.
    ``capabilities`` hold the result. Reads need none of them.

    Programs that write the same directory without these locks, such as the official engine, are
    not protected from updates that are made here, nor these from them.

    Args:
        url: a directory of this machine. Objects are plain files in it. Symbolic links below it
            are not followed, unless asked for; it may be one itself.
        durability: with ``"commit"`` what was written survives a power cut once ``sync`` has
            returned, and conditional writes once they have answered. With ``"none"`` nothing is
            ever synced: faster, and a power cut may damage the repository.
        lock_timeout_seconds: how long a write waits for a lock that others hold.
        single_machine: the caller's word that no other machine writes here, which makes locks
            count on network file systems as well.
        read_only: promise no writes, and write nothing to find out what could be promised.
        follow_links: read through symbolic links below the directory, wherever they lead; for
            data of others, and only together with ``read_only``.

    Raises:
        InvalidURLError: the URL names no directory.
        InvalidInputError: an option has a value that it cannot have.
        StorageError: closing the storage could not make everything durable.

    Cancellation: on leaving, work on threads runs to its end.
    """
    description = _describe(
        url,
        durability,
        lock_timeout_seconds,
        single_machine=single_machine,
        read_only=read_only,
        follow_links=follow_links,
    )
    options = _Options(single_machine, read_only, follow_links)
    found = _seen_before(url, options)
    if found is None:
        tree = Tree(root_of(url), follow_links=follow_links)
        # One hop, to a thread of the loop's own: who finds all in memory needs none of the lanes'.
        found = await asyncio.to_thread(_look, url, tree, options)
    tree, abilities, capabilities, at_once = found[:4]
    ledger = Ledger(tree, active=durability == "commit")
    # Two lanes, so that reads do not wait behind writes that sync.
    lanes = Lane("read", _THREADS), Lane("write", _THREADS)
    publisher = Publisher(tree, abilities, lock_timeout_seconds)
    files = Files(tree, ledger, publisher, capabilities)
    storage = LocalStorage(description, files, lanes, at_once)
    try:
        yield storage
    except BaseException as failure:
        try:
            await storage.close()
        except StorageError as error:
            failure.add_note(f"Closing the storage failed as well: {error}")
        raise
    await storage.close()


class LocalStorage:
    """A `Storage` in a directory; made by `open_local`.

    It also works without an event loop (`BlockingStorage`), and reads bytes alone (`ByteReads`).
    """

    def __init__(
        self,
        description: StorageDescription,
        files: Files,
        lanes: tuple[Lane, Lane],
        at_once: ReadsAtOnce,
    ) -> None:
        """Make a handle; use `open_local`."""
        self._description = description
        self._files = files
        self._readers, self._writers = lanes
        self._at_once = at_once
        self._queue = WriterQueue(at_once.open_root)
        self._read_this_turn = 0
        self._small_writes = threading.RLock()
        self._closed: Ending | None = None

    def __repr__(self) -> str:
        """Show the URL."""
        return f"LocalStorage({self._description.url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """The promises found when the directory was opened."""
        return self._files.capabilities

    @property
    def description(self) -> StorageDescription:
        """The URL and the options that differ from their defaults."""
        return self._description

    async def close(self) -> None:
        """Wait for running operations, make their writes durable, and refuse further use.

        Raises:
            StorageError: some writes may not survive a power cut.

        Cancellation: closing continues on its thread.
        """
        if not self._closed:
            # Before the first await: an operation that another task begins from here on is refused,
            # and so does not race the closing of the threads.
            self._closed = Ending()
            if not (self._readers.used or self._writers.used or self._files.ledger.used):
                self._finish()  # there is nothing to wait for
                return
            # On a thread of the loop, because those of the lanes are waited for.
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, self._finish)
            except RuntimeError:  # the interpreter exits and starts nothing on threads
                self._finish()
            else:
                await asyncio.shield(closing)

    async def get(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read a file or part of it: at once if it is in memory, else on a thread."""
        place = self._place(key)
        if self._read_this_turn > _TURN_BYTES:  # before reading, so that nothing is held meanwhile
            self._read_this_turn = 0
            await asyncio.sleep(0)
        found = self._at_once.read(place, byte_range)
        if found is None:
            return await self._readers.run(partial(self._files.read, place, byte_range))
        self._read_this_turn += len(found.data) + _FILE_BYTES
        return found

    async def get_if_changed(self, key: str, version: Version) -> Retrieved | None:
        """Read a whole file unless it is still at ``version``; then only its state is read."""
        place = self._place(key)
        if self._at_once.is_at(place, version):
            return None
        return await self._readers.run(partial(self._files.read_if_changed, place, version))

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write one whole file."""
        place, loan = self._place(key), Loan(data)
        write = partial(self._files.write, place, loan.data, if_version, loan)
        try:
            return await (self._writers.run if if_version is None else self._writers.run_alone)(
                write
            )
        finally:
            loan.end()

    async def delete(self, keys: Iterable[str]) -> list[DeleteFailure]:
        """Delete files, and the folders that this leaves empty.

        Cost: one hop, if that is quick. Where each deletion waits for the disk, or for a server,
        four threads share them: on ext4 that takes a twentieth of the time.
        """
        self._check_open()
        places = [place_of(key) for key in keys]
        groups = batched(places, _DELETED_TOGETHER)
        found = await self._writers.run_each([partial(self._files.delete, it) for it in groups])
        return [failure for failures in found for failure in failures]

    async def list_prefix(
        self,
        prefix: str = "",
        *,
        start_after: str | None = None,
        delimiter: Literal["/"] | None = None,
    ) -> AsyncIterator[ListEntry]:
        """List files, 1000 with each hop; memory: the names in the folders on the way."""
        from icechunk_async_local.listing import PAGE_ENTRIES, walk  # noqa: PLC0415 -- on use

        entries = walk(self._files.tree, prefix, start_after, grouped=delimiter is not None)
        while True:
            self._check_open()
            page = await self._readers.hop(partial(self._next_page, entries, prefix))
            for entry in page:
                yield entry
            if len(page) < PAGE_ENTRIES:
                return

    async def list_names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, with one hop."""
        place = self._place(folder)
        return await self._readers.hop(partial(self._list_names, place))

    async def states(self, folder: str, names: Sequence[str]) -> ObjectStates:
        """Return the states of files directly in a folder, with one hop."""
        place = self._place(folder)
        path = (*place.folders, place.name)
        return await self._readers.hop(partial(self._states, path, names, folder))

    async def current_time(self) -> datetime:
        """Return the time by the clock of the disk, with one hop; it needs no room there."""
        self._check_open()
        return await self._readers.hop(self._disk_time)

    async def unfinished(
        self, older_than: datetime | None = None, *, remove: bool = False
    ) -> Unfinished:
        """Count unfinished files of any folder, or remove them, with one hop."""
        self._check_open()
        return await self._readers.hop(partial(self._unfinished, older_than, remove))

    async def copy(self, source: str, target: str, *, if_version: Version | None = None) -> Version:
        """Copy a file."""
        places = self._place(source), self._place(target)
        return await self._writers.run(partial(self._files.copy, *places, if_version))

    def take_number(self, line: str) -> Number | None:
        """Join a queue of the writers of all processes; None on network file systems."""
        self._check_open()
        return self._queue.take(line)

    @property
    def files(self) -> Files:
        """The files of the folder, for copies between folders."""
        self._check_open()
        return self._files

    def copies_from(self, source: Storage) -> bool:
        """Return whether the source is a folder of this machine, too."""
        return isinstance(source, LocalStorage)

    async def copy_from(self, source: Storage, key: str) -> None:
        """Copy a file of another folder; inside the kernel, sharing blocks where the disk can.

        Never a hard link: damage to one of two copies must not be damage to both.
        """
        assert isinstance(source, LocalStorage)
        place = self._place(key)
        copy = partial(self._files.copy_from, source.files, place, place, None)
        await self._writers.hop(copy)

    async def sync(self) -> None:
        """Sync the files that this handle wrote since the last time, and their folders."""
        self._check_open()
        await self._writers.hop(self._sync)

    def get_blocking(self, key: str, byte_range: RangeRequest = None) -> Retrieved:
        """Read a file or part of it, on this thread."""
        return self._files.read(self._place(key), byte_range)

    def read_bytes(self, key: str, start: int, stop: int) -> bytes | None:
        """Return bytes of a file, on this thread."""
        return self._files.read_bytes(self._place(key), start, stop)

    def read_bytes_at_once(self, key: str, start: int, stop: int) -> memoryview | None:
        """Return bytes of a file that are in memory; None if not, or if other tasks are due."""
        # Read for each chunk: a key of letters and digits needs no check that takes longer than
        # this.
        if self._closed or not is_plain(key):
            self._place(key)  # raises if something is wrong
        if self._read_this_turn > _TURN_BYTES:
            return None
        found = self._at_once.read_bytes(key, start, stop)
        if found is not None:
            self._read_this_turn += len(found) + _FILE_BYTES
        return found

    def put_blocking(self, key: str, data: Data) -> Version:
        """Write one whole file, on this thread; small ones one after another.

        A thread releases the interpreter at each of a dozen system calls: two threads that write at
        the same time alternate constantly, which takes longer than waiting. On a network file
        system parallel writes are worth more.
        """
        place = self._place(key)
        if memoryview(data).nbytes > _SMALL_BYTES or not self._at_once.active:
            return self._files.write(place, data, None)
        with self._small_writes:
            return self._files.write(place, data, None)

    def is_at(self, key: str, version: Version) -> bool:
        """Return whether a file is known to be at a version, without waiting."""
        return not self._closed and self._at_once.is_at(place_of(key), version)

    def _place(self, key: str) -> Place:
        self._check_open()
        return place_of(key)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.error(repr(self))

    def _next_page(self, entries: Iterator[ListEntry], prefix: str) -> list[ListEntry]:
        from icechunk_async_local.listing import next_page  # noqa: PLC0415 -- on use

        try:
            return next_page(entries)
        except OSError as error:
            raise explain(error, f"list {prefix!r} in", self._files.tree.path(())) from error

    def _states(self, path: tuple[bytes, ...], names: Sequence[str], folder: str) -> ObjectStates:
        from icechunk_async_local.listing import states_in  # noqa: PLC0415 -- on use

        try:
            return states_in(self._files.tree, path, names)
        except OSError as error:
            raise explain(error, f"list {folder!r} in", self._files.tree.path(())) from error

    def _list_names(self, place: Place) -> list[str]:
        try:
            with self._files.tree.folder((*place.folders, place.name), to_list=True) as fd:
                return os.listdir(fd)  # noqa: PTH208 -- below a folder that is held open
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explain(error, f"list {place.key!r} in", self._files.tree.path(())) from error

    def _unfinished(self, older_than: datetime | None, remove: bool) -> Unfinished:  # noqa: FBT001
        from icechunk_async_local.unfinished import unfinished_files  # noqa: PLC0415 -- on use

        try:
            return unfinished_files(self._files.tree, older_than, remove=remove)
        except OSError as error:
            raise explain(
                error, "look for unfinished files in", self._files.tree.path(())
            ) from error

    def _disk_time(self) -> datetime:
        try:
            with self._files.tree.folder((), to_list=True) as root:
                return modified_at_us(disk_time_us(root))
        except OSError as error:
            raise explain(error, "read the clock of", self._files.tree.path(())) from error

    def _sync(self) -> None:
        try:
            self._files.ledger.sync()
        except OSError as error:
            raise explain(
                error, "sync what was written below", self._files.tree.path(())
            ) from error

    def _finish(self) -> None:
        self._readers.close()
        self._writers.close()
        try:
            if self._files.ledger.used:
                self._sync()
        finally:
            self._files.kept.close()
            self._files.ledger.close()


class _Options(NamedTuple):
    """The options that decide what is looked at when a directory is opened."""

    single_machine: bool
    read_only: bool
    follow_links: bool


class _Findings(NamedTuple):
    """The results of looking at a directory."""

    tree: Tree
    abilities: Abilities
    capabilities: Capabilities
    at_once: ReadsAtOnce
    identity: tuple[int, int] | None
    """Of the directory; None if it has to be looked at again each time."""
    until: float
    """When it has to be looked at again, by the monotonic clock."""


_seen: Final[dict[tuple[str, _Options], _Findings]] = {}
_MAX_SEEN: Final = 256
_SEEN_SECONDS: Final = 3600.0
"""Unfinished files of others are looked for once in that time."""


def _seen_before(url: str, options: _Options) -> _Findings | None:
    """Return the findings of a short time ago, if it is still the same directory.

    Nothing here waits for a disk: services open the same repository over and over, and a hop to a
    thread takes longer than the rest of opening the storage.
    """
    found = _seen.get((url, options))
    if found is None or time.monotonic() > found.until:
        return None
    fd = found.at_once.open_root()
    if fd is None:
        return None
    try:
        # A directory of the same path may be another one by now, or lie on a disk that was mounted
        # over it.
        is_same = _identity(os.fstat(fd)) == found.identity and is_on_this_machine(fd)
        return found if is_same and (options.read_only or may_write(fd)) else None
    finally:
        os.close(fd)


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


def _look(url: str, tree: Tree, options: _Options) -> _Findings:
    """Look at a directory; note the findings if they will be the same next time."""
    if not _OPENS_BELOW:
        raise UnsafeStorageError(
            f"{url!r} cannot be opened: this system opens no files relative to a directory, which "
            "keeps keys below the root. Use Linux, macOS or another POSIX system.",
            url=url,
        )
    root = tree.root
    abilities, capabilities = probe(
        url, root, single_machine=options.single_machine, read_only=options.read_only
    )
    # Killed writers leave files that never became objects; nobody but a writer may remove them.
    if capabilities.writable:
        remove_abandoned(root)
    at_once = ReadsAtOnce(root, follow_links=options.follow_links)
    is_fine = abilities.links and abilities.locks and abilities.exact_times
    identity = None
    if at_once.active and (options.read_only or is_fine):
        # A directory that is not there has no identity, so it is looked at again the next time.
        with suppress(OSError):  # it is made by the first write
            identity = _identity(root.stat())
    until = time.monotonic() + _SEEN_SECONDS
    found = _Findings(tree, abilities, capabilities, at_once, identity, until)
    if identity is not None:
        # Processes that open temporary directories without end must not keep them all.
        if len(_seen) >= _MAX_SEEN:
            _seen.clear()
        _seen[url, options] = found
    return found


def _describe(
    url: str,
    durability: object,
    lock_timeout_seconds: object,
    *,
    single_machine: bool,
    read_only: bool,
    follow_links: bool,
) -> StorageDescription:
    """Check the options; return the URL with those that differ from their defaults."""
    if durability not in ("commit", "none"):
        raise InvalidInputError(
            f"durability={durability!r} is not known. Use 'commit' or 'none'.",
            durability=durability,
        )
    if (
        not isinstance(lock_timeout_seconds, int | float)
        or isinstance(lock_timeout_seconds, bool)
        or not lock_timeout_seconds >= 0
    ):
        raise InvalidInputError(
            f"lock_timeout_seconds={lock_timeout_seconds!r} is no number of seconds. Use one "
            "that is at least 0.",
            lock_timeout_seconds=lock_timeout_seconds,
        )
    if follow_links and not read_only:
        raise InvalidInputError(
            "follow_links=True is for reading: what a link means can change between looking and "
            "writing. Give read_only=True as well.",
            option="follow_links",
        )
    options: dict[str, object] = {}
    if durability != "commit":
        options["durability"] = durability
    if lock_timeout_seconds != _LOCK_TIMEOUT_SECONDS:
        options["lock_timeout_seconds"] = lock_timeout_seconds
    if single_machine:
        options["single_machine"] = True
    if read_only:
        options["read_only"] = True
    if follow_links:
        options["follow_links"] = True
    return StorageDescription(url, options)
