"""Solvers for commits that lost a race, and what they are given and answer."""

from icechunk_async.repository.conflicts import (
    BasicConflictSolver,
    Clash,
    Conflict,
    ConflictDetector,
    ConflictKind,
    ConflictSolver,
    Resolution,
    VersionSelection,
)

__all__ = [
    "BasicConflictSolver",
    "Clash",
    "Conflict",
    "ConflictDetector",
    "ConflictKind",
    "ConflictSolver",
    "Resolution",
    "VersionSelection",
]
