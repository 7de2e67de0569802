"""The application of the page about HTTP serves what the page says."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.api.asynchronous import open_group

from icechunk_async import Repository
from icechunk_async.gateway import app
from icechunk_async.gateway.app import _PIECE_BYTES
from icechunk_async.gateway.contents import _LARGEST_BYTES
from tests.docs.run_page import REPOSITORY, blocks
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_options_have_the_defaults_of_the_page() -> None:
    """Each row of the table of limits; other numbers of the page are those of the code."""
    page = (REPOSITORY / "docs" / "how-to" / "serve-over-http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \|", page, re.MULTILINE)
    parameters = inspect.signature(app).parameters
    shown = {"True": "on", "('*',)": "`*`"}
    defaults = {name: str(parameters[name].default).removesuffix(".0") for name, _ in rows}
    assert dict(rows) == {name: shown.get(text, text) for name, text in defaults.items()}
    options = {name for name, it in parameters.items() if it.kind is it.KEYWORD_ONLY}
    assert options - {"grants"} == set(defaults)
    assert f"sending each {_PIECE_BYTES >> 10} KiB" in page
    assert f"up to {_LARGEST_BYTES >> 20} MiB" in page


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
