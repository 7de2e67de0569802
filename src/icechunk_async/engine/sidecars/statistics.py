"""Load and store statistics of chunks, some objects for each array.

An object that is missing, damaged or about something else makes statistics unknown, and nothing
more: `StatisticsFiles.load` says so in the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
)
from icechunk_async.format.ids import StatisticsId
from icechunk_async.format.layout import STATISTICS, statistics_key, statistics_prefix
from icechunk_async.format.statistics import ChunkStatistics, carried, joined
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.statistics import Rows, ValueKind
    from icechunk_async.storage import Storage

__all__ = ["StatisticsFiles", "id_of"]

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 8
_NOTHING: Final = ChunkStatistics(b"", "f", joined([], "f"))


class StatisticsFiles:
    """The statistics of one repository, cached by weight."""

    def __init__(self, storage: Storage, chunk_refs: int) -> None:
        """Use ``storage``; keep ``chunk_refs`` rows in memory."""
        self._storage = storage
        self._cache: WeightedCache[StatisticsId, ChunkStatistics] = WeightedCache(chunk_refs)

    async def find(self, node_id: NodeId) -> list[StatisticsId]:
        """Return the ids of the objects with statistics of an array's chunks. Cost: a listing."""
        found: list[StatisticsId] = []
        entries = self._storage.list_prefix(statistics_prefix(node_id))
        async with closing(entries):
            async for entry in entries:
                if isinstance(entry, ObjectInfo):
                    parsed = id_of(entry.key)
                    # Anybody may have put other names below the prefix: they are skipped, and not
                    # read.
                    if parsed is not None and parsed.node_id == node_id:
                        found.append(parsed)
        return sorted(found)

    async def load(self, ids: Iterable[StatisticsId], meaning: bytes, kind: ValueKind) -> Rows:
        """Return the rows of some objects that hold for a meaning of bytes, in order of their keys.

        Cost: one request for each object that is not cached.
        """
        found = await bounded_map(self._load, list(ids), limit=_AT_ONCE)
        fitting = (it for it in found if it is not None and it.meaning == meaning)
        return joined((it.rows for it in fitting if it.kind == kind), kind)

    async def _load(self, statistics_id: StatisticsId) -> ChunkStatistics | None:
        """Return the statistics in an object; none if it is damaged, None if it is gone."""
        cached = self._cache.get(statistics_id)
        if cached is not None:
            return cached
        try:
            data = (await self._storage.get(statistics_key(statistics_id))).data
            statistics = ChunkStatistics.decode(data, statistics_id)
        except ObjectNotFoundError:  # deleted meanwhile
            return None
        except FormatError as error:
            # Kept in the cache as empty: names are random, so nobody will replace the object by a
            # good one.
            _log.warning("statistics are taken for unknown: %s", error)
            statistics = _NOTHING
        self._cache.put(statistics_id, statistics, 1 + len(statistics.rows))
        return statistics

    async def put(self, node_id: NodeId, statistics: ChunkStatistics) -> StatisticsId:
        """Store statistics of an array's chunks under a fresh id, and return that.

        Cancellation: they may be stored.
        """
        statistics_id = StatisticsId.of_array(node_id)
        await self._storage.put(statistics_key(statistics_id), statistics.encode(statistics_id))
        self._cache.put(statistics_id, statistics, 1 + len(statistics.rows))
        return statistics_id

    async def carry(self, node_id: NodeId, before: ChunkRefs, after: ChunkRefs) -> int:
        """Give copies of an array's chunks the statistics that the chunks have.

        Args:
            node_id: the array.
            before: references to the chunks, whose bytes were copied.
            after: references to the copies, in the same order.

        Returns:
            The number of rows that were stored. Storage that fails is logged, and 0 returned:
            statistics are never needed.

        Cost: a listing, one request for each object of the array's statistics that is not cached,
        and one for each meaning of bytes that some of the chunks have statistics for.
        """
        try:
            return await self._carry(node_id, before, after)
        except StorageError as error:
            _log.warning("statistics of %d copied chunk(s) stay unknown: %s", len(before), error)
            return 0

    async def _carry(self, node_id: NodeId, before: ChunkRefs, after: ChunkRefs) -> int:
        found = await bounded_map(self._load, await self.find(node_id), limit=_AT_ONCE)
        parts: dict[tuple[bytes, ValueKind], list[Rows]] = {}
        for it in found:
            if it is not None and len(rows := carried(it.rows, before, after)):
                parts.setdefault((it.meaning, it.kind), []).append(rows)
        stored = 0
        for (meaning, kind), some in parts.items():
            rows = joined(some, kind)
            await self.put(node_id, ChunkStatistics(meaning, kind, rows))
            stored += len(rows)
        return stored


def id_of(key: str) -> StatisticsId | None:
    """Return the id of an object with statistics by its key; None if the name is not ours."""
    name = key.removeprefix(STATISTICS)
    try:
        parsed = StatisticsId.parse(name)
    except InvalidInputError:
        return None
    return parsed if str(parsed) == name else None
