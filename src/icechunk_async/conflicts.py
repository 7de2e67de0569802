"""What clashes when commits race or forks are merged, and solvers for commits that lost."""

from icechunk_async.repository.conflicts import (
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
from icechunk_async.repository.merge import MergeClash, MergeClashKind

__all__ = [
    "Answer",
    "BasicConflictSolver",
    "ChunkAnswers",
    "Clash",
    "Conflict",
    "ConflictDetector",
    "ConflictKind",
    "ConflictSolver",
    "MergeClash",
    "MergeClashKind",
    "Resolution",
    "Side",
    "VersionSelection",
]
