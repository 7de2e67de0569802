"""Features of ways of publishing beyond references and commits, and the refusal of others."""

from __future__ import annotations

from typing import Final, Literal

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import UnsupportedBySpecError

__all__ = ["Capabilities", "Feature"]

type Feature = Literal[
    "amend",
    "move_nodes",
    "metadata",
    "status",
    "feature_flags",
    "operations_log",
    "repo_info_file",
    "tag_deletion",
    "expiration",
    "upkeep",
    "sums",
    "leases",
    "proposals",
    "protection",
]

_NOUNS: Final[dict[Feature, str]] = {
    "amend": "amendments of commits",
    "move_nodes": "moves of nodes",
    "metadata": "metadata for the repository itself",
    "status": "repository status",
    "feature_flags": "feature flags",
    "operations_log": "operations log",
    "repo_info_file": "repo info file",
    "tag_deletion": "deletion of tags",
    "expiration": "expiration of snapshots",
    "upkeep": "upkeep of its files (collection, compaction, verification, statistics, copies)",
    "sums": "checksums of chunks",
    "leases": "leases of sessions",
    "proposals": "proposals",
    "protection": "protection of branches",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of repositories that are published in one way.

    Every way has branches, tags, ancestry, a stored configuration and commits; these are extras.
    """

    way: str
    """Names the way in messages, such as ``format version 1``."""
    instead: str = ""
    """A sentence for messages: what to do to get what is missing."""
    amend: bool = False
    """A snapshot can take the place of a branch's tip, see `Session.amend`."""
    move_nodes: bool = False
    """A commit can record that nodes moved, see `Repository.rearrange_session`."""
    metadata: bool = False
    """The repository has properties besides those of its commits."""
    status: bool = False
    """The repository can be closed to changes, for all writers at once."""
    feature_flags: bool = False
    """Single operations can be forbidden to all writers."""
    operations_log: bool = False
    """The repository remembers what was done to it besides commits."""
    repo_info_file: bool = False
    """Refs, ancestry and settings are in one file, see `Repository.inspect_repo_info`."""
    tag_deletion: bool = False
    """Tags can be deleted."""
    expiration: bool = False
    """Old snapshots can be dropped from the history, see `Repository.expire_snapshots`."""
    upkeep: bool = False
    """Files can be collected, compacted, verified, measured and copied."""
    sums: bool = False
    """Checksums of chunks can be kept, see `Repository.save_sums`."""
    leases: bool = False
    """Sessions can have leases, see `Repository.writable_session`."""

    proposals: bool = False
    """Changes can be proposed, checked, and accepted, see `Repository.propose`."""
    protection: bool = False
    """Branches can be closed to all changes but proposals, see `Repository.protect_branch`."""

    def require(self, feature: Feature) -> None:
        """Raise `UnsupportedBySpecError` if this way lacks a feature.

        Raises:
            UnsupportedBySpecError: it says what is missing and what to do instead.
        """
        if not getattr(self, feature):
            what = _NOUNS[feature]
            raise UnsupportedBySpecError(
                f"A repository of {self.way} has no {what}. {self.instead}".rstrip(), what=what
            )
