"""Edits of a session at random, as plain data, and making them through either package."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from zarr.core.sync import sync

from tests.interop.sides import buffer, document
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from tests.interop.sides import Side

__all__ = ["BASE", "EDITS", "FORK_EDITS", "GROUPS", "RANKS", "Edit", "edit"]

GROUPS = ("", "g", "g/h", "k")
RANKS = {"a": 1, "g/x": 1, "g/h/y": 2, "k/z": 2}
"""Paths of arrays, and their numbers of dimensions."""
PATHS = (*GROUPS, *RANKS)
SIZES = (4, 40)
"""Sizes of chunks in bytes: one inline, one in a separate object."""


@dataclass(frozen=True)
class Edit:
    """One call that changes a session."""

    kind: str
    path: str
    values: tuple[Any, ...] = ()


_GROUP = st.builds(Edit, st.just("group"), st.sampled_from(GROUPS), st.tuples(st.integers(0, 3)))
_ANYWHERE = st.builds(Edit, st.just("group"), st.sampled_from(PATHS), st.tuples(st.integers(0, 3)))
_SHAPES = st.tuples(
    st.lists(st.integers(1, 8), min_size=2, max_size=2), st.integers(0, 2), st.booleans()
)
_ARRAY = st.builds(Edit, st.just("array"), st.sampled_from(tuple(RANKS)), _SHAPES)
_COORDS = st.tuples(st.integers(0, 4), st.integers(0, 4))
_CHUNK = st.builds(
    Edit,
    st.just("chunk"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(_COORDS, st.sampled_from(SIZES), st.integers(0, 255)),
)
_VIRTUAL = st.builds(
    Edit,
    st.just("virtual"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(
        _COORDS,
        st.sampled_from(("data", "data", "data", "sub/more", "missing")),
        st.integers(0, 60),
        st.sampled_from((4, 8, 40)),
        st.sampled_from((None, None, "past", "future")),
    ),
)
_FOREIGN = st.builds(
    Edit,
    st.just("foreign"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(_COORDS, st.booleans()),
)
_REFS = st.builds(
    Edit,
    st.just("refs"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True), st.integers(0, 40)),
)
_DROP = st.builds(Edit, st.just("drop chunk"), st.sampled_from(tuple(RANKS)), st.tuples(_COORDS))
_DELETE = st.builds(Edit, st.just("delete"), st.sampled_from(PATHS))
_DELETE_ALL = st.builds(Edit, st.just("delete all"), st.sampled_from(PATHS))
_SHIFT = st.builds(
    Edit,
    st.just("shift"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(st.tuples(st.integers(-2, 2), st.integers(-2, 2))),
)
_REINDEX = st.builds(
    Edit,
    st.just("reindex"),
    st.sampled_from(tuple(RANKS)),
    st.tuples(st.integers(0, 4), st.booleans()),
)
_MOVE = st.builds(
    Edit,
    st.just("move"),
    st.sampled_from(PATHS),
    st.tuples(st.sampled_from((*PATHS, "m", "g/m", "m/n"))),
)

_COMMON = (_GROUP, _GROUP, _ARRAY, _ARRAY, _ARRAY, *[_CHUNK] * 4, _VIRTUAL, _REFS, _DROP)
FORK_EDITS = st.lists(st.one_of(*_COMMON, _DELETE), min_size=1, max_size=4)
"""Edits of forks: no array takes the path of a group."""
EDITS = st.lists(
    st.one_of(
        *_COMMON, _ANYWHERE, _FOREIGN, _DELETE, _DELETE_ALL, _DELETE_ALL, _SHIFT, _REINDEX, _MOVE
    ),
    min_size=1,
    max_size=8,
)
"""Edits of sessions."""

BASE = (
    *(Edit("group", path, (0,)) for path in GROUPS),
    *(Edit("array", path, ([8, 6], 0, True)) for path in RANKS),
    *(
        Edit("chunk", path, ((place, place % 2), SIZES[place % 2], place))
        for path in RANKS
        for place in range(3)
    ),
)
"""A hierarchy to begin with."""


def _key(path: str) -> str:
    return f"{path}/zarr.json".lstrip("/")


def _chunk(path: str, coords: tuple[int, ...]) -> str:
    return "/".join([path, "c", *map(str, coords[: RANKS[path]])])


def _array(path: str, shape: list[int], value: int, named: bool) -> dict[str, Any]:  # noqa: FBT001
    rank = RANKS[path]
    made: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape[:rank],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2] * rank}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {"value": value},
    }
    return {**made, "dimension_names": ["x", None][:rank]} if named else made


def edit(side: Side, session: Any, given: Edit) -> object:  # noqa: C901, PLR0912
    """Make an edit; errors are those of the package."""
    store, path, values = session.store, given.path, given.values
    # After two changes the official engine also lists chunks that never were.
    reshapes = given.kind in {"shift", "reindex"}
    if reshapes and f"/{path}" in session.status().updated_chunks:
        return None
    match given.kind:
        case "group":
            made = {"zarr_format": 3, "node_type": "group", "attributes": {"value": values[0]}}
            _write(side, store, _key(path), document(made))
        case "array":
            _write(side, store, _key(path), document(_array(path, *values)))
        case "chunk":
            coords, size, byte = values
            _write(side, store, _chunk(path, coords), buffer(bytes([byte]) * size))
        case "virtual" | "foreign":
            return _virtual(side, store, given)
        case "refs":
            return _refs(side, store, given)
        case "drop chunk":
            sync(store.delete(_chunk(path, values[0])))
        case "delete":
            sync(store.delete(_key(path)))
        case "delete all":
            if sync(store.exists(_key(path))):  # else the official engine leaves what is below
                sync(store.delete_dir(path))
        case "shift":
            session.shift_array(f"/{path}", values[0][: RANKS[path]])
        case "reindex":
            _reindex(session, path, *values)
        case "move":
            session.move(f"/{path}", f"/{values[0]}")
        case kind:
            raise AssertionError(kind)
    return None


def _write(side: Side, store: Any, key: str, value: Any) -> None:
    """Set a key; the official engine leaves the object of a chunk behind that it refuses."""
    before = side.chunk_files()
    try:
        sync(store.set(key, value))
    except Exception:
        left = side.chunk_files() - before
        assert not left or side.package is icechunk
        for name in left:
            (side.place / "chunks" / name).unlink()
        raise


def _virtual(side: Side, store: Any, given: Edit) -> object:
    if given.kind == "foreign":
        coords, validate = given.values
        location = "s3://nowhere/data"
        return store.set_virtual_ref(
            _chunk(given.path, coords), location, offset=0, length=4, validate_container=validate
        )
    coords, name, offset, length, guard = given.values
    days = {None: None, "past": -5, "future": 5}[guard]
    checksum = None if days is None else _day() + dt.timedelta(days=days)
    return store.set_virtual_ref(
        _chunk(given.path, coords),
        side.url + name,
        offset=offset,
        length=length,
        checksum=checksum,
    )


def _day() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _refs(side: Side, store: Any, given: Edit) -> object:
    rows, offset = given.values
    # The last row first: the official engine stores those before one that it refuses.
    specs = [
        side.package.VirtualChunkSpec([row, 0][: RANKS[given.path]], side.url + "data", offset, 4)
        for row in sorted(rows, reverse=True)
    ]
    return store.set_virtual_refs(f"/{given.path}", specs)


def _reindex(session: Any, path: str, modulus: int, backward: bool) -> None:  # noqa: FBT001
    def forward(index: Any) -> list[int] | None:
        found = [modulus - it for it in index]
        return found if min(found) >= 0 else None

    session.reindex_array(f"/{path}", forward, forward if backward else None)
