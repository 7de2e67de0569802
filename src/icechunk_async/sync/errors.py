"""The errors of the facade: the official class tree, each also an error of this library.

    IcechunkError
    ├── ConflictError
    │   └── RebaseFailedError
    ├── NotFoundError                 (also a KeyError)
    │   ├── NodeNotFoundError
    │   ├── SnapshotNotFoundError
    │   ├── RefNotFoundError
    │   └── RepositoryNotFoundError
    ├── AlreadyExistsError
    ├── ReadOnlyError
    ├── InvalidInputError             (also a ValueError)
    ├── SessionStateError
    ├── StorageError
    ├── FormatError
    └── InternalError

Each error that the facade raises is also an instance of the class of `icechunk_async.errors` that
the engine raised, so `except` catches it by either class. Its `kind` is an `ErrorKind`.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast, override

from icechunk_async import errors as native
from icechunk_async._runtime.blocking.tracebacks import shown_cause
from icechunk_async.sync.official.display import public

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import TracebackType

    from icechunk_async.sync.conflicts import Conflict

__all__ = [
    "AlreadyExistsError",
    "ConflictError",
    "ErrorKind",
    "FormatError",
    "IcechunkError",
    "InternalError",
    "InvalidInputError",
    "NodeNotFoundError",
    "NotFoundError",
    "ReadOnlyError",
    "RebaseFailedError",
    "RefNotFoundError",
    "RepositoryNotFoundError",
    "SessionStateError",
    "SnapshotNotFoundError",
    "StorageError",
    "coded",
    "refusal",
    "translate",
    "translated",
]


@public("")
class ErrorKind(StrEnum):
    """The codes in the `kind` of errors: those of the official package.

    Codes may be added; none is changed or removed. This library raises those that fit its errors.
    The others are here so that code which names them runs.
    """

    # a conflict with another writer
    COMMIT_CONFLICT = "commit-conflict"
    BRANCH_UPDATE_CONFLICT = "branch-update-conflict"
    REBASE_FAILED = "rebase-failed"
    CONFIG_UPDATED = "config-updated"
    REPO_INFO_UPDATED = "repo-info-updated"
    UPDATE_ATTEMPTS_EXHAUSTED = "update-attempts-exhausted"
    GC_DELETES_FAILING = "gc-deletes-failing"
    # something does not exist
    NODE_NOT_FOUND = "node-not-found"
    ANCESTOR_NODE_NOT_FOUND = "ancestor-node-not-found"
    CHUNK_NOT_FOUND = "chunk-not-found"
    KEY_NOT_FOUND = "key-not-found"
    SNAPSHOT_NOT_FOUND = "snapshot-not-found"
    NO_SNAPSHOT_AT_TIME = "no-snapshot-at-time"
    REF_NOT_FOUND = "ref-not-found"
    BRANCH_NOT_FOUND = "branch-not-found"
    TAG_NOT_FOUND = "tag-not-found"
    REPOSITORY_NOT_FOUND = "repository-not-found"
    MANIFEST_INFO_NOT_FOUND = "manifest-info-not-found"
    # the name or place is taken
    NODE_ALREADY_EXISTS = "node-already-exists"
    BRANCH_ALREADY_EXISTS = "branch-already-exists"
    TAG_ALREADY_EXISTS = "tag-already-exists"
    TAG_PREVIOUSLY_DELETED = "tag-previously-deleted"
    MOVE_WONT_OVERWRITE = "move-wont-overwrite"
    # nothing may be written
    READ_ONLY_SESSION = "read-only-session"
    READ_ONLY_STORE = "read-only-store"
    READ_ONLY_STORAGE = "read-only-storage"
    READ_ONLY_REPOSITORY = "read-only-repository"
    # the call itself is wrong
    INVALID_KEY = "invalid-key"
    INVALID_CHUNK_INDEX = "invalid-chunk-index"
    ZERO_LENGTH_CHUNK = "zero-length-chunk"
    INVALID_MANIFEST_SPLIT_INDEX = "invalid-manifest-split-index"
    INVALID_REF_TYPE = "invalid-ref-type"
    INVALID_REF_NAME = "invalid-ref-name"
    INVALID_SNAPSHOT_ID = "invalid-snapshot-id"
    INVALID_PATH = "invalid-path"
    BAD_KEY_PREFIX = "bad-key-prefix"
    BAD_METADATA = "bad-metadata"
    BAD_PREFIX = "bad-prefix"
    NOT_AN_ARRAY = "not-an-array"
    NOT_A_GROUP = "not-a-group"
    INVALID_BYTE_RANGE = "invalid-byte-range"
    INVALID_COMMIT_CONFIGURATION = "invalid-commit-configuration"
    INVALID_ARRAY_METADATA = "invalid-array-metadata"
    INVALID_FEATURE_FLAG = "invalid-feature-flag"
    INVALID_VIRTUAL_REF = "invalid-virtual-ref"
    INVALID_CREDENTIALS = "invalid-credentials"
    NO_CONTAINER_FOR_VIRTUAL_CHUNK = "no-container-for-virtual-chunk"
    UNAUTHORIZED_VIRTUAL_CHUNK_CONTAINER = "unauthorized-virtual-chunk-container"
    EMPTY_PREFIX_CREATION = "empty-prefix-creation"
    PARENT_DIRECTORY_NOT_CLEAN = "parent-directory-not-clean"
    BAD_SNAPSHOT_CHAIN_FOR_DIFF = "bad-snapshot-chain-for-diff"
    # the state of session or repository
    COMMIT_NOT_ALLOWED = "commit-not-allowed"
    MERGE_NOT_ALLOWED = "merge-not-allowed"
    CANNOT_FORK_READ_ONLY_SESSION = "cannot-fork-read-only-session"
    REARRANGE_SESSION_ONLY = "rearrange-session-only"
    NON_REARRANGE_SESSION = "non-rearrange-session"
    MOVE_INTO_SELF_OR_DESCENDANT = "move-into-self-or-descendant"
    MOVE_DESTINATION_PARENT_MISSING = "move-destination-parent-missing"
    MOVE_DESTINATION_PARENT_NOT_GROUP = "move-destination-parent-not-group"
    NO_CHANGES_TO_COMMIT = "no-changes-to-commit"
    NO_AMEND_FOR_INITIAL_COMMIT = "no-amend-for-initial-commit"
    NOT_ON_BRANCH = "not-on-branch"
    NO_SNAPSHOT = "no-snapshot"
    CANNOT_DELETE_MAIN = "cannot-delete-main"
    UNCOMMITTED_CHANGES = "uncommitted-changes"
    MERGE_FAILED = "merge-failed"
    NOT_ALLOWED = "not-allowed"
    UNIMPLEMENTED = "unimplemented"
    REBASE_TX_LOG_PRUNED = "rebase-tx-log-pruned"
    FEATURE_FLAG_DISABLED = "feature-flag-disabled"
    TAG_ERROR = "tag-error"
    INVALID_REPOSITORY_MIGRATION = "invalid-repository-migration"
    # the storage, or its configuration
    OBJECT_NOT_FOUND = "object-not-found"
    OBJECT_STORE = "object-store"
    IO = "io"
    STORAGE_CONFIG = "storage-config"
    CANNOT_PARSE_URL = "cannot-parse-url"
    BAD_REDIRECT = "bad-redirect"
    SEMAPHORE_ACQUIRE = "semaphore-acquire"
    THROTTLED = "throttled"
    STORAGE_OTHER = "storage-other"
    VIRTUAL_CHUNK_FETCH = "virtual-chunk-fetch"
    VIRTUAL_CHUNK_MODIFIED = "virtual-chunk-modified"
    INVALID_OBJECT_SIZE = "invalid-object-size"
    # a file cannot be read
    SERIALIZATION = "serialization"
    DESERIALIZATION = "deserialization"
    CONFIG_DESERIALIZATION = "config-deserialization"
    INVALID_FILE_FORMAT = "invalid-file-format"
    UNSUPPORTED_SPEC_VERSION = "unsupported-spec-version"
    UNSUPPORTED_OPERATION_FOR_VERSION = "unsupported-operation-for-version"
    SNAPSHOT_TIMESTAMP = "snapshot-timestamp"
    DUPLICATE_SNAPSHOT_ID = "duplicate-snapshot-id"
    # the engine itself
    CONCURRENCY = "concurrency"
    FLUSH = "flush"
    PARTIAL_VALUES_PANIC = "partial-values-panic"
    CONFLICTING_PATH_NOT_FOUND = "conflicting-path-not-found"
    INCONSISTENT_MANIFESTS = "inconsistent-manifests"
    POISON_LOCK = "poison-lock"
    PICKLE = "pickle"
    UNKNOWN = "unknown"


class IcechunkError(native.IcechunkError):
    """Base of every error that the facade raises on purpose.

    Attributes:
        message: the request, the finding, and the remedy.
        kind: a code, see `ErrorKind`.
        context: the values named in the message.
    """

    message: str
    kind: str

    def __init__(self, message: str, kind: str | None = None) -> None:
        """Keep the message for people and the code for handlers."""
        super().__init__(message)
        self.kind = kind or ErrorKind.UNKNOWN.value

    @override
    def __repr__(self) -> str:
        name = f"icechunk_async.sync.{type(self).__name__}"
        return f'{name}(message="{self.message}", kind="{self.kind}")'

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from both base classes: pickle finds no class that was made at run time."""
        cls = type(self)
        both = cls.__dict__.get("made_of")
        maker = (_made, both) if both else (_bare, (cls,))
        return *maker, (self.args, self.__dict__)

    def __setstate__(self, state: Any) -> None:
        """Take the state that `__reduce__` kept."""
        self.args, fields = state
        self.__dict__.update(fields)


