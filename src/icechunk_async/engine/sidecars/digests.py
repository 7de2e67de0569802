"""Load, make and store the lists of digests of snapshots."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.digests import DigestList, Listed
from icechunk_async.format.layout import digests_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from icechunk_async.engine.sidecars.sums import SumFiles
    from icechunk_async.format.ids import ManifestId, SnapshotId
    from icechunk_async.format.sums import ManifestSums
    from icechunk_async.storage import Storage

__all__ = ["DigestFiles", "digests_of", "listed"]

_log = logging.getLogger(__name__)
_KEPT_MANIFESTS: Final = 100_000
_CONCURRENT_SIDECARS: Final = 16
_MAX_SIDECARS: Final = 256
"""Sidecars that one commit reads to find digests that the list of its base lacks."""


class DigestFiles:
    """The lists of one repository; the newest are kept in memory."""

    def __init__(self, storage: Storage) -> None:
        """Use ``storage``."""
        self._storage = storage
        self._cache: WeightedCache[SnapshotId, DigestList] = WeightedCache(_KEPT_MANIFESTS)

    async def read(self, snapshot_id: SnapshotId) -> DigestList | None:
        """Read the list of a snapshot; None if no list exists.

        Raises:
            FormatError: it is damaged.
        """
        try:
            retrieved = await self._storage.get(digests_key(snapshot_id))
        except ObjectNotFoundError:
            return None
        return DigestList.decode(retrieved.data)

    async def load(self, snapshot_id: SnapshotId) -> DigestList | None:
        """Return the list of a snapshot; None if no usable list exists.

        Cost: one request unless it was stored or loaded by this repository object.
        """
        found = self._cache.get(snapshot_id)
        if found is not None:
            return found
        try:
            found = await self.read(snapshot_id)
        except FormatError as error:
            _log.warning("a list of digests is ignored: %s", error)
        # That none exists is not kept: `add_sums` can store one at any time, also in another
        # process.
        if found is not None:
            self._keep(snapshot_id, found)
        return found

    async def put(self, snapshot_id: SnapshotId, digests: DigestList) -> None:
        """Store the list of a snapshot.

        Cancellation: it may be stored.
        """
        await self._storage.put(digests_key(snapshot_id), digests.data)
        self._keep(snapshot_id, digests)

    def _keep(self, snapshot_id: SnapshotId, digests: DigestList) -> None:
        self._cache.put(snapshot_id, digests, 1 + len(digests.manifests) + len(digests.nodes))


def listed(sums: ManifestSums, data: bytes | None = None) -> Listed:
    """Return the entry of a manifest with these sums; ``data`` is their encoded form."""
    # An incomplete sidecar may be completed later, in place: a list that vouched for its bytes
    # would then call it damaged.
    if not sums.head.is_complete:
        return Listed(sums.head.manifest_digest, None)
    encoded = sums.encode() if data is None else data
    return Listed(sums.head.manifest_digest, hashlib.sha256(encoded).digest())


def _is_open(manifest_id: ManifestId, known: Mapping[ManifestId, Listed | None]) -> bool:
    """Return whether a sidecar may say more of a manifest than the list of the base does.

    What that list calls unknown was looked for when it was made, and stays unknown until
    `add_sums` makes another list.
    """
    entry = known.get(manifest_id)
    return manifest_id not in known if entry is None else entry.sums is None


async def digests_of(
    manifests: Iterable[ManifestId],
    new: Mapping[ManifestId, Listed],
    base_list: DigestList | None,
    sums: SumFiles,
) -> dict[ManifestId, Listed | None]:
    """Return the digests of what a snapshot uses that is about to be stored; None: unknown.

    Args:
        manifests: those that it uses.
        new: the digests of the manifests that were made for it.
        base_list: the list of the snapshot before it, where the other manifests come from.
        sums: sidecars of manifests.

    Cost: no request if the base's list is complete. Else a request for each manifest that it
    lacks digests of, if those are few.
    """
    known: Mapping[ManifestId, Listed | None] = {} if base_list is None else base_list.manifests
    found: dict[ManifestId, Listed | None] = {
        it: new[it] if it in new else known.get(it) for it in manifests
    }
    open_ones = [it for it in found if it not in new and _is_open(it, known)]

    async def look(manifest_id: ManifestId) -> None:
        sidecar = await sums.load(manifest_id)
        if sidecar is not None:
            found[manifest_id] = listed(sidecar)

    # More of them are left unknown. A commit must not read thousands of sidecars because sums were
    # switched on late; `add_sums` does that once.
    if len(open_ones) <= _MAX_SIDECARS:
        await bounded_map(look, open_ones, limit=_CONCURRENT_SIDECARS)
    return found
