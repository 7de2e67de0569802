"""Showing documents to people: tables and trees, in colour where the terminal has it.

What comes out of a repository (names, messages) is printed as it is: never as markup, and never
as control characters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from icechunk_async.cli.console import plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from rich.console import Console

    from icechunk_async.cli.documents import (
        ChunkCounts,
        Comparison,
        Created,
        Details,
        Hierarchy,
        Listing,
        Log,
        Node,
        Promises,
        RefChange,
        RefList,
        SnapshotLine,
        Touched,
        TouchedChunks,
    )

__all__ = [
    "REMOVED",
    "SNAPSHOT",
    "comparison",
    "created",
    "details",
    "hierarchy",
    "listing",
    "log",
    "make_table",
    "promises",
    "ref_change",
    "ref_list",
    "time_of",
]

SNAPSHOT, _BRANCH, _TAG, _QUIET = "yellow", "green", "cyan", "dim"
_ADDED, REMOVED, _CHANGED = "green", "red", "yellow"
_TYPE_STYLES = {"group": "bold blue", "array": "green", "document": "", "chunks": "blue"}


def created(document: Created, console: Console) -> None:
    """Show what ``init`` did."""
    console.print(
        Text.assemble(
            "Created a repository of format version ",
            (str(document.spec_version), "bold"),
            " at ",
            plain(document.url, "bold"),
            ". Its branch ",
            (document.branch, _BRANCH),
            " is at ",
            (document.snapshot_id, SNAPSHOT),
            ".",
        ),
        soft_wrap=True,
    )


def log(document: Log, console: Console) -> None:
    """Show one line a snapshot."""
    table = make_table("SNAPSHOT", "WRITTEN (UTC)", "REFS", "MESSAGE")
    for line in document.snapshots:
        table.add_row(
            Text(line.id, SNAPSHOT), time_of(line.written_at), _refs(line), plain(line.message)
        )
    console.print(table)


def details(document: Details, console: Console) -> None:
    """Show one snapshot and what it touched."""
    line = document.snapshot
    table = make_table("", "", header=False)
    table.add_row("snapshot", Text(line.id, SNAPSHOT))
    table.add_row(
        "parent", Text(line.parent_id, SNAPSHOT) if line.parent_id else "none, it is the first"
    )
    table.add_row("written", Text(f"{line.written_at:%Y-%m-%d %H:%M:%S.%f} UTC"))
    table.add_row("message", plain(line.message))
    for name, value in sorted(line.metadata.items()):
        table.add_row(plain(name), plain(json.dumps(value, ensure_ascii=False)))
    if line.branches or line.tags:
        table.add_row("refs", _refs(line))
    console.print(table)
    if document.touched is not None:
        console.print()
        touched(document.touched, console)


def comparison(document: Comparison, console: Console) -> None:
    """Show what lies between two snapshots."""
    console.print(
        Text.assemble(
            "From ",
            plain(document.from_ref, "bold"),
            f" ({document.from_snapshot_id}) to ",
            plain(document.to_ref, "bold"),
            f" ({document.to_snapshot_id}):",
        ),
        soft_wrap=True,
    )
    touched(document.touched, console)


def touched(document: Touched, console: Console) -> None:
    """Show what commits touched, one line a node."""
    if document.is_empty:
        console.print("Nothing was touched.")
        return
    table = make_table("", "", "", header=False)
    rows = [
        ("+ new group", _ADDED, document.new_groups),
        ("+ new array", _ADDED, document.new_arrays),
        ("- deleted group", REMOVED, document.deleted_groups),
        ("- deleted array", REMOVED, document.deleted_arrays),
        ("~ metadata of group", _CHANGED, document.updated_groups),
        ("~ metadata of array", _CHANGED, document.updated_arrays),
    ]
    for label, style, paths in rows:
        for path in paths:
            table.add_row(Text(label, style), plain(path))
    for chunks in document.updated_chunks:
        table.add_row(
            Text("~ chunks of array", _CHANGED), plain(chunks.path), Text(_chunks(chunks), _QUIET)
        )
    for move in document.moved_nodes:
        moved = Text.assemble(plain(move.source), " to ", plain(move.target))
        table.add_row(Text("> moved", _CHANGED), moved)
    console.print(table)


def _chunks(chunks: TouchedChunks) -> str:
    shown = ", ".join("/".join(map(str, coords)) for coords in chunks.coords)
    if chunks.count <= len(chunks.coords):
        return f"{chunks.count}: {shown or 'the only one'}"
    box = ", ".join(f"{start}:{stop}" for start, stop in chunks.bounds)
    return f"{chunks.count} in [{box}]: {shown}, ..." if shown else f"{chunks.count} in [{box}]"


def hierarchy(document: Hierarchy, console: Console) -> None:
    """Show groups and arrays as a tree."""
    title = Text.assemble(plain(document.ref, "bold"), f" ({document.snapshot_id})")
    root = Tree(title, guide_style=_QUIET)
    branches: dict[str, Tree] = {"/": root}
    for node in document.nodes:
        if node.path == "/" and node.type == "group":
            continue
        _branch_above(branches, node.path).add(_node(node))
        if node.type == "group":
            branches[node.path] = _branch_above(branches, node.path).children[-1]
    console.print(root)
    if not document.nodes:
        console.print("The hierarchy is empty.")


def _branch_above(branches: dict[str, Tree], path: str) -> Tree:
    """Answer where a node belongs; groups that only their children imply are added."""
    parent = path.rpartition("/")[0] or "/"
    if parent not in branches:
        above = _branch_above(branches, parent)
        branches[parent] = above.add(plain(f"{parent.rpartition('/')[2]}/", _TYPE_STYLES["group"]))
    return branches[parent]


def _node(node: Node) -> Text:
    name = node.path.rpartition("/")[2]
    if node.type == "group" or node.shape is None or node.chunks is None:
        return plain(f"{name}/", _TYPE_STYLES["group"])
    chunk_shape = "several shapes" if node.chunk_shape is None else _shape(node.chunk_shape)
    return Text.assemble(
        plain(name or "/", "bold green"),
        " ",
        plain(_axes(node.shape, node.dimension_names)),
        " ",
        plain(str(node.data_type), "magenta"),
        (f"  chunks {chunk_shape}: {_count(node.chunks)}", _QUIET),
    )


def _axes(shape: Sequence[int], names: Sequence[str | None] | None) -> str:
    if names is None:
        return _shape(shape)
    pairs = zip(names, shape, strict=True)
    axes = [str(size) if name is None else f"{name}: {size}" for name, size in pairs]
    return f"({', '.join(axes)})"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _count(chunks: ChunkCounts) -> str:
    kinds = {"inline": chunks.inline, "native": chunks.native, "virtual": chunks.virtual}
    stored = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    if not stored:
        return f"none of {chunks.in_grid} stored"
    missing = "" if chunks.stored == chunks.in_grid else f" of {chunks.in_grid}"
    return f"{stored}{missing}, {decimal(chunks.size_bytes)}"


def listing(document: Listing, console: Console) -> None:
    """Show one line a name."""
    for entry in document.entries:
        folder = "/" if entry.type in {"group", "array", "chunks"} else ""
        console.print(plain(entry.name + folder, _TYPE_STYLES.get(entry.type, "")), soft_wrap=True)


def ref_list(document: RefList, console: Console) -> None:
    """Show one line a branch or tag."""
    if not document.refs:
        console.print(
            "There are no branches." if document.kind == "branch" else "There are no tags."
        )
        return
    table = make_table(document.kind.upper(), "SNAPSHOT", "WRITTEN (UTC)", "MESSAGE")
    style = _BRANCH if document.kind == "branch" else _TAG
    for ref in document.refs:
        name, snapshot_id = plain(ref.name, style), Text(ref.snapshot_id, SNAPSHOT)
        table.add_row(name, snapshot_id, time_of(ref.written_at), plain(ref.message))
    console.print(table)


def ref_change(document: RefChange, console: Console) -> None:
    """Show what was done to a branch or tag."""
    style = _BRANCH if document.kind == "branch" else _TAG
    text = Text.assemble(
        f"{document.action.capitalize()} {document.kind} ", plain(document.name, style)
    )
    if document.snapshot_id is not None:
        text.append(" at ").append(document.snapshot_id, SNAPSHOT)
    if document.previous_snapshot_id is not None:
        text.append("; it was at ").append(document.previous_snapshot_id, SNAPSHOT)
    console.print(text.append("."), soft_wrap=True)


def promises(document: Promises, console: Console) -> None:
    """Show one line a promise, and what follows from them."""
    table = make_table("PROMISE", "NEEDED", "VERDICT", "")
    for line in document.promises:
        style = {"kept": _ADDED, "broken": REMOVED}.get(line.verdict, _CHANGED)
        needed = "yes" if line.needed else "no"
        table.add_row(line.promise, needed, Text(line.verdict, style), plain(line.detail))
    console.print(table)
    for key in document.left_behind:
        console.print(Text.assemble("Could not be removed: ", plain(key)), soft_wrap=True)
    sentence = "is safe for commits" if document.is_safe else "is not safe: commits could be lost"
    console.print(Text.assemble(plain(document.url, "bold"), f" {sentence}."), soft_wrap=True)


def make_table(*columns: str, header: bool = True) -> Table:
    """Answer a table without frames."""
    table = Table(box=None, pad_edge=False, show_header=header, header_style="bold")
    for column in columns:
        # Ids and times are of no use in part; what is long at the end of a line folds.
        folds = column in {"MESSAGE", "REFS", ""}
        table.add_column(column, no_wrap=not folds, overflow="fold")
    return table


def time_of(moment: datetime) -> Text:
    """Answer a time to the second; heads of columns say that it is UTC."""
    return Text(f"{moment:%Y-%m-%d %H:%M:%S}", _QUIET)


def _refs(line: SnapshotLine) -> Text:
    branches = [plain(name, _BRANCH) for name in line.branches]
    tags = [plain(name, _TAG) for name in line.tags]
    return Text(", ").join([*branches, *tags])
