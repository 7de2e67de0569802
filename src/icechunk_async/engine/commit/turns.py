"""Turns of the writers of a branch: in one process, and where the storage can, between processes.

The sessions of one process line up for each branch, so that they do not race each other: each
begins its try when the one before it has landed, and on the state that this one left. Between
processes writers queue if the storage has a queue for them (`QueuesWriters`). Elsewhere those of
one machine queue, and those of several machines race: `Courtesy` decides who lets others go first.

All of this saves time and makes waiting fair. That no commit is lost does not depend on it.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime.backoff import Courtesy
from icechunk_async._runtime.line import Line
from icechunk_async.storage.extensions import QueuesWriters

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping

    from icechunk_async._runtime.line import Place
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.storage.extensions import WriterNumber
    from icechunk_async.storage.protocol import Storage

__all__ = ["RESERVED", "Turn", "Writers"]

RESERVED: Final = "__icechunk"
"""The property of a snapshot that both engines keep for themselves."""
_REBASES: Final = "rebase_attempts"
_OVERTAKEN: Final = "overtaken_by"
# Only to tell commits of this process from others; an old one that is forgotten makes waiting a
# little less fair.
_MOST_REMEMBERED: Final = 256

_HERE_SECONDS: Final = 10.0
"""How long a writer of this process may give no sign of life before it is overtaken."""
_ELSEWHERE_SECONDS: Final = 2.0
"""The same for one of another process, which may be stopped."""
_TRIES: Final = 8
"""Both are at least this many times as long as our last tries."""
_POLL_SECONDS: Final = 0.001
_LONGEST_POLL_SECONDS: Final = 0.5


class Writers:
    """The writers of one repository in this process."""

    def __init__(self) -> None:
        """Begin without any."""
        self._branches: dict[str, _Branch] = {}

    @asynccontextmanager
    async def turn(self, branch: str, storage: Storage, backend: object) -> AsyncGenerator[Turn]:
        """Wait for a turn to publish on a branch, and have it for the length of the block.

        Args:
            branch: where to publish.
            storage: where the branch is.
            backend: the storage without its policies.

        Cancellation: the turn goes to the next writer.
        """
        state = self._branches.setdefault(branch, _Branch())
        number: WriterNumber | None = None
        queued = False

        def take_number() -> None:
            nonlocal number, queued  # in the order of the line: nobody in it waits for one behind
            if isinstance(backend, QueuesWriters):
                number = backend.take_number(branch)
                queued = number is not None
            if number is None and storage.capabilities.shared:
                from icechunk_async.storage.queueing import queue_of_machine  # noqa: PLC0415 -- to write

                number = queue_of_machine.take(f"{storage.description.url}\0{branch}")

        with state.line.join(take_number) as place:
            try:
                waited = not place.has_turn
                await place.wait(lambda: max(_HERE_SECONDS, _TRIES * state.try_seconds))
                overtaken = number is not None and await _wait_for(number, state)
                yield Turn(state, place, waited=waited, queued=queued, overtaken=overtaken)
            finally:
                if number is not None:
                    number.give_back()


class _Branch:
    """The knowledge of this process about the writers of a branch."""

    def __init__(self) -> None:
        self.line = Line()
        self.courtesy = Courtesy()
        self.try_seconds = 0.0
        """The length of a recent try."""
        self.published: deque[SnapshotId] = deque(maxlen=_MOST_REMEMBERED)
        """The last snapshots of this process."""
        self.met: deque[SnapshotId] = deque(maxlen=_MOST_REMEMBERED)
        """Snapshots of other processes that `courtesy` knows of."""


async def _wait_for(number: WriterNumber, state: _Branch) -> bool:
    """Wait until no writer with a smaller number is left; return whether there was one.

    Looking costs one system call and tells at once, so it needs no thread.
    """
    ahead = number.ahead()
    if not ahead:
        return False
    since = anyio.current_time()
    while ahead:
        # Only the one who is next looks often.
        others = (len(ahead) - 1) * state.try_seconds / 2
        await anyio.sleep(min(max(_POLL_SECONDS, others), _LONGEST_POLL_SECONDS))
        now_ahead = number.ahead()
        if now_ahead != ahead:
            ahead, since = now_ahead, anyio.current_time()
        elif anyio.current_time() - since > max(_ELSEWHERE_SECONDS, _TRIES * state.try_seconds):
            # Its process may be stopped or dead. Nothing is lost if it is not: the write itself
            # decides.
            number.overlook(ahead[0])
            since = anyio.current_time()
    return True


class Turn:
    """The turn of one writer, from its first try until it lands or gives up."""

    def __init__(
        self, state: _Branch, place: Place, *, waited: bool, queued: bool, overtaken: bool
    ) -> None:
        """Begin the turn; see `Writers.turn`."""
        self._state = state
        self._place = place
        self.queued = queued
        """Whether other processes queue as well, so that none of them publishes meanwhile."""
        self.must_look = queued or overtaken
        """Whether another process published before this turn began, or looking costs nothing."""
        self._is_due = overtaken
        self._over: set[SnapshotId] = set()
        self._overtaken = 0
        self._by_others = 0
        self._tried = False
        self._began = 0.0
        self.waited = waited
        """Whether others of this process published before this turn began."""
        self.rebases = 0

    def stands_on(self, snapshot_id: SnapshotId, properties: Mapping[str, JSON]) -> None:
        """Note the snapshot that the writer began at, which may tell of others."""
        if snapshot_id not in self._state.published:
            self._note(snapshot_id, properties)

    def _note(self, snapshot_id: SnapshotId, properties: Mapping[str, JSON]) -> None:
        """Note a snapshot of another process."""
        if snapshot_id not in self._state.met:
            self._state.met.append(snapshot_id)
            self._state.courtesy.saw(_overtaken(properties))

    def saw(self, commits: Iterable[tuple[SnapshotId, Mapping[str, JSON]]]) -> bool:
        """Note commits that overtook the writer, given by ids and properties.

        Returns:
            Whether one of them was not noted before.
        """
        before = len(self._over)
        for snapshot_id, properties in commits:
            if snapshot_id in self._over:
                continue
            self._over.add(snapshot_id)
            self._overtaken += 1
            if snapshot_id not in self._state.published:
                self._by_others += 1
                self._note(snapshot_id, properties)
        return len(self._over) > before

    def rebased(self, commits: Iterable[tuple[SnapshotId, Mapping[str, JSON]]]) -> None:
        """Note that the writer moved over commits, given by ids and properties."""
        passed = list(commits)
        self.saw(passed)
        if passed:
            self.rebases += 1

    def pause(self) -> float:
        """Return for how many seconds to let others go first; 0 to try now."""
        if self.queued:
            return 0.0
        if self._is_due and not self._tried:
            return 0.0  # it waited already, and others of this machine wait for it
        return self._state.courtesy.pause(self._overtaken, first=not self._tried)

    def nobody_came(self) -> None:
        """Note that nobody published during a pause."""
        self._state.courtesy.nobody_came()

    def begin(self) -> None:
        """Begin a try: what is done from now on is repeated if others are quicker."""
        self._place.give_sign()
        self._began = anyio.current_time()

    def landed(self, snapshot_id: SnapshotId) -> None:
        """Note that the try published a snapshot."""
        state = self._state
        state.published.append(snapshot_id)
        state.try_seconds = anyio.current_time() - self._began
        state.courtesy.landed(self._overtaken, self._by_others, state.try_seconds)

    def lost(self) -> None:
        """Note that another writer was quicker."""
        self._tried = True
        self._state.try_seconds = anyio.current_time() - self._began
        self._state.courtesy.lost(self._state.try_seconds)

    async def start_again(self) -> None:
        """Wait after a lost race, for a writer that does not rebase but makes its changes anew."""
        self.lost()
        self._overtaken += 1
        await anyio.sleep(self.pause())

    def properties(self) -> dict[str, JSON]:
        """Return the properties by which the snapshot of the next try tells of this writer."""
        found: dict[str, JSON] = {_REBASES: self.rebases}
        if self._overtaken > self.rebases:
            found[_OVERTAKEN] = self._overtaken
        return found


def _overtaken(properties: Mapping[str, JSON]) -> int:
    """Return by how many commits that of a snapshot was overtaken, as far as it tells."""
    reserved = properties.get(RESERVED)
    if not isinstance(reserved, dict):
        return 0
    count = reserved.get(_OVERTAKEN, reserved.get(_REBASES, 0))
    # Properties are written by anybody; they only make this writer more or less patient.
    return count if isinstance(count, int) and count > 0 else 0
