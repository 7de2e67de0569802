"""Repositories with numbered states: the official engine never takes one for a repository."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.api.asynchronous

from icechunk_async import Repository
from tests.interop.theirs import icechunk, open_official
from tests.without_updates import NUMBERED

if TYPE_CHECKING:
    from pathlib import Path

ZARR: Any = zarr
ASYNC: Any = zarr.api.asynchronous


async def build(root: Path) -> None:
    """Commit an array, and set a tag."""
    async with Repository.create(root, layout=NUMBERED) as repository:
        async with repository.transaction("main", message="data") as store:
            await ASYNC.create_array(store, name="a", data=np.arange(100), chunks=(10,))
        await repository.create_tag("v1", await repository.lookup_branch("main"))


def contents(root: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {
        str(it.relative_to(root)): it.read_bytes() for it in sorted(root.rglob("*")) if it.is_file()
    }


async def test_official_engine_neither_opens_nor_creates_over_it(tmp_path: Path) -> None:
    """It finds no repository there, and a folder that is not empty; it changes nothing."""
    await build(tmp_path)
    before = contents(tmp_path)
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    assert not icechunk.Repository.exists(storage)
    for make in ("open", "create", "open_or_create"):
        with pytest.raises(icechunk.IcechunkError):
            getattr(icechunk.Repository, make)(storage)
    assert contents(tmp_path) == before


async def test_official_engine_is_opened_where_it_was_told_to_create_all_the_same(
    tmp_path: Path,
) -> None:
    """With `check_clean_root=False`: there are two, until the object `repo` is removed.

    Both have the same first snapshot, without nodes, which is written anew.
    """
    await build(tmp_path)
    before = contents(tmp_path)
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    icechunk.Repository.create(storage, check_clean_root=False)
    assert await Repository.fetch_layout(tmp_path) == "format-2"
    after = contents(tmp_path)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"{it}/1CECHNKREP0F1RSTCMT0" for it in ("snapshots", "transactions")}
    (tmp_path / "repo").unlink()
    async with Repository.open(tmp_path) as repository:
        assert repository.layout == NUMBERED
        assert set(await repository.tags()) == {"v1"}
        assert len([it async for it in repository.ancestry(tag="v1")]) == 2
        (finding,) = (await repository.verify()).findings
        assert finding.location == "snapshots/1CECHNKREP0F1RSTCMT0"
        assert finding.problem == "disagrees"


async def test_official_engine_opens_a_copy(tmp_path: Path) -> None:
    """Copied to storage that can compare and set, it is an ordinary repository."""
    await build(tmp_path / "numbered")
    async with Repository.open(tmp_path / "numbered") as repository:
        await repository.copy_to(tmp_path / "plain")
        ours = {str(it.id) async for it in repository.ancestry(branch="main")}
    official = open_official(tmp_path / "plain")
    assert {it.id for it in official.ancestry(branch="main")} == ours
    store = official.readonly_session(tag="v1").store
    assert (ZARR.open_array(store, path="a", mode="r")[:] == np.arange(100)).all()
    session = official.writable_session("main")
    ZARR.open_array(session.store, path="a", mode="r+")[:10] = 1
    session.commit("theirs")
    async with Repository.open(tmp_path / "plain") as repository:
        assert (await repository.verify()).findings == ()
