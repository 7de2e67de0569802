"""Reference sets of VirtualiZarr and kerchunk, of real NetCDF and HDF5 files, in our repositories.

What we write, the official engine reads; what both packages say of a file, a reader gets.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.errors import (
    InvalidInputError,
    MissingDriverError,
    ReadOnlyError,
    VirtualContainerError,
)
from icechunk_async.format.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.virtual import write_kerchunk_references, write_virtual_dataset
from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from icechunk_async import Session


def _module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: see the group interop")


kerchunk_hdf = _module("kerchunk.hdf")
kerchunk_combine = _module("kerchunk.combine")
virtualizarr = _module("virtualizarr")
parsers = _module("virtualizarr.parsers")
registry = _module("obspec_utils.registry")
obstore_stores = _module("obstore.store")
h5py = _module("h5py")
xarray = _module("xarray")
SAMPLES = Path(_module("iris_sample_data").path).resolve()

pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs"),
    # Of the packages themselves, and of attributes that Zarr cannot hold.
    *(
        pytest.mark.filterwarnings(f"ignore:::{name}")
        for name in ("kerchunk", "virtualizarr", "xarray", "fsspec", "zarr")
    ),
]

FILE = "E1_north_america.nc"
FILES = [
    FILE,
    pytest.param("orca2_votemper.nc", marks=pytest.mark.thorough),
    "vlstr_type.nc",
    "NEMO/nemo_1m_20150101-20150201_grid-T.nc",
]
OPEN: dict[str, Any] = {"decode_times": False}


async def on_thread(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a blocking call on a thread."""
    return await asyncio.to_thread(work, *args, **options)


def in_store(store: Any, group: str) -> Any:
    """Read a dataset through a store."""
    return xarray.open_zarr(store, group=group, consolidated=False, **OPEN).load()


def in_file(source: Any, engine: str = "h5netcdf") -> Any:
    """Read a dataset from where it is."""
    return xarray.open_dataset(source, engine=engine, **OPEN).load()


def opened(path: Path, **options: Any) -> Any:
    """Let VirtualiZarr open a file."""
    sources = registry.ObjectStoreRegistry({"file://": obstore_stores.LocalStore()})
    return virtualizarr.open_virtual_dataset(
        path.as_uri(), registry=sources, parser=parsers.HDFParser(), **OPEN, **options
    )


class Place:
    """A repository that both engines may read, whose sources are below a directory."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root = root
        self.prefix = f"{directory.as_uri()}/"
        self._session: Session | None = None

    async def session(self, spec: int = 2) -> AsyncGenerator[Session]:
        """Return a writable session on a new repository."""
        container = VirtualChunkContainer(self.prefix, LocalFileSystemStore("/"))
        async with Repository.create(
            self.root,
            spec_version=spec,
            config=RepositoryConfig(virtual_chunk_containers=(container,)),
            authorize_virtual_chunk_access={self.prefix: LocalFileSystemAccess()},
        ) as repository:
            yield await repository.writable_session("main")

    def read_by_the_official_engine(self, group: str) -> Any:
        """Read a dataset of the tip with the other engine."""
        repository = icechunk.Repository.open(
            icechunk.local_filesystem_storage(str(self.root)),
            authorize_virtual_chunk_access=icechunk.containers_credentials(
                {self.prefix: icechunk.credentials.LocalFileSystemAccess}
            ),
        )
        return in_store(repository.readonly_session("main").store, group)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return where references to the sample files are kept."""
    return Place(tmp_path / "repo", SAMPLES)


@pytest.fixture
async def session(place: Place) -> AsyncGenerator[Session]:
    """Begin a session there."""
    async for session in place.session():
        yield session


@pytest.mark.parametrize("name", FILES)
async def test_kerchunk_and_virtualizarr_say_what_is_in_a_file(
    place: Place, session: Session, name: str
) -> None:
    """Written in columns, committed, and read by both engines as the packages themselves read."""
    path = SAMPLES / name
    references = await on_thread(kerchunk_hdf.SingleHdf5ToZarr(str(path)).translate)
    written = await write_kerchunk_references(session, references, path="by/kerchunk")
    assert written == sum(isinstance(it, list) for it in references["refs"].values())
    dataset = await on_thread(opened, path, loadable_variables=[])
    await write_virtual_dataset(session, dataset, group="by/virtualizarr")
    await session.commit("references")
    plain = await on_thread(in_file, path)
    as_kerchunk = await on_thread(in_file, references, "kerchunk")
    for group, expected in (("by/kerchunk", as_kerchunk), ("by/virtualizarr", plain)):
        found = await on_thread(in_store, session.store, group)
        xarray.testing.assert_equal(found, expected)
        theirs = await on_thread(place.read_by_the_official_engine, group)
        xarray.testing.assert_identical(theirs, found)


