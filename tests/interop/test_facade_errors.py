"""Errors of the blocking facade beside the official ones: the tree, codes, pickles, translation."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import icechunk_async.sync as facade
from icechunk_async import Repository, errors
from icechunk_async.engine.commit.conflicts import Conflict, ConflictKind
from icechunk_async.sync.errors import translate, translated
from tests.helpers import memory_url
from tests.interop.facade_pair import in_their_words
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAMES = (
    "AlreadyExistsError",
    "ConflictError",
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
)


def every_error(of: type[errors.IcechunkError]) -> set[type[errors.IcechunkError]]:
    """Return a class of the engine's and all below it."""
    below = (it for cls in of.__subclasses__() for it in every_error(cls))
    return {it for it in (of, *below) if it.__module__ == "icechunk_async.errors"}


@pytest.mark.parametrize("name", NAMES)
def test_the_classes_form_the_official_tree(name: str) -> None:
    """Each has the official bases, built-in ones included."""
    official, ours = getattr(icechunk, name), getattr(facade, name)
    theirs = {it.__name__ for it in official.__mro__}
    assert theirs <= {it.__name__ for it in ours.__mro__}
    assert issubclass(ours, errors.IcechunkError)


def test_errors_are_made_and_shown_as_the_official_ones() -> None:
    """Message, code, text and repr; pickles keep them."""
    for package in (icechunk, facade):
        error = package.NodeNotFoundError("no such node", "node-not-found")
        assert (error.message, error.kind) == ("no such node", package.ErrorKind.NODE_NOT_FOUND)
        assert str(error) == "no such node"
        assert in_their_words(repr(error)) == (
            'icechunk.NodeNotFoundError(message="no such node", kind="node-not-found")'
        )
        assert package.InvalidInputError("x").kind == "unknown"
        conflict = package.ConflictError("a", "b")
        assert (conflict.expected_parent, conflict.actual_parent) == ("a", "b")
        assert (conflict.kind, package.ConflictError().expected_parent) == ("commit-conflict", None)
        assert package.ConflictError("a", "b", "told", "code").message == "told"
        clash = package.Conflict(package.ConflictType.ChunkDoubleUpdate, "/a", [[1, 2]])
        failed = package.RebaseFailedError("SNAP", [clash])
        assert (failed.snapshot, failed.kind) == ("SNAP", "rebase-failed")
        assert str(failed) == "Rebase failed on snapshot SNAP: 1 conflicts found"
        for made in (error, conflict, failed):
            copy = pickle.loads(pickle.dumps(made))
            assert type(copy) is type(made)
            assert (copy.message, copy.kind) == (made.message, made.kind)
        again = pickle.loads(pickle.dumps(failed))
        assert again.conflicts[0].conflicted_chunks == [[1, 2]]


def name_of(cls: object) -> str:
    """Return the name of a class, to sort by."""
    return repr(cls)


OF_SPARK = {
    errors.DuplicateRowsError,
    errors.OutsideGridError,
    errors.MissingCoordinatesError,
    errors.AmbiguousCoordinatesError,
    errors.UnsortedCoordinatesError,
    errors.IngestError,
    errors.StreamPositionLostError,
    errors.StreamSchemaChangedError,
    errors.CheckpointLostError,
}
"""Nothing that the official engine does can raise these, and it has no code for them."""


@pytest.mark.parametrize("cls", sorted(every_error(errors.IcechunkError), key=name_of))
def test_every_error_of_the_engine_is_translated(cls: type[errors.IcechunkError]) -> None:
    """Caught by the engine's class and by the facade's; message, context and code travel."""
    error = translate(cls("what happened", key="a/b"))
    assert isinstance(error, cls)
    assert isinstance(error, facade.IcechunkError)
    assert (str(error), error.context) == ("what happened", {"key": "a/b"})
    assert error.kind in set(facade.ErrorKind)
    assert error.kind != "unknown" or cls in {
        errors.IcechunkError,
        errors.InvalidInputError,
        errors.InvalidConfigError,
        errors.WrongTypeError,  # there it is a plain TypeError
        *OF_SPARK,
    }
    if issubclass(cls, errors.InvalidInputError):
        assert isinstance(error, ValueError)
    if issubclass(cls, errors.NotFoundError):
        assert isinstance(error, facade.NotFoundError | KeyError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.kind, copy.context) == (str(error), error.kind, error.context)
    assert translate(error) is error