def _bare(cls: type[IcechunkError]) -> IcechunkError:
    return cls.__new__(cls)


class ConflictError(IcechunkError):
    """The branch moved since the session began; nothing was published.

    Attributes:
        expected_parent: the snapshot that the session is based on.
        actual_parent: the branch's tip.
    """

    expected_parent: str | None
    actual_parent: str | None

    def __init__(
        self,
        expected_parent: str | None = None,
        actual_parent: str | None = None,
        message: str | None = None,
        kind: str | None = None,
    ) -> None:
        """Name the expected snapshot and the one that was found."""
        told = f"Failed to commit, expected parent: {expected_parent}, actual: {actual_parent}"
        super().__init__(message or told, kind or ErrorKind.COMMIT_CONFLICT.value)
        self.expected_parent = expected_parent
        self.actual_parent = actual_parent


class RebaseFailedError(ConflictError):
    """Changes of this session and of a newer commit cannot both stand.

    Attributes:
        snapshot: the newer commit.
        conflicts: all conflicts with it.
    """

    snapshot: str
    conflicts: list[Conflict]

    def __init__(self, snapshot: str, conflicts: list[Conflict]) -> None:
        """Name the commit and the conflicts with it."""
        found = f"Rebase failed on snapshot {snapshot}: {len(conflicts)} conflicts found"
        super().__init__(None, None, found, ErrorKind.REBASE_FAILED.value)
        self.snapshot = snapshot
        self.conflicts = conflicts


