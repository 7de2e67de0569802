"""Pages for people: what a snapshot holds, where it comes from, what it changed, and a slice drawn.

One HTML file each, without script, for light and dark screens, phone and desktop.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from dataclasses import field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import numpy as np
from zarr.api.asynchronous import open_array  # pyright: ignore[reportUnknownVariableType]

from icechunk_async._display.cards import date, document, literal
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import IcechunkError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from icechunk_async import Repository, Session, SnapshotId
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Node
    from icechunk_async.gateway.requests import Ref

    type Links = Callable[[SnapshotId], str | None]

__all__ = ["Slice", "index_page", "snapshot_page"]

_MOST_NODES: Final = 500
_MOST_COMMITS: Final = 30
_MOST_CHANGES: Final = 50
_MOST_DRAWN: Final = 3
"""Arrays with a picture."""
_SIDE: Final = 256
"""Pixels of a picture along its longer side, at most."""
# Of chunks that are decoded for one picture: 32 MiB of doubles.
_MOST_CELLS: Final = 1 << 22
_MOST_CHUNKS: Final = 64
"""Of one picture."""
_LARGEST_CHUNK: Final = 1 << 24
"""Cells of a chunk that is decoded for a picture, at most; even one never written takes memory."""
_STYLE: Final = """
nav { margin-bottom: 1rem; } a { color: inherit; }
.log { list-style: none; padding: 0; } .log li { margin-bottom: 0.6rem; }
figure { margin: 0.6rem 0 1.4rem; } figcaption { color: var(--quiet); font-size: 0.85rem; }
img { image-rendering: pixelated; width: 100%; max-width: 40rem; height: auto; max-height: 32rem;
  display: block; border: 1px solid var(--line); }