async def test_our_writer_does_what_virtualizarr_does(
    place: Place, session: Session, tmp_path: Path
) -> None:
    """A dataset that VirtualiZarr writes into a store of the official engine is the same there."""
    dataset = await on_thread(opened, SAMPLES / FILE, loadable_variables=["time"])
    await write_virtual_dataset(session, dataset)
    config = icechunk.RepositoryConfig.default()
    store = icechunk.local_filesystem_store("/")
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer(place.prefix, store))
    repository = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(tmp_path / "theirs")),
        config=config,
        authorize_virtual_chunk_access={place.prefix: icechunk.credentials.LocalFileSystemAccess},
    )
    other = repository.writable_session("main")
    await on_thread(dataset.vz.to_icechunk, other.store)
    ours = [key async for key in session.store.list()]
    theirs = [key async for key in other.store.list()]
    assert sorted(ours) == sorted(theirs)
    assert sorted(await session.all_virtual_chunk_locations()) == sorted(
        await on_thread(other.all_virtual_chunk_locations)
    )
    xarray.testing.assert_identical(
        await on_thread(in_store, session.store, ""),
        await on_thread(in_store, other.store, ""),
    )


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Make files that differ in what HDF5 can do."""
    directory = tmp_path / "files"
    directory.mkdir()
    for part in range(3):
        data = np.arange(24, dtype="f4").reshape(4, 6) + 100 * part
        dataset = xarray.Dataset(
            {"t": (("time", "x"), data, {"units": "K"})},
            {"time": np.arange(4) + 4 * part, "x": np.linspace(0, 1, 6)},
        )
        encoding = {"t": {"chunksizes": (2, 3), "zlib": True, "shuffle": True}}
        dataset.to_netcdf(directory / f"{part}.nc", engine="h5netcdf", encoding=encoding)
    with h5py.File(directory / "odd.h5", "w") as file:
        group = file.create_group("inner/most")
        big = np.arange(12, dtype=">i2").reshape(3, 4)
        options = {"chunks": (2, 2), "compression": "gzip", "fletcher32": True}
        group.create_dataset("big", data=big, **options)
        group.create_dataset("flags", data=np.array([True, False]))
        group.create_dataset("whole", data=np.arange(5.0))
        group.create_dataset("text", data=np.array([b"ab", b"cde"]))
        group.create_dataset("empty", shape=(4,), dtype="i4", chunks=(2,), fillvalue=7)
    return directory


async def test_all_kinds_of_hdf5_datasets_are_read(made: Path, tmp_path: Path) -> None:
    """Groups, big-endian numbers, checksums, text, chunks that were never written."""
    async for session in Place(tmp_path / "repo", made).session(spec=1):
        path = made / "odd.h5"
        for threshold in (0, 100):
            translate = kerchunk_hdf.SingleHdf5ToZarr(str(path), inline_threshold=threshold)
            references = await on_thread(translate.translate)
            written = await write_kerchunk_references(session, references)
            assert bool(written) == (threshold == 0)
            zarr = import_module("zarr")

            def values(zarr: Any = zarr, store: Any = session.store) -> dict[str, Any]:
                group = zarr.open_group(store, path="inner/most", mode="r")
                return {name: array[...] for name, array in group.arrays()}

            found = await on_thread(values)
            assert found.pop("empty").tolist() == [7] * 4
            with h5py.File(path) as file:
                assert {name: it.tolist() for name, it in found.items()} == {
                    name: it[...].tolist()
                    for name, it in file["inner/most"].items()
                    if name != "empty"
                }


async def test_virtual_files_are_concatenated(made: Path, tmp_path: Path) -> None:
    """Combined by kerchunk, joined by xarray, or appended commit by commit: one dataset."""
    paths = [made / f"{part}.nc" for part in range(3)]
    parts = [await on_thread(opened, it, loadable_variables=["time"]) for it in paths]
    place = Place(tmp_path / "repo", made)

    def combined() -> Any:
        singles = [kerchunk_hdf.SingleHdf5ToZarr(str(it)).translate() for it in paths]
        both = {"concat_dims": ["time"], "identical_dims": ["x"]}
        return kerchunk_combine.MultiZarrToZarr(singles, **both).translate()

    def plain() -> Any:
        files = [in_file(it) for it in paths]
        return xarray.concat(
            files, "time", data_vars="minimal", coords="minimal", compat="override"
        )

    expected = await on_thread(plain)
    async for session in place.session():
        await write_kerchunk_references(session, await on_thread(combined), path="combined")
        joined = xarray.concat(
            parts, "time", data_vars="minimal", coords="minimal", compat="override"
        )
        await write_virtual_dataset(session, joined, group="joined")
        await write_virtual_dataset(session, parts[0], group="appended")
        for part in parts[1:]:
            await write_virtual_dataset(session, part, group="appended", append_dim="time")
        await write_virtual_dataset(session, joined, group="replaced")
        await write_virtual_dataset(
            session,
            parts[0].drop_vars(["x", "time"]),
            group="replaced",
            region={"time": slice(4, 8)},
        )
        await session.commit("one dataset")
        for group in ("combined", "joined", "appended"):
            found = await on_thread(in_store, session.store, group)
            xarray.testing.assert_equal(found, expected)
            theirs = await on_thread(place.read_by_the_official_engine, group)
            xarray.testing.assert_identical(theirs, found)
        replaced = await on_thread(in_store, session.store, "replaced")
        assert replaced.t.values[4:8].tolist() == expected.t.values[:4].tolist()
        assert replaced.t.values[8:].tolist() == expected.t.values[8:].tolist()


async def test_trees_are_written_group_by_group(made: Path, tmp_path: Path) -> None:
    """Each dataset of a tree is where it is in the tree."""
    parts = [await on_thread(opened, made / f"{it}.nc") for it in range(2)]
    tree = xarray.DataTree.from_dict({"/one": parts[0], "/deep/er": parts[1]})
    async for session in Place(tmp_path / "repo", made).session():
        await write_virtual_dataset(session, tree, group="top")
        for group, part in (("top/one", 0), ("top/deep/er", 1)):
            found = await on_thread(in_store, session.store, group)
            expected = await on_thread(in_file, made / f"{part}.nc")
            assert found.t.values.tolist() == expected.t.values.tolist()
        with pytest.raises(InvalidInputError, match="one by one"):
            await write_virtual_dataset(session, tree, region={"time": slice(0, 4)})


async def test_what_cannot_be_written_changes_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources outside of containers, contradictions, groups that exist, a missing package."""
    dataset = await on_thread(opened, SAMPLES / FILE, loadable_variables=[])
    inside = await on_thread(opened, made / "0.nc", loadable_variables=[])
    async for session in Place(tmp_path / "repo", made).session():
        with pytest.raises(VirtualContainerError, match="E1_north_america"):
            await write_virtual_dataset(session, dataset)
        with pytest.raises(InvalidInputError, match="mode='w'"):
            await write_virtual_dataset(session, inside, mode="w", append_dim="time")
        assert not session.has_uncommitted_changes
        await write_virtual_dataset(session, dataset, validate_containers=False)
        with pytest.raises(import_module("zarr").errors.ContainsGroupError):
            await write_virtual_dataset(session, inside)
        await write_virtual_dataset(session, inside, mode="w")
        assert set(await session.all_virtual_chunk_locations()) == {(made / "0.nc").as_uri()}
        part = inside.drop_vars("time")
        with pytest.raises(InvalidInputError, match="lacks 'time': append"):
            await write_virtual_dataset(session, part, append_dim="time")
        new = xarray.Dataset({"more": ("time", np.zeros(inside.sizes["time"] + 1))})
        with pytest.raises(InvalidInputError, match="no 'more' yet"):
            await write_virtual_dataset(session, new, mode="a")
        new = xarray.Dataset({"more": ("time", np.zeros(inside.sizes["time"]))})
        await write_virtual_dataset(session, new, mode="a")
        assert (await on_thread(in_store, session.store, "/")).sizes == inside.sizes
        monkeypatch.setitem(sys.modules, "virtualizarr.writers.icechunk", None)
        with pytest.raises(MissingDriverError, match="pip install virtualizarr"):
            await write_virtual_dataset(session, inside, group="again")
        monkeypatch.undo()
        await session.commit("done")
        with pytest.raises(ReadOnlyError):
            await write_virtual_dataset(session, inside, group="again")
