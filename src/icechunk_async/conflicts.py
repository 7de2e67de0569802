"""Clashes of racing commits and merged forks, and solvers for commits that lost a race."""

from icechunk_async.engine.changes.merge import MergeClash, MergeClashKind
from icechunk_async.engine.commit.conflicts import (
    Answer,
    BasicConflictSolver,
    ChunkAnswers,
    Clash,
    Conflict,
    ConflictDetector,
    ConflictKind,
    ConflictSolver,
    Resolution,
    Side,
    VersionSelection,
)
from icechunk_async.engine.commit.solvers import AttributesSolver, Newest, PerPath
from icechunk_async.zarr.append import AppendSolver

__all__ = [
    "Answer",
    "AppendSolver",
    "AttributesSolver",
    "BasicConflictSolver",
    "ChunkAnswers",
    "Clash",
    "Conflict",
    "ConflictDetector",
    "ConflictKind",
    "ConflictSolver",
    "MergeClash",
    "MergeClashKind",
    "Newest",
    "PerPath",
    "Resolution",
    "Side",
    "VersionSelection",
]
