"""Check that every object exists that branches and tags lead to, virtual sources included.

This is a verification at the level *length*, told in fewer words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.upkeep.integrity.report import Level
from icechunk_async.engine.upkeep.integrity.verify import VerifyOptions, verify
from icechunk_async.engine.upkeep.leftovers import NOTHING_LEFT, Leftovers, find_leftovers

if TYPE_CHECKING:
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Engine
    from icechunk_async.engine.upkeep.integrity.report import VerifyReport

__all__ = ["CHECK", "BrokenReference", "ReferenceReport", "check_references"]

CHECK: Final = VerifyOptions(Level.LENGTH)
"""The level of a check, of all refs and chunks."""


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """An object that is not as it must be, or with references that it cannot serve."""

    kind: str
    location: str
    """Its key in the repository, or its URL if it is virtual."""
    problem: str
    """See `icechunk_async.upkeep.Finding`."""
    detail: str
    references: int
    """The number of references to it, in all manifests; 0 for an object without chunks."""


@dataclass(frozen=True, slots=True)
class ReferenceReport:
    """The number of objects that were looked up, and those that are not usable."""

    snapshots: int
    transaction_logs: int
    manifests: int
    chunk_objects: int
    """Of the repository."""
    virtual_objects: int
    """Outside of the repository. An object with references to several states counts for each."""
    virtual_not_authorized: int
    """Virtual objects in containers that were not authorised."""
    broken: tuple[BrokenReference, ...] = ()
    """References first, then snapshots, what they refer to, and so on."""
    not_looked_at: tuple[str, ...] = ()
    """Sentences about parts that were in question and not looked at."""
    leftovers: Leftovers = NOTHING_LEFT
    """The remains of killed processes, which are no damage."""

    @property
    def is_whole(self) -> bool:
        """Return whether every object that could be looked up is usable."""
        return not self.broken

    @classmethod
    def of(cls, report: VerifyReport, leftovers: Leftovers) -> Self:
        """Return a verification in these words, with what killed processes left."""
        return cls(
            report.snapshots,
            report.transaction_logs,
            report.manifests,
            report.chunk_objects,
            report.virtual_objects,
            report.virtual_not_authorized,
            tuple(
                BrokenReference(it.kind, it.location, it.problem, it.detail, it.references)
                for it in report.findings
            ),
            tuple(it.what for it in report.not_looked_at),
            leftovers,
        )


async def check_references(
    engine: Engine, progress: ProgressCallback | None = None
) -> ReferenceReport:
    """Check all objects; see `Repository.check_references`."""
    report = await verify(engine, CHECK, progress=progress)
    return ReferenceReport.of(report, await find_leftovers(engine))
