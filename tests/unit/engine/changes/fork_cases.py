"""Cases of two forks of one session: those that clash, and those that go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icechunk_async.conflicts import MergeClashKind
from tests.helpers import array_document, group_document, write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from icechunk_async.session import AnySession

    type Steps = Sequence[Callable[[AnySession], Awaitable[object]]]

__all__ = [
    "ARRAY",
    "CLASHES",
    "FLAT",
    "GROUP",
    "MARKED",
    "MARKED_2",
    "SMALL",
    "TOGETHER",
    "drop",
    "put",
    "remove",
    "steps",
]

K = MergeClashKind


def put(key: str, data: bytes) -> Callable[[AnySession], Awaitable[object]]:
    """Return a step that sets a key."""
    return lambda session: write(session, key, data)


def drop(key: str) -> Callable[[AnySession], Awaitable[object]]:
    """Return a step that deletes a chunk."""
    return lambda session: session.store.delete(key)


def remove(path: str) -> Callable[[AnySession], Awaitable[object]]:
    """Return a step that deletes a node and all below it."""
    return lambda session: session.store.delete_dir(path)


GROUP, OTHER_GROUP = group_document(), group_document(other=1)
ARRAY, MARKED = array_document((10,), (1,)), array_document((10,), (1,), attributes={"x": 1})
MARKED_2 = array_document((10,), (1,), attributes={"x": 2})
SMALL = array_document((4,), (1,))
FLAT = array_document((4, 4), (1, 1))

CLASHES: dict[str, tuple[Steps, Steps, list[tuple[MergeClashKind, str, Any]]]] = {
    "group_and_group": (
        [put("n/zarr.json", GROUP)],
        [put("n/zarr.json", GROUP)],
        [(K.CREATED_BY_BOTH, "/n", ())],
    ),
    "group_and_array": (
        [put("n/zarr.json", GROUP)],
        [put("n/zarr.json", ARRAY), put("n/c/0", b"x")],
        [(K.CREATED_BY_BOTH, "/n", ())],
    ),
    "below_a_new_array": (
        [put("n/zarr.json", ARRAY)],
        [put("n/x/zarr.json", GROUP)],
        [(K.CREATED_BELOW_ARRAY, "/n", ())],
    ),
    "array_above_a_new_node": (
        [put("n/x/y/zarr.json", GROUP)],
        [put("n/zarr.json", ARRAY)],
        [(K.CREATED_BELOW_ARRAY, "/n", ())],
    ),
    "metadata": (
        [put("a/zarr.json", MARKED)],
        [put("a/zarr.json", MARKED_2)],
        [(K.UPDATED_BY_BOTH, "/a", ())],
    ),
    "group_metadata": (
        [put("zarr.json", group_document(x=1))],
        [put("zarr.json", group_document(x=2))],
        [(K.UPDATED_BY_BOTH, "/", ())],
    ),
    "deleted_and_written": (
        [remove("a")],
        [put("a/c/7", b"7"), put("a/c/3", b"3")],
        [(K.DELETED_AND_CHANGED, "/a", ((3,), (7,)))],
    ),
    "written_and_deleted": (
        [put("a/c/7", b"7")],
        [remove("a")],
        [(K.DELETED_AND_CHANGED, "/a", ())],
    ),
    "deleted_and_updated": (
        [remove("a")],
        [put("a/zarr.json", MARKED)],
        [(K.DELETED_AND_CHANGED, "/a", ())],
    ),
    "updated_and_deleted": (
        [put("a/zarr.json", MARKED)],
        [remove("a")],
        [(K.DELETED_AND_CHANGED, "/a", ())],
    ),
    "deleted_and_made_anew": (
        [remove("a")],
        [remove("a"), put("a/zarr.json", ARRAY), put("a/c/0", b"x")],
        [(K.DELETED_AND_CHANGED, "/a", ())],
    ),
    "made_anew_and_deleted": (
        [remove("a"), put("a/zarr.json", ARRAY)],
        [remove("a")],
        [(K.DELETED_AND_CHANGED, "/a", ())],
    ),
    "made_anew_by_both": (
        [remove("a"), put("a/zarr.json", ARRAY)],
        [remove("a"), put("a/zarr.json", ARRAY)],
        [(K.CREATED_BY_BOTH, "/a", ())],
    ),
    "made_anew_and_written": (
        [remove("a"), put("a/zarr.json", ARRAY)],
        [put("a/c/1", b"1")],
        [(K.DELETED_AND_CHANGED, "/a", ((1,),))],
    ),
    "another_rank": (
        [put("a/zarr.json", FLAT)],
        [put("a/c/1", b"1")],
        [(K.OTHER_RANK, "/a", ((1,),))],
    ),
    "another_rank_later": (
        [put("a/c/1", b"1")],
        [put("a/zarr.json", FLAT), put("a/c/1/1", b"1")],
        [(K.OTHER_RANK, "/a", ((1, 1),))],
    ),
    "many": (
        [put("n/zarr.json", GROUP), remove("a"), put("zarr.json", group_document(x=1))],
        [put("n/zarr.json", GROUP), put("a/c/1", b"1"), put("zarr.json", group_document(x=2))],
        [
            (K.CREATED_BY_BOTH, "/n", ()),
            (K.DELETED_AND_CHANGED, "/a", ((1,),)),
            (K.UPDATED_BY_BOTH, "/", ()),
        ],
    ),
}


async def steps(session: AnySession, edits: Steps) -> None:
    """Make edits."""
    for edit in edits:
        await edit(session)


TOGETHER: dict[str, tuple[Steps, Steps, dict[str, bytes | None]]] = {
    "same_chunk": ([put("a/c/0", b"x")], [put("a/c/0", b"y")], {"a/c/0": b"y"}),
    "deleted_then_written": ([drop("a/c/0")], [put("a/c/0", b"y")], {"a/c/0": b"y"}),
    "written_then_deleted": ([put("a/c/0", b"x")], [drop("a/c/0")], {"a/c/0": None}),
    "same_metadata": (
        [put("a/zarr.json", MARKED)],
        [put("a/zarr.json", MARKED)],
        {"a/zarr.json": MARKED},
    ),
    "both_delete": ([remove("a")], [remove("a")], {"a/zarr.json": None, "a/c/0": None}),
    "metadata_and_chunks": (
        [put("a/zarr.json", MARKED)],
        [put("a/c/5", b"y")],
        {"a/zarr.json": MARKED, "a/c/5": b"y", "a/c/1": b"\x01"},
    ),
    "shrunk_then_written": (
        [put("a/zarr.json", SMALL)],
        [put("a/c/8", b"y"), put("a/c/2", b"z")],
        {"a/c/8": None, "a/c/2": b"z", "a/c/0": b"\x00"},
    ),
    "written_then_shrunk": (
        [put("a/c/8", b"y"), put("a/c/2", b"z")],
        [put("a/zarr.json", SMALL)],
        {"a/c/8": None, "a/c/2": b"z"},
    ),
    "written_then_shrunk_and_grown": (
        [put("a/c/8", b"y"), put("a/c/2", b"z")],
        [put("a/zarr.json", SMALL), put("a/zarr.json", ARRAY)],
        {"a/c/8": None, "a/c/2": b"z"},
    ),
    "other_rank": (
        [put("a/zarr.json", FLAT), put("a/c/1/1", b"y")],
        [put("zarr.json", GROUP)],
        {"a/c/1/1": b"y"},
    ),
    "a_child_of_a_deleted_group": (
        [put("g/n/zarr.json", GROUP)],
        [remove("g")],
        {"g/n/zarr.json": GROUP, "g/zarr.json": None},
    ),
    "two_new_arrays": (
        [put("n/zarr.json", GROUP), put("n/x/zarr.json", ARRAY), put("n/x/c/1", b"x")],
        [put("m/zarr.json", GROUP), put("m/x/zarr.json", ARRAY), put("m/x/c/1", b"y")],
        {"n/x/c/1": b"x", "m/x/c/1": b"y"},
    ),
}
