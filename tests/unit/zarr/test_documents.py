"""Metadata documents: what is stored and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository
from icechunk_async.conflicts import AppendSolver
from icechunk_async.errors import FormatError, InvalidInputError, InvalidMetadataError
from icechunk_async.format.snapshot import Dimension
from icechunk_async.format.zarr_document import parse_document
from tests.helpers import NO_ARRAY_DOCUMENTS, array_document, memory_url, set_document
from tests.unit.zarr.queries.truth import commit_array

if TYPE_CHECKING:
    from icechunk_async import Session


def _regular(shape: list[Any], chunks: list[int], **more: Any) -> bytes:
    return array_document(tuple(shape), tuple(chunks), **more)


def _rectilinear(shape: tuple[int, ...], axes: list[Any]) -> bytes:
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": axes}}
    return array_document(shape, shape, chunk_grid=grid)


@pytest.mark.parametrize(
    ("shape", "chunks", "counts"),
    [
        ([], [], []),
        ([10], [3], [4]),
        ([9], [3], [3]),
        ([0], [3], [0]),
        ([0], [0], [0]),
        ([1, 5, 7], [1, 2, 100], [1, 3, 1]),
        ([(1 << 64) - 1], [1 << 33], [1 << 31]),
    ],
)
def test_regular_grids_count_their_chunks(
    shape: list[int], chunks: list[int], counts: list[int]
) -> None:
    """The last chunk may reach beyond the array."""
    document = parse_document(_regular(shape, chunks), "/a")
    assert document.array is not None
    assert document.regular_grid
    assert list(document.array.dimensions) == [
        Dimension(*pair) for pair in zip(shape, counts, strict=True)
    ]


def test_rectilinear_grids_count_sizes_and_runs() -> None:
    """An axis lists sizes and runs of them, or is one size."""
    document = parse_document(_rectilinear((10, 10, 10), [[2, 3, 5], [[2, 4], 2], 4]), "/a")
    assert document.array is not None
    assert not document.regular_grid
    assert document.array.grid == (3, 5, 3)


def test_dimension_names_may_be_missing_null_or_empty() -> None:
    """Empty counts as unnamed."""
    named = parse_document(_regular([1, 1, 1], [1, 1, 1], dimension_names=["x", None, ""]), "/a")
    assert named.array is not None
    assert named.array.dimension_names == ("x", None, None)
    unnamed = parse_document(_regular([1], [1], dimension_names=None), "/a")
    assert unnamed.array is not None
    assert unnamed.array.dimension_names is None


def test_group_document_has_no_array() -> None:
    """Its attributes are its own affair."""
    assert parse_document(b'{"node_type": "group", "attributes": {"x": [1]}}', "/").array is None


def _with_grid(grid: Any) -> bytes:
    return _regular([4], [2], chunk_grid=grid)


def _without(key: str) -> bytes:
    document = json.loads(_regular([4], [2]))
    del document[key]
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (_regular([4], [2]).decode().encode("utf-16"), "no JSON"),
        (_regular([4], [2]).decode().encode("utf-32"), "no JSON"),
        (b"\xef\xbb\xbf" + _regular([4], [2]), "no JSON"),
        (b'{"shape": [1], ' + _regular([4], [2])[1:], "'shape' is given twice"),
        (_regular([4], [2]).replace(b'"name"', b'"name": "x", "name"'), "'name' is given twice"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"node_type": "array", "zarr_format": 2}', "zarr_format is 2"),
        (b'{"zarr_format": 3}', "node_type is None"),
        (b'{"node_type": "table"}', "node_type is 'table'"),
        (_without("shape"), "shape is None"),
        (_without("chunk_grid"), "no chunk_grid"),
        (_regular([-1], [1]), "shape"),
        (_regular([1 << 64], [1 << 40]), "shape"),
        (_regular([True], [2]), "shape"),
        (_regular(["4"], [2]), "shape"),
        (_regular([1] * 65, [1] * 65), "65 axes"),
        (_regular([4, 4], [2]), "needs 2 sizes"),
        (_regular([4], [0]), "size of 0"),
        (_with_grid(None), "no chunk_grid"),
        (_with_grid({"name": "regular"}), "no chunk_grid"),
        (
            _with_grid({"name": "hexagonal", "configuration": {}}),
            "'hexagonal', not 'regular' or 'rectilinear'",
        ),
        (_regular([1 << 40], [1]), "at most 4294967295"),
        (_regular([4], [2], chunk_key_encoding={"name": "v2"}), "chunk_key_encoding"),
        (
            _regular(
                [4],
                [2],
                chunk_key_encoding={"name": "default", "configuration": {"separator": "."}},
            ),
            "chunk_key_encoding",
        ),
        (_regular([4], [2], dimension_names=["x", "y"]), "needs 1 names"),
        (_regular([4], [2], dimension_names=[1]), "dimension_names"),
        (_regular([4], [2], dimension_names=["\ud800"]), "lone surrogates"),
        (_rectilinear((4,), [[2, "x"]]), "sizes and runs"),
        (_rectilinear((4,), [[[1, 2, 3]]]), "sizes and runs"),
        (_rectilinear((4,), ["x"]), "sizes and runs"),
        (_rectilinear((4,), []), "need 1 axes"),
    ],
)
def test_what_cannot_be_stored_is_refused(document: bytes, problem: str) -> None:
    """With the path and the reason."""
    with pytest.raises(InvalidMetadataError, match=problem) as caught:
        parse_document(document, "/some/path")
    assert "'/some/path'" in str(caught.value)
    assert "Nothing was changed" in str(caught.value)


# Documents in a snapshot


DAMAGED: list[bytes | dict[str, Any]] = [
    *NO_ARRAY_DOCUMENTS,
    {"chunk_grid": {"name": "regular"}},
    {"attributes": 5},
    {"attributes": [1]},
]


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
async def test_damaged_documents_are_format_errors_for_those_who_ask_for_values(
    damage: bytes | dict[str, Any],
) -> None:
    """Other arrays are analyzed all the same."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.arange(8), (4,))
        await commit_array(repository, np.arange(8), (4,), "/b")
        session = await repository.writable_session("main")
        set_document(session, "/a", damage)
        await session.commit("damaged")
        session = await repository.readonly_session("main")
        with pytest.raises(FormatError, match="'/a' is not that of an array of 1 axes"):
            await session.aggregate("a", "max")
        with pytest.raises(FormatError, match="'/a'"):
            await session.where("a > 3")
        done = await repository.analyze()
        assert (done.arrays, done.chunks, len(done.left_out)) == (1, 2, 1)
        assert "'/a'" in done.left_out[0]


