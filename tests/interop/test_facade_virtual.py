"""The blocking writers of virtual data do what `vz.to_icechunk` does with the official engine."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import errors, sync
from icechunk_async.sync.virtual import write_kerchunk_references, write_virtual_dataset
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from pathlib import Path


def _module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: see the group interop")


kerchunk_hdf = _module("kerchunk.hdf")
virtualizarr = _module("virtualizarr")
parsers = _module("virtualizarr.parsers")
registry = _module("obspec_utils.registry")
obstore_stores = _module("obstore.store")
xarray = _module("xarray")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs"),
    # Of the packages themselves, and of attributes that Zarr cannot hold.
    *(
        pytest.mark.filterwarnings(f"ignore:::{name}")
        for name in ("kerchunk", "virtualizarr", "xarray", "fsspec", "zarr")
    ),
]
PARTS = 2


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Make NetCDF files that continue each other in time."""
    found: list[Path] = []
    for part in range(PARTS):
        data = np.arange(24, dtype="f4").reshape(4, 6) + 100 * part
        dataset = xarray.Dataset(
            {"t": (("time", "x"), data, {"units": "K"})},
            {"time": np.arange(4) + 4 * part, "x": np.linspace(0, 1, 6)},
        )
        found.append(tmp_path / f"{part}.nc")
        encoding = {"t": {"chunksizes": (2, 3), "zlib": True}}
        dataset.to_netcdf(found[-1], engine="h5netcdf", encoding=encoding)
    return found


def opened(path: Path, **options: Any) -> Any:
    """Let VirtualiZarr open a file."""
    sources = registry.ObjectStoreRegistry({"file://": obstore_stores.LocalStore()})
    return virtualizarr.open_virtual_dataset(
        path.as_uri(), registry=sources, parser=parsers.HDFParser(), **options
    )


def repository_of(engine: Any, root: Path, sources: Path) -> Any:
    """Create a repository with either engine, by the same calls."""
    prefix = f"{sources.as_uri()}/"
    config = engine.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        engine.VirtualChunkContainer(prefix, engine.local_filesystem_store("/"))
    )
    return engine.Repository.create(
        engine.local_filesystem_storage(str(root)),
        config=config,
        authorize_virtual_chunk_access={prefix: engine.credentials.LocalFileSystemAccess},
    )


def in_store(store: Any, group: str) -> Any:
    """Read a dataset through a store of either engine."""
    return xarray.open_zarr(store, group=group, consolidated=False).load()


def contents(session: Any) -> tuple[list[str], list[str]]:
    """Return the keys and the virtual locations of a session of either engine."""

    async def keys() -> list[str]:
        return sorted([key async for key in session.store.list()])

    return asyncio.run(keys()), sorted(session.all_virtual_chunk_locations())


def test_one_line_does_what_virtualizarrs_method_does(tmp_path: Path, files: list[Path]) -> None:
    """New groups, appended files and copied variables: the same keys, locations and values."""
    ours = repository_of(sync, tmp_path / "ours", tmp_path)
    theirs = repository_of(icechunk, tmp_path / "theirs", tmp_path)
    first, second = (opened(it, loadable_variables=["time"]) for it in files)
    with (
        ours.transaction("main", message="data") as store,
        theirs.transaction("main", message="data") as other,
    ):
        steps: list[tuple[str, Any, dict[str, Any]]] = [
            ("plain", first, {}),
            ("long", first, {"mode": "w"}),
            ("long", second, {"append_dim": "time"}),
        ]
        for group, part, options in steps:
            write_virtual_dataset(store.session, part, group=group, **options)
            part.vz.to_icechunk(other, group=group, **options)
    found, expected = (it.readonly_session("main") for it in (ours, theirs))
    assert contents(found) == contents(expected)
    for group in ("plain", "long"):
        xarray.testing.assert_identical(
            in_store(found.store, group), in_store(expected.store, group)
        )
    assert in_store(found.store, "long").sizes["time"] == 4 * PARTS


def test_virtualizarrs_method_refuses_our_store(tmp_path: Path, files: list[Path]) -> None:
    """As `docs/how-to/virtual-data.md` says, and nothing is written."""
    session = repository_of(sync, tmp_path / "ours", tmp_path).writable_session("main")
    with pytest.raises(TypeError, match="store: expected type IcechunkStore, but got type"):
        opened(files[0]).vz.to_icechunk(session.store)
    assert not session.has_uncommitted_changes


def test_kerchunks_references_are_written(tmp_path: Path, files: list[Path]) -> None:
    """In a fork, too, whose changes come with the merge."""
    session = repository_of(sync, tmp_path / "ours", tmp_path).writable_session("main")
    fork = session.fork()
    references = kerchunk_hdf.SingleHdf5ToZarr(str(files[0]), inline_threshold=0).translate()
    assert write_kerchunk_references(fork, references, path="kerchunk") > 0
    write_virtual_dataset(fork, opened(files[1], loadable_variables=[]), group="virtualizarr")
    session.merge(fork)
    session.commit("both")
    for group, path in (("kerchunk", files[0]), ("virtualizarr", files[1])):
        with xarray.open_dataset(path, engine="h5netcdf") as expected:
            assert in_store(session.store, group).t.values.tolist() == expected.t.values.tolist()


def test_what_cannot_be_written_says_so_and_changes_nothing(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the facade's errors: one class of the official engine, one of the library."""
    (tmp_path / "elsewhere").mkdir()
    repository = repository_of(sync, tmp_path / "ours", tmp_path / "elsewhere")
    session = repository.writable_session("main")
    dataset = opened(files[0], loadable_variables=[])
    with pytest.raises(sync.IcechunkError, match=r"0\.nc") as caught:
        write_virtual_dataset(session, dataset)
    assert isinstance(caught.value, errors.VirtualContainerError)
    with pytest.raises(sync.InvalidInputError, match="mode='w'"):
        write_virtual_dataset(session, dataset, mode="w", append_dim="time")
    store: Any = session.store
    with pytest.raises(sync.InvalidInputError, match=r"IcechunkStore\. Give"):
        write_virtual_dataset(store, dataset)
    with pytest.raises(TypeError, match="this is a str"):
        write_kerchunk_references("main", {})  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "virtualizarr.writers.icechunk", None)
        with pytest.raises(errors.MissingDriverError, match="pip install virtualizarr"):
            write_virtual_dataset(session, dataset)
    assert not session.has_uncommitted_changes
    with pytest.raises(sync.ReadOnlyError):
        write_virtual_dataset(repository.readonly_session("main"), dataset)
    write_virtual_dataset(session, dataset, validate_containers=False)
    with pytest.raises(import_module("zarr").errors.ContainsGroupError):
        write_virtual_dataset(session, dataset, validate_containers=False)
