"""The reports of upkeep, and the upgrade of a repository's format.

The operations are methods of `Repository`.
"""

from icechunk_async.engine.upkeep.check import BrokenReference, ReferenceReport
from icechunk_async.engine.upkeep.collect import GarbageReport
from icechunk_async.engine.upkeep.compact import CompactReport
from icechunk_async.engine.upkeep.copying.copy import CopyReport, RefChange
from icechunk_async.engine.upkeep.migrate import MigrationReport, upgrade
from icechunk_async.engine.upkeep.statistics import ChunkStorageStats

__all__ = [
    "BrokenReference",
    "ChunkStorageStats",
    "CompactReport",
    "CopyReport",
    "GarbageReport",
    "MigrationReport",
    "RefChange",
    "ReferenceReport",
    "upgrade",
]
