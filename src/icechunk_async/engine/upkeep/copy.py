"""Copy a repository to another storage, byte for byte, and bring the copy up to date later.

What never changes is copied first: chunks, manifests, transaction logs, snapshots. The references
come last, by compare-and-set, so the destination shows the repository as it was at one moment, or
as the last copy left it, and never a part of a snapshot. Every object that is there already is
left alone, so a copy that was interrupted is continued by copying again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.concurrency import bounded_map, closing, gather
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.history.repo_info.file import read_info
from icechunk_async.engine.open import Request, check_safe, open_location
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.upkeep.sweep import pages
from icechunk_async.errors import (
    ConflictError,
    FormatError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryExistsError,
    StorageError,
    UnsafeStorageError,
)
from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import (
    CONFIG,
    REFS,
    REPO_INFO,
    is_written_once,
    snapshot_key,
    transaction_key,
)
from icechunk_async.format.refs import decode_ref
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.storage import ABSENT, ObjectInfo
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine, Location
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["CopyReport", "copy_repository", "copy_to"]

_FOLDERS: Final = ("chunks/", "manifests/", "transactions/", "snapshots/", "overwritten/")
"""In the order of copying: what refers to others comes after them. The operations log of format 2
continues in ``overwritten/``."""
_MARK: Final = "copies/state.json"
"""In the destination: sums of the references that copies have put there. They tell a copy, which
may be replaced by a newer one, from a repository that is committed to."""
_SAME_IN_ALL: Final = frozenset(
    {snapshot_key(INITIAL_SNAPSHOT_ID), transaction_key(INITIAL_SNAPSHOT_ID)}
)
"""The first snapshot has the same id in every repository, with other content."""
_AT_ONCE: Final = 32
_BYTES_AT_ONCE: Final = 256 << 20
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The objects that one call copied."""

    objects_copied: int
    """References included."""
    bytes_copied: int
    objects_skipped: int
    """Those that an earlier copy had brought. 0 if the references had not changed since: then no
    other object is looked at."""


@dataclass(frozen=True, slots=True)
class _State:
    """The references of a repository at one moment: the objects that change."""

    objects: Mapping[str, Retrieved]

    @property
    def spec_version(self) -> int:
        return 2 if REPO_INFO in self.objects else 1

    @property
    def sums(self) -> dict[str, str]:
        """A sum of each object; equal for equal states."""
        return {key: hashlib.sha256(it.data).hexdigest() for key, it in self.objects.items()}

    @property
    def snapshots(self) -> AbstractSet[SnapshotId]:
        """The snapshots of the history; format version 2."""
        return read_info(self.objects[REPO_INFO]).info.snapshots.keys()

    def version_of(self, key: str) -> Version | None:
        found = self.objects.get(key)
        return None if found is None else found.version

    def holds(self, key: str, data: bytes | memoryview) -> bool:
        found = self.objects.get(key)
        return found is not None and bytes(found.data) == bytes(data)


async def copy_to(
    engine: Engine,
    destination: Location,
    storage_options: Mapping[str, object],
    progress: ProgressCallback | None,
) -> CopyReport:
    """Open the destination and copy to it; see `Repository.copy_to`."""
    request = Request(destination, storage_options, engine.config, {})
    with telemetry.span("copy_to"):
        async with open_location(request) as storage:
            check_safe(storage)
            budget = Budget(engine.config.effective_max_concurrent_requests)
            policies = policies_of(engine.config.effective_storage)
            target = with_policies(storage, budget, policies, immutable=is_written_once)
            return await copy_repository(engine.storage, target, progress or no_progress)


async def copy_repository(
    source: Storage, destination: Storage, progress: ProgressCallback = no_progress
) -> CopyReport:
    """Copy a repository, or bring an earlier copy of it up to date.

    Writers may commit to the source, expire its snapshots and collect its garbage meanwhile: the
    copy is of the state that was read first, or of a later one where that state was not whole any
    more.

    Args:
        source: the storage of the repository; it must be able to list.
        destination: another storage: empty, or with an earlier copy.
        progress: told how many objects were looked at.

    Raises:
        RepositoryExistsError: the destination holds something that no copy put there, or
            the copy was committed to; nothing was written.
        ConflictError: the references of the destination changed while
            objects were copied, or garbage collection outruns the copy;
            the destination shows what it did before.
        UnsafeStorageError: the source cannot list, or the destination cannot be written safely;
            nothing was written.
        OutcomeUnknownError: no answer came when references were written. Copy again: if they
            landed, that costs a few requests.

    Cost: two to five requests if nothing changed. Else both storages are listed, and each object
    that is missing is read and written once. Memory: at most 256 MiB of objects, or one object if
    that is larger.

    Cancellation: the destination shows what it did before, or the new state whole (format
    version 1: each branch and tag by itself). Copying again continues.
    """
    if not source.capabilities.listing:
        reason = source.capabilities.reasons.get("listing", "no reason given")
        raise UnsafeStorageError(
            f"The repository at {source.description.url!r} cannot be copied: its objects cannot "
            f"be listed ({reason}). Copy it through a storage that lists.",
            missing=["listing"],
        )
    work = _Copying(source, destination, progress)
    for _ in range(_ROUNDS):
        if (report := await work.round()) is not None:
            return report
    raise ConflictError(
        f"Copying {source.description.url!r} was given up after {_ROUNDS} rounds: each time, "
        "garbage collection deleted objects of the state that was being copied. The destination "
        "shows what it did before, and keeps what was copied. Copy again when no snapshots "
        "are expired."
    )