class NotFoundError(IcechunkError, KeyError):
    """A node, snapshot, branch, tag, chunk or repository does not exist."""


class NodeNotFoundError(NotFoundError):
    """There is no group, array or chunk at the path."""


class SnapshotNotFoundError(NotFoundError):
    """There is no snapshot with this id, or of this time."""


class RefNotFoundError(NotFoundError):
    """There is no branch or tag with this name."""


class RepositoryNotFoundError(NotFoundError):
    """There is no repository in the storage."""


class AlreadyExistsError(IcechunkError):
    """The name or place is taken."""


class ReadOnlyError(IcechunkError):
    """The session, store, storage or repository only reads."""


class InvalidInputError(IcechunkError, ValueError):
    """An argument, key, index or document is wrong."""


class SessionStateError(IcechunkError):
    """The session or repository cannot do this in its present state."""


class StorageError(IcechunkError):
    """The storage failed, which often passes, or is not configured correctly."""


class FormatError(IcechunkError):
    """A file cannot be read, or the format cannot express the request."""


class InternalError(IcechunkError):
    """The engine found its own state inconsistent."""


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
    native.LeaseNotFoundError: ErrorKind.KEY_NOT_FOUND,
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
    native.ChunksCollectedError: ErrorKind.NOT_ALLOWED,
    native.VirtualChunkError: ErrorKind.VIRTUAL_CHUNK_FETCH,
    native.VirtualContainerError: ErrorKind.NO_CONTAINER_FOR_VIRTUAL_CHUNK,
    native.VirtualAccessError: ErrorKind.UNAUTHORIZED_VIRTUAL_CHUNK_CONTAINER,
    native.VirtualSourceChangedError: ErrorKind.VIRTUAL_CHUNK_MODIFIED,
}

