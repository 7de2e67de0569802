"""Reading every manifest that some snapshots need, each once, in bounded memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.snapshot import Snapshot

__all__ = ["Limits", "Survey", "portions"]

_BYTES_A_REF: Final = 100
"""A rough size of each reference, to tell small work from large."""
_UNKNOWN_SIZE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is held in memory at a time."""

    snapshots: int = 50
    manifests: int = 64
    manifest_bytes: int = 512 << 20
    """Stored size of all manifests that are read at a time, unless a single one is larger."""

    def __post_init__(self) -> None:
        """Validate that every limit allows something to be read."""
        least = min(self.snapshots, self.manifests, self.manifest_bytes)
        if least < 1:
            raise InvalidInputError(
                f"The limits on what is held in memory must be at least 1; {least} was given."
            )


def portions[K](sizes: Iterable[tuple[K, int]], limits: Limits) -> Iterator[list[tuple[K, int]]]:
    """Divide manifests, or what stands for them, with their sizes into lists within limits."""
    portion: list[tuple[K, int]] = []
    total = 0
    for name, size_bytes in sizes:
        # 0: the snapshot does not say.
        size = size_bytes or _UNKNOWN_SIZE_BYTES
        if portion and (len(portion) >= limits.manifests or total + size > limits.manifest_bytes):
            yield portion
            portion, total = [], 0
        portion.append((name, size_bytes))
        total += size
    if portion:
        yield portion


class Survey[T]:
    """A pass over snapshots and their manifests, which are neither kept nor cached."""

    def __init__(
        self,
        assets: Assets,
        extract: Callable[[Manifest], T],
        absorb: Callable[[list[T]], None],
        *,
        limits: Limits,
        note: Callable[[Snapshot], None] | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Begin without snapshots.

        Args:
            assets: where the files are.
            extract: returns the part of a manifest that is wanted; called on any thread.
            absorb: takes the parts of several manifests; one call at a time, on any thread.
            limits: bounds on memory.
            note: called with each snapshot, which is not kept.
            progress: called with the number of snapshots and manifests read.
        """
        self._assets = assets
        self._extract = extract
        self._absorb = absorb
        self._limits = limits
        self._note = note
        self._progress = progress or no_progress
        self._parents: dict[SnapshotId, SnapshotId | None] = {}
        self._sizes: dict[ManifestId, int] = {}
        """Of the manifests that were named and not yet read."""
        self._named: set[ManifestId] = set()

    @property
    def manifests(self) -> set[ManifestId]:
        """Every manifest that some snapshot read so far needs."""
        return self._named

    async def parent_of(self, snapshot_id: SnapshotId) -> SnapshotId | None:
        """Read a snapshot, note its manifests, and return the parent that its file names.

        Raises:
            SnapshotNotFoundError, FormatError: it is missing, or damaged.
        """
        if snapshot_id in self._parents:
            return self._parents[snapshot_id]
        snapshot = await self._assets.read_snapshot(snapshot_id)
        for info in snapshot.manifests.values():
            # No `await` since the snapshot was read: of two snapshots that share a manifest one
            # names it.
            if info.id not in self._named:
                self._named.add(info.id)
                self._sizes[info.id] = info.size_bytes
        if self._note is not None:
            self._note(snapshot)
        self._parents[snapshot_id] = snapshot.parent_id
        self._progress(Progress("reading snapshots", len(self._parents)))
        return snapshot.parent_id

    async def discover(self, snapshots: Iterable[SnapshotId]) -> list[tuple[ManifestId, int]]:
        """Read these snapshots, and return their manifests with sizes, each only once ever.

        Raises:
            SnapshotNotFoundError, FormatError: one is missing, or damaged.
        """
        unread = [it for it in snapshots if it not in self._parents]
        await bounded_map(self.parent_of, unread, limit=self._limits.snapshots)
        sizes, self._sizes = self._sizes, {}
        return list(sizes.items())

    async def cover(self, snapshots: Iterable[SnapshotId]) -> None:
        """Read these snapshots and all of their manifests, except those read before.

        Raises:
            SnapshotNotFoundError, FormatError: one is missing, or damaged.
        """
        found = await self.discover(snapshots)
        await self.read(found, done=len(self._named) - len(found))

    async def read(self, manifests: Iterable[tuple[ManifestId, int]], *, done: int = 0) -> None:
        """Read some manifests, given with their sizes; ``done`` were read before, for progress."""
        for portion in portions(manifests, self._limits):
            parts = await bounded_map(self._read, portion, limit=self._limits.manifests)
            work = partial(self._absorb, parts)
            await self._assets.compute(work, size_bytes=sum(size for _, size in portion))
            done += len(portion)
            self._progress(Progress("reading manifests", done, len(self._named)))

    async def _read(self, entry: tuple[ManifestId, int]) -> T:
        manifest = await self._assets.manifests.read(*entry)
        return await self._assets.compute(
            lambda: self._extract(manifest), size_bytes=_BYTES_A_REF * len(manifest)
        )
