"""Commands about what a snapshot holds: ``tree``, ``ls``, ``cat``."""

from __future__ import annotations

import base64
import json
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async._concurrency import bounded_map
from icechunk_async.cli import render
from icechunk_async.cli.documents import ChunkCounts, Content, Entry, Hierarchy, Listing, Node
from icechunk_async.cli.opening import on_repository, open_session
from icechunk_async.cli.options import (  # noqa: TC001  # Typer reads them at run time
    AsJson,
    AsOf,
    Debug,
    Options,
    Ref,
    Url,
)
from icechunk_async.cli.run import answer
from icechunk_async.errors import InvalidStoreKeyError, NodeNotFoundError, VirtualAccessError

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository, Session
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.snapshot import Node as StoredNode

__all__ = ["read_content", "read_hierarchy", "read_listing", "register"]

_CONCURRENT_ARRAYS = 16

_RefOption = Annotated[
    str, typer.Option("--ref", metavar="REF", help="A branch, a tag or a snapshot id.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (tree, ls, cat):
        app.command()(command)


def tree(
    url: Url,
    ref: Ref = "main",
    *,
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show groups and arrays with shapes, data types, chunk shapes and numbers of chunks.

    JSON keys: ref, snapshot_id, nodes (each: path, type, shape, data_type, chunk_shape,
    dimension_names, chunks (in_grid, inline, native, virtual, size_bytes); all but path and type
    null for a group).
    """
    work = on_repository(url, option, lambda it: read_hierarchy(it, ref, as_of))
    answer(work, render.hierarchy, as_json=as_json, debug=debug)


async def read_hierarchy(
    repository: Repository, ref: str, as_of: datetime | None = None
) -> Hierarchy:
    """Answer what ``tree`` shows."""
    target, session = await open_session(repository, ref, as_of)
    stored = list(session.workspace.tree.nodes())
    nodes = await bounded_map(partial(_node, session), stored, limit=_CONCURRENT_ARRAYS)
    return Hierarchy(target.ref, str(target.snapshot_id), nodes)


async def _node(session: Session, node: StoredNode) -> Node:
    if node.array is None:
        return Node(node.path, "group")
    document: dict[str, Any] = json.loads(node.user_data)
    names = node.array.dimension_names
    return Node(
        node.path,
        "array",
        [dimension.array_length for dimension in node.array.dimensions],
        _data_type(document.get("data_type", "unknown")),
        document.get("chunk_grid", {}).get("configuration", {}).get("chunk_shape"),
        None if names is None else list(names),
        await _count(session, node.path, math.prod(node.array.grid)),
    )


def _data_type(given: str | dict[str, Any]) -> str:
    """Answer a Zarr data type's name; what configures it is in the metadata document."""
    return given if isinstance(given, str) else str(given.get("name"))


async def _count(session: Session, path: str, in_grid: int) -> ChunkCounts:
    from icechunk_async.format.chunk_refs import Kind  # noqa: PLC0415  # slow to import

    refs = await session.workspace.all_refs(path)
    inline, native, virtual = (
        int((refs.kinds == kind).sum()) for kind in (Kind.INLINE, Kind.NATIVE, Kind.VIRTUAL)
    )
    return ChunkCounts(in_grid, inline, native, virtual, int(refs.lengths.sum()))


def ls(
    url: Url,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A node, or a folder of chunks.")
    ] = "/",
    *,
    ref: _RefOption = "main",
    as_of: AsOf = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the names directly below a path.

    JSON keys: ref, snapshot_id, path, entries (each: name, type, which is group, array, document,
    chunks or chunk).
    """
    work = on_repository(url, option, lambda it: read_listing(it, path, ref, as_of))
    answer(work, render.listing, as_json=as_json, debug=debug)


async def read_listing(
    repository: Repository, path: str, ref: str, as_of: datetime | None = None
) -> Listing:
    """Answer what ``ls`` shows."""
    from icechunk_async.repository.paths import check_path, join  # noqa: PLC0415  # slow to import

    path = check_path(path)
    target, session = await open_session(repository, ref, as_of)
    names = [name async for name in session.store.list_dir(path.strip("/"))]
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


def cat(
    url: Url,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Such as air/zarr.json or air/c/0/0.")],
    *,
    ref: _RefOption = "main",
    as_of: AsOf = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print a document's bytes as they are stored.")
    ] = False,
    authorize: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL_PREFIX",
            help="Read virtual chunks of the container with this prefix. May be repeated.",
        ),
    ] = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print a metadata document, or the bytes of a chunk as they are stored.

    JSON keys: ref, snapshot_id, key, size_bytes, document (null for a chunk), base64 (the bytes).
    """
    work = on_repository(
        url,
        option,
        lambda it: read_content(it, key, ref, as_of),
        authorize=dict.fromkeys(authorize or ()),
    )
    answer(work, _write if raw else _print_content, as_json=as_json, debug=debug)


async def read_content(
    repository: Repository, key: str, ref: str, as_of: datetime | None = None
) -> Content:
    """Answer what ``cat`` shows."""
    from zarr.core.buffer import default_buffer_prototype  # noqa: PLC0415  # slow to import

    key = key.lstrip("/")
    target, session = await open_session(repository, ref, as_of)
    try:
        value = await session.store.get(key, default_buffer_prototype())
    except VirtualAccessError as error:
        prefix = error.context["url_prefix"]
        raise VirtualAccessError(
            f"The bytes of {key!r} are not in the repository but below {prefix}, and nothing was "
            f"said about trusting that. If you do, add: --authorize {prefix}",
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
        document = json.loads(data)
    encoded = base64.b64encode(data).decode()
    return Content(target.ref, str(target.snapshot_id), key, len(data), document, encoded)


def _print_content(content: Content, console: Console) -> None:
    if content.document is None:
        _write(content, console)
    else:
        console.print_json(data=content.document, ensure_ascii=False)


def _write(content: Content, _console: Console) -> None:
    sys.stdout.buffer.write(base64.b64decode(content.base64))
