"""All errors of the library, in one tree.

    IcechunkError
    ├── StorageError                     the object store refused, failed or did not reply
    │   ├── ObjectNotFoundError
    │   ├── PreconditionFailedError      a conditional write was refused; nothing changed
    │   ├── OutcomeUnknownError          a write may have landed; read back to know
    │   ├── StorageUnavailableError      a transient failure; the same call may succeed later
    │   │   ├── ThrottledError           too many requests; slow down
    │   │   └── UnreachableError         no connection to the host
    │   │       └── NameResolutionError
    │   ├── PermissionDeniedError
    │   │   ├── ExpiredCredentialsError
    │   │   └── ClockSkewError           this machine's clock is wrong
    │   ├── BucketNotFoundError
    │   ├── WrongRegionError
    │   ├── TLSError
    │   ├── StorageFullError
    │   ├── StorageClosedError
    │   └── UnsafeStorageError           the storage lacks a promise that the engine needs
    ├── FormatError                      stored bytes are damaged, hostile or not Icechunk
    │   ├── UnsupportedSpecVersionError
    │   ├── UnsupportedFeatureError      a source needs what this library does not have
    │   └── ChunkDamagedError            a chunk's bytes are not those that were written
    ├── InvalidInputError (ValueError)   the call itself is wrong; fix it
    │   ├── WrongTypeError (TypeError)
    │   ├── InvalidURLError
    │   ├── UnknownSchemeError
    │   ├── InvalidObjectKeyError
    │   ├── InvalidStoreKeyError
    │   ├── InvalidMetadataError
    │   ├── InvalidCoordinatesError
    │   ├── InvalidRefNameError
    │   ├── InvalidConfigError
    │   ├── UnsupportedBySpecError
    │   ├── DuplicateRowsError           rows of a table that cannot be placed in arrays
    │   ├── OutsideGridError
    │   ├── MissingCoordinatesError
    │   ├── AmbiguousCoordinatesError
    │   ├── UnsortedCoordinatesError
    │   └── IngestError
    ├── MissingDriverError (ImportError)
    ├── NotFoundError (KeyError)
    │   ├── RepositoryNotFoundError
    │   ├── BranchNotFoundError
    │   ├── TagNotFoundError
    │   ├── SnapshotNotFoundError
    │   ├── NodeNotFoundError
    │   ├── LeaseNotFoundError           no session with a lease has this id
    │   └── ProposalNotFoundError
    ├── AlreadyExistsError
    │   ├── RepositoryExistsError
    │   ├── BranchExistsError
    │   ├── TagExistsError
    │   ├── TagDeletedError
    │   └── NodeExistsError
    ├── ConflictError                    another writer was first; rebase or start again
    │   ├── RebaseFailedError
    │   └── MergeConflictError           what is to be merged clashes with the branch
    ├── ChunksCollectedError             garbage collection deleted what a session wrote
    ├── StreamPositionLostError          the history no longer holds the stream's position
    ├── StreamSchemaChangedError         a commit changed the columns of a stream's table
    ├── CheckpointLostError              a stream counts its batches anew under an old name
    ├── ReadOnlyError
    │   └── RepositoryReadOnlyError
    ├── SessionStateError
    │   ├── FeatureDisabledError         a feature flag of the repository forbids it
    │   ├── BranchProtectedError         the branch changes only by proposals
    │   ├── ProposalStateError           the proposal was accepted or closed, or is out of date
    │   ├── ChecksFailedError            checks of a proposal did not pass; nothing was published
    │   ├── InvalidMoveError
    │   ├── NothingToCommitError
    │   ├── LeaseExpiredError            the session was idle for longer than its lease holds
    │   ├── LeaseLostError               another process holds, committed or ended the session
    │   ├── IncompleteWriteError         tasks of a job did not report exactly once each
    │   └── MergeFailedError             forks clash; nothing was merged
    └── VirtualChunkError
        ├── VirtualContainerError        no container covers the location
        ├── VirtualAccessError           the reader did not authorise the container
        └── VirtualSourceChangedError

Each class has a stable ``kind`` for logs and for handlers in other languages; the data behind
the message is in ``context``. Messages say what was asked, what was found and what to do.
Errors pickle, so that they cross process boundaries whole.
"""

from __future__ import annotations


