"""The library for code that blocks: scripts, notebooks, tasks of batch systems.

The same names as in :mod:`icechunk_async`, without ``async`` and ``await``.
"""

from icechunk_async.sync.repository import Repository
from icechunk_async.sync.session import Session

__all__ = ["Repository", "Session"]
