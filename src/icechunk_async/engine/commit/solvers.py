"""Stock conflict solvers beyond the official ones: by time, by path, and for attributes."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.changes.detect import ConflictKind
from icechunk_async.engine.commit.conflicts import ConflictDetector, Resolution
from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.engine.changes.detect import Conflict
    from icechunk_async.engine.commit.conflicts import Answer, Clash, ConflictSolver

__all__ = ["AttributesSolver", "Newest", "PerPath"]

_ABSENT: Final = object()


async def _ask(
    solver: ConflictSolver, clash: Clash, conflicts: Sequence[Conflict]
) -> Sequence[Answer]:
    """Let a solver decide some of the conflicts of a clash."""
    solved = solver.solve(replace(clash, conflicts=tuple(conflicts)))
    answers = await solved if inspect.isawaitable(solved) else solved
    if len(answers) != len(conflicts):
        raise InvalidInputError(
            f"A conflict solver returned {len(answers)} resolutions for {len(conflicts)} "
            "conflicts; it must return one for each."
        )
    return answers


class Newest:
    """Keep what was committed last, for each chunk and document; deletions count, too.

    Changes that are not committed yet are the newest of all. Times are those that the writers'
    clocks gave to their commits. Metadata become the newer document as a whole; see
    `AttributesSolver` to merge them. What neither side can take over is left to be decided.
    """

    async def solve(self, clash: Clash) -> Sequence[Answer]:
        """Take the newer side of each conflict."""
        return [await self._solve(clash, conflict) for conflict in clash.conflicts]

    async def _solve(self, clash: Clash, conflict: Conflict) -> Answer:
        ours, theirs = await clash.commits(conflict)
        newest = max((it.flushed_at for it in theirs), default=clash.theirs.snapshot.flushed_at)
        if ours and max(it.flushed_at for it in ours) < newest:
            return Resolution.THEIRS
        if conflict.kind is ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
            # As bytes, since `OURS` never settles metadata, see `_ALWAYS_OURS` of the rebase.
            node = clash.ours.node(conflict.path)
            return Resolution.FAIL if node is None else node.user_data
        return Resolution.OURS


@dataclass(frozen=True, slots=True)
class PerPath:
    """Let different solvers decide for different nodes.

    Attributes:
        solvers: a solver for each pattern of paths, such as ``/forecast/*``; ``*`` also stands
            for ``/``. The first pattern that fits counts.
        default: decides everything else.
    """

    solvers: Mapping[str, ConflictSolver]
    default: ConflictSolver = ConflictDetector()

    async def solve(self, clash: Clash) -> Sequence[Answer]:
        """Ask each solver about its conflicts."""
        chosen = [self._solver(conflict.path) for conflict in clash.conflicts]
        answers: list[Answer] = [Resolution.FAIL] * len(chosen)
        # By identity, because solvers need not be hashable. Each is asked once, with all of its
        # conflicts, as it would be without patterns.
        for solver in dict.fromkeys(map(id, chosen)):
            places = [at for at, it in enumerate(chosen) if id(it) == solver]
            some = [clash.conflicts[at] for at in places]
            for at, answer in zip(places, await _ask(chosen[places[0]], clash, some), strict=True):
                answers[at] = answer
        return answers

    def _solver(self, path: str) -> ConflictSolver:
        for pattern, solver in self.solvers.items():
            if fnmatchcase(path, pattern):
                return solver
        return self.default


@dataclass(frozen=True, slots=True)
class AttributesSolver:
    """Merge two versions of a metadata document, key by key, as a three-way merge.

    A key that one side changed becomes what that side made of it; so inside of attributes that are
    mappings themselves. A key that both changed differently, and every other kind of conflict,
    is left to another solver.

    Attributes:
        default: decides everything else.
    """

    default: ConflictSolver = ConflictDetector()

    async def solve(self, clash: Clash) -> Sequence[Answer]:
        """Merge documents, and ask the other solver about the rest."""
        answers: list[Answer | None] = [self._merge(clash, it) for it in clash.conflicts]
        left = [at for at, it in enumerate(answers) if it is None]
        if left:
            rest = await _ask(self.default, clash, [clash.conflicts[at] for at in left])
            for at, answer in zip(left, rest, strict=True):
                answers[at] = answer
        return [Resolution.FAIL if it is None else it for it in answers]

    @staticmethod
    def _merge(clash: Clash, conflict: Conflict) -> bytes | None:
        if conflict.kind is not ConflictKind.ZARR_METADATA_DOUBLE_UPDATE:
            return None
        base = clash.base.metadata_of(conflict)
        ours, theirs = clash.ours.metadata_of(conflict), clash.theirs.metadata_of(conflict)
        if ours is None or theirs is None:
            return None
        try:
            return json.dumps(_three_way(base or {}, ours, theirs)).encode()
        except _BothChangedError:
            return None


class _BothChangedError(Exception):
    """Two versions of a value cannot be merged."""


def _three_way(base: Any, ours: Any, theirs: Any) -> Any:
    """Merge two versions of a JSON value; ``_ABSENT`` stands for a key that is not there."""
    if _are_equal(theirs, ours) or _are_equal(theirs, base):
        return ours
    if _are_equal(ours, base):
        return theirs
    if not (_is_object(ours) and _is_object(theirs)):
        raise _BothChangedError
    mine, other, before = ours, theirs, base if _is_object(base) else dict[str, Any]()
    merged = {
        key: _three_way(*(it.get(key, _ABSENT) for it in (before, mine, other)))
        for key in dict.fromkeys((*other, *mine))
    }
    return {key: it for key, it in merged.items() if it is not _ABSENT}


def _are_equal(one: Any, other: Any) -> bool:
    # As JSON: Python takes 1, 1.0 and true for equal, so a change from one to another would be
    # undone without a conflict; and NaN differs from itself.
    if one is _ABSENT or other is _ABSENT:
        return one is other
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
