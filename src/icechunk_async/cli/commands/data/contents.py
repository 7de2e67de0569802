"""`tree`, `ls`, `cat`, `du` and `stats`: what a snapshot holds, and what it takes."""

from __future__ import annotations

import base64
import json
import math
import sys
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.filesize import decimal
from rich.text import Text
from rich.tree import Tree

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import QUIET, make_table, plain, print_json
from icechunk_async.cli.declaring import AsOf, Ref, RefOption, repository_command
from icechunk_async.cli.targets import open_session
from icechunk_async.errors import (
    FormatError,
    InvalidStoreKeyError,
    NodeNotFoundError,
    VirtualAccessError,
)
from icechunk_async.format.json.values import is_list, is_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from icechunk_async import Repository, Session, SnapshotId
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.snapshot import Node as StoredNode

__all__ = ["Hierarchy", "register", "show_hierarchy", "tree"]

_CONCURRENT_ARRAYS = 16
_TYPE_STYLES = {"group": "bold blue", "array": "green", "document": "", "chunks": "blue"}

_Path = Annotated[str, typer.Argument(metavar="PATH", help="A node, or a folder of chunks.")]
_Key = Annotated[str, typer.Argument(metavar="KEY", help="Such as air/zarr.json or air/c/0/0.")]
_Raw = Annotated[bool, typer.Option("--raw", help="Print the stored bytes of a document.")]
_Below = Annotated[
    str, typer.Option("--path", metavar="PATH", help="Only arrays at or below this path.")
]


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """The number of chunks of an array, by the place of their bytes."""

    in_grid: int
    """Chunks that the array's shape has room for."""
    inline: int
    native: int
    virtual: int
    size_bytes: int
    """As stored, all together."""

    @property
    def stored(self) -> int:
        """Chunks that were written."""
        return self.inline + self.native + self.virtual


@dataclass(frozen=True, slots=True)
class Node:
    """A group or an array."""

    path: str
    type: str
    """``group`` or ``array``."""
    shape: list[int] | None = None
    data_type: str | None = None
    chunk_shape: list[int] | None = None
    """None for a group, and for chunks of several shapes."""
    dimension_names: list[str | None] | None = None
    chunks: ChunkCounts | None = None


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The document of `tree`, ascending by path."""

    ref: str
    snapshot_id: str
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class Entry:
    """A name below a path."""

    name: str
    type: str
    """``group``, ``array``, ``document``, ``chunks`` (more names below) or ``chunk``."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The document of `ls`."""

    ref: str
    snapshot_id: str
    path: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Content:
    """The document of `cat`, a metadata document or the bytes of a chunk."""

    ref: str
    snapshot_id: str
    key: str
    size_bytes: int
    document: JSON
    """None for a chunk."""
    base64: str
    """The stored bytes."""


class RawContent(Content):
    """Content whose stored bytes are printed, even if it is a metadata document."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ArrayUsage:
    """The space of the chunks of one array."""

    path: str
    chunks: int
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The document of `du`."""

    ref: str
    snapshot_id: str
    arrays: list[ArrayUsage]
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int


@dataclass(frozen=True, slots=True)
class Volume:
    """The document of `stats`."""

    url: str
    spec_version: int
    branches: int
    tags: int
    snapshots: int
    """Those that a branch or tag leads to."""
    native_bytes: int
    virtual_bytes: int
    inline_bytes: int
    unfinished_bytes: int
    """Of files that killed writers left on a local disk."""


async def tree(repository: Repository, ref: Ref = "main", *, as_of: AsOf = None) -> Hierarchy:
    """Show groups and arrays with shapes, data types, chunk shapes and numbers of chunks.

    JSON keys: ref, snapshot_id, nodes (each: path, type, shape, data_type, chunk_shape,
    dimension_names, chunks (in_grid, inline, native, virtual, size_bytes); all but path and type
    null for a group).
    """
    target, session = await open_session(repository, ref, as_of)
    stored = list(session.workspace.tree.nodes())
    nodes = await bounded_map(partial(_read_node, session), stored, limit=_CONCURRENT_ARRAYS)
    return Hierarchy(target.ref, str(target.snapshot_id), nodes)


async def _read_node(session: Session, node: StoredNode) -> Node:
    if node.array is None:
        return Node(node.path, "group")
    data_type, chunk_shape = _type_and_chunks(node.user_data)
    names = node.array.dimension_names
    return Node(
        node.path,
        "array",
        [dimension.array_length for dimension in node.array.dimensions],
        data_type,
        chunk_shape,
        None if names is None else list(names),
        await _count_chunks(session, node.path, math.prod(node.array.grid)),
    )