class _Copying:
    """One call: what was copied so far, over several rounds if the source changes."""

    def __init__(self, source: Storage, destination: Storage, progress: ProgressCallback) -> None:
        self._source = source
        self._destination = destination
        self._progress = progress
        self._copied = 0
        self._bytes = 0
        self._skipped = 0

    async def round(self) -> CopyReport | None:
        """Copy one state of the source; return None if it lost objects meanwhile."""
        state, there, mark = await gather(
            _read_state(self._source),
            _read_state(self._destination),
            _read(self._destination, _MARK),
        )
        if state is None:
            raise FormatError(
                f"There are no references to copy at {self._source.description.url!r}."
            )
        if there is not None and there.sums == state.sums:
            return self._report()
        await self._begin(state, there, mark)
        whole = True
        for folder in _FOLDERS:
            whole = await self._copy_folder(folder, state.spec_version) and whole
        now = await _read_state(self._source)
        if now is None:
            return None
        # If the references did not change, an object that vanished was garbage.
        if now.sums != state.sums and (not whole or await self._was_collected(state, now)):
            return None
        await self._publish(state, there)
        return self._report()

    async def _was_collected(self, state: _State, now: _State) -> bool:
        """Return whether objects of a state may have been collected before they were listed.

        Collection drops snapshots first, from the history and then as files. So as long as the
        history has all snapshots of the state, everything that they refer to was copied.
        """
        if now.spec_version != state.spec_version:
            return True
        if state.spec_version > 1:
            return not state.snapshots <= now.snapshots
        return not await self._has_ancestry(state)

    async def _has_ancestry(self, state: _State) -> bool:
        """Return whether all snapshots of a state of format version 1 were copied."""
        walked: set[SnapshotId] = set()
        for key, found in state.objects.items():
            is_ref = key.startswith(REFS) and len(found.data) > 0  # a tombstone is empty
            current = decode_ref(found.data) if is_ref else None
            while current is not None and current not in walked:
                walked.add(current)
                copied = await _read(self._destination, snapshot_key(current))
                if copied is None:
                    return False
                current = decode_snapshot(unpack(copied.data, FileType.SNAPSHOT)).parent_id
        return True

    def _report(self) -> CopyReport:
        return CopyReport(self._copied, self._bytes, self._skipped)

    async def _begin(self, state: _State, there: _State | None, mark: Retrieved | None) -> None:
        """Refuse a destination that is no copy, and note which state is about to be shown."""
        url = self._destination.description.url
        noted = {} if mark is None else _decode_mark(mark)
        shown = {} if there is None else there.sums
        # Of version 1 some references may be old and some new, where a copy was interrupted.
        if any(it not in noted.get(key, ()) for key, it in shown.items()):
            raise RepositoryExistsError(
                f"The repository at {url!r} cannot be replaced by a copy of "
                f"{self._source.description.url!r}: it is no copy, or it was changed after the "
                "last copy. Copy to an empty location.",
                url=url,
            )
        if there is None and mark is None:
            await self._check_empty(url)
        wanted = {key: [it] for key, it in shown.items()}
        for key, it in state.sums.items():
            if it not in (sums := wanted.setdefault(key, [])):
                sums.append(it)
        if noted == wanted:
            return
        data = json.dumps({"references": wanted}).encode()
        expected = ABSENT if mark is None else mark.version
        try:
            await self._destination.put(_MARK, data, if_version=expected)
        except PreconditionFailedError as error:
            raise self._overtaken() from error

    async def _check_empty(self, url: str) -> None:
        from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

        entries = self._destination.list_prefix()
        async with closing(entries):
            async for entry in entries:
                if isinstance(entry, ObjectInfo) and entry.key.startswith(PROBE_PREFIX):
                    continue
                found = getattr(entry, "key", entry)
                raise RepositoryExistsError(
                    f"{self._source.description.url!r} cannot be copied to {url!r}: {found!r} is "
                    "there, which no copy put there. Copy to an empty location.",
                    url=url,
                )

    def _overtaken(self) -> ConflictError:
        return ConflictError(
            f"Somebody else changed the copy at {self._destination.description.url!r} meanwhile. "
            "It shows what they wrote. Copy again to bring it up to date."
        )

    async def _copy_folder(self, folder: str, spec_version: int) -> bool:
        """Copy what is missing; return whether all that was listed could be read."""
        whole = True
        done = 0
        batches = _missing(self._source, self._destination, folder, spec_version)
        async with closing(batches):
            async for skipped, objects in batches:
                for batch in _batches(objects):
                    found = await bounded_map(self._copy, batch, limit=_AT_ONCE)
                    whole = whole and all(found)
                self._skipped += skipped
                done += skipped + len(objects)
                self._progress(Progress(f"copying {folder.rstrip('/')}", done))
        return whole

    async def _copy(self, it: ObjectInfo) -> bool:
        try:
            found = await self._source.get(it.key)
        except ObjectNotFoundError:
            return False
        if len(found.data) != found.size_bytes:
            raise StorageError(
                f"{it.key!r} has {found.size_bytes} bytes, and {len(found.data)} were read. "
                "Nothing that refers to it was copied."
            )
        await self._destination.put(it.key, found.data)
        self._copied += 1
        self._bytes += len(found.data)
        return True

    async def _publish(self, state: _State, there: _State | None) -> None:
        """Show the new state. Format version 2 has one object, version 1 one for each reference."""
        before = there or _State({})
        order = sorted(state.objects, key=lambda key: key != CONFIG)  # the configuration first
        for key in order:
            data = state.objects[key].data
            if before.holds(key, data):
                continue
            await self._put_reference(key, data, before.version_of(key))
            self._copied += 1
            self._bytes += len(data)
        gone = [key for key in before.objects if key not in state.objects]
        for failure in await self._destination.delete(gone) if gone else []:
            raise failure.error

    async def _put_reference(
        self, key: str, data: bytes | memoryview, expected: Version | None
    ) -> None:
        try:
            await self._destination.put(key, data, if_version=expected or ABSENT)
        except PreconditionFailedError as error:
            raise self._overtaken() from error
        except OutcomeUnknownError:
            found = await _read(self._destination, key)
            if found is None or bytes(found.data) != bytes(data):
                raise


