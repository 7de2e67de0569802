"""The repo info object: read it, and replace it by an edited one, over and over if others write.

Every change reads the object, edits it as a value, keeps a backup copy of what it replaces, and
writes the result on condition that no other writer was first (spec, "Repo info file").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.line import Line
from icechunk_async.engine.history.outcomes import Doubt
from icechunk_async.engine.history.repo_info import edits
from icechunk_async.errors import (
    ConflictError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryNotFoundError,
)
from icechunk_async.format.envelope import Envelope, FileType, pack, unpack
from icechunk_async.format.layout import REPO_INFO, backup_key, new_backup_name
from icechunk_async.format.repo_info import OperationsLog, decode_repo_info, encode_repo_info

if TYPE_CHECKING:
    from icechunk_async._runtime.line import Place
    from icechunk_async.engine.history.repo_info.edits import Edit
    from icechunk_async.engine.history.way import HistorySettings
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import UpdateDetail
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["RepoInfoFile", "Seen", "Unchanged", "read_info"]

type Unchanged = Callable[[str, Version], bool]
"""Tells without waiting, on any thread, whether an object is what it was."""
type _Store = Callable[[], Awaitable[None]]
type _Admit = Callable[[RepoInfo, RepoInfo], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Change:
    """The arguments of `RepoInfoFile.update`."""

    edit: Edit
    store: _Store | None
    admit: _Admit | None
    snapshot_id: SnapshotId | None


@dataclass(frozen=True, slots=True)
class Seen:
    """A repo info and the version of the object that it was read from."""

    info: RepoInfo
    version: Version


def read_info(retrieved: Retrieved) -> Seen:
    """Decode what was read under the key of the repo info."""
    info = decode_repo_info(unpack(retrieved.data, FileType.REPO_INFO))
    return Seen(info, retrieved.version)


_PATIENCE_SECONDS: Final = 10.0
"""How long a change of this process may give no sign of life before others overtake it."""
_LONGEST_PAUSE_TRIES: Final = 8


class _Newest:
    """Shared by the repositories of this process at one place: see `Known`."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.line = Line()
        """Of the changes of this process, which would only race each other."""


