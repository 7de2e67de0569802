"""Older layouts through the command, the blocking facade, and what runs beside them."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from icechunk_async import Repository as AsyncRepository
from icechunk_async import sync
from icechunk_async.errors import UnsupportedBySpecError
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

LAYOUTS = pytest.mark.parametrize("layout", ["alpha", "first-draft"])


@LAYOUTS
def test_the_command_knows_older_layouts(layout: str, tmp_path: Path) -> None:
    """It creates, shows and migrates them."""
    url = tmp_path / "it"
    made = run("init", url, "--layout", layout, "--json").json
    assert (made["layout"], made["spec_version"]) == (layout, 0)
    assert f"layout {layout}" in run("init", tmp_path / "other", "--layout", layout).stdout
    assert run("status", url, "--json").json["layout"] == layout
    assert run("tag", "create", url, "v1", "main").exit_code == 0
    log = run("log", url, "v1", "--json").json["snapshots"]
    assert [it["id"] for it in log] == [made["snapshot_id"]]
    refused = run("gc", url, "--older-than", "7d")
    assert refused.exit_code == 1
    assert "migrate" in refused.stderr
    assert run("migrate", url, "--dry-run").exit_code == 0
    assert run("migrate", url).exit_code == 0
    assert run("status", url, "--json").json["layout"] == "format-2"
    assert run("log", url, "v1", "--json").json["snapshots"][0]["message"] == log[0]["message"]
    wrong = run("init", tmp_path / "third", "--layout", "beta")
    assert wrong.exit_code == 1
    assert "no layout 'beta'" in wrong.stderr


@LAYOUTS
def test_the_facade_opens_older_layouts(layout: str, tmp_path: Path) -> None:
    """With the official engine's names; what has no version says so."""

    async def create() -> None:
        async with AsyncRepository.create(tmp_path, layout=layout):
            pass

    asyncio.run(create())
    storage = sync.local_filesystem_storage(str(tmp_path))
    assert sync.Repository.exists(storage)
    assert sync.Repository.fetch_spec_version(storage) is None
    repository = sync.Repository.open(storage)
    with pytest.raises(sync.IcechunkError, match=layout):
        _ = repository.spec_version
    assert "Repository" in repr(repository)
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("a", data=np.arange(6), chunks=(2,))
    tip = session.commit("blocking")
    repository.create_tag("v1", snapshot_id=tip)
    assert next(it.message for it in repository.ancestry(tag="v1")) == "blocking"
    read = zarr.open_group(repository.readonly_session("main").store, mode="r")
    values: Any = read["a"]
    assert values[:].tolist() == [*range(6)]
    with pytest.raises(sync.IcechunkError, match="deletion of tags"):
        repository.delete_tag("v1")


@pytest.mark.blocks_the_loop  # pyarrow imports a part of itself when it is first used
@LAYOUTS
def test_tables_need_no_conversion(layout: str, tmp_path: Path) -> None:
    """Nodes and chunks as Arrow tables."""
    pytest.importorskip("pyarrow", reason="tables need pyarrow")
    tables: Any = importlib.import_module("icechunk_async.tables")

    async def look() -> None:
        async with AsyncRepository.create(tmp_path, layout=layout) as repository:
            session = await repository.writable_session("main")
            root = await zarr.api.asynchronous.open_group(session.store, mode="a")
            array = await root.create_array("a", shape=(4,), chunks=(2,), dtype="i4")
            await array.setitem(slice(None), np.arange(4))
            await session.commit("array")
            nodes = await tables.read_table(repository, "nodes")
            assert nodes["path"].to_pylist() == ["/", "/a"]
            assert len(await tables.read_table(repository, "chunks")) == 2
            changes = await tables.read_table(repository, "changes")
            assert "/a" in changes["path"].to_pylist()

    asyncio.run(look())


@LAYOUTS
async def test_a_facade_feature_that_is_missing_names_the_layout(
    layout: str, tmp_path: Path
) -> None:
    """Each refusal says where it comes from."""
    async with AsyncRepository.create(tmp_path, layout=layout) as repository:
        with pytest.raises(UnsupportedBySpecError, match=r"(alpha|draft).*no metadata"):
            await repository.get_metadata()
