"""Which official code fits an error of the engine, and which class an official code has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async import errors as native
from icechunk_async.sync._error_kinds import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["class_name_of", "kind_of"]

_KINDS: Final[Mapping[type[native.IcechunkError], ErrorKind]] = {
    native.IcechunkError: ErrorKind.UNKNOWN,
    native.StorageError: ErrorKind.OBJECT_STORE,
    native.ObjectNotFoundError: ErrorKind.OBJECT_NOT_FOUND,
    native.OutcomeUnknownError: ErrorKind.STORAGE_OTHER,
    native.ThrottledError: ErrorKind.THROTTLED,
    native.UnreachableError: ErrorKind.IO,
    native.StorageFullError: ErrorKind.IO,
    native.StorageClosedError: ErrorKind.STORAGE_OTHER,
    native.UnsafeStorageError: ErrorKind.READ_ONLY_STORAGE,
    native.BucketNotFoundError: ErrorKind.STORAGE_CONFIG,
    native.WrongRegionError: ErrorKind.STORAGE_CONFIG,
    native.InvalidInputError: ErrorKind.UNKNOWN,
    native.FormatError: ErrorKind.DESERIALIZATION,
    native.UnsupportedSpecVersionError: ErrorKind.UNSUPPORTED_SPEC_VERSION,
    native.UnsupportedBySpecError: ErrorKind.UNSUPPORTED_SPEC_VERSION,
    native.InvalidURLError: ErrorKind.CANNOT_PARSE_URL,
    native.UnknownSchemeError: ErrorKind.STORAGE_CONFIG,
    native.MissingDriverError: ErrorKind.STORAGE_CONFIG,
    native.InvalidObjectKeyError: ErrorKind.BAD_PREFIX,
    native.InvalidStoreKeyError: ErrorKind.INVALID_KEY,
    native.InvalidMetadataError: ErrorKind.BAD_METADATA,
    native.InvalidCoordinatesError: ErrorKind.INVALID_CHUNK_INDEX,
    native.InvalidRefNameError: ErrorKind.INVALID_REF_NAME,
    native.NotFoundError: ErrorKind.KEY_NOT_FOUND,
    native.RepositoryNotFoundError: ErrorKind.REPOSITORY_NOT_FOUND,
    native.BranchNotFoundError: ErrorKind.REF_NOT_FOUND,
    native.TagNotFoundError: ErrorKind.REF_NOT_FOUND,
    native.SnapshotNotFoundError: ErrorKind.SNAPSHOT_NOT_FOUND,
    native.NodeNotFoundError: ErrorKind.NODE_NOT_FOUND,
    native.AlreadyExistsError: ErrorKind.NODE_ALREADY_EXISTS,
    native.RepositoryExistsError: ErrorKind.PARENT_DIRECTORY_NOT_CLEAN,
    native.BranchExistsError: ErrorKind.BRANCH_ALREADY_EXISTS,
    native.TagExistsError: ErrorKind.TAG_ALREADY_EXISTS,
    native.TagDeletedError: ErrorKind.TAG_PREVIOUSLY_DELETED,
    native.ConflictError: ErrorKind.COMMIT_CONFLICT,
    native.RebaseFailedError: ErrorKind.REBASE_FAILED,
    native.ReadOnlyError: ErrorKind.READ_ONLY_STORE,
    native.RepositoryReadOnlyError: ErrorKind.READ_ONLY_REPOSITORY,
    native.SessionStateError: ErrorKind.NOT_ALLOWED,
    native.NothingToCommitError: ErrorKind.NO_CHANGES_TO_COMMIT,
    native.VirtualChunkError: ErrorKind.VIRTUAL_CHUNK_FETCH,
    native.VirtualContainerError: ErrorKind.NO_CONTAINER_FOR_VIRTUAL_CHUNK,
    native.VirtualAccessError: ErrorKind.UNAUTHORIZED_VIRTUAL_CHUNK_CONTAINER,
    native.VirtualSourceChangedError: ErrorKind.VIRTUAL_CHUNK_MODIFIED,
}

# By the first code of each group of ErrorKind: the class of the group.
_GROUPS: Final = (
    (ErrorKind.COMMIT_CONFLICT, "ConflictError"),
    (ErrorKind.NODE_NOT_FOUND, "NotFoundError"),
    (ErrorKind.NODE_ALREADY_EXISTS, "AlreadyExistsError"),
    (ErrorKind.READ_ONLY_SESSION, "ReadOnlyError"),
    (ErrorKind.INVALID_KEY, "InvalidInputError"),
    (ErrorKind.COMMIT_NOT_ALLOWED, "SessionStateError"),
    (ErrorKind.OBJECT_NOT_FOUND, "StorageError"),
    (ErrorKind.SERIALIZATION, "FormatError"),
    (ErrorKind.CONCURRENCY, "InternalError"),
)
_SPECIAL: Final = {
    ErrorKind.REBASE_FAILED: "RebaseFailedError",
    ErrorKind.NODE_NOT_FOUND: "NodeNotFoundError",
    ErrorKind.ANCESTOR_NODE_NOT_FOUND: "NodeNotFoundError",
    ErrorKind.CHUNK_NOT_FOUND: "NodeNotFoundError",
    ErrorKind.SNAPSHOT_NOT_FOUND: "SnapshotNotFoundError",
    ErrorKind.NO_SNAPSHOT_AT_TIME: "SnapshotNotFoundError",
    ErrorKind.REF_NOT_FOUND: "RefNotFoundError",
    ErrorKind.BRANCH_NOT_FOUND: "RefNotFoundError",
    ErrorKind.TAG_NOT_FOUND: "RefNotFoundError",
    ErrorKind.REPOSITORY_NOT_FOUND: "RepositoryNotFoundError",
    ErrorKind.UNKNOWN: "IcechunkError",
}


def kind_of(error: native.IcechunkError) -> ErrorKind:
    """Return the official code for an error of the engine.

    It is what the error says itself (``code`` in its context), where there are several codes for
    a class; else that of the nearest class above it.
    """
    told = error.context.get("code")
    if isinstance(told, str) and told in _VALUES:
        return ErrorKind(told)
    return next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)


_VALUES: Final = frozenset(ErrorKind)


def class_name_of(kind: ErrorKind, error: native.IcechunkError) -> str:
    """Return the name of the class that errors with this code have."""
    if kind is ErrorKind.UNKNOWN and isinstance(error, native.InvalidInputError):
        return "InvalidInputError"  # there is no code for each way to be wrong
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    order = list(ErrorKind)
    place = order.index(kind)
    return [name for first, name in _GROUPS if order.index(first) <= place][-1]
