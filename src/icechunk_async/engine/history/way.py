"""A way of publishing as a value: how to recognise, create and open repositories that use it.

A new way is a folder beside ``repo_info`` and ``ref_files`` that defines one of these, and a line
in `opening.WAYS`.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, cast

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.settings import OwnSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.engine.history.protocol import History
    from icechunk_async.engine.virtual.elsewhere import Elsewhere
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage

__all__ = ["Creating", "Found", "HistorySettings", "Known", "Way", "as_it_is"]


def as_it_is(storage: Storage) -> Storage:
    """Return a storage unchanged."""
    return storage


class Known:
    """The knowledge of the open repositories of a process at one place about its references.

    Each way of publishing keeps its own part here, one for each layout that it serves: a place may
    get another layout while repositories are open. It is a guess to begin with: a change lands only
    if what it replaces is still there.
    """

    def __init__(self) -> None:
        """Begin without knowing anything."""
        self._parts: dict[tuple[type[object], str], object] = {}

    def part[T](self, kind: type[T], layout: str = "") -> T:
        """Return the part of a way, made by ``kind()`` when it is first asked for.

        Args:
            kind: the type of the part.
            layout: the layout that it is about, if the way serves several.
        """
        # In one step, because threads may open repositories of one place at once: the first part
        # that was made is everybody's.
        return cast("T", self._parts.setdefault((kind, layout), kind()))


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """Settings of publishing, from the configuration in force."""

    backoff: Backoff
    """How long to wait after lost races."""
    max_updates: int
    """Entries of the operations log that are kept in the repo info."""
    compression_level: int
    known: Known = field(default_factory=Known)
    """Shared by the repositories of this process at one place."""


@dataclass(frozen=True, slots=True)
class Found:
    """A repository that was found or created, not yet opened."""

    name: str
    """The name of the way, see `Way`."""
    layout: Layout
    """Names and encodes the immutable files."""
    config: RepositoryConfig | None
    """The stored configuration."""
    open: Callable[[Storage, Assets, HistorySettings], History]
    """Opens the history at the state that was just read or written, without a request."""
    settings: OwnSettings = field(default_factory=OwnSettings)
    """Those that the repository stores."""
    elsewhere: Elsewhere | None = None
    """The other place of its files, if they are not where it is."""
    view: Callable[[Storage], Storage] = as_it_is
    """See `Way.view`."""

    @property
    def spec_version(self) -> int:
        """The version of the format; 0 for layouts before version 1."""
        return self.layout.spec_version


@dataclass(frozen=True, slots=True)
class Creating:
    """A repository to create."""

    storage: Storage
    assets: Assets
    snapshot: Snapshot
    """The first snapshot; not stored yet."""
    config: RepositoryConfig | None
    settings: OwnSettings
    """Stored if the way has a place for it."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of publishing snapshots."""

    name: str
    """The name of the whole layout, as `Repository.create` takes it."""
    spec_version: int
    """The version of the format; 0 for layouts before version 1."""
    new_layout: Callable[[], Layout]
    """Returns the layout of the files of a new repository."""
    storage_needs: Sequence[str]
    """See `History.storage_needs`."""
    marker: str
    """The key of the object that every such repository has, or how it begins."""
    detect: Callable[[Storage], Awaitable[Callable[[], Found] | None]]
    """Reads what decides whether a storage holds such a repository. Decoding is left to the result,
    because objects that another way left behind may not decode."""
    create: Callable[[Creating], Awaitable[Found]]
    """Creates a repository.

    Raises ``RepositoryExistsError`` if another writer was first.
    """
    folders: tuple[str, ...] = ()
    """Beginnings of all keys of a layout before version 1, in the order in which to delete them."""
    view: Callable[[Storage], Storage] = as_it_is
    """Returns the storage through which an open repository, and all upkeep of it, sees its objects.
    Detection is given the storage itself."""
