"""Where branches, tags and ancestry live: one module per way of publishing a snapshot."""

from icechunk_async.engine.history.protocol import (
    Amend,
    Commit,
    Detach,
    History,
    Publication,
    StoredConfig,
)

__all__ = ["Amend", "Commit", "Detach", "History", "Publication", "StoredConfig"]