.scale { height: 0.7rem; max-width: 40rem; margin-top: 0.4rem;
  background: linear-gradient(90deg, #440154, #3b528b, #21918c, #5ec962, #fde725); }
.ends { display: flex; justify-content: space-between; max-width: 40rem; font-size: 0.85rem; }
"""
_COLOURS: Final = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float64
)
"""The colours of low to high values, as in the scale."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of an array over its last two axes, drawn; or why there is no picture."""

    path: str
    caption: str
    png: bytes = b""
    low: float = 0.0
    high: float = 0.0


@dataclass(slots=True)
class _Page:
    """The contents of a page of a snapshot."""

    ref: Ref
    info: SnapshotInfo | None
    """None for a snapshot outside of the history."""
    session: Session
    links: Links
    history: list[SnapshotInfo] = field(default_factory=list["SnapshotInfo"])
    diff: Diff | None = None
    slices: list[Slice] = field(default_factory=list[Slice])


def index_page(title: str, targets: Mapping[Ref, SnapshotId]) -> str:
    """Return the page above all refs.

    Args:
        title: of the page.
        targets: refs that have pages, and the snapshots that they name.
    """
    body = [f"<h1>{literal(title)}</h1>", "<p>A versioned Zarr hierarchy, read-only.</p>"]
    for kind, heading in (("branch", "Branches"), ("tag", "Tags"), ("snapshot", "Snapshots")):
        refs = sorted((it for it in targets if it.kind == kind), key=lambda it: it.name)
        if not refs:
            continue
        rows = (
            f'<tr><td><a href="{literal(f"./{it.segment}/")}">{literal(it.name)}</a></td>'
            f"<td>{literal(targets[it])}</td></tr>"
            for it in refs
        )
        body += [f"<h2>{heading}</h2>", f'<div class="wide"><table>{"".join(rows)}</table></div>']
    return document(title, body, style=_STYLE)


async def snapshot_page(repository: Repository, session: Session, ref: Ref, links: Links) -> str:
    """Return the page of the snapshot that a session reads.

    Args:
        repository: of the session.
        session: read-only.
        ref: by which it was asked for.
        links: where the page of another snapshot is, relative to this one; None: nowhere.

    Cost: the requests of `Repository.ancestry` and `Repository.diff`, and the chunks of at most
    three slices, 64 each. Arrays whose chunks have more than 16 million cells are not read.
    """
    page = _Page(ref, None, session, links)
    try:
        page.info = await repository.lookup_snapshot(session.snapshot_id)
    except NotFoundError:
        pass
    else:
        async for info in repository.ancestry(snapshot_id=session.snapshot_id):
            # One more than is shown, which says that there are earlier ones.
            page.history.append(info)
            if len(page.history) > _MOST_COMMITS:
                break
        page.diff = await _diff(repository, page.info)
    arrays = [it for it in session.workspace.tree.nodes() if it.array is not None]
    arrays.sort(key=lambda it: -len(_shape(it)))  # of one axis are mostly coordinates
    for node in islice(filter(_is_drawn, arrays), _MOST_DRAWN):  # parses few documents
        page.slices.append(await _draw(session, node))
    body = [*_head(page), *_tree(page), *_slices(page), *_changes(page), *_history(page)]
    return document(_title(page), body, style=_STYLE)


async def _diff(repository: Repository, info: SnapshotInfo) -> Diff | None:
    """Return the changes of the snapshot; None for the first one, or if the log is gone."""
    if info.parent_id is None:
        return None
    try:
        return await repository.diff(from_snapshot_id=info.parent_id, to_snapshot_id=info.id)
    except IcechunkError:  # a page with the rest is better than none
        return None


def _shape(node: Node) -> tuple[int, ...]:
    assert node.array is not None
    return tuple(it.array_length for it in node.array.dimensions)


def _is_drawn(node: Node) -> bool:
    if node.array is None:
        return False
    shape = _shape(node)
    kind = _document(node).get("data_type")
    numeric = isinstance(kind, str) and kind.startswith(("int", "uint", "float"))
    return numeric and bool(shape) and all(shape) and shape[-1] > 1


def _document(node: Node) -> dict[str, Any]:
    try:
        found = json.loads(node.user_data)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _member(value: object, name: str) -> Any:
    """Return a member of a JSON object; None of another value, or if it is not there."""
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


async def _draw(session: Session, node: Node) -> Slice:
    """Read and draw a part of an array; an error becomes the caption."""
    assert node.array is not None
    shape = _shape(node)
    chunks = [-(-size // count) for size, count in zip(shape, node.array.grid, strict=True)]
    window = _window(shape, chunks)
    where = ", ".join([*("0" for _ in shape[: -len(window)]), *(f"0:{size}" for size in window)])
    try:
        array = await open_array(store=session.store, path=node.path[1:], mode="r")
        if max(math.prod(window), math.prod(array.chunks)) > _LARGEST_CHUNK:
            return Slice(node.path, "No picture: its chunks are too large to draw.")
        selection: tuple[int | slice[int, int], ...] = (
            *((0,) * (len(shape) - len(window))),
            *(slice(0, size) for size in window),
        )
        found = np.asarray(await array.getitem(selection), np.float64)
    except Exception as error:  # noqa: BLE001 -- codecs and data types of others
        return Slice(node.path, f"No picture: it cannot be read here ({type(error).__name__}).")
    values = found.reshape((1, -1) if found.ndim == 1 else found.shape)
    step = max(1, -(-max(values.shape) // _SIDE))
    # Every n-th cell, not averages: the picture shows values that are there.
    values = values[::step, ::step]
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Slice(node.path, f"[{where}] has no finite value.")
    low, high = float(finite.min()), float(finite.max())
    every = "" if step == 1 else f", every {step}th cell"
    unit = _member(_document(node).get("attributes"), "units")
    caption = f"[{where}]{every}" + (f", in {unit}" if isinstance(unit, str) else "")
    return Slice(node.path, caption, _png(_coloured(values, low, high)), low, high)


def _window(shape: tuple[int, ...], chunks: list[int]) -> tuple[int, ...]:
    """Return the number of cells to read along the last axes: all, or few chunks."""
    window = list(shape[-2:])
    sizes = chunks[-2:]

    def too_much() -> bool:
        counts = [-(-size // chunk) for size, chunk in zip(window, sizes, strict=True)]
        count, cells = math.prod(counts), math.prod(counts) * math.prod(sizes)
        return count > _MOST_CHUNKS or (count > 1 and cells > _MOST_CELLS)

    # The axis that spans most chunks is halved, so that this ends: one chunk is never too much.
    while too_much():
        axis = max(range(len(window)), key=lambda it: window[it] / sizes[it])
        window[axis] = max(window[axis] // 2, 1)
    return tuple(window)


def _coloured(values: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Return pixels ``(height, width, 4)``; those without a finite value are clear."""
    known = np.isfinite(values)
    # Halved first: the difference of the greatest and the least number has no finite value.
    share = np.where(known, values / 2 - low / 2, 0.0) / ((high / 2 - low / 2) or 1.0)
    places = np.clip(share, 0, 1) * (len(_COLOURS) - 1)
    pixels = np.empty((*values.shape, 4), np.uint8)
    for channel in range(3):
        pixels[..., channel] = np.interp(places, range(len(_COLOURS)), _COLOURS[:, channel])
    pixels[..., 3] = np.where(known, 255, 0)
    return pixels


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an image of red, green, blue and alpha."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 4 * width), np.uint8)  # a zero before each row: no filter
    rows[:, 1:] = pixels.reshape(height, -1)

    def part(name: bytes, data: bytes) -> bytes:
        checked = name + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", data) + part(b"IEND", b"")


def _title(page: _Page) -> str:
    if page.ref.kind == "snapshot":
        return f"Snapshot {page.session.snapshot_id}"
    return f"{page.ref.kind.capitalize()} {page.ref.name}"


def _link(page: _Page, snapshot_id: SnapshotId) -> str:
    target = None if snapshot_id == page.session.snapshot_id else page.links(snapshot_id)
    name = literal(snapshot_id)
    return name if target is None else f'<a href="{literal(target)}">{name}</a>'


def _head(page: _Page) -> Iterator[str]:
    yield '<nav><a href="../">All branches and tags</a></nav>'
    yield f"<h1>{literal(_title(page))}</h1>"
    info = page.info
    if info is None:
        yield '<p class="quiet">This snapshot is outside of the history.</p>'
        return
    if info.message:
        yield f"<pre>{literal(info.message)}</pre>"
    rows = [("Snapshot", literal(info.id)), ("Written", date(info.flushed_at))]
    if info.parent_id is not None:
        rows.append(("Parent", _link(page, info.parent_id)))
    rows += [
        (literal(name), literal(value if isinstance(value, str) else json.dumps(value)))
        for name, value in info.metadata.items()
    ]
    cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    yield f'<div class="wide"><table>{cells}</table></div>'


def _tree(page: _Page) -> Iterator[str]:
    yield "<h2>Groups and arrays</h2>"
    nodes = list(page.session.workspace.tree.nodes())
    heads = "".join(f"<th>{it}</th>" for it in ("Name", "Shape", "Type", "Chunks"))
    yield f'<div class="wide"><table><tr>{heads}</tr>'
    for node in nodes[:_MOST_NODES]:
        depth = 0 if node.path == "/" else node.path.count("/")
        name = node.path.rpartition("/")[2] or "/"
        document_of = f"{'' if node.path == '/' else quote(node.path[1:]) + '/'}zarr.json"
        anchor = f'<a href="{literal(document_of)}">{literal(name)}</a>'
        # Bounded: paths of strangers may be as deep as they like.
        indent = f"padding-left: {0.8 * min(depth, 20):.1f}rem"
        name_cell = f'<td class="short" style="{indent}">{anchor}</td>'
        if node.array is None:
            yield f'<tr>{name_cell}<td colspan="3" class="quiet">group</td></tr>'
        else:
            yield f"<tr>{name_cell}{_array_cells(node)}</tr>"
    yield "</table></div>"
    if len(nodes) > _MOST_NODES:
        yield f'<p class="quiet">And {len(nodes) - _MOST_NODES:,} more.</p>'


def _array_cells(node: Node) -> str:
    assert node.array is not None
    names = node.array.dimension_names or (None,) * len(node.array.dimensions)
    axes = [
        f"{size:,}" if name is None else f"{literal(name)}: {size:,}"
        for name, size in zip(names, _shape(node), strict=True)
    ]
    found = _document(node)
    kind = found.get("data_type")
    kind = kind if isinstance(kind, str) else _member(kind, "name")
    grid = " &times; ".join(f"{it:,}" for it in node.array.grid) or "1"
    return f"<td>{', '.join(axes) or 'one cell'}</td><td>{literal(kind or '')}</td><td>{grid}</td>"


def _slices(page: _Page) -> Iterator[str]:
    if not page.slices:
        return
    yield "<h2>Values</h2>"
    for it in page.slices:
        yield f"<h3>{literal(it.path)}</h3><figure>"
        if it.png:
            data = base64.b64encode(it.png).decode()
            yield f'<img alt="Values of {literal(it.path)}" src="data:image/png;base64,{data}">'
            ends = f"<span>{it.low:.6g}</span><span>{it.high:.6g}</span>"
            yield f'<div class="scale"></div><div class="ends">{ends}</div>'
        yield f"<figcaption>{literal(it.caption)}</figcaption></figure>"


def _changes(page: _Page) -> Iterator[str]:
    diff = page.diff
    if diff is None:
        return
    yield "<h2>Changes since the parent</h2>"
    rows = [
        *(
            (f"{what} {kind}", path, "")
            for what, kind, paths in (
                ("new", "group", diff.new_groups),
                ("new", "array", diff.new_arrays),
                ("deleted", "group", diff.deleted_groups),
                ("deleted", "array", diff.deleted_arrays),
                ("metadata of", "group", diff.updated_groups),
                ("metadata of", "array", diff.updated_arrays),
            )
            for path in sorted(paths)
        ),
        *(("moved", f"{source} -> {target}", "") for source, target in diff.moved_nodes),
        *(
            ("chunks of", path, f"{len(coords):,}")
            for path, coords in sorted(diff.updated_chunks.items())
        ),
    ]
    if not rows:
        yield "<p>Nothing changed.</p>"
        return
    yield '<div class="wide"><table><tr><th>Change</th><th>Path</th><th>Chunks</th></tr>'
    for what, path, count in rows[:_MOST_CHANGES]:
        yield (
            f'<tr><td class="short">{what}</td><td>{literal(path)}</td>'
            f'<td class="short">{count}</td></tr>'
        )
    yield "</table></div>"
    if len(rows) > _MOST_CHANGES:
        yield f'<p class="quiet">And {len(rows) - _MOST_CHANGES:,} more.</p>'


def _history(page: _Page) -> Iterator[str]:
    if not page.history:
        return
    yield "<h2>History</h2>"
    yield '<ol class="log">'
    for info in page.history[:_MOST_COMMITS]:
        # Messages may be megabytes, and the page shows one line of each.
        line = info.message.split("\n", 1)[0][:200]
        yield (
            f"<li>{literal(line) or '(no message)'}<br>"
            f'<span class="quiet">{date(info.flushed_at)}</span> '
            f"<code>{_link(page, info.id)}</code></li>"
        )
    yield "</ol>"
    if len(page.history) > _MOST_COMMITS:
        yield '<p class="quiet">And earlier ones.</p>'
