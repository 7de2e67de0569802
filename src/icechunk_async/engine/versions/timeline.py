"""The versions of arrays along a history: which commits count, and what each has of an array."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.versions.naming import find_ref
from icechunk_async.errors import FormatError, InvalidInputError, NodeNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from icechunk_async.engine.open import Engine
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Extents
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import ManifestFileInfo, Node, Snapshot

    type Moments = npt.NDArray[np.int64]

__all__ = ["Along", "ArrayVersion", "Choice", "Timeline", "Track", "choose", "trace"]

type Along = Literal["commits", "days"]

_CONCURRENT_SNAPSHOTS: Final = 16
_MAX_VERSIONS: Final = 100_000
_DAY_US: Final = 86_400_000_000
_MAX_US: Final = (1 << 63) // 1000 - _DAY_US
"""The latest time that tables of times in nanoseconds can hold."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The versions that are wanted; see `Repository.cube`."""

    along: Along = "commits"
    since: SnapshotId | str | datetime | None = None
    until: datetime | None = None
    every: int = 1
    limit: int | None = None

    def check(self) -> None:
        """Raise InvalidInputError for values that choose nothing."""
        if self.along not in {"commits", "days"}:
            raise InvalidInputError(
                f"A cube goes along='commits' or along='days', not {self.along!r}."
            )
        for name, value in (("every", self.every), ("limit", self.limit)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise InvalidInputError(f"{name} must be at least 1; it is {value!r}.")


@dataclass(frozen=True, slots=True)
class ArrayVersion:
    """An array as one or more versions have it: all that its values follow from."""

    path: str
    node_id: NodeId
    document: bytes
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    """Chunks along each axis."""
    manifests: tuple[tuple[ManifestFileInfo, Extents], ...]
    """Its manifests, and the box of the grid that each has chunks in."""


@dataclass(frozen=True, slots=True)
class Track:
    """One array along the versions of a timeline."""

    states: tuple[ArrayVersion, ...]
    """Each different one once, in the order in which they came."""
    rows: npt.NDArray[np.int32]
    """For each version the index of its state, ``(n,)``; -1 where there is no such array."""

    @property
    def newest(self) -> ArrayVersion:
        """The state of the newest version that has the array."""
        return self.states[int(self.rows[self.rows >= 0][-1])]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The versions of an array and of its coordinates, oldest first."""

    snapshots: tuple[SnapshotId, ...]
    known_us: Moments
    """When each was known, microseconds since the epoch, strictly ascending, ``(n,)``."""
    committed_us: Moments
    """When each was committed, by its writer's clock, ``(n,)``."""
    array: Track
    coordinates: dict[str, Track]
    """Arrays beside it that are named as one of its dimensions, or that it lists, by name."""


async def trace(engine: Engine, path: str, ref: SnapshotId | str, choice: Choice) -> Timeline:
    """Find the versions of an array and what each has of it.

    From the newest version back, the array is the node with the same id, wherever it was then; if a
    version has no such node, the array at the path where it was last. So moves are followed, and
    so are arrays that were replaced by others at the same path.

    Args:
        engine: of the repository.
        path: its path in the newest version that has it.
        ref: the newest version.
        choice: which of the versions before that count.

    Raises:
        NotFoundError: nothing is called ``ref``, or ``since``.
        NodeNotFoundError: none of the versions has the array.
        InvalidInputError: the choice is wrong, or leaves nothing, or too much.
        FormatError: a snapshot is damaged.

    Cost: the ancestry, and one request for each different snapshot that is not cached.
    """
    choice.check()
    infos = await _ancestry(engine, await find_ref(engine, ref), choice)
    chosen, known = choose(infos, choice)
    followed = _Followed(path)
    different = list(dict.fromkeys(info.id for info in reversed(chosen)))
    for start in range(0, len(different), _CONCURRENT_SNAPSHOTS):
        some = different[start : start + _CONCURRENT_SNAPSHOTS]
        snapshots = await bounded_map(engine.assets.snapshot, some, limit=_CONCURRENT_SNAPSHOTS)
        for snapshot in snapshots:
            followed.see(snapshot)
    return followed.timeline(chosen, known, str(ref))


async def _ancestry(engine: Engine, tip: SnapshotId, choice: Choice) -> list[SnapshotInfo]:
    """Return the commits that may count, oldest first."""
    since = choice.since
    begin = None if since is None or isinstance(since, datetime) else await find_ref(engine, since)
    earliest = clock.to_us(since) if isinstance(since, datetime) else None
    latest = None if choice.until is None else clock.to_us(choice.until)
    most = None
    if choice.along == "commits" and choice.limit is not None:
        # Of every third commit, four: 10 are enough. A long history is not walked to its end.
        most = (choice.limit - 1) * choice.every + 1
    found: list[SnapshotInfo] = []
    async for info in engine.history.ancestry(tip):
        _check_time(info)
        if earliest is not None and info.flushed_at < earliest:
            break
        if latest is None or info.flushed_at <= latest:
            found.append(info)
        if info.id == begin or len(found) == most:
            break
    else:
        if begin is not None:
            raise InvalidInputError(
                f"Snapshot {begin}, where the cube is to begin (since=), is not among the "
                f"snapshots before {tip}, or expired. 'ancestry' lists those that are."
            )
    if not found:
        raise InvalidInputError(
            f"No commit before {tip} was made between since={since} and until={choice.until}."
        )
    return found[::-1]


def _check_time(info: SnapshotInfo) -> None:
    if not 0 <= info.flushed_at <= _MAX_US:
        raise FormatError(
            f"Snapshot {info.id} says that it was made {info.flushed_at} microseconds after 1970, "
            f"and times from 0 to {_MAX_US} are supported."
        )


def choose(infos: Sequence[SnapshotInfo], choice: Choice) -> tuple[list[SnapshotInfo], Moments]:
    """Return the versions, oldest first, and when each was known; pure.

    A commit was not known before its parent, whatever its writer's clock said: such a one counts as
    made one microsecond after its parent.
    """
    times = np.array([info.flushed_at for info in infos], np.int64)
    steps = np.arange(len(times))
    # Times 50, 20, 52, 90 become 50, 51, 52, 90: strictly ascending, and each as early as can be.
    known = np.maximum.accumulate(times - steps) + steps
    if choice.along == "commits":
        rows, moments = steps, known
    else:
        days = known // _DAY_US
        count = int(days[-1] - days[0]) + 1
        _check_count(-(-count // choice.every), choice)
        # Days 3, 3, 5 give the rows 1, 1, 2 for the days 3, 4, 5: the last commit up to the end of
        # each.
        every_day: Moments = days[-1] - np.arange(count)[::-1]
        rows = np.searchsorted(days, every_day, side="right") - 1
        moments = (every_day + 1) * _DAY_US - 1
    # Counted from the newest, which is always among them.
    rows = rows[::-1][:: choice.every][: choice.limit][::-1]
    moments = moments[::-1][:: choice.every][: choice.limit][::-1]
    _check_count(len(rows), choice)
    return [infos[row] for row in rows.tolist()], moments


def _check_count(count: int, choice: Choice) -> None:
    wanted = count if choice.limit is None else min(count, choice.limit)
    if wanted > _MAX_VERSIONS:
        raise InvalidInputError(
            f"The cube would have {wanted:,} versions, and at most {_MAX_VERSIONS:,} are possible. "
            "Choose some with since=, until=, every= or limit=."
        )


class _Followed:
    """An array and its coordinates, followed from the newest version back."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._array = _Trail(path)
        self._coordinates: dict[str, _Trail] | None = None
        self._seen: list[SnapshotId] = []
        self._groups: set[str] = set()
        """Arrays below the path, where that is a group."""

    def see(self, snapshot: Snapshot) -> None:
        """Note what the next older version has."""
        self._seen.append(snapshot.id)
        node = self._array.see(snapshot)
        # The newest version that has the array says what its coordinates are.
        if node is not None and self._coordinates is None:
            gone = len(self._seen) - 1
            found = _coordinates(node, snapshot)
            self._coordinates = {name: _Trail(path, gone) for name, path in found}
        elif node is None and not self._groups and self._path in snapshot.nodes:
            nodes = snapshot.nodes
            self._groups = {it for it in nodes.below(self._path) if nodes[it].array is not None}
        for trail in (self._coordinates or {}).values():
            trail.see(snapshot)

    def timeline(self, chosen: list[SnapshotInfo], known: Moments, ref: str) -> Timeline:
        """Return all of it, from the first version that has the array."""
        if self._coordinates is None:
            raise self._missing(len(chosen), ref)
        places = {it: row for row, it in enumerate(self._seen)}
        order = np.array([places[info.id] for info in chosen])
        array = self._array.track(order)
        first = int(np.flatnonzero(array.rows >= 0)[0])  # nothing was known of it before
        tracks = {name: it.track(order[first:]) for name, it in self._coordinates.items()}
        return Timeline(
            tuple(info.id for info in chosen[first:]),
            known[first:],
            np.array([info.flushed_at for info in chosen[first:]], np.int64),
            Track(array.states, array.rows[first:]),
            tracks,
        )

    def _missing(self, count: int, ref: str) -> NodeNotFoundError:
        if self._groups:
            some = ", ".join(sorted(self._groups)[:10])
            reason = f"It is a group; name one of its arrays: {some}."
        else:
            reason = f"None of the {count} versions of {ref!r} that were asked for has an array."
        return NodeNotFoundError(
            f"{self._path!r} has no values along history. {reason}", path=self._path
        )


class _Trail:
    """The states of one array, from the newest version back."""

    def __init__(self, path: str, missing: int = 0) -> None:
        self._path = path
        self._node_id: NodeId | None = None
        self._known: dict[ArrayVersion, int] = {}
        self._rows = [-1] * missing
        # Versions share most of what they have, and so do the objects that say so.
        self._documents: dict[bytes, bytes] = {}
        self._files: dict[tuple[ManifestFileInfo, Extents], tuple[ManifestFileInfo, Extents]] = {}

    def see(self, snapshot: Snapshot) -> Node | None:
        """Note what the next older version has; return the node."""
        nodes = snapshot.nodes
        there = None if self._node_id is None else nodes.path_of(self._node_id)
        # By id first, so that the array is followed through moves of it and of the groups above.
        node = nodes.get(self._path if there is None else there)
        if node is None or node.array is None:
            self._rows.append(-1)
            return None
        self._node_id, self._path = node.id, node.path
        state = self._state(node, snapshot)
        self._rows.append(self._known.setdefault(state, len(self._known)))
        return node

    def _state(self, node: Node, snapshot: Snapshot) -> ArrayVersion:
        assert node.array is not None
        manifests: list[tuple[ManifestFileInfo, Extents]] = []
        for ref in sorted(node.array.manifests, key=lambda it: it.extents):
            info = snapshot.manifests.get(ref.manifest_id)
            if info is None:
                raise FormatError(
                    f"Array {node.path!r} uses manifest {ref.manifest_id}, which snapshot "
                    f"{snapshot.id} does not list. The repository is damaged."
                )
            manifests.append(self._files.setdefault((info, ref.extents), (info, ref.extents)))
        return ArrayVersion(
            node.path,
            node.id,
            self._documents.setdefault(node.user_data, node.user_data),
            tuple(it.array_length for it in node.array.dimensions),
            node.array.grid,
            tuple(manifests),
        )

    def track(self, order: npt.NDArray[np.intp]) -> Track:
        """Return the states of versions; ``order`` says when each was seen."""
        rows = np.array(self._rows, np.int32)[order]
        states = list(self._known)
        used: list[int] = list(dict.fromkeys(rows[rows >= 0].tolist()))
        # One more at the end: it stays -1, and is what the row -1, no array, finds there.
        places = np.full(len(states) + 1, -1, np.int32)
        places[used] = np.arange(len(used))
        return Track(tuple(states[row] for row in used), places[rows])


def _coordinates(node: Node, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Find arrays beside an array that xarray takes for its coordinates: names and paths."""
    assert node.array is not None
    dimensions = node.array.dimension_names or ()
    group, _, own = node.path.rpartition("/")
    try:
        document: Any = json.loads(node.user_data)
        listed: Any = document.get("attributes", {}).get("coordinates", "")
    except (ValueError, AttributeError, RecursionError):  # opening the array says what is wrong
        return
    names = [*dimensions, *(listed.split() if isinstance(listed, str) else ())]
    for name in dict.fromkeys(names):
        if name is None or name == own:
            continue
        beside = snapshot.nodes.get(f"{group}/{name}")
        if beside is None or beside.array is None:
            continue
        theirs = beside.array.dimension_names or ()
        # As xarray decides: a variable of other dimensions is no coordinate of this one.
        fits = len(theirs) == len(beside.array.dimensions) and set(theirs) <= set(dimensions)
        if fits and (name not in dimensions or theirs == (name,)):
            yield name, beside.path