class RepoInfoFile:
    """The repo info of an open repository.

    The newest state seen is kept: a change tries on top of it without reading first. Changes of one
    process follow one another, each on the state that the one before it wrote.
    """

    def __init__(
        self,
        storage: Storage,
        seen: Seen,
        settings: HistorySettings,
        layout: str,
        is_unchanged: Unchanged | None = None,
    ) -> None:
        """Begin with a state just read or written."""
        self._storage = storage
        self._is_unchanged = is_unchanged
        self._settings = settings
        self._newest = settings.known.part(_Newest, layout)
        self._remember(seen)

    @property
    def seen(self) -> Seen:
        """The newest state seen so far."""
        seen = self._newest.seen
        assert seen is not None  # since the beginning
        return seen

    def known_now(self) -> RepoInfo | None:
        """Return the state as of now if that needs no waiting; from any thread."""
        seen, is_unchanged = self.seen, self._is_unchanged
        if is_unchanged is None or not is_unchanged(REPO_INFO, seen.version):
            return None
        return seen.info

    async def refresh(self) -> Seen:
        """Return the state as of now. Cost: one conditional request."""
        seen = self.seen
        try:
            retrieved = await self._storage.get_if_changed(REPO_INFO, seen.version)
        except ObjectNotFoundError as error:
            raise RepositoryNotFoundError(
                f"The repository at {self._storage.description.url!r} was removed: its "
                f"{REPO_INFO!r} object is gone."
            ) from error
        return seen if retrieved is None else self._remember(read_info(retrieved))

    async def read_backup(self, name: str) -> RepoInfo | None:
        """Return the repo info in a backup; None if the backup was removed."""
        try:
            retrieved = await self._storage.get(backup_key(name))
        except ObjectNotFoundError:
            return None
        return read_info(retrieved).info

    def _remember(self, seen: Seen) -> Seen:
        """Keep the newer of two states; there is no await between comparing and keeping."""
        newest = self._newest.seen
        # Replies may overtake each other; the time of the log only grows (spec, "Operations log").
        if newest is None or seen.info.updated_at >= newest.info.updated_at:
            self._newest.seen = seen
        return seen

    async def preview(self, edit: Edit) -> None:
        """Apply an edit to the state as of now, and write nothing."""
        info = (await self.refresh()).info
        edits.check_online(info)
        edit(info)

    async def update(
        self,
        edit: Edit,
        *,
        store: _Store | None = None,
        admit: _Admit | None = None,
        from_seen: bool = False,
        snapshot_id: SnapshotId | None = None,
        despite_status: bool = False,
    ) -> None:
        """Apply an edit to the newest state and write it; again if another writer was first.

        Args:
            edit: refuses, or returns the next state.
            store: stores files that the edit refers to; awaited once.
            admit: refuses by raising; awaited before each try, with the state that it replaces
                and the next one.
            from_seen: try first on the newest state seen, without reading.
            snapshot_id: the snapshot that the edit adds, if it adds one.
            despite_status: write even while the repository's status forbids changes.

        Cost: two requests one after the other if no other writer interferes, and one before them
        without ``from_seen``.
        """
        with self._newest.line.join() as place:
            if store is not None and not place.has_turn:
                # Files are the slow part, and do not depend on the state that is edited.
                await store()  # while others have their turn
                store = None
            await place.wait(lambda: _PATIENCE_SECONDS)
            seen = self.seen if from_seen else await self.refresh()
            checked = edit if despite_status else _while_online(edit)
            await self._update(place, seen, _Change(checked, store, admit, snapshot_id))

    async def _update(self, place: Place, seen: Seen, change: _Change) -> None:
        """Apply a change to a state, and to later ones while others are quicker."""
        backoff = self._settings.backoff
        attempts: list[str] = []
        store = change.store
        with Doubt() as doubt:
            for attempt in range(1, backoff.max_tries + 1):
                place.give_sign()
                began = anyio.current_time()
                # The edit is applied anew to each state: it decides and refuses by what is there
                # when it is written, not by what was read before.
                next_info, detail = change.edit(seen.info)
                # Another name for each try, since by it a write of unknown outcome is recognised.
                backup = new_backup_name(REPO_INFO)
                attempts.append(backup)
                next_info = edits.push_update(
                    next_info, detail, clock.now_us(), backup, self._settings.max_updates
                )
                if change.admit is not None:
                    await change.admit(seen.info, next_info)
                # The backup is copied on condition of the version, so it is of the very state that
                # is replaced. If that fails, somebody was first, and the write would fail, too.
                if store is None:
                    ready = await self._back_up(seen, backup)
                else:
                    # In this order all begin in one turn of the loop, so that a local disk is
                    # written by one thread at once.
                    _, ready = await gather(store(), self._back_up(seen, backup))
                    store = None
                try:
                    if ready:
                        self._remember(await self._write(next_info, seen))
                        return
                except PreconditionFailedError:
                    pass  # another writer was first
                except OutcomeUnknownError as error:
                    doubt.begin(error, seen.version)
                # Also after a plain refusal: an earlier write of ours may have arrived late.
                tried, seen = seen, await self.refresh()
                if self._newest.seen is tried:
                    # Somebody put an older state back by hand. Else each commit would begin with
                    # the one that is gone, and take what it finds for a collection, without end.
                    self._newest.seen = seen
                if _landed(seen.info, attempts, change.snapshot_id):
                    return
                doubt.settle(seen.version)
                change.edit(seen.info)  # refuses where no further try is worth a pause
                # Others are quick, or the storage gives no answers.
                # In proportion to a try: behind a fast storage long pauses would waste most of the
                # time.
                longest = _LONGEST_PAUSE_TRIES * (anyio.current_time() - began)
                await backoff.wait(attempt, None if doubt.error else longest)
                seen = await self.refresh()
            raise doubt.error or ConflictError(
                f"The repository changed each of {backoff.max_tries} times that this change was "
                "tried; nothing was changed. Try again when fewer writers are at work."
            )

    async def _back_up(self, seen: Seen, name: str) -> bool:
        """Copy the object that is about to be replaced; return whether it was still that one."""
        try:
            await self._storage.copy(REPO_INFO, backup_key(name), if_version=seen.version)
        except (ObjectNotFoundError, PreconditionFailedError, OutcomeUnknownError):
            return False  # where it is gone, the next look says that the repository was removed
        return True

    async def _write(self, info: RepoInfo, seen: Seen) -> Seen:
        payload = encode_repo_info(info)
        data = pack(payload, FileType.REPO_INFO, 2, level=self._settings.compression_level)
        # The only moment at which a change becomes visible; everything before it can be thrown
        # away.
        version = await self._storage.put(REPO_INFO, data, if_version=seen.version)
        if not info.is_light:  # what lies on top of an older file is in the new one, to be copied
            info = decode_repo_info(Envelope(2, payload))
        return Seen(info, version)


def _while_online(edit: Edit) -> Edit:
    """Return an edit that refuses while the repository's status forbids changes."""

    def checked(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        edits.check_online(info)
        return edit(info)

    return checked


def _landed(info: RepoInfo, attempts: list[str], snapshot_id: SnapshotId | None) -> bool:
    """Return whether one of our writes is part of this state.

    Each attempt takes a backup under a new name, and the log names the backups of those that
    landed.
    """
    backups = {info.before_updates, *OperationsLog.of(info.updates).backups()}
    return not backups.isdisjoint(attempts) or snapshot_id in info.snapshots