@pytest.mark.parametrize(
    "foreign",
    [
        {"data_type": 5},
        {"data_type": "unheard-of"},
        {"codecs": 5},
        {"codecs": [{"name": "unheard-of"}]},
        {"fill_value": {}},
    ],
    ids=range(5),
)
async def test_arrays_that_zarr_does_not_open_cannot_be_queried(foreign: dict[str, Any]) -> None:
    """The message has Zarr's reason: an extension may be missing where the repository is right."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.arange(8), (4,))
        session = await repository.writable_session("main")
        set_document(session, "/a", foreign)
        with pytest.raises(InvalidInputError, match="Zarr does not open the array"):
            await session.aggregate("a", "max")


@pytest.mark.parametrize("damage", DAMAGED, ids=range(len(DAMAGED)))
async def test_damaged_documents_are_format_errors_for_appends(
    damage: bytes | dict[str, Any],
) -> None:
    """In the base of both sides as well as on the branch."""
    async with Repository.create(memory_url()) as repository:
        await commit_array(repository, np.arange(8), (4,), names=("time",))
        right = (await repository.readonly_session("main")).workspace.base.nodes["/a"]

        async def appended() -> Session:
            session = await repository.writable_session("main")
            document = json.dumps(json.loads(right.user_data) | {"shape": [12]}).encode()
            session.workspace.set_node("/a", document, parse_document(document, "/a").array)
            await session.workspace.write_chunk("/a", (2,), bytes(32))
            return session

        async def spoil() -> None:
            session = await repository.writable_session("main")
            set_document(session, "/a", damage)
            await session.workspace.write_chunk("/a", (1,), bytes(32))
            await session.commit("damaged")

        late = await appended()
        await spoil()
        with pytest.raises(FormatError, match="'/a'"):
            await late.commit("on a damaged branch", rebase_with=AppendSolver("time"))
        early, late = await appended(), await appended()
        await early.commit("append")
        with pytest.raises(FormatError, match="'/a'"):
            await late.commit("on a damaged base", rebase_with=AppendSolver("time"))
