"""Where the engines answer a step differently on purpose, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.interop.sides import Outcome

__all__ = ["CODES", "DIFFERENCES", "Difference", "difference"]


@dataclass(frozen=True)
class Difference:
    """A pair of outcomes that is meant to be."""

    step: str
    """The step, by its name in the test."""
    theirs: str
    """"did", or the class of the official error."""
    ours: str
    reason: str
    ends: bool = False
    """Whether the session is now another one on each side, so that it cannot be compared on."""


_ENDED: Final = "a session that was committed only reads, and says so, whatever is asked of it"
_IDLE: Final = "what only reads or moves refuses every edit, and says so first"
_GROUP: Final = "no array is there; that a group is does not make the path a wrong argument"
_MOVES: Final = "a session that cannot move nodes says so before it looks for them"

_FILE: Final = "a snapshot of version 1 whose file is gone is a snapshot that is not there"
_GONE: Final = "the session's base is no longer on its branch, so that nothing says what clashes"

DIFFERENCES: Final = (
    Difference("commit", "SessionStateError", "ReadOnlyError", _ENDED),
    Difference("amend", "SessionStateError", "ReadOnlyError", _ENDED),
    Difference("amend", "FormatError", "ReadOnlyError", _ENDED),
    Difference("amend", "FormatError", "SessionStateError", _ENDED),
    Difference("closed: commit", "SessionStateError", "ReadOnlyError", _ENDED),
    Difference("rebase", "SessionStateError", "ReadOnlyError", _ENDED),
    Difference("chunk type", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("chunk", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("foreign", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("virtual", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("refs", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("move", "AlreadyExistsError", "SessionStateError", _MOVES),
    Difference("move", "NodeNotFoundError", "SessionStateError", _MOVES),
    Difference("move", "FormatError", "SessionStateError", _MOVES),
    Difference(
        "create branch",
        "ConflictError",
        "AlreadyExistsError",
        "in version 1 the official engine takes a name that exists for a lost race",
    ),
    Difference(
        "create branch",
        "SnapshotNotFoundError",
        "AlreadyExistsError",
        "both are so, and in version 1 the official engine looks for the snapshot first",
    ),
    Difference(
        "reset branch",
        "ConflictError",
        "RefNotFoundError",
        "in version 1 it takes a branch that is not there for a lost race",
    ),
    Difference("create branch", "StorageError", "SnapshotNotFoundError", _FILE),
    Difference("create tag", "StorageError", "SnapshotNotFoundError", _FILE),
    Difference("reset branch", "StorageError", "SnapshotNotFoundError", _FILE),
    Difference("diff", "StorageError", "SnapshotNotFoundError", _FILE),
    Difference("expire", "StorageError", "SnapshotNotFoundError", _FILE),
    Difference("reindex", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("shift", "InvalidInputError", "NodeNotFoundError", _GROUP),
    Difference("rebase", "did", "ConflictError", _GONE, ends=True),
    # Before it fails, theirs may move the session to a commit that does not follow its base.
    Difference("rebase", "InternalError", "ConflictError", _GONE, ends=True),
    Difference(
        "diff",
        "InvalidInputError",
        "did",
        "between a snapshot and itself there is no difference, which is no error",
    ),
)

CODES: Final[Mapping[str, frozenset[str]]] = {
    "bad-snapshot-chain-for-diff": frozenset({"unknown"}),
    "branch-not-found": frozenset({"ref-not-found"}),
    "cannot-fork-read-only-session": frozenset({"not-allowed"}),
    "branch-update-conflict": frozenset({"commit-conflict"}),
    "feature-flag-disabled": frozenset({"not-allowed"}),
    "invalid-feature-flag": frozenset({"unknown"}),
    "merge-failed": frozenset({"not-allowed"}),
    "move-destination-parent-missing": frozenset({"non-rearrange-session"}),
    "move-into-self-or-descendant": frozenset({"non-rearrange-session"}),
    "move-wont-overwrite": frozenset({"node-already-exists"}),
    "no-amend-for-initial-commit": frozenset({"not-allowed"}),
    "non-rearrange-session": frozenset({"not-allowed"}),
    "rearrange-session-only": frozenset({"not-allowed"}),
    "read-only-session": frozenset({"read-only-store"}),
    "tag-already-exists": frozenset({"tag-previously-deleted"}),
    "unsupported-operation-for-version": frozenset({"unsupported-spec-version"}),
}
"""Official codes of errors that say more than ours, or less: ours by theirs.

This library has a code for each class of errors, the official one for each way to be wrong.
"""


_DELETING: Final = {"delete", "delete all", "drop chunk"}
_EDITING: Final = {*_DELETING, "chunk", "foreign", "move", "refs", "reindex", "shift", "virtual"}


def difference(step: str, theirs: Outcome, ours: Outcome, *, idle: bool) -> Difference | None:
    """Return the difference on purpose that explains two outcomes, if there is one.

    Args:
        step: what was asked.
        theirs: what the official engine did.
        ours: what ours did.
        idle: whether it was asked of a session that takes no edits.
    """
    named, found = (verdict if verdict == "did" else value[0] for verdict, value in (theirs, ours))
    if named == found != "did" and ours[1][1] in CODES.get(theirs[1][1], ()):
        return Difference(step, named, found, "our code says less")
    refused = idle and found in {"ReadOnlyError", "SessionStateError"}
    if refused and step in (_DELETING if named == "did" else _EDITING):
        return Difference(step, named, found, _IDLE)
    return next(
        (it for it in DIFFERENCES if (it.step, it.theirs, it.ours) == (step, named, found)), None
    )