def _type_and_chunks(data: bytes) -> tuple[str, list[int] | None]:
    """Return the name of the data type and the chunk shape in an array's metadata document.

    A snapshot that is read does not say that its documents make sense: what is not understood is
    "unknown" and None, so that a tree with one damaged document is shown.
    """
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    data_type, chunk_shape = _inner(document, "data_type"), _inner(document, "chunk_grid")
    # What configures a data type is in the metadata document.
    data_type = _inner(data_type, "name") or data_type
    chunk_shape = _inner(_inner(chunk_shape, "configuration"), "chunk_shape")
    are_sizes = is_list(chunk_shape) and all(isinstance(it, int) for it in chunk_shape)
    return (
        data_type if isinstance(data_type, str) else "unknown",
        chunk_shape if are_sizes else None,
    )


def _inner(value: object, name: str) -> Any:
    return value.get(name) if is_object(value) else None


async def _count_chunks(session: Session, path: str, in_grid: int) -> ChunkCounts:
    from icechunk_async.format.manifest.chunk import Kind  # noqa: PLC0415  # slow to import

    refs = await session.workspace.all_refs(path)
    inline, native, virtual = (
        int((refs.kinds == kind).sum()) for kind in (Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL)
    )
    return ChunkCounts(in_grid, inline, native, virtual, int(refs.lengths.sum()))


async def ls(
    repository: Repository, path: _Path = "/", *, ref: RefOption = "main", as_of: AsOf = None
) -> Listing:
    """List the names directly below a path.

    JSON keys: ref, snapshot_id, path, entries (each: name, type, which is group, array, document,
    chunks or chunk).
    """
    from icechunk_async.format.paths import check_path, join  # noqa: PLC0415 -- slow to import

    path = check_path(path)
    target, session = await open_session(repository, ref, as_of)
    names = [name async for name in session.store.list_dir(path.strip("/"))]
    # An array has its document at least, so that a node is never without names.
    if not names and path != "/":
        raise NodeNotFoundError(
            f"There is nothing at {path!r} in snapshot {target.snapshot_id}. List what is there "
            "with 'ls' and a path above it.",
            path=path,
        )
    entries = [Entry(name, _entry_type(session, join(path, name))) for name in names]
    return Listing(target.ref, str(target.snapshot_id), path, entries)


def _entry_type(session: Session, path: str) -> str:
    from icechunk_async.zarr.keys import ChunkKey, parse_key  # noqa: PLC0415  # slow to import

    node = session.workspace.node(path)
    if node is not None:
        return "group" if node.array is None else "array"
    try:
        parsed = parse_key(path[1:])
    except InvalidStoreKeyError:
        return "group"  # nothing is stored for it, only for what is below it
    if not isinstance(parsed, ChunkKey):
        return "document"
    array = session.workspace.array(parsed.path).array
    return "chunk" if array is not None and len(array.grid) == len(parsed.coords) else "chunks"


async def cat(
    repository: Repository,
    key: _Key,
    *,
    ref: RefOption = "main",
    as_of: AsOf = None,
    raw: _Raw = False,
) -> Content:
    """Print a metadata document, or the stored bytes of a chunk.

    JSON keys: ref, snapshot_id, key, size_bytes, document (null for a chunk), base64 (the bytes).
    """
    from zarr.core.buffer import default_buffer_prototype  # noqa: PLC0415  # slow to import

    key = key.lstrip("/")
    target, session = await open_session(repository, ref, as_of)
    try:
        value = await session.store.get(key, default_buffer_prototype())
    except VirtualAccessError as error:
        # The library's message shows a dictionary for Python; here it is the option to add.
        missing = error.context.get("url_prefixes")
        if not isinstance(missing, tuple):  # it was authorised, and its store denied access
            raise
        prefixes = cast("tuple[str, ...]", missing)
        words = " ".join(f"--authorize {quote(prefix)}" for prefix in prefixes)
        raise VirtualAccessError(
            f"The bytes of {key!r} are not in the repository but below "
            f"{error.context['url_prefix']}, which has not been authorized. If you trust what the "
            f"repository refers to, add: {words}",
            **error.context,
        ) from error
    if value is None:
        raise NodeNotFoundError(
            f"There is nothing at {key!r} in snapshot {target.snapshot_id}; a chunk that was "
            "never written holds the array's fill value.",
            key=key,
        )
    data = value.to_bytes()
    document: JSON = None
    if key.rpartition("/")[2] == "zarr.json":
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            if not raw:
                raise FormatError(
                    f"{key!r} in snapshot {target.snapshot_id} is no JSON ({error}). Print what is "
                    "stored with --raw."
                ) from error
    encoded = base64.b64encode(data).decode()
    kind = RawContent if raw else Content
    return kind(target.ref, str(target.snapshot_id), key, len(data), document, encoded)