def test_an_error_may_have_a_finer_code_than_its_class() -> None:
    """It decides the facade's class as well; what is no code is left alone."""
    moved = errors.SessionStateError("into itself", code="move-into-self-or-descendant")
    assert translate(moved).kind == facade.ErrorKind.MOVE_INTO_SELF_OR_DESCENDANT
    early = translate(errors.SnapshotNotFoundError("too early", code="no-snapshot-at-time"))
    assert isinstance(early, facade.SnapshotNotFoundError)
    other = errors.ReadOnlyError("committed", code="commit-not-allowed")
    assert isinstance(translate(other), facade.SessionStateError)
    assert isinstance(translate(other), errors.ReadOnlyError)
    assert translate(errors.FormatError("damaged", code=17)).kind == "deserialization"


def test_a_failed_rebase_says_what_clashed() -> None:
    """In the facade's values, beside the engine's own in the context."""
    clash = Conflict(ConflictKind.CHUNK_DOUBLE_UPDATE, "/a", ((1, 2), (3, 4)))
    error = translate(errors.RebaseFailedError("clash", snapshot_id="SNAP", conflicts=(clash,)))
    assert isinstance(error, facade.RebaseFailedError)
    assert isinstance(error, errors.RebaseFailedError)
    assert error.snapshot == "SNAP"
    assert error.conflicts == [
        facade.Conflict(facade.ConflictType.ChunkDoubleUpdate, "/a", [[1, 2], [3, 4]])
    ]


def test_what_is_raised_in_a_block_is_translated_with_its_cause() -> None:
    """Errors of the facade and of other packages pass unchanged."""
    cause = errors.BranchExistsError("there is one", branch="b")
    with pytest.raises(facade.AlreadyExistsError) as caught, translated():
        raise cause
    assert caught.value.__cause__ is cause
    own = facade.StorageError("mine")
    with pytest.raises(facade.StorageError) as passed, translated():
        raise own
    assert passed.value is own
    with pytest.raises(RuntimeError), translated():
        raise RuntimeError


FAILING: dict[str, tuple[Callable[[Any], Any], Callable[[Repository], Awaitable[object]]]] = {
    "branch": (lambda it: it.lookup_branch("no"), lambda it: it.lookup_branch("no")),
    "tag": (lambda it: it.lookup_tag("no"), lambda it: it.lookup_tag("no")),
    "branch to delete": (lambda it: it.delete_branch("no"), lambda it: it.delete_branch("no")),
    "snapshot": (
        lambda it: it.lookup_snapshot("AAAAAAAAAAAAAAAAAAAG"),
        lambda it: it.lookup_snapshot("AAAAAAAAAAAAAAAAAAAG"),
    ),
    "session": (lambda it: it.writable_session("no"), lambda it: it.writable_session("no")),
    "branch twice": (
        lambda it: it.create_branch("main", it.lookup_branch("main")),
        lambda it: it.create_branch("main", "1CECHNKREP0F1RSTCMT0"),
    ),
}


@pytest.mark.parametrize(("theirs", "ours"), FAILING.values(), ids=FAILING)
def test_the_same_mistake_has_the_same_class_and_code(
    theirs: Callable[[Any], Any], ours: Callable[[Repository], Awaitable[object]]
) -> None:
    """As the official package raises them."""
    with pytest.raises(icechunk.IcechunkError) as official:
        theirs(icechunk.Repository.create(icechunk.in_memory_storage()))

    async def mistaken() -> None:
        async with Repository.create(memory_url()) as repo:
            with translated():
                await ours(repo)

    with pytest.raises(facade.IcechunkError) as found:
        asyncio.run(mistaken())
    assert found.value.kind == official.value.kind
    assert type(found.value).__name__ == type(official.value).__name__
