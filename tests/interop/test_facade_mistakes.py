"""The same mistakes with the official package and with the facade: class and code of the errors."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.interop.facade_pair import PACKAGES
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable

# Zarr's functions have types that are not complete.
zarr: Any = import_module("zarr")

NOWHERE = "AAAAAAAAAAAAAAAAAAAG"
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class Place:
    """A repository of one of the packages with an array, and what to make mistakes with."""

    def __init__(self, package: Any) -> None:
        """Write ``/a``, two branches and two tags, one of them deleted."""
        self.package = package
        self.storage = package.in_memory_storage()
        self.repo = package.Repository.create(self.storage)
        self.first = self.repo.lookup_branch("main")
        session = self.repo.writable_session("main")
        group = zarr.create_group(session.store)
        group.create_array("a", shape=(4,), chunks=(2,), dtype="i4")[:] = 1
        self.tip = session.commit("first")
        self.done = session
        self.repo.create_branch("side", self.first)
        self.repo.create_tag("v1", self.tip)
        self.repo.create_tag("v2", self.tip)
        self.repo.delete_tag("v2")

    @property
    def session(self) -> Any:
        """A new writable session."""
        return self.repo.writable_session("main")

    @property
    def reader(self) -> Any:
        """A new session that reads."""
        return self.repo.readonly_session("main")

    @property
    def mover(self) -> Any:
        """A new session that moves nodes."""
        return self.repo.rearrange_session("main")

    def put(self, session: Any, key: str, data: bytes) -> None:
        """Write below a key of the store."""
        value = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data)
        asyncio.run(session.store.set(key, value))

    def clash(self, act: Callable[[Any], object]) -> None:
        """Let two sessions write one chunk, and the second act after the first has committed."""
        both = self.session, self.session
        for value, session in enumerate(both):
            zarr.open_group(session.store)["a"][0] = value + 5
        both[0].commit("won")
        act(both[1])

    def without(self, flag: str) -> Any:
        """Return the repository with a feature switched off."""
        self.repo.set_feature_flag(flag, False)  # noqa: FBT003 - as theirs
        return self.repo

    @property
    def closed(self) -> Any:
        """The repository, closed to changes."""
        status = self.package.RepoStatus(self.package.RepoAvailability.read_only)
        self.repo.set_status(status)
        return self.repo

    def wrote(self) -> Any:
        """Return a session that wrote a chunk."""
        session = self.session
        zarr.open_array(session.store, path="a")[0] = 2
        return session

    def module(self, name: str) -> Any:
        """Return a module of the package."""
        return import_module(f"{self.package.__name__}.{name}")

    def old(self) -> Any:
        """Return a repository of format version 1."""
        package = self.package
        return package.Repository.create(package.in_memory_storage(), spec_version=1)


def reset_elsewhere(repo: Any) -> None:
    """Reset a branch from where it is not."""
    first = repo.lookup_branch("main")
    session = repo.writable_session("main")
    zarr.create_group(session.store)
    session.commit("moved")
    repo.reset_branch("main", first, from_snapshot_id=first)


MISTAKES: dict[str, Callable[[Place], object]] = {
    "create twice": lambda it: it.package.Repository.create(it.storage),
    "open nothing": lambda it: it.package.Repository.open(it.package.in_memory_storage()),
    "delete main": lambda it: it.repo.delete_branch("main"),
    "no branch": lambda it: it.repo.lookup_branch("no"),
    "no tag": lambda it: it.repo.lookup_tag("no"),
    "delete no branch": lambda it: it.repo.delete_branch("no"),
    "delete no tag": lambda it: it.repo.delete_tag("no"),
    "bad snapshot id": lambda it: it.repo.lookup_snapshot("xx"),
    "no snapshot": lambda it: it.repo.lookup_snapshot(NOWHERE),
    "branch at nothing": lambda it: it.repo.create_branch("new", NOWHERE),
    "branch twice": lambda it: it.repo.create_branch("side", it.first),
    "tag twice": lambda it: it.repo.create_tag("v1", it.first),
    "tag again": lambda it: it.repo.create_tag("v2", it.first),
    "deleted tag": lambda it: it.repo.lookup_tag("v2"),
    "reset nothing": lambda it: it.repo.reset_branch("no", it.first),
    "write on nothing": lambda it: it.repo.writable_session("no"),
    "read nothing": lambda it: it.repo.readonly_session("no"),
    "read no tag": lambda it: it.repo.readonly_session(tag="no"),
    "read no snapshot": lambda it: it.repo.readonly_session(snapshot_id=NOWHERE),
    "read too early": lambda it: it.repo.readonly_session("main", as_of=LONG_AGO),
    "commit nothing": lambda it: it.session.commit("nothing"),
    "write to a reader": lambda it: it.put(it.reader, "zarr.json", b"{}"),
    "write after the commit": lambda it: it.put(it.done, "a/c/0", b"12345678"),
    "lost race": lambda it: it.clash(lambda session: session.commit("lost")),
    "clash": lambda it: it.clash(lambda session: session.rebase(it.package.ConflictDetector())),
    "amend the first": lambda it: it.repo.writable_session("side").amend("x", allow_empty=True),
    "bad document": lambda it: it.put(it.session, "zarr.json", b"{"),
    "odd document": lambda it: it.put(it.session, "b/zarr.json", b"{}"),
    "chunk of nothing": lambda it: it.put(it.session, "no/c/0", b"x"),
    "chunk outside": lambda it: it.put(it.session, "a/c/77", b"12345678"),
    "empty chunk": lambda it: it.put(it.session, "a/c/0", b""),
    "group over array": lambda it: it.put(
        it.session, "a/zarr.json", b'{"zarr_format":3,"node_type":"group"}'
    ),
    "move in a writer": lambda it: it.session.move("/a", "/b"),
    "no node": lambda it: it.session.get_node_id("/no"),
    "write in a mover": lambda it: it.put(it.mover, "a/c/0", b"12345678"),
    "move nothing": lambda it: it.mover.move("/no", "/b"),
    "move into itself": lambda it: it.mover.move("/a", "/a/b"),
    "move to no group": lambda it: it.mover.move("/a", "/x/y"),
    "uncovered": lambda it: it.session.store.set_virtual_ref(
        "a/c/0", "s3://b/k", offset=0, length=8
    ),
    "no URL": lambda it: it.session.store.set_virtual_ref(
        "a/c/0", "key", offset=0, length=8, validate_container=False
    ),
    "commit a fork": lambda it: it.session.fork().commit("x"),
    "fork a reader": lambda it: it.reader.fork(),
    "commit a reader": lambda it: it.reader.commit("x"),
    "amend a reader": lambda it: it.reader.amend("x"),
    "rebase a reader": lambda it: it.reader.rebase(it.package.ConflictDetector()),
    "commit twice": lambda it: it.done.commit("x"),
    "discard in a reader": lambda it: it.reader.discard_changes(),
    "reset elsewhere": lambda it: it.repo.reset_branch("main", it.first, from_snapshot_id=it.first),
    "old reset elsewhere": lambda it: reset_elsewhere(it.old()),
    "chunk of a group": lambda it: it.put(it.session, "c/0", b"12345678"),
    "type of a group's chunk": lambda it: it.session.chunk_type("/", [0]),
    "shift a group": lambda it: it.session.shift_array("/", (1,)),
    "no flag": lambda it: it.repo.set_feature_flag("no", True),  # noqa: FBT003 - as theirs
    "flag off": lambda it: it.without("create_tag").create_tag("v3", it.tip),
    "closed": lambda it: it.closed.create_branch("new", it.tip),
    "write when closed": lambda it: it.closed.writable_session("main"),
    "old metadata": lambda it: it.old().get_metadata(),
    "old moves": lambda it: it.old().rearrange_session("main"),
    "old log": lambda it: list(it.old().ops_log()),
    "diff backwards": lambda it: it.repo.diff(from_branch="main", to_branch="side"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_same_mistake_has_the_same_class_and_code(
    mistake: Callable[[Place], object],
) -> None:
    """And none of the mistakes is taken for something right."""
    found: list[tuple[str, str]] = []
    for package in PACKAGES:
        place = Place(package)
        with pytest.raises(package.IcechunkError) as caught:
            mistake(place)
        found.append((type(caught.value).__name__, caught.value.kind))
    assert found[1] == found[0]
    assert icechunk.ErrorKind(found[0][1])


class Odd:
    """No JSON."""


WRONG_TYPES: dict[str, Callable[[Place], object]] = {
    "commit": lambda it: it.wrote().commit("m", {"x": Odd()}),
    "commit a set": lambda it: it.wrote().commit("m", {"x": {1, 2}}),
    "commit within": lambda it: it.wrote().commit("m", {"x": [{"y": Odd()}]}),
    "commit a number as name": lambda it: it.wrote().commit("m", {1: 2}),
    "commit a list": lambda it: it.wrote().commit("m", [1]),
    "amend": lambda it: it.wrote().amend("m", metadata={"x": Odd()}),
    "flush": lambda it: it.wrote().flush("m", metadata={"x": Odd()}),
    "set": lambda it: it.repo.set_metadata({"x": Odd()}),
    "update": lambda it: it.repo.update_metadata({"x": Odd()}),
    "default": lambda it: it.repo.set_default_commit_metadata({"x": Odd()}),
    "rewrite": lambda it: it.repo.rewrite_manifests("m", branch="main", metadata={"x": Odd()}),
    "merge a session": lambda it: it.module("distributed").merge_sessions(it.session),
    "merge a number": lambda it: it.module("distributed").merge_sessions(it.session.fork(), 3),
    "reduce other arrays": lambda it: it.module("dask").merge_sessions_array_kwargs(
        np.ones(2), axis=(0,), keepdims=True
    ),
}


@pytest.mark.parametrize("mistake", WRONG_TYPES.values(), ids=WRONG_TYPES)
@pytest.mark.parametrize("package", PACKAGES, ids=["official", "facade"])
def test_a_value_of_a_wrong_type_is_a_type_error(
    package: Any, mistake: Callable[[Place], object]
) -> None:
    """Nothing was done."""
    place = Place(package)
    with pytest.raises(TypeError):
        mistake(place)
    assert place.repo.lookup_branch("main") == place.tip
    assert place.repo.get_metadata() == place.repo.default_commit_metadata() == {}
