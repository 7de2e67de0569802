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

What the facade raises is caught by ``except`` for a class of this tree, and as well for the class
of :mod:`icechunk_async.errors` that the engine raised. ``kind`` is an :class:`ErrorKind`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast, override

from icechunk_async import errors as native
from icechunk_async.sync._display import public
from icechunk_async.sync._error_kinds import ErrorKind
from icechunk_async.sync._error_table import class_name_of, kind_of

if TYPE_CHECKING:
    from collections.abc import Generator

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
    "translate",
    "translated",
]


@public("")
class IcechunkError(native.IcechunkError):
    """Base of every error that the facade raises on purpose.

    Attributes:
        message: what was asked, what was found, what to do.
        kind: a code, see :class:`ErrorKind`.
        context: the values named in the message.
    """

    message: str
    kind: str

    def __init__(self, message: str, kind: str | None = None) -> None:
        """Keep the sentence for people and the code for handlers."""
        super().__init__(message)
        self.kind = kind or ErrorKind.UNKNOWN.value

    @override
    def __repr__(self) -> str:
        name = f"icechunk_async.sync.{type(self).__name__}"
        return f'{name}(message="{self.message}", kind="{self.kind}")'

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild by class and state: the class may have been made for one error of the engine."""
        cls = type(self)
        both = cls.__dict__.get("made_of")
        maker = (_made, both) if both else (_bare, (cls,))
        return *maker, (self.args, self.__dict__)

    def __setstate__(self, state: Any) -> None:
        """Take what ``__reduce__`` kept."""
        self.args, fields = state
        self.__dict__.update(fields)


def _bare(cls: type[IcechunkError]) -> IcechunkError:
    return cls.__new__(cls)


@public("")
class ConflictError(IcechunkError):
    """The branch moved since the session began; nothing was published.

    Attributes:
        expected_parent: the snapshot that the session stands on.
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
        """Say which snapshot was expected, and which was found."""
        told = f"Failed to commit, expected parent: {expected_parent}, actual: {actual_parent}"
        super().__init__(message or told, kind or ErrorKind.COMMIT_CONFLICT.value)
        self.expected_parent = expected_parent
        self.actual_parent = actual_parent


@public("")
class RebaseFailedError(ConflictError):
    """Changes of this session and of a newer commit cannot both stand.

    Attributes:
        snapshot: the newer commit.
        conflicts: all clashes with it.
    """

    snapshot: str
    conflicts: list[Conflict]

    def __init__(self, snapshot: str, conflicts: list[Conflict]) -> None:
        """Say with which commit there are which clashes."""
        found = f"Rebase failed on snapshot {snapshot}: {len(conflicts)} conflicts found"
        super().__init__(None, None, found, ErrorKind.REBASE_FAILED.value)
        self.snapshot = snapshot
        self.conflicts = conflicts


@public("")
class NotFoundError(IcechunkError, KeyError):
    """Something that was asked for does not exist."""


@public("")
class NodeNotFoundError(NotFoundError):
    """There is no group, array or chunk at the path."""


@public("")
class SnapshotNotFoundError(NotFoundError):
    """There is no snapshot with the id, or at the time."""


@public("")
class RefNotFoundError(NotFoundError):
    """There is no branch or tag of the name."""


@public("")
class RepositoryNotFoundError(NotFoundError):
    """There is no repository in the storage."""


@public("")
class AlreadyExistsError(IcechunkError):
    """Something of the name is there already."""


@public("")
class ReadOnlyError(IcechunkError):
    """A write was asked of something that only reads."""


@public("")
class InvalidInputError(IcechunkError, ValueError):
    """An argument, key, index or document is wrong."""


@public("")
class SessionStateError(IcechunkError):
    """Session or repository cannot do this in their present state."""


@public("")
class StorageError(IcechunkError):
    """The storage failed, or is not configured right; often it passes."""


@public("")
class FormatError(IcechunkError):
    """What is stored cannot be read, or the format cannot express what was asked."""


@public("")
class InternalError(IcechunkError):
    """The engine contradicts itself."""


@contextmanager
def translated() -> Generator[None]:
    """Raise the facade's error for each of the engine's, which becomes its cause."""
    try:
        yield
    except native.IcechunkError as error:
        if isinstance(error, IcechunkError):
            raise
        raise translate(error) from error


@contextmanager
def coded(code: str) -> Generator[None]:
    """Give the engine's refusal to write with a session that only reads another official code."""
    try:
        yield
    except native.RepositoryReadOnlyError:
        raise
    except native.ReadOnlyError as error:
        error.context["code"] = code
        raise


def translate(error: native.IcechunkError) -> IcechunkError:
    """Return the facade's error for one of the engine's; an error of the facade is itself.

    It has the engine's message and context, the code that fits, and both classes.
    """
    if isinstance(error, IcechunkError):
        return error
    kind = kind_of(error)
    found = _made(class_name_of(kind, error), type(error))
    native.IcechunkError.__init__(found, error.message, **error.context)
    found.kind = kind.value
    if isinstance(found, ConflictError):
        found.expected_parent = _text(error.context.get("expected_parent"))
        found.actual_parent = _text(error.context.get("actual_parent"))
    if isinstance(found, RebaseFailedError):
        from icechunk_async.sync._mirrors import from_native  # noqa: PLC0415 - rarely needed

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
    """Return a class that is one of the facade and one of the engine."""
    known = _MADE.get((name, engine_class))
    if known is not None:
        return known
    facade_class: type[IcechunkError] = _CLASSES[name]
    made = type(name, (facade_class, engine_class), {"made_of": (name, engine_class)})
    made.__module__, made.__doc__ = facade_class.__module__, facade_class.__doc__
    return _MADE.setdefault((name, engine_class), cast("type[IcechunkError]", made))


_MADE: Final[dict[tuple[str, type], type[IcechunkError]]] = {}
_CLASSES: Final = {
    cls.__name__: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, IcechunkError)
}
