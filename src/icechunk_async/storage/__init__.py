"""Storage: the contract of an object store, and opening one by URL.

Backends and third parties use this package and `icechunk_async.errors` only. `protocol` holds the
contract, `registry` finds the backend of a URL, `authoring` helps to write one. `policies` are
wrappers around a storage, the cache among them; `probe` tries the promises of one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from icechunk_async.storage.protocol import (
    ABSENT,
    MAX_KEY_BYTES,
    Absent,
    BlockingStorage,
    ByteRange,
    Capabilities,
    CommonPrefix,
    Data,
    DeleteFailure,
    Expected,
    ListEntry,
    ObjectInfo,
    RangeRequest,
    Retrieved,
    Storage,
    StorageDescription,
    SuffixRange,
    Version,
    check_key,
    slice_range,
)
from icechunk_async.storage.registry import (
    OpenBackend,
    installed_schemes,
    normalize_url,
    open_storage,
    reopen,
)

if TYPE_CHECKING:
    from icechunk_async.storage.authoring import (
        BlockingObjects,
        ThreadedStorage,
        check_expected,
        check_user_agent,
        listed,
    )
    from icechunk_async.storage.policies.cache import CacheOptions, CacheStatistics
    from icechunk_async.storage.policies.hedge import HedgePolicy

__all__ = [
    "ABSENT",
    "MAX_KEY_BYTES",
    "Absent",
    "BlockingObjects",
    "BlockingStorage",
    "ByteRange",
    "CacheOptions",
    "CacheStatistics",
    "Capabilities",
    "CommonPrefix",
    "Data",
    "DeleteFailure",
    "Expected",
    "HedgePolicy",
    "ListEntry",
    "ObjectInfo",
    "OpenBackend",
    "RangeRequest",
    "Retrieved",
    "Storage",
    "StorageDescription",
    "SuffixRange",
    "ThreadedStorage",
    "Version",
    "check_expected",
    "check_key",
    "check_user_agent",
    "installed_schemes",
    "listed",
    "normalize_url",
    "open_storage",
    "reopen",
    "slice_range",
]

# Imported at first use: who reads needs neither.
_HOMES: Final = {
    **dict.fromkeys(
        ("BlockingObjects", "ThreadedStorage", "check_expected", "check_user_agent", "listed"),
        "authoring",
    ),
    **dict.fromkeys(("CacheOptions", "CacheStatistics"), "policies.cache"),
    "HedgePolicy": "policies.hedge",
}

if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