class IcechunkError(Exception):
    """Base of every error that this library raises on purpose."""

    kind: str = "icechunk"

    def __init__(self, message: str, /, **context: object) -> None:
        """Store the message for people and the data for handlers.

        Args:
            message: what was asked, what was found, what to do.
            context: the values named in the message; plain, picklable, never a secret.
        """
        super().__init__(message)
        self.message = message
        self.context = context

    def __str__(self) -> str:
        """Return the message, also where a built-in base would print its repr."""
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from message and context."""
        # `Exception` rebuilds itself from `args`, which is the message alone: the context would be
        # lost.
        return _rebuild, (type(self), self.message, self.context)


def _rebuild(cls: type[IcechunkError], message: str, context: dict[str, object]) -> IcechunkError:
    return cls(message, **context)


class StorageError(IcechunkError):
    """The object store failed in a way that no subclass describes."""

    kind = "storage"


class ObjectNotFoundError(StorageError):
    """No object has this key. ``context`` holds ``key``."""

    kind = "object-not-found"


class PreconditionFailedError(StorageError):
    """A conditional operation was refused; nothing changed.

    ``context`` holds ``key`` and ``expected``, the state that the caller asked for.
    """

    kind = "precondition-failed"


class OutcomeUnknownError(StorageError):
    """A write was sent and no reply came: it may have landed, or may land later."""

    kind = "outcome-unknown"


class StorageUnavailableError(StorageError):
    """The store cannot serve the request now (busy, throttled, unreachable); nothing changed."""

    kind = "storage-unavailable"


class ThrottledError(StorageUnavailableError):
    """The store asks to slow down; nothing changed.

    ``context`` may hold ``retry_after_seconds``, the pause that the store asked for.
    """

    kind = "throttled"


class UnreachableError(StorageUnavailableError):
    """No connection to the store's host: refused, no route, or no reply in time."""

    kind = "unreachable"


class NameResolutionError(UnreachableError):
    """The name of the store's host could not be resolved."""

    kind = "name-resolution"


class PermissionDeniedError(StorageError):
    """The store does not allow the operation with these credentials or this user."""

    kind = "permission-denied"


class ExpiredCredentialsError(PermissionDeniedError):
    """The credentials have expired."""

    kind = "expired-credentials"


class ClockSkewError(PermissionDeniedError):
    """The store refuses requests because this machine's clock is too far from its own."""

    kind = "clock-skew"


class BucketNotFoundError(StorageError):
    """The bucket or container does not exist. ``context`` holds ``bucket``."""

    kind = "bucket-not-found"


class WrongRegionError(StorageError):
    """The bucket is in another region than the one requested. ``context`` may hold ``region``."""

    kind = "wrong-region"


class TLSError(StorageError):
    """No secure connection to the store: its certificate is not trusted, or it speaks no TLS."""

    kind = "tls"


class StorageFullError(StorageError):
    """The storage is full; nothing changed."""

    kind = "storage-full"


class StorageClosedError(StorageError):
    """The storage was used outside its ``async with`` block, or after its event loop ended."""

    kind = "storage-closed"


class UnsafeStorageError(StorageError):
    """The storage lacks a promise that this operation needs; nothing was sent."""

    kind = "unsafe-storage"


class FormatError(IcechunkError):
    """Stored bytes are truncated, damaged, hostile, or of another kind than expected."""

    kind = "format"


class UnsupportedSpecVersionError(FormatError):
    """A file was written to a version of the format that this library does not know."""

    kind = "unsupported-spec-version"


class UnsupportedFeatureError(FormatError):
    """Stored data of another library needs a feature that this library does not have.

    ``context`` holds ``feature``, its name.
    """

    kind = "unsupported-feature"


class ChunkDamagedError(FormatError):
    """The bytes of a chunk are not those that were written: their checksum is another one.

    The context has ``path``, ``coords``, ``object``, ``offset``, ``length``, and the sums
    ``expected`` and ``found``.
    """

    kind = "chunk-damaged"


class InvalidInputError(IcechunkError, ValueError):
    """An argument is wrong; nothing was done."""

    kind = "invalid-input"


class WrongTypeError(InvalidInputError, TypeError):
    """An argument, or a part of one, has a type that cannot be used; nothing was done."""

    kind = "wrong-type"


class InvalidURLError(InvalidInputError):
    """A storage URL cannot be understood."""

    kind = "invalid-url"


class UnknownSchemeError(InvalidInputError):
    """No installed backend serves this URL scheme."""

    kind = "unknown-scheme"


class InvalidObjectKeyError(InvalidInputError):
    """An object key is empty, absolute, too long, or climbs out of the storage."""

    kind = "invalid-object-key"


class InvalidStoreKeyError(InvalidInputError):
    """A Zarr store key is neither a metadata document nor a chunk."""

    kind = "invalid-store-key"


class InvalidMetadataError(InvalidInputError):
    """A ``zarr.json`` document cannot be stored."""

    kind = "invalid-metadata"


