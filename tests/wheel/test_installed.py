"""The installed wheel without extras."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import icechunk_async
from icechunk_async.errors import MissingDriverError


def test_the_library_comes_from_the_wheel() -> None:
    """Not from the source tree; with its type marker, backends and command."""
    package = Path(icechunk_async.__file__).parent
    assert "site-packages" in package.parts
    assert (package / "py.typed").exists()
    for name in ("icechunk_async_memory", "icechunk_async_local"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).with_name("py.typed").exists()
    files = importlib.metadata.files("icechunk-async") or []
    assert not [file for file in files if file.parts[0] in {"tests", "benchmarks", "docs"}]


def test_no_driver_comes_unasked() -> None:
    """The core stays small; what an extra brings is named when it is missing."""
    assert importlib.util.find_spec("aiobotocore") is None

    async def open_bucket() -> None:
        async with icechunk_async.Repository.open("s3://bucket/nowhere"):
            pass

    with pytest.raises(MissingDriverError, match=r"pip install 'icechunk-async\[s3\]'"):
        asyncio.run(open_bucket())


@pytest.mark.parametrize("where", ["memory", "path", "file URL"])
def test_a_repository_works_without_extras(where: str, tmp_path: Path) -> None:
    """In memory and on a local disk, from creation to reading back, with zarr."""
    location = {
        "memory": "memory://wheel",
        "path": str(tmp_path / "repository"),
        "file URL": (tmp_path / "repository").as_uri(),
    }[where]
    import zarr.api.asynchronous as zarr

    async def scenario() -> float:
        async with icechunk_async.Repository.create(location) as repository:
            session = await repository.writable_session("main")
            array = await zarr.create_array(session.store, name="a", shape=(4,), dtype="f4")
            await array.setitem(slice(None), 2.5)
            await session.commit("first")
            reader = await repository.readonly_session("main")
            opened = await zarr.open_array(store=reader.store, path="a", mode="r")
            value: Any = await opened.getitem(3)
            return float(value)

    assert asyncio.run(scenario()) == 2.5


@pytest.mark.parametrize("arguments", [[], ["--help"], ["log", "somewhere"]])
def test_the_command_says_in_one_sentence_which_extra_it_needs(arguments: list[str]) -> None:
    """With any arguments; a service that never runs it is not burdened with its packages."""
    assert importlib.util.find_spec("typer") is importlib.util.find_spec("rich") is None
    program = Path(sys.executable).with_name("icechunk-async")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "The command icechunk-async needs typer and rich, not installed here. "
        "Install what it needs with: pip install 'icechunk-async[cli]'\n"
    )
