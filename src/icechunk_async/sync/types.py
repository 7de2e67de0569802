"""Types without a class."""

from typing import Literal

__all__ = ["CommitMethod"]

CommitMethod = Literal["new_commit", "amend"]
"""How rewritten manifests are published: as a new commit, or in place of the branch's tip."""