class InvalidCoordinatesError(InvalidInputError):
    """Chunk coordinates have the wrong rank or lie outside the array's chunk grid."""

    kind = "invalid-coordinates"


class InvalidRefNameError(InvalidInputError):
    """A branch or tag name cannot be stored."""

    kind = "invalid-ref-name"


class InvalidConfigError(InvalidInputError):
    """A configuration value is of the wrong type or out of range."""

    kind = "invalid-config"


class UnsupportedBySpecError(InvalidInputError):
    """The repository's format version cannot express what was asked."""

    kind = "unsupported-by-spec"


class DuplicateRowsError(InvalidInputError):
    """Several rows of a table have the coordinates of one cell; nothing was published.

    ``context`` holds ``array`` and ``index``, the place of the first such cell.
    """

    kind = "duplicate-rows"


class OutsideGridError(InvalidInputError):
    """A row of a table has a coordinate that the arrays do not have; nothing was published.

    ``context`` holds ``dimension`` and ``value``, the first such coordinate.
    """

    kind = "outside-grid"


class MissingCoordinatesError(InvalidInputError):
    """A table or one of its rows lacks a coordinate; nothing was published.

    ``context`` holds ``dimension``.
    """

    kind = "missing-coordinates"


class AmbiguousCoordinatesError(InvalidInputError):
    """A dimension has the same coordinate twice, so a row with it has no unique place.

    Nothing was published. ``context`` holds ``dimension`` and ``value``, the first such coordinate.
    """

    kind = "ambiguous-coordinates"


class UnsortedCoordinatesError(InvalidInputError):
    """Coordinates to append do not continue the order of the existing ones.

    Nothing was published. ``context`` holds ``dimension``.
    """

    kind = "unsorted-coordinates"


class IngestError(InvalidInputError):
    """Files cannot be ingested; nothing was published.

    ``context`` holds ``report``, an Arrow table with a row for each file.
    """

    kind = "ingest"


class MissingDriverError(IcechunkError, ImportError):
    """A backend is registered, but the driver package it needs is not installed."""

    kind = "missing-driver"


class NotFoundError(IcechunkError, KeyError):
    """Something named in the call does not exist."""

    kind = "not-found"


class RepositoryNotFoundError(NotFoundError):
    """The location holds no Icechunk repository."""

    kind = "repository-not-found"


class BranchNotFoundError(NotFoundError):
    """The repository has no branch of this name."""

    kind = "branch-not-found"


class TagNotFoundError(NotFoundError):
    """The repository has no tag of this name, or it was deleted."""

    kind = "tag-not-found"


class SnapshotNotFoundError(NotFoundError):
    """The repository has no snapshot with this id."""

    kind = "snapshot-not-found"


class NodeNotFoundError(NotFoundError):
    """The snapshot has no array or group at this path."""

    kind = "node-not-found"


class LeaseNotFoundError(NotFoundError):
    """No session with a lease has this id. ``context`` holds ``session_id``."""

    kind = "lease-not-found"


class ProposalNotFoundError(NotFoundError):
    """The repository has no proposal of this id."""

    kind = "proposal-not-found"


class AlreadyExistsError(IcechunkError):
    """Something of this name already exists; nothing changed."""

    kind = "already-exists"


class RepositoryExistsError(AlreadyExistsError):
    """The location for a new repository is not empty."""

    kind = "repository-exists"


class BranchExistsError(AlreadyExistsError):
    """A branch of this name exists."""

    kind = "branch-exists"


class TagExistsError(AlreadyExistsError):
    """A tag of this name exists; tags do not move."""

    kind = "tag-exists"


class TagDeletedError(AlreadyExistsError):
    """A tag of this name was deleted; the name cannot be reused."""

    kind = "tag-deleted"


class NodeExistsError(AlreadyExistsError):
    """A node of the other type is at this path, or any node at the target of a move."""

    kind = "node-exists"


class ConflictError(IcechunkError):
    """The branch moved since the session began; nothing was published.

    ``context`` holds ``branch``, ``expected_parent`` and ``actual_parent``. After a commit or an
    amendment it has ``kept_snapshot_id``, unless that could not be stored: a snapshot outside of
    the history with the changes of the session, which `Repository.readonly_session` opens until
    it is collected as garbage.
    """

    kind = "conflict"


class RebaseFailedError(ConflictError):
    """Changes of this session conflict with a newer commit.

    ``context`` holds ``snapshot_id``, the newer commit, and ``conflicts``, all clashes with it;
    besides ``kept_snapshot_id``, see `ConflictError`.
    The session's changes are kept; its base is the last commit that did not clash.
    """

    kind = "rebase-failed"


