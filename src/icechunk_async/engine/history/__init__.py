"""Where branches, tags and ancestry live, and how a snapshot becomes the tip of a branch.

`protocol` is what others use: `History`, and `RepositoryState` for ways that keep more than refs.
`opening` lists the ways and finds the one that a storage uses. Each way has a folder or a module.
`settings` reads those of this library alone, which are stored with the metadata of a repository.
`diff` and `graph` show what a history holds.
"""

from icechunk_async.engine.history.protocol import (
    MAIN,
    SAFE_UPDATES,
    Amend,
    Audit,
    Capabilities,
    Commit,
    Detach,
    Expiration,
    Fault,
    FeatureFlag,
    History,
    Publication,
    RepositoryState,
    StoredConfig,
    check_moves_allowed,
    check_online,
    check_unprotected,
    state_for,
)

__all__ = [
    "MAIN",
    "SAFE_UPDATES",
    "Amend",
    "Audit",
    "Capabilities",
    "Commit",
    "Detach",
    "Expiration",
    "Fault",
    "FeatureFlag",
    "History",
    "Publication",
    "RepositoryState",
    "StoredConfig",
    "check_moves_allowed",
    "check_online",
    "check_unprotected",
    "state_for",
]