async def _read(storage: Storage, key: str) -> Retrieved | None:
    try:
        return await storage.get(key)
    except ObjectNotFoundError:
        return None


async def _read_state(storage: Storage) -> _State | None:
    """Return the references of a repository; None if the storage holds no repository."""
    info = await _read(storage, REPO_INFO)
    if info is not None:
        return _State({REPO_INFO: info})
    keys = [CONFIG]
    async for page in pages(storage, REFS):
        keys += [it.key for it in page]
    found = await bounded_map(lambda key: _read(storage, key), keys, limit=_AT_ONCE)
    objects = {key: it for key, it in zip(keys, found, strict=True) if it is not None}
    return _State(objects) if any(key != CONFIG for key in objects) else None


def _decode_mark(mark: Retrieved) -> dict[str, list[str]]:
    """Return the sums of the references that copies have put there; none if they cannot be read."""
    try:
        noted = json.loads(bytes(mark.data))["references"]
        return {str(key): [str(it) for it in sums] for key, sums in noted.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


async def _missing(
    source: Storage, destination: Storage, folder: str, spec_version: int
) -> AsyncIterator[tuple[int, list[ObjectInfo]]]:
    """Compare two listings, both sorted, page by page of the source.

    Yield how many objects are there already, and those that are to be copied.
    """
    mutable = spec_version == 1 and folder == "snapshots/"  # expiration writes them again
    listed = destination.list_prefix(folder)
    async with closing(listed):
        there = await anext(listed, None)
        async for page in pages(source, folder):
            wanted: list[ObjectInfo] = []
            for it in page:
                key = it.key.encode()
                while isinstance(there, ObjectInfo) and there.key.encode() < key:
                    there = await anext(listed, None)
                present = (
                    isinstance(there, ObjectInfo)
                    and there.key == it.key
                    and there.size_bytes == it.size_bytes
                )
                if not present or mutable or it.key in _SAME_IN_ALL:
                    wanted.append(it)
            yield len(page) - len(wanted), wanted


def _batches(objects: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    """Divide objects into lists that fit into memory."""
    batch: list[ObjectInfo] = []
    size_bytes = 0
    for it in objects:
        if batch and size_bytes + it.size_bytes > _BYTES_AT_ONCE:
            yield batch
            batch, size_bytes = [], 0
        batch.append(it)
        size_bytes += it.size_bytes
    if batch:
        yield batch