class MergeConflictError(ConflictError):
    """A merge, cherry-pick, revert or restore clashes with the branch.

    Nothing was published. ``context`` holds ``report``, a `MergeReport` whose ``conflicts`` name
    every clash, and the commits of both sides that touched it.
    """

    kind = "merge-conflict"


class ChunksCollectedError(IcechunkError):
    """Garbage was collected while a session was open, and chunks that it wrote are gone.

    Nothing was published. The session keeps its changes: write these chunks again and commit.
    ``context`` holds ``chunks``: for each array's path the coordinates, ``(n, rank)``; and
    ``kept_snapshot_id``, see `ConflictError`, in which these chunks cannot be read.
    """

    kind = "chunks-collected"


class StreamPositionLostError(IcechunkError):
    """A stream cannot continue: the history of its branch no longer holds its snapshot.

    ``context`` holds ``branch`` and ``snapshot_id``. No row was read.
    """

    kind = "stream-position-lost"


class StreamSchemaChangedError(IcechunkError):
    """A stream stopped at a commit that changed the columns of its table.

    ``context`` holds ``snapshot_id``, the commit, or None if the query itself asks for other
    columns than before. No row of it was read.
    """

    kind = "stream-schema-changed"


class CheckpointLostError(IcechunkError):
    """A streaming query tries a batch again that a branch does not hold under its number.

    ``context`` holds ``branch``, ``app_id``, ``batch`` and ``newest``, the last batch that the
    branch has. Nothing of the batch was written.
    """

    kind = "checkpoint-lost"


class ReadOnlyError(IcechunkError):
    """A write was attempted on something read-only."""

    kind = "read-only"


class RepositoryReadOnlyError(ReadOnlyError):
    """The repository's status forbids changes at present."""

    kind = "repository-read-only"


class SessionStateError(IcechunkError):
    """The session's state does not allow the operation."""

    kind = "session-state"


class InvalidMoveError(SessionStateError):
    """A node cannot be moved into itself or below something that is no group; nothing was moved.

    ``context`` holds ``source`` and ``target``, and ``parent`` where that is no group.
    """

    kind = "invalid-move"


class NothingToCommitError(SessionStateError):
    """The session has no changes."""

    kind = "nothing-to-commit"


class LeaseExpiredError(SessionStateError):
    """A leased session was idle for longer than its lease holds; nothing was written.

    ``context`` holds ``session_id``.
    """

    kind = "lease-expired"


class LeaseLostError(SessionStateError):
    """Another process continued, committed or ended a leased session; nothing was written.

    ``context`` holds ``session_id``, and ``snapshot_id`` if it was committed.
    """

    kind = "lease-lost"


class IncompleteWriteError(SessionStateError):
    """Tasks of a distributed write did not report exactly once each; nothing was published.

    ``context`` holds ``missing`` and ``repeated``, numbers of tasks.
    """

    kind = "incomplete-write"


class MergeFailedError(SessionStateError):
    """Forks clash with each other or with their session; nothing was merged.

    ``context`` holds ``clashes``, a `MergeClash` each.
    """

    kind = "merge-failed"


class FeatureDisabledError(SessionStateError):
    """A feature flag of the repository forbids the operation; nothing changed.

    ``context`` holds ``feature``, the flag's name.
    """

    kind = "feature-disabled"


class BranchProtectedError(SessionStateError):
    """The branch changes only by proposals; nothing was changed.

    ``context`` has the ``branch``, and the names of the ``checks`` if some did not pass.
    """

    kind = "branch-protected"


class ProposalStateError(SessionStateError):
    """A proposal cannot be accepted or closed in its present state; nothing was published.

    ``context`` has its ``proposal_id`` and its ``state``.
    """

    kind = "proposal-state"


class ChecksFailedError(SessionStateError):
    """Checks of a proposal did not pass, or were not run, on the state that would be merged.

    Nothing was published. ``context`` has the ``proposal_id`` and the names of the ``checks``.
    """

    kind = "checks-failed"


class VirtualChunkError(IcechunkError):
    """A chunk stored in another file or object cannot be read."""

    kind = "virtual-chunk"


class VirtualContainerError(VirtualChunkError):
    """No virtual chunk container covers the location, or its store can hold no such object."""

    kind = "virtual-container"


class VirtualAccessError(VirtualChunkError):
    """The reader has not authorised the virtual chunk container, or its store denies access."""

    kind = "virtual-access"


class VirtualSourceChangedError(VirtualChunkError):
    """The referenced object was modified, replaced or removed since it was referenced."""

    kind = "virtual-source-changed"
