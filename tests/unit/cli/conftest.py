"""A small repository on disk, and a way to run the command on it."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from zarr.api.asynchronous import open_array, open_group

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.cli.app import app
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer

HOSTILE_MESSAGE = "Change one chunk [red]\x1b[31m"
VIRTUAL_BYTES = np.arange(3, dtype="<i4").tobytes()


@dataclass(frozen=True)
class Outcome:
    """The output and the exit code of a command."""

    exit_code: int
    stdout: str
    stdout_bytes: bytes
    stderr: str

    @property
    def json(self) -> Any:
        """The one document on standard output."""
        return json.loads(self.stdout)


def run(*arguments: object) -> Outcome:
    """Run the command in this process; whatever else than an exit leaves it is raised."""
    result = CliRunner().invoke(app, [str(it) for it in arguments], catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stdout_bytes, result.stderr)


@dataclass(frozen=True)
class Sample:
    """A repository with three snapshots: the first, ``v1`` and the tip of ``main``."""

    path: Path
    container: str
    first: str
    v1: str
    tip: str


async def _fill(directory: Path) -> Sample:
    container = f"{directory.as_uri()}/outside/"
    outside = directory / "outside"
    outside.mkdir()
    (outside / "numbers.bin").write_bytes(VIRTUAL_BYTES)
    config = RepositoryConfig().with_virtual_chunk_container(
        VirtualChunkContainer(container, LocalFileSystemStore(str(outside)))
    )
    async with Repository.create(directory / "repository", config=config) as repository:
        first = await repository.lookup_branch("main")
        session = await repository.writable_session("main")
        root = await open_group(store=session.store, mode="a", attributes={"title": "sample"})
        grid = await root.create_array(
            "small", shape=(4, 6), chunks=(2, 3), dtype="int32", dimension_names=("y", "x")
        )
        await grid.setitem((slice(0, 2), slice(None)), 7)
        deep = await root.create_group("deep")
        large = await deep.create_array(
            "large", shape=(200,), chunks=(100,), dtype="float64", compressors=None
        )
        await large.setitem(slice(None), np.arange(200.0))
        await root.create_array(
            "outside", shape=(3,), chunks=(3,), dtype="int32", compressors=None, filters=None
        )
        session.store.set_virtual_ref(
            "outside/c/0", f"{container}numbers.bin", offset=0, length=len(VIRTUAL_BYTES)
        )
        v1 = await session.commit("Fill", metadata={"author": "Anna"})
        await repository.create_tag("v1", v1)
        await repository.create_branch("dev", v1)
        session = await repository.writable_session("main")
        array = await open_array(store=session.store, path="small", mode="r+")
        await array.setitem((0, 0), 8)
        tip = await session.commit(HOSTILE_MESSAGE)
        return Sample(directory / "repository", container, str(first), str(v1), str(tip))


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Make the repository; tests only read it."""
    return asyncio.run(_fill(tmp_path_factory.mktemp("sample")))


@pytest.fixture
def repository(sample: Sample, tmp_path: Path) -> Path:
    """Copy the repository for a test that changes it."""
    return Path(shutil.copytree(sample.path, tmp_path / "repository"))


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the terminal in which the tests run."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