async def du(
    repository: Repository, ref: Ref = "main", *, path: _Below = "/", as_of: AsOf = None
) -> Usage:
    """Show how much the chunks of each array take in one snapshot.

    Bytes that several arrays or snapshots share are counted for each of them; stats counts them
    once.

    JSON keys: ref, snapshot_id, arrays (each: path, chunks, native_bytes, virtual_bytes,
    inline_bytes), native_bytes, virtual_bytes, inline_bytes.
    """
    from icechunk_async.format.paths import check_path  # noqa: PLC0415  # slow to import

    path = check_path(path)
    target, session = await open_session(repository, ref, as_of)
    tree = session.workspace.tree
    if path != "/" and tree.get(path) is None:
        raise NodeNotFoundError(
            f"There is nothing at {path!r} in snapshot {target.snapshot_id}; 'tree' shows what "
            "is there.",
            path=path,
        )
    # The path itself may be an array; those below it are what `tree.paths` gives.
    paths = sorted({path, *tree.paths(path)})
    found = [node.path for node in map(tree.get, paths) if node is not None and node.array]
    arrays = await bounded_map(partial(_measure, session), found, limit=_CONCURRENT_ARRAYS)
    return Usage(
        target.ref,
        str(target.snapshot_id),
        arrays,
        sum(it.native_bytes for it in arrays),
        sum(it.virtual_bytes for it in arrays),
        sum(it.inline_bytes for it in arrays),
    )


async def _measure(session: Session, path: str) -> ArrayUsage:
    from icechunk_async.format.manifest.chunk import Kind  # noqa: PLC0415  # slow to import

    refs = await session.workspace.all_refs(path)
    native, virtual, inline = (
        int(refs.lengths[refs.kinds == kind].sum())
        for kind in (Kind.NATIVE, Kind.VIRTUAL, Kind.INLINE)
    )
    return ArrayUsage(path, len(refs), native, virtual, inline)


async def stats(repository: Repository) -> Volume:
    """Show how much all chunks take that a branch or tag leads to, each counted once.

    JSON keys: url, spec_version, branches, tags, snapshots, native_bytes, virtual_bytes,
    inline_bytes, unfinished_bytes (left by killed writers on a local disk; gc removes them).
    """
    branches, tags = await repository.branches(), await repository.tags()
    known: set[SnapshotId] = set()
    for tip in (*branches.values(), *tags.values()):
        async for info in repository.ancestry(snapshot_id=tip):
            # Its history was walked from another ref.
            if info.id in known:
                break
            known.add(info.id)
    found = await repository.chunk_storage_stats()
    return Volume(
        repository.storage.description.url,
        repository.spec_version,
        len(branches),
        len(tags),
        len(known),
        found.native_bytes,
        found.virtual_bytes,
        found.inlined_bytes,
        found.unfinished_bytes,
    )


def show_hierarchy(document: Hierarchy, console: Console) -> None:
    """Print groups and arrays as a tree."""
    title = Text.assemble(plain(document.ref, "bold"), f" ({document.snapshot_id})")
    root = Tree(title, guide_style=QUIET)
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
    """Return where a node belongs; groups that only their children imply are added."""
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
        (f"  chunks {chunk_shape}: {_count(node.chunks)}", QUIET),
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


def _show_listing(document: Listing, console: Console) -> None:
    for entry in document.entries:
        # As `ls -F` marks what has more below it.
        folder = "/" if entry.type in {"group", "array", "chunks"} else ""
        console.print(plain(entry.name + folder, _TYPE_STYLES.get(entry.type, "")), soft_wrap=True)


def _show_content(content: Content, console: Console) -> None:
    if content.document is None or isinstance(content, RawContent):
        # Bytes, so that they can be piped on unchanged.
        sys.stdout.buffer.write(base64.b64decode(content.base64))
    else:
        print_json(content.document, console)


def _show_usage(document: Usage, console: Console) -> None:
    table = make_table("ARRAY", "CHUNKS", "NATIVE", "VIRTUAL", "INLINE")
    for column in table.columns[1:]:
        column.justify = "right"
    for it in document.arrays:
        sizes = (it.native_bytes, it.virtual_bytes, it.inline_bytes)
        table.add_row(plain(it.path), f"{it.chunks:,}", *map(decimal, sizes))
    sums = (document.native_bytes, document.virtual_bytes, document.inline_bytes)
    chunks = sum(it.chunks for it in document.arrays)
    table.add_row(Text("all", "bold"), f"{chunks:,}", *map(decimal, sums))
    console.print(table)


def _show_volume(document: Volume, console: Console) -> None:
    table = make_table("", "", header=False)
    table.add_row("repository", plain(document.url))
    table.add_row("format version", str(document.spec_version))
    table.add_row("branches", f"{document.branches:,}")
    table.add_row("tags", f"{document.tags:,}")
    table.add_row("snapshots", f"{document.snapshots:,}")
    table.add_row("native chunks", decimal(document.native_bytes))
    table.add_row("virtual chunks", decimal(document.virtual_bytes))
    table.add_row("inline chunks", decimal(document.inline_bytes))
    if document.unfinished_bytes:
        table.add_row("of killed writers", decimal(document.unfinished_bytes))
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(repository_command(tree, show_hierarchy))
    app.command()(repository_command(ls, _show_listing))
    app.command()(repository_command(cat, _show_content, authorizes=True))
    app.command()(repository_command(du, _show_usage))
    app.command()(repository_command(stats, _show_volume))
