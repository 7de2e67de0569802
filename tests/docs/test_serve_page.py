"""The application of the page about HTTP serves what the page says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.api.asynchronous import open_group

from icechunk_async import Repository
from tests.docs.run_page import REPOSITORY, blocks
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_fastapi_mounts_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lifespan opens and closes it; arrays are below the prefix."""
    async with Repository.create(tmp_path / "weather") as repository:
        session = await repository.writable_session("main")
        root = await open_group(store=session.store, mode="a")
        await root.create_array("t2m", data=np.arange(3))
        await session.commit("filled")
    page = REPOSITORY / "docs" / "how-to" / "serve-over-http.md"
    (code,) = (text for _, _, text in blocks(page) if "FastAPI(" in text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 -- our own documentation
    target = "/arrays/@branch.main/zarr.json"
    async with names["api"].router.lifespan_context(names["api"]):
        answer = await ask(names["api"], target)
        assert answer.status == 200
        assert set(answer.json["consolidated_metadata"]["metadata"]) == {"t2m"}
    assert (await ask(names["api"], target)).status == 503
