"""The adapter for URL pipelines, against the contract of zarr-python's proposal #4192.

No release has it yet, so the contract's two values and its base class are made here.
"""

# xarray, Zarr and fsspec are only partly typed.
# pyright: basic

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import zarr.api.asynchronous as azarr
from zarr.storage import StorePath

from icechunk_async import Repository
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "icechunk_async.plugins.pipeline"


@dataclass
class Segment:
    """One step of a pipeline."""

    raw: str


@dataclass
class Context:
    """The arguments of an adapter beside its step."""

    preceding_url: str
    mode: str | None = None
    storage_options: dict[str, Any] | None = None


@dataclass
class Resolution:
    """The result of an adapter."""

    store: Any
    path: str = ""


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the adapter where Zarr has the contract."""
    contract = ModuleType("zarr.abc.url_pipeline")
    contract.URLPipelineAdapter = type("URLPipelineAdapter", (), {})  # type: ignore[attr-defined]
    contract.AdapterResolution = Resolution  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, contract.__name__, contract)
    monkeypatch.setattr("zarr.abc.url_pipeline", contract, raising=False)
    sys.modules.pop(_MODULE, None)
    yield import_module(_MODULE).IcechunkAdapter
    sys.modules.pop(_MODULE, None)


async def test_a_pipeline_opens_a_store_and_a_path(adapter: Any) -> None:
    """Read-only unless the mode writes; the session of a store that was written commits."""
    url = memory_url()
    async with Repository.create(url) as repository:
        found = await adapter.open_pipeline_segment(
            Segment("icechunk-async:@branch.main/g"), Context(url, "a")
        )
        assert found.path == "g"
        group = await azarr.open_group(StorePath(found.store, found.path), mode="a")
        await group.update_attributes({"by": "pipeline"})
        await found.store.session.commit_async("written")
        assert (await anext(aiter(repository.ancestry()))).message == "written"
        read = await adapter.open_pipeline_segment(Segment("icechunk-async:g"), Context(url, "r"))
        assert read.store.read_only
        again = await azarr.open_group(StorePath(read.store, read.path), mode="r")
        assert again.attrs == {"by": "pipeline"}
