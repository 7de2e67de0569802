"""``tree``, ``ls``, ``cat``."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async import Repository
from tests.helpers import array_document, group_document, write
from tests.unit.cli.conftest import VIRTUAL_BYTES, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def test_tree_describes_every_node(sample: Sample) -> None:
    """Shapes, data types, chunk shapes, names of axes, and chunks by where they are."""
    document = run("tree", sample.path, "--json").json
    assert document["snapshot_id"] == sample.tip
    nodes = {node["path"]: node for node in document["nodes"]}
    assert list(nodes) == ["/", "/deep", "/deep/large", "/outside", "/small"]
    assert nodes["/deep"] == {
        "path": "/deep",
        "type": "group",
        "shape": None,
        "data_type": None,
        "chunk_shape": None,
        "dimension_names": None,
        "chunks": None,
    }
    small = nodes["/small"]
    assert (small["shape"], small["chunk_shape"]) == ([4, 6], [2, 3])
    assert (small["data_type"], small["dimension_names"]) == ("int32", ["y", "x"])
    assert small["chunks"] == {
        "in_grid": 4,
        "inline": 2,
        "native": 0,
        "virtual": 0,
        "size_bytes": small["chunks"]["size_bytes"],
    }
    assert nodes["/deep/large"]["chunks"]["native"] == 2
    assert nodes["/deep/large"]["chunks"]["size_bytes"] == 1600
    assert nodes["/outside"]["chunks"]["virtual"] == 1


def test_tree_draws_a_tree(sample: Sample) -> None:
    """Arrays below their groups, with what is missing of their chunks."""
    text = run("tree", sample.path).stdout
    assert text.startswith(f"main ({sample.tip})")
    assert "small (y: 4, x: 6) int32  chunks (2, 3): 2 inline of 4" in text
    assert "large (200) float64  chunks (100): 2 native, 1.6 kB" in text
    assert text.index("deep/") < text.index("large")


def test_tree_shows_an_earlier_snapshot(sample: Sample) -> None:
    """The first one is empty."""
    outcome = run("tree", sample.path, sample.first)
    assert outcome.exit_code == 0
    assert "The hierarchy is empty." in outcome.stdout


def test_tree_shows_groups_that_are_only_implied(tmp_path: Path) -> None:
    """An array below groups without documents, and one at the root."""

    async def fill(name: str, key: str, document: bytes) -> None:
        async with Repository.create(tmp_path / name) as repository:
            session = await repository.writable_session("main")
            await write(session, key, document)
            await session.commit("fill")

    array = array_document((2,), (1,), data_type={"name": "numpy.datetime64"})
    asyncio.run(fill("implied", "a/b/array/zarr.json", array))
    lines = run("tree", tmp_path / "implied").stdout.splitlines()
    assert [line.strip(" └─") for line in lines[1:3]] == ["a/", "b/"]
    assert "array (2) numpy.datetime64  chunks (1): none of 2 stored" in lines[3]
    assert run("ls", tmp_path / "implied", "a").stdout.split() == ["b/"]
    asyncio.run(fill("root", "zarr.json", array_document((), ())))
    assert "/ () uint8  chunks (): none of 1 stored" in run("tree", tmp_path / "root").stdout


@pytest.mark.parametrize(
    "document",
    [
        b"{",
        b"[" * 100_000,
        b"[]",
        b'{"chunk_grid": 7, "data_type": []}',
        b'{"chunk_grid": {"configuration": {"chunk_shape": ["\\u001b[31m"]}}, "data_type": {}}',
    ],
)
def test_a_damaged_document_is_shown_and_crashes_nothing(tmp_path: Path, document: bytes) -> None:
    """The rest of the tree is there; what is stored can be printed."""

    async def fill() -> None:
        async with Repository.create(tmp_path / "damaged") as repository:
            session = await repository.writable_session("main")
            await write(session, "a/zarr.json", array_document((2,), (1,)))
            await write(session, "b/zarr.json", array_document((4,), (2,)))
            damaged = session.workspace.node("/a")
            assert damaged is not None
            session.workspace.set_node("/a", document, damaged.array)
            await session.commit("fill")

    asyncio.run(fill())
    lines = run("tree", tmp_path / "damaged").stdout.splitlines()
    assert "a (2) unknown  chunks several shapes: none of 2 stored" in lines[1]
    assert "b (4) uint8  chunks (2): none of 2 stored" in lines[2]
    assert run("cat", tmp_path / "damaged", "a/zarr.json", "--raw").stdout_bytes == document
    shown = run("cat", tmp_path / "damaged", "a/zarr.json")
    if document.startswith((b"{}", b"[]", b'{"')):
        assert (shown.exit_code, json.loads(shown.stdout)) == (0, json.loads(document))
    else:
        assert shown.exit_code == 1
        assert "is no JSON" in " ".join(shown.stderr.split())


@pytest.mark.parametrize(
    ("path", "entries"),
    [
        ("/", {"zarr.json": "document", "deep": "group", "outside": "array", "small": "array"}),
        ("deep", {"zarr.json": "document", "large": "array"}),
        ("/small/", {"zarr.json": "document", "c": "chunks"}),
        ("small/c", {"0": "chunks"}),
        ("small/c/0", {"0": "chunk", "1": "chunk"}),
    ],
)
def test_ls_names_what_is_below(sample: Sample, path: str, entries: dict[str, str]) -> None:
    """Nodes, documents and chunks, each with its type."""
    document = run("ls", sample.path, path, "--json").json
    assert {it["name"]: it["type"] for it in document["entries"]} == entries
    names = run("ls", sample.path, path).stdout.split()
    assert [name.rstrip("/") for name in names] == [it["name"] for it in document["entries"]]


def test_ls_reads_any_ref(sample: Sample) -> None:
    """--ref; the root of the first snapshot is empty, which is no error."""
    outcome = run("ls", sample.path, "--ref", sample.first, "--json")
    assert (outcome.exit_code, outcome.json["entries"]) == (0, [])
    assert run("ls", sample.path, "deep", "--ref", sample.first).exit_code == 1


def test_cat_prints_documents_for_people(sample: Sample) -> None:
    """Indented JSON; a slash in front does no harm."""
    text = run("cat", sample.path, "/small/zarr.json").stdout
    assert json.loads(text)["shape"] == [4, 6]
    assert text.startswith('{\n  "')


def test_cat_prints_documents_as_they_are(sample: Sample) -> None:
    """--raw: the stored bytes, as --json has them in base64."""
    raw = run("cat", sample.path, "zarr.json", "--raw").stdout_bytes
    document = run("cat", sample.path, "zarr.json", "--json").json
    assert base64.b64decode(document["base64"]) == raw
    assert document["document"] == json.loads(raw)
    assert (document["key"], document["size_bytes"]) == ("zarr.json", len(raw))


def test_cat_prints_chunks(sample: Sample) -> None:
    """Byte for byte."""
    chunk = run("cat", sample.path, "deep/large/c/1").stdout_bytes
    assert chunk == np.arange(100.0, 200.0).tobytes()
    document = run("cat", sample.path, "deep/large/c/1", "--json").json
    assert document["document"] is None
    assert base64.b64decode(document["base64"]) == chunk


def test_cat_reads_any_ref(sample: Sample) -> None:
    """--ref."""
    now, before = (
        run("cat", sample.path, "small/c/0/0", "--ref", ref).stdout_bytes for ref in ("main", "v1")
    )
    assert now != before


def test_cat_reads_virtual_chunks_only_if_authorized(sample: Sample) -> None:
    """Without --authorize the error says what to add; with it the bytes come."""
    refused = run("cat", sample.path, "outside/c/0")
    assert refused.exit_code == 1
    assert f"--authorize {sample.container}" in refused.stderr
    allowed = run("cat", sample.path, "outside/c/0", "--authorize", sample.container)
    assert allowed.stdout_bytes == VIRTUAL_BYTES


def test_hostile_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """A node's name is neither markup nor a command to the terminal."""

    async def fill() -> None:
        async with Repository.create(tmp_path / "hostile") as repository:
            session = await repository.writable_session("main")
            await write(session, "[bold]\x1b[2J/zarr.json", group_document())
            await session.commit("fill")

    asyncio.run(fill())
    for command in ("tree", "ls"):
        text = run(command, tmp_path / "hostile").stdout
        assert r"[bold]\x1b[2J/" in text
        assert "\x1b" not in text
