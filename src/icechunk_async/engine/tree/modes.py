"""The kinds of sessions, apart from what they do: opening a repository needs no more of them."""

from __future__ import annotations

from enum import Enum

__all__ = ["SessionMode"]


class SessionMode(Enum):
    """The kinds of sessions."""

    READONLY = "readonly"
    WRITABLE = "writable"
    REARRANGE = "rearrange"
    """It may move nodes, and nothing else."""
