"""Load and store the checksums of chunks, one sidecar for each manifest.

A sidecar that is missing, damaged or about something else makes sums unknown, and nothing more:
`SumFiles.load` says so in the log. Only those who look for damage, `SumFiles.read`, get an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import FormatError, ObjectNotFoundError
from icechunk_async.format.layout import sums_key
from icechunk_async.format.sums import ManifestSums
from icechunk_async.storage import ByteRange

if TYPE_CHECKING:
    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.storage import BlockingStorage, Storage

__all__ = ["SumFiles", "with_sums"]

_log = logging.getLogger(__name__)
_BYTES_PER_REF: Final = 40
"""Roughly what a decoded reference takes."""


class _Absent:
    """In place of a sidecar that is missing or cannot be used."""


_ABSENT = _Absent()


class SumFiles:
    """The sidecars of one repository, cached by weight, each loaded once at a time.

    Usable from any thread but for the coroutines, which belong to one event loop at a time.
    """

    def __init__(self, storage: Storage, chunk_refs: int) -> None:
        """Use ``storage``; keep sums that weigh as much as ``chunk_refs`` references."""
        self._storage = storage
        self._cache: WeightedCache[ManifestId, ManifestSums | bytes | _Absent] = WeightedCache(
            chunk_refs
        )
        """Sums, or the sidecar of such that were stored here and not wanted yet."""
        self._flights: SingleFlight[ManifestId, ManifestSums | None] = SingleFlight()

    async def read(self, manifest_id: ManifestId) -> ManifestSums | None:
        """Read the sums of a manifest's chunks; None if no sidecar exists.

        Raises:
            FormatError: the sidecar is damaged.

        Cost: one request; it is not cached.
        """
        try:
            retrieved = await self._storage.get(sums_key(manifest_id))
        except ObjectNotFoundError:
            return None
        return ManifestSums.decode(retrieved.data, manifest_id)

    async def load(self, manifest_id: ManifestId) -> ManifestSums | None:
        """Return the sums of a manifest's chunks; None if no usable sidecar exists.

        Cost: one request unless cached, also if no sidecar exists.
        """
        known = self._find(manifest_id)
        if known is not None:
            return known if isinstance(known, ManifestSums) else None
        return await self._flights.run(manifest_id, lambda: self._load(manifest_id))

    def _find(self, manifest_id: ManifestId) -> ManifestSums | _Absent | None:
        """Return the sums of a manifest that are in memory."""
        known = self._cache.get(manifest_id)
        # Two threads may decode it at once, and keep equal values.
        if isinstance(known, bytes):
            return self.keep(manifest_id, ManifestSums.decode(known, manifest_id))
        return known

    async def _load(self, manifest_id: ManifestId) -> ManifestSums | None:
        try:
            return self.keep(manifest_id, await self.read(manifest_id))
        except FormatError as error:
            return self._ignore(manifest_id, error)

    def load_blocking(
        self, manifest_id: ManifestId, storage: BlockingStorage
    ) -> ManifestSums | None:
        """Return the sums of a manifest's chunks on the calling thread; as `load`."""
        known = self._find(manifest_id)
        if known is not None:
            return known if isinstance(known, ManifestSums) else None
        try:
            # Threads that miss at the same time all read it, which is harmless; a lock would be
            # held over the read.
            data = storage.get_blocking(sums_key(manifest_id), ByteRange(0, None)).data
            return self.keep(manifest_id, ManifestSums.decode(data, manifest_id))
        except ObjectNotFoundError:
            return self.keep(manifest_id, None)
        except FormatError as error:
            return self._ignore(manifest_id, error)

    def keep(self, manifest_id: ManifestId, sums: ManifestSums | None) -> ManifestSums | None:
        """Remember the sums of a manifest, or that no sidecar exists, and return them."""
        # Kept like sums, because a repository that switched them on late has none for most
        # manifests, and each read that is verified asks.
        if sums is None:
            self._cache.put(manifest_id, _ABSENT, 1)
        else:
            self._cache.put(manifest_id, sums, sums.weight)
        return sums

    def _ignore(self, manifest_id: ManifestId, error: FormatError) -> ManifestSums | None:
        _log.warning("checksums are taken for unknown: %s", error)
        return self.keep(manifest_id, None)

    async def put(self, manifest_id: ManifestId, data: bytes) -> None:
        """Store an encoded sidecar, and keep it.

        Cancellation: it may be stored.
        """
        await self._storage.put(sums_key(manifest_id), data)
        self._cache.put(manifest_id, data, 1 + len(data) // _BYTES_PER_REF)


def with_sums(manifest: Manifest, sums: ManifestSums | None) -> Manifest:
    """Return a manifest whose references have sums; unchanged if they do not fit it."""
    if sums is None:
        return manifest
    try:
        return sums.attached_to(manifest)
    # Sums of another manifest, or of one that was rewritten by hand. Reads must work without them.
    except FormatError as error:
        _log.warning("checksums are taken for unknown: %s", error)
        return manifest