# The class of each group of `ErrorKind`, by the first code of the group.
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
_CODES: Final = frozenset(ErrorKind)


def _kind_of(error: native.IcechunkError) -> ErrorKind:
    """Return the official code for an error of the engine.

    An error whose class has several codes names its own (`code` in its context). For others it is
    the code of the nearest class above.
    """
    named = error.context.get("code")
    if isinstance(named, str) and named in _CODES:
        return ErrorKind(named)
    return next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)


def _class_name_of(kind: ErrorKind, error: native.IcechunkError) -> str:
    """Return the name of the class of errors with this code."""
    if kind is ErrorKind.UNKNOWN and isinstance(error, native.InvalidInputError):
        return "InvalidInputError"  # there are more ways to be wrong than codes
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    # Codes of one class stand together, so its group is the last one that begins at the code or
    # before.
    order = list(ErrorKind)
    place = order.index(kind)
    return [name for first, name in _GROUPS if order.index(first) <= place][-1]


# A class, since a generator made into a block takes several times as long, and each call enters
# one.
class Translated:
    """A block; for each of the engine's errors it raises the facade's, as `caught` returns it."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, native.IcechunkError) and not isinstance(error, IcechunkError):
            raise caught(error)


def translated() -> Translated:
    """Return a block that raises the facade's errors for those of the engine."""
    return _TRANSLATED


_TRANSLATED: Final = Translated()


def caught(error: native.IcechunkError) -> IcechunkError:
    """Return the facade's error to raise in the handler of one of the engine's.

    Its cause is one that says more to a caller, see `_runtime.blocking.tracebacks`.
    """
    found = translate(error)
    if found is not error:
        found.__cause__ = shown_cause(found, error)
    return found


@contextmanager
def coded(code: str) -> Generator[None]:
    """Give this official code to the engine's refusal to write with a read-only session."""
    try:
        yield
    # Another code: not the session refuses here, but the whole repository.
    except native.RepositoryReadOnlyError:
        raise
    except native.ReadOnlyError as error:
        error.context["code"] = code
        raise


def refusal(error: native.IcechunkError, kind: ErrorKind) -> IcechunkError:
    """Return the facade's error for one of the library, with a more precise code."""
    found = translate(error)
    found.kind = kind.value
    return found


def translate(error: native.IcechunkError) -> IcechunkError:
    """Return the facade's error for one of the engine's; errors of the facade are returned as is.

    The result has the message and context of the engine's error, the official code, and is an
    instance of both classes.
    """
    if isinstance(error, IcechunkError):
        return error
    kind = _kind_of(error)
    found = _made(_class_name_of(kind, error), type(error))
    native.IcechunkError.__init__(found, error.message, **error.context)
    found.kind = kind.value
    if isinstance(found, ConflictError):
        found.expected_parent = _text(error.context.get("expected_parent"))
        found.actual_parent = _text(error.context.get("actual_parent"))
    if isinstance(found, RebaseFailedError):
        from icechunk_async.sync.official.mirrors import from_native  # noqa: PLC0415 - rarely needed

        found.snapshot = str(error.context.get("snapshot_id"))
        clashes = cast("tuple[object, ...]", error.context.get("conflicts") or ())
        found.conflicts = [from_native(clash) for clash in clashes]
    return found


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _made(name: str, engine_class: type[native.IcechunkError]) -> IcechunkError:
    cls = _both(name, engine_class)
    return cls.__new__(cls)


def _both(name: str, engine_class: type[native.IcechunkError]) -> type[IcechunkError]:
    """Return a class that derives from one of the facade and one of the engine."""
    known = _MADE.get((name, engine_class))
    if known is not None:
        return known
    facade_class: type[IcechunkError] = _CLASSES[name]
    made = type(name, (facade_class, engine_class), {"made_of": (name, engine_class)})
    made.__module__, made.__doc__ = facade_class.__module__, facade_class.__doc__
    # Two threads may make one at the same time. The first counts, so that there is one class to
    # catch.
    return _MADE.setdefault((name, engine_class), cast("type[IcechunkError]", made))


_MADE: Final[dict[tuple[str, type], type[IcechunkError]]] = {}
_CLASSES: Final = {
    cls.__name__: public("")(cls)
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, IcechunkError)
}
