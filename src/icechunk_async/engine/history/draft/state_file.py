"""The state file of an open repository: read it, and replace it by an edited one.

Every change edits the state as a value and writes it on condition that no other writer was first;
if one was, the change is decided anew on what that one wrote.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.line import Line
from icechunk_async.engine.history.outcomes import Doubt, read_if_there
from icechunk_async.engine.history.refusals import migrated_meanwhile
from icechunk_async.errors import (
    ConflictError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryNotFoundError,
)
from icechunk_async.format.draft.names import STATE
from icechunk_async.format.draft.state import State, decode_state, encode_state
from icechunk_async.format.layout import REPO_INFO

if TYPE_CHECKING:
    from icechunk_async._runtime.line import Place
    from icechunk_async.engine.history.way import HistorySettings
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["Seen", "StateFile", "read_state"]

type Edit = Callable[[State], State]
type Store = Callable[[], Awaitable[None]]

_PATIENCE_SECONDS: Final = 10.0
"""How long a change of this process may give no sign of life before others overtake it."""
_LONGEST_PAUSE_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """A state and the version of the object that it was read from."""

    state: State
    version: Version


def read_state(retrieved: Retrieved) -> Seen:
    """Decode what was read under the key of the state file.

    Raises:
        FormatError: it is damaged.
    """
    return Seen(decode_state(retrieved.data), retrieved.version)


class _Newest:
    """Shared by the repositories of this process at one place: see `Known`."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.line = Line()
        """Of the changes of this process, which would only race each other."""


class StateFile:
    """The state of an open repository.

    The newest state seen is kept: a change tries on top of it without reading first. Changes of one
    process follow one another, each on the state that the one before it wrote.
    """

    def __init__(self, storage: Storage, seen: Seen, settings: HistorySettings) -> None:
        """Begin with a state just read or written."""
        self._storage = storage
        self._backoff = settings.backoff
        self._newest = settings.known.part(_Newest)
        self._remember(seen)

    @property
    def seen(self) -> Seen:
        """The newest state seen so far."""
        seen = self._newest.seen
        assert seen is not None  # since the beginning
        return seen

    async def refresh(self) -> Seen:
        """Return the state as of now.

        Raises:
            ConflictError: the repository was migrated since it was opened.
            RepositoryNotFoundError: it was removed.

        Cost: one conditional request.
        """
        seen = self.seen
        try:
            retrieved = await self._storage.get_if_changed(STATE, seen.version)
        except ObjectNotFoundError as error:
            if await read_if_there(self._storage, REPO_INFO) is not None:
                raise migrated_meanwhile() from error
            raise RepositoryNotFoundError(
                f"The repository at {self._storage.description.url!r} was removed: its "
                f"{STATE!r} object is gone."
            ) from error
        return seen if retrieved is None else self._remember(read_state(retrieved))

    def _remember(self, seen: Seen) -> Seen:
        """Keep the newer of two states; there is no await between comparing and keeping.

        One of another repository takes the place of that of one that was removed.
        """
        newest = self._newest.seen
        if (
            newest is None
            or seen.state.id != newest.state.id
            or seen.state.generation >= newest.state.generation
        ):
            self._newest.seen = seen
        return seen

    async def update(
        self, edit: Edit, *, store: Store | None = None, from_seen: bool = False
    ) -> None:
        """Apply an edit to the newest state and write it; again if another writer was first.

        Args:
            edit: refuses by raising, or returns the next state.
            store: stores files that the edit refers to; awaited once, before the first try.
            from_seen: try first on the newest state seen, without reading.

        Raises:
            OutcomeUnknownError: the storage did not reply, and reading back did not settle it.
            ConflictError: others were quicker each time.

        Cancellation: the state may have been written.

        Cost: one request if no other writer interferes, and one before it without ``from_seen``.
        """
        with self._newest.line.join() as place:
            if store is not None and not place.has_turn:
                await store()  # while others have their turn
                store = None
            await place.wait(lambda: _PATIENCE_SECONDS)
            seen = self.seen if from_seen else await self.refresh()
            await self._update(place, seen, edit, store)

    async def _update(self, place: Place, seen: Seen, edit: Edit, store: Store | None) -> None:
        attempts: set[str] = set()
        with Doubt() as doubt:
            for attempt in range(1, self._backoff.max_tries + 1):
                place.give_sign()
                began = anyio.current_time()
                state = edit(seen.state).stamped(seen.state.generation)
                if store is not None:
                    await store()
                    store = None
                # A new mark for each try. The state keeps those of its last writes, so that ours is
                # found below a newer one.
                attempts.add(state.marks[-1])
                try:
                    data = encode_state(state)
                    version = await self._storage.put(STATE, data, if_version=seen.version)
                except PreconditionFailedError:
                    pass  # another writer was first
                except OutcomeUnknownError as error:
                    doubt.begin(error, seen.version)
                else:
                    self._remember(Seen(state, version))
                    return
                # Also after a plain refusal: an earlier write of ours may have arrived late.
                seen = await self.refresh()
                if not attempts.isdisjoint(seen.state.marks):
                    return
                doubt.settle(seen.version)
                edit(seen.state)  # refuses where no further try is worth a pause
                longest = _LONGEST_PAUSE_TRIES * (anyio.current_time() - began)
                await self._backoff.wait(attempt, None if doubt.error else longest)
                seen = await self.refresh()
                # Looked for again, since a write that was slow may have landed during the pause.
                if not attempts.isdisjoint(seen.state.marks):
                    return
            raise doubt.error or ConflictError(
                f"The repository changed each of {self._backoff.max_tries} times that this change "
                "was tried; nothing was changed. Try again when fewer writers are at work."
            )
