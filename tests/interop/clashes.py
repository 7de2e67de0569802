"""Changes of a session and a newer commit to one hierarchy, and the clashes between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from icechunk_async.engine.commit.conflicts import ConflictKind
from tests.interop.edits import (
    Edit,
    array,
    attributes,
    delete_chunk,
    delete_node,
    group,
    resize,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BASE", "ROWS", "Row"]

K = ConflictKind

BASE: Final = (
    group("g", base=True),
    group("g/sub"),
    group("g/sub/deep"),
    group("e"),
    array("g/a", [8, 8], [2, 2]),
    write("g/a", [0, 0], [8, 8], 1),
    array("g/b", [20], [5]),
    write("g/b", [0], [20], 2),
    array("s", [], []),
    write("s", [], [], 3),
)


@dataclass(frozen=True)
class Row:
    """A clash, or none."""

    ours: Sequence[Edit]
    theirs: Sequence[Edit]
    """The newer commit."""
    found: Sequence[tuple[ConflictKind, str]] = ()
    """The conflicts that the detector finds, sorted."""
    solved: bool = False
    """Whether the basic solver settles it, as it comes."""
    stricter: bool = False
    """Whether we refuse what the official engine lets pass with a damaged result."""


def _orphan(path: str) -> Edit:
    """Create a group without those above it."""
    return Edit("orphan", path, {"attributes": {}})


_NEW, _INSIDE = K.NEW_NODE_CONFLICTS_WITH_EXISTING_NODE, K.NEW_NODE_IN_INVALID_GROUP
_RECREATE_B = (array("g/b", [4], [2], overwrite=True), write("g/b", [0], [4], 9))
_SMALL = array("n", [4], [2])

ROWS: Final[dict[str, Row]] = {
    # 1: a new node where there is one
    "group_and_group": Row([group("n")], [group("n")], [(_NEW, "/n")]),
    "array_and_array": Row(
        [_SMALL, write("n", [0], [4])], [_SMALL, write("n", [0], [4])], [(_NEW, "/n")]
    ),
    "group_and_array": Row([group("n")], [_SMALL], [(_NEW, "/n")]),
    "same_document": Row([_orphan("n")], [_orphan("n")], [(_NEW, "/n")]),
    "new_where_we_deleted": Row(_RECREATE_B, [group("n")]),
    "both_recreate": Row(
        _RECREATE_B,
        _RECREATE_B,
        [(_NEW, "/g/b"), (K.DELETE_OF_UPDATED_ARRAY, "/g/b")],
        stricter=True,
    ),
    "we_recreate_what_they_wrote": Row(
        _RECREATE_B, [write("g/b", [0], [5], 8)], [(K.DELETE_OF_UPDATED_ARRAY, "/g/b")], solved=True
    ),
    "we_recreate_what_they_deleted": Row(_RECREATE_B, [delete_node("g/b")]),
    # 2: a new node below an array
    "below_a_new_array": Row([_orphan("n/x")], [_SMALL], [(_INSIDE, "/n")]),
    "two_below_a_new_array": Row(
        [_orphan("n/x"), _orphan("n/y")], [_SMALL], [(_INSIDE, "/n"), (_INSIDE, "/n")]
    ),
    "far_below_a_new_array": Row([_orphan("n/x/y")], [_SMALL], [(_INSIDE, "/n")]),
    "below_a_group_that_became_an_array": Row(
        [group("e/x")], [delete_node("e"), array("e", [4], [2])], [(_INSIDE, "/e")]
    ),
    "new_group_and_child": Row([group("n/x")], [_SMALL], [(_NEW, "/n"), (_INSIDE, "/n")]),
    # 3, 4, 5: metadata
    "both_update_an_array": Row(
        [attributes("g/a", x=1)],
        [attributes("g/a", x=2)],
        [(K.ZARR_METADATA_DOUBLE_UPDATE, "/g/a")],
    ),
    "both_update_a_group": Row(
        [attributes("g", x=1)], [attributes("g", y=2)], [(K.ZARR_METADATA_DOUBLE_UPDATE, "/g")]
    ),
    "both_update_the_root": Row(
        [attributes("", x=1)], [attributes("", y=2)], [(K.ZARR_METADATA_DOUBLE_UPDATE, "/")]
    ),
    "update_of_a_deleted_array": Row(
        [attributes("g/a", x=1)],
        [delete_node("g/a")],
        [(K.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY, "/g/a")],
    ),
    "update_of_a_recreated_array": Row(
        [attributes("g/b", x=1)],
        _RECREATE_B,
        [(K.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY, "/g/b")],
    ),
    "update_of_a_deleted_group": Row(
        [attributes("e", x=1)],
        [delete_node("e")],
        [(K.ZARR_METADATA_UPDATE_OF_DELETED_GROUP, "/e")],
    ),
    # 6, 7, 8: chunks
    "same_chunks": Row(
        [write("g/a", [0, 0], [4, 4], 10)],
        [write("g/a", [2, 2], [8, 8], 11)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/a")],
        solved=True,
    ),
    "same_chunk_of_a_scalar": Row(
        [write("s", [], [], 10)],
        [write("s", [], [], 11)],
        [(K.CHUNK_DOUBLE_UPDATE, "/s")],
        solved=True,
    ),
    "chunk_deleted_and_written": Row(
        [delete_chunk("g/b", 1), write("g/b", [10], [15], 10)],
        [write("g/b", [5], [10], 11), delete_chunk("g/b", 2)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/b")],
        solved=True,
    ),
    "both_delete_a_chunk": Row(
        [delete_chunk("g/b", 1)],
        [delete_chunk("g/b", 1)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/b")],
        solved=True,
    ),
    "chunks_of_two_arrays": Row(
        [write("g/a", [0, 0], [4, 4], 10), write("g/b", [0], [20], 11)],
        [write("g/a", [2, 2], [8, 8], 12), write("g/b", [5], [10], 13)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/a"), (K.CHUNK_DOUBLE_UPDATE, "/g/b")],
        solved=True,
    ),
    "other_chunks": Row([write("g/b", [0], [10], 10)], [write("g/b", [10], [20], 11)]),
    "chunks_of_a_deleted_array": Row(
        [write("g/b", [0], [5], 10)],
        [delete_node("g/b")],
        [(K.CHUNKS_UPDATED_IN_DELETED_ARRAY, "/g/b")],
    ),
    "chunks_of_a_recreated_array": Row(
        [write("g/b", [0], [5], 10)],
        _RECREATE_B,
        [(K.CHUNKS_UPDATED_IN_DELETED_ARRAY, "/g/b")],
    ),
    "chunks_of_an_updated_array": Row(
        [write("g/b", [0], [5], 10)],
        [attributes("g/b", x=1)],
        [(K.CHUNKS_UPDATED_IN_UPDATED_ARRAY, "/g/b")],
    ),
    "chunks_of_a_resized_array": Row(
        [write("g/b", [15], [20], 10)],
        [resize("g/b", 10)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/b"), (K.CHUNKS_UPDATED_IN_UPDATED_ARRAY, "/g/b")],
    ),
    "we_resize_where_they_wrote": Row(
        [resize("g/b", 10)],
        [write("g/b", [15], [20], 10)],
        [(K.CHUNK_DOUBLE_UPDATE, "/g/b")],
        solved=True,
    ),
    "we_grow_where_they_wrote": Row(
        [resize("g/b", 30), write("g/b", [25], [30], 10)], [write("g/b", [0], [5], 11)]
    ),
    # 9, 10: deletions
    "delete_of_an_array_with_new_chunks": Row(
        [delete_node("g/b")],
        [write("g/b", [0], [5], 10)],
        [(K.DELETE_OF_UPDATED_ARRAY, "/g/b")],
        solved=True,
    ),
    "delete_of_an_array_with_new_metadata": Row(
        [delete_node("g/b")],
        [attributes("g/b", x=1)],
        [(K.DELETE_OF_UPDATED_ARRAY, "/g/b")],
        solved=True,
    ),
    "delete_of_an_updated_group": Row(
        [delete_node("e")], [attributes("e", x=1)], [(K.DELETE_OF_UPDATED_GROUP, "/e")], solved=True
    ),
    "delete_of_a_tree_that_changed": Row(
        [delete_node("g")],
        [attributes("g/sub", x=1), write("g/b", [0], [5], 10), attributes("g/a", y=1)],
        [
            (K.DELETE_OF_UPDATED_ARRAY, "/g/a"),
            (K.DELETE_OF_UPDATED_ARRAY, "/g/b"),
            (K.DELETE_OF_UPDATED_GROUP, "/g/sub"),
        ],
        solved=True,
    ),
    "delete_of_a_recreated_array": Row(
        [delete_node("g/b")], _RECREATE_B, [(K.DELETE_OF_UPDATED_ARRAY, "/g/b")], solved=True
    ),
    "delete_of_an_array_recreated_empty": Row([delete_node("g/b")], _RECREATE_B[:1]),
    "delete_of_an_array_that_became_a_group": Row(
        [delete_node("g/b")], [delete_node("g/b"), group("g/b")]
    ),
    "delete_of_a_group_that_became_an_array": Row(
        [delete_node("e")],
        [delete_node("e"), array("e", [4], [2]), write("e", [0], [4])],
    ),
    "both_delete_an_array": Row([delete_node("g/b")], [delete_node("g/b")]),
    "both_delete_a_group": Row([delete_node("g")], [delete_node("g/sub"), delete_node("g/a")]),
    # What nobody detects.
    "metadata_over_new_chunks": Row([attributes("g/b", x=1)], [write("g/b", [0], [5], 10)]),
    "delete_of_a_group_with_new_children": Row([delete_node("e")], [group("e/child")]),
    "child_of_a_deleted_group": Row([group("e/child")], [delete_node("e")]),
    "unrelated": Row([group("e/ours"), attributes("g/a", x=1)], [group("e/theirs")]),
    # Everything at once.
    "many": Row(
        [
            attributes("g", x=1),
            attributes("g/a", x=1),
            write("g/b", [0], [10], 10),
            delete_node("e"),
            group("n"),
        ],
        [
            attributes("g", x=2),
            delete_node("g/a"),
            write("g/b", [5], [15], 11),
            attributes("e", x=2),
            group("n"),
        ],
        [
            (_NEW, "/n"),
            (K.ZARR_METADATA_DOUBLE_UPDATE, "/g"),
            (K.ZARR_METADATA_UPDATE_OF_DELETED_ARRAY, "/g/a"),
            (K.CHUNK_DOUBLE_UPDATE, "/g/b"),
            (K.DELETE_OF_UPDATED_GROUP, "/e"),
        ],
    ),
}
"""Named rows; those found empty have no conflict in either engine."""
