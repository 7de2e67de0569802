"""One URL, opened in every place that takes it."""

# xarray, Zarr and fsspec are only partly typed.
# pyright: basic

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import xarray as xr
import zarr
import zarr.api.asynchronous as azarr

import icechunk_async.sync as icechunk
from icechunk_async import IcechunkURL, Repository, open_url
from icechunk_async.arrow import dataset as arrow_dataset
from icechunk_async.engine.tree.workspace import Workspace
from icechunk_async.errors import (
    InvalidInputError,
    InvalidURLError,
    RepositoryNotFoundError,
)
from icechunk_async.plugins.filesystem import IcechunkFileSystem
from icechunk_async.plugins.xarray import IcechunkBackend
from icechunk_async.sync.urls import open_url as open_blocking
from icechunk_async.sync.xarray import to_icechunk

opened_by = partial(xr.open_dataset, engine="icechunk-async")


class Place:
    """A repository with two states of a group `g/h`: 0..5 tagged v1, and 10 more on main."""

    def __init__(self, directory: Path) -> None:
        self.location = f"file://{directory}/repo"
        with icechunk.Repository.create(self.location) as repository:
            self.first = self._commit(repository, 0)
            repository.create_tag("v1", self.first)
            self.second = self._commit(repository, 10)
            moments = {it.id: it.written_at for it in repository.ancestry(branch="main")}
        self.time = moments[self.first].isoformat()

    @staticmethod
    def _commit(repository: icechunk.Repository, start: int) -> str:
        data = xr.Dataset({"a": ("x", np.arange(start, start + 6))}, {"x": np.arange(6)})
        session = repository.writable_session("main")
        to_icechunk(data, session, group="g/h", mode="w")
        return session.commit(f"from {start}")

    def url(self, rest: str = "") -> str:
        """Return a URL of it."""
        return f"{self.location}/|icechunk:{rest}"

    @property
    def urls(self) -> dict[str, int]:
        """URLs of the group, and the first value there."""
        return {
            self.url("g/h"): 10,
            self.url("@branch.main/g/h"): 10,
            self.url("@tag.v1/g/h"): 0,
            self.url(f"@{self.first}/g/h"): 0,
            self.url(f"@as-of.{self.time}/g/h"): 0,
            self.url("@tag.v1/g/h/"): 0,
            self.url("@tag.v1|zarr3:g/h"): 0,
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Make it once; tests that write make another."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture
def other(tmp_path: Path) -> Place:
    """Make one to write to."""
    return Place(tmp_path)


async def test_zarr_opens_a_url_from_asyncio(place: Place) -> None:
    """The repository closes with the block."""
    for url, first in place.urls.items():
        async with open_url(url) as found:
            group = await azarr.open_group(found, mode="r")
            array = await group.getitem("a")
            assert isinstance(array, zarr.AsyncArray)
            assert int((await array.getitem(0)).item()) == first  # type: ignore[union-attr]


async def test_a_url_opens_a_session_that_writes(other: Place) -> None:
    """On its branch, or main; other refs are refused."""
    place = other
    async with open_url(place.url("g"), writable=True) as found:
        group = await azarr.open_group(found)
        await group.create_array("new", shape=(1,), dtype="i1")
        await found.store.session.commit("new")  # type: ignore[attr-defined]
    for rest in ("@tag.v1", f"@{place.first}", f"@as-of.{place.time}"):
        with pytest.raises(InvalidInputError, match="a state that nobody changes"):
            await open_url(place.url(rest), writable=True).__aenter__()


def test_a_url_opens_a_session_that_writes_in_blocking_code(tmp_path: Path) -> None:
    """On its branch, or main; other refs are refused."""
    place = Place(tmp_path)
    blocking: Any = open_blocking(place.url("@branch.main/g"), writable=True)
    zarr.open_group(blocking).create_array("new", shape=(1,), dtype="i1")
    zarr.open_group(blocking)["new"][0] = 7  # type: ignore[index]
    blocking.store.session.commit("seven")
    assert zarr.open_group(open_blocking(place.location), mode="r")["g/new"][0] == 7  # type: ignore[index]
    for rest in ("@tag.v1", f"@{place.first}", f"@as-of.{place.time}"):
        with pytest.raises(icechunk.IcechunkError, match="a state that nobody changes"):
            open_blocking(place.url(rest), writable=True)


def test_zarr_and_xarray_open_a_url_in_blocking_code(place: Place) -> None:
    """As a store, without a warning of consolidated metadata."""
    for url, first in place.urls.items():
        assert int(zarr.open_group(open_blocking(url), mode="r")["a"][0]) == first  # type: ignore[index, arg-type]
        assert int(xr.open_zarr(open_blocking(url)).a[0]) == first


def test_xarray_opens_a_url_with_the_engine(place: Place) -> None:
    """By its name, and by its class."""
    engines: tuple[Any, ...] = ("icechunk-async", IcechunkBackend)
    for url, first in place.urls.items():
        for engine in engines:
            opened = xr.open_dataset(url, engine=engine)
            assert int(opened.a[0]) == first
    opened = xr.open_dataset(place.location, engine="icechunk-async", group="g/h", ref="v1")
    assert int(opened.a[0]) == 0
    below = xr.open_dataset(place.url("@tag.v1/g"), engine="icechunk-async", group="h", chunks={})
    assert int(below.a[0].compute()) == 0
    assert "a" not in opened_by(place.url("g/h"), drop_variables="a")
    with pytest.raises(icechunk.IcechunkError, match=r"and ref='main' one more\. Give one"):
        opened_by(place.url("@tag.v1/g/h"), ref="main")
    with pytest.raises(FileNotFoundError, match=r"^There is no group 'nothing' in .*URL\.$"):
        opened_by(place.url("nothing"))
    with pytest.raises(icechunk.IcechunkError, match="is not a node path"):
        xr.open_dataset(place.url("g"), engine="icechunk-async", group="a//h")


@pytest.mark.skipif(
    find_spec("netCDF4") is not None, reason="xarray asks netCDF4 first, which takes every URL"
)
def test_xarray_finds_the_engine_by_the_url(place: Place) -> None:
    """Where the URL says what it is."""
    for url, first in place.urls.items():
        assert int(xr.open_dataset(url).a[0]) == first


def test_mistakes_of_the_engine_show_its_call_and_one_sentence(place: Place) -> None:
    """The caller's line, xarray's and ours: neither other frames nor a chain of errors."""
    for rest in ("@branch.mainly", "@brnch.main", "@tag.v2/g", "nothing", "a//h"):
        with pytest.raises((icechunk.IcechunkError, FileNotFoundError)) as caught:
            xr.open_dataset(place.url(rest), engine="icechunk-async")
        frames = traceback.extract_tb(caught.value.__traceback__)
        ours = [Path(it.filename).name for it in frames if "icechunk_async" in it.filename]
        assert set(ours) <= {"xarray.py"}, rest
        assert len(frames) <= 4, rest
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert "\n" not in str(caught.value)


def test_the_engine_leaves_other_files_to_others() -> None:
    """It asks for no place that it is not named for."""
    guess = IcechunkBackend().guess_can_open
    assert guess("s3://b/r|icechunk:@tag.v1")
    assert not any(map(guess, ["s3://b/r", "a.nc", "a.zarr", b"CDF", None]))


def test_names_do_not_collide_with_those_of_others() -> None:
    """`icechunk` of Zarr and xarray is left to the official package; of fsspec it is nobody's."""
    ours = {
        group: {it.name for it in entry_points(group=group) if "icechunk_async" in it.value}
        for group in ("xarray.backends", "zarr.url_adapters", "fsspec.specs")
    }
    assert ours == {
        "xarray.backends": {"icechunk-async"},
        "zarr.url_adapters": {"icechunk-async"},
        "fsspec.specs": {"icechunk", "icechunk-async"},
    }


def test_an_accessor_of_another_package_stays() -> None:
    """Ours has its second name then, and xarray does not warn."""
    script = (
        "import warnings, xarray\n"
        "warnings.simplefilter('error')\n"
        "@xarray.register_dataset_accessor('icechunk')\n"
        "class Theirs:\n"
        "    def __init__(self, dataset): pass\n"
        "import icechunk_async.plugins.accessor as ours\n"
        "assert xarray.Dataset.icechunk is Theirs\n"
        "assert xarray.Dataset.icechunk_async is ours.IcechunkAccessor\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_accessor_tells_where_a_dataset_is_from(place: Place) -> None:
    """Also of a selection, a computation and a copy that travelled."""
    opened = opened_by(place.url("@tag.v1/g/h"))
    for data in (opened, opened.isel(x=0), opened[["a"]], pickle.loads(pickle.dumps(opened))):
        assert data.icechunk.snapshot_id == place.first
        assert data.icechunk.group == "g/h"
        assert data.icechunk.snapshot.message == "from 0"
    assert [it.message for it in opened.icechunk.history(1)] == ["from 0"]
    assert len(opened.icechunk.history()) == 2
    assert opened.icechunk.branch is None
    assert opened.icechunk.repository.list_tags() == {"v1"}
    assert opened.icechunk.session.read_only
    assert "@tag.v1" in repr(opened.icechunk)
    assert opened_by(place.url("g/h")).icechunk.branch == "main"
    with pytest.raises(icechunk.IcechunkError, match="does not know its repository"):
        _ = xr.Dataset().icechunk.snapshot_id


def test_the_accessor_writes_back(tmp_path: Path) -> None:
    """Changed and new variables become a commit; a branch that moved on is refused."""
    place = Place(tmp_path)
    opened = opened_by(place.url("@branch.main/g/h"))
    changed = opened.assign(b=opened.a * 2)
    changed["a"][0] = 99
    changed.encoding = opened.encoding
    found = changed.icechunk.commit("changed", metadata={"by": "me"})
    again = opened_by(place.url("@branch.main/g/h"))
    assert again.icechunk.snapshot_id == found
    assert (again.icechunk.snapshot.message, again.icechunk.snapshot.metadata) == (
        "changed",
        {"by": "me"},
    )
    assert again.a.values.tolist() == [99, 11, 12, 13, 14, 15]
    assert again.b.values.tolist() == [20, 22, 24, 26, 28, 30]
    assert "icechunk_async_origin" not in str(
        zarr.open_group(open_blocking(place.url("g/h"))).attrs
    )
    with pytest.raises(icechunk.IcechunkError, match="another writer was first"):
        changed.icechunk.commit("too late")
    tagged = opened_by(place.url("@tag.v1/g/h"))
    with pytest.raises(icechunk.IcechunkError, match=r"not at a branch\. Name where to commit"):
        tagged.icechunk.commit("where?")


def test_fsspec_reads_keys_of_a_hierarchy(place: Place) -> None:
    """Through both schemes; Zarr and xarray on top of it read the same values."""
    for url, first in place.urls.items():
        opened = xr.open_zarr(f"icechunk://{url}", consolidated=False)
        assert int(opened.a[0]) == first
    for scheme in ("icechunk", "icechunk-async"):
        opening: Any = fsspec.open(f"{scheme}://{place.url('g/h/zarr.json')}", "rb")
        with opening as file:
            assert b'"node_type"' in file.read()
    files: Any = fsspec.filesystem("icechunk", url=place.url("@tag.v1"))
    assert isinstance(files, IcechunkFileSystem)
    assert files.ls("", detail=False) == ["g", "zarr.json"]
    assert files.isdir("g/h")
    assert files.isfile("g/h/zarr.json")
    assert files.cat_file("g/h/zarr.json", 0, 1) == b"{"
    assert files.find("g/h/a") == ["g/h/a/c/0", "g/h/a/zarr.json"]
    assert not files.exists("g/nothing")
    with pytest.raises(FileNotFoundError):
        files.cat_file("g/nothing/zarr.json")
    with pytest.raises(OSError, match="cannot be written"):
        files.open("g/zarr.json", "wb")


def test_fsspec_reads_no_more_than_the_part_that_is_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a chunk, as a slice has it; only of places from both ends the whole is read."""
    files: Any = fsspec.filesystem("icechunk", url=place.url("@tag.v1"))
    key = "g/h/a/c/0"
    whole = files.cat_file(key)
    size = len(whole)
    read: list[int] = []
    own = Workspace.read_chunk

    async def counted(self: Workspace, *args: Any) -> Any:
        data = await own(self, *args)
        read.append(0 if data is None else len(data))
        return data

    monkeypatch.setattr(Workspace, "read_chunk", counted)
    starts, ends = (None, 0, 3, size, size + 9), (None, 0, 2, 5, size, size + 9)
    parts = [(start, end) for start in starts for end in ends] + [(-3, None), (-size - 9, None)]
    for start, end in parts:
        assert files.cat_file(key, start, end) == whole[start:end]
        assert read.pop() == len(whole[start:end])
    for start, end in [(1, -1), (-4, -2), (-4, size)]:
        assert files.cat_file(key, start, end) == whole[start:end]
    assert read == [size] * 3


def test_fsspec_takes_nothing_but_a_missing_key_for_one(place: Place, tmp_path: Path) -> None:
    """Zarr would show fill values: for chunks that cannot be read, and for all of a wrong ref."""
    source = tmp_path / "source" / "values"
    source.parent.mkdir()
    source.write_bytes(np.arange(1.0, 5.0).tobytes())
    prefix = f"file://{source.parent}/"
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(prefix, icechunk.local_filesystem_store(prefix))
    )
    with icechunk.Repository.create(tmp_path / "virtual", config=config) as repository:
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="a", shape=4, dtype="f8", compressors=None)
        session.store.set_virtual_ref("a/c/0", f"{prefix}values", offset=0, length=32)
        session.commit("four values")
    virtual = f"icechunk://{tmp_path}/virtual/|icechunk:"
    with pytest.raises(icechunk.IcechunkError, match="not authorised"):
        zarr.open_group(virtual, mode="r")["a"][:]  # type: ignore[index]
    for url in (place.url("@tag.v9"), f"{tmp_path}/nothing/|icechunk:"):
        files: Any = fsspec.filesystem("icechunk", url=url)
        for ask in (files.cat_file, files.info, files.ls, files.exists):
            with pytest.raises(OSError, match="There is no") as caught:
                ask("g/h/a/c/0")
            assert not isinstance(caught.value, FileNotFoundError)
    files = fsspec.filesystem("icechunk", url=place.url("@tag.v1"))
    for key in ("g/h/a/c/7", "g/h/a/c/0/0", "g//h", "g/h/a/zarr", ".zgroup"):
        assert not files.exists(key), key
        with pytest.raises(FileNotFoundError):
            files.cat_file(key)


def test_xarray_opens_a_tree_of_groups(place: Place) -> None:
    """Each of its datasets knows where it is from."""
    for url, first in place.urls.items():
        tree = xr.open_datatree(url, engine="icechunk-async")
        assert int(tree.a[0]) == first
    for url in (place.url("@tag.v1"), place.url("@tag.v1/g")):
        tree = xr.open_datatree(url, engine="icechunk-async")
        leaf = tree["g/h" if url.endswith("v1") else "h"].to_dataset()
        assert leaf.a.values.tolist() == [0, 1, 2, 3, 4, 5]
        assert (leaf.icechunk.snapshot_id, leaf.icechunk.group) == (place.first, "g/h")
    groups = xr.open_groups(place.url("g"), engine="icechunk-async")
    assert {path.strip("./"): it.icechunk.group for path, it in groups.items()} == {
        "": "g",
        "h": "g/h",
    }
    with pytest.raises(FileNotFoundError, match=r"^There is no group 'nothing' in .*URL\.$"):
        xr.open_datatree(place.url("nothing"), engine="icechunk-async")


def test_xarray_says_how_a_state_and_a_group_are_named(place: Place) -> None:
    """Sessions take a branch or a tag; the engine has one argument for all."""
    for named in ("branch", "tag", "snapshot_id", "as_of"):
        given: dict[str, Any] = {named: "main"}
        with pytest.raises(icechunk.InvalidInputError, match=rf"no {named}=\. .* with ref="):
            opened_by(place.url("g/h"), **given)
    with pytest.raises(FileNotFoundError, match=r"an array and no group at 'g/h/a'"):
        opened_by(place.url("g/h/a"))


def test_arrow_reads_the_rows_of_a_url(place: Place) -> None:
    """The group is that of the URL; one more lies below it."""
    for url, first in place.urls.items():
        assert arrow_dataset(url).to_table()["a"].to_pylist()[0] == first
    assert arrow_dataset(place.url("@tag.v1/g"), "h").to_table()["a"].to_pylist()[0] == 0
    with pytest.raises(icechunk.IcechunkError, match="Give one"):
        arrow_dataset(place.url("@tag.v1/g/h"), ref="main")


def test_arrow_reads_a_path_with_a_bar(tmp_path: Path) -> None:
    """It is a path where no step of ours follows."""
    path = str(tmp_path / "a|b")
    with icechunk.Repository.create(path) as repository:
        session = repository.writable_session("main")
        to_icechunk(xr.Dataset({"a": ("x", [7])}), session, group="g")
        session.commit("seven")
    assert arrow_dataset(path, "g").to_table()["a"].to_pylist() == [7]


async def test_a_repository_is_opened_whole(place: Place) -> None:
    """A step that adds nothing is left out; one that names a part is refused, with what to call."""
    for location in (place.url(), place.url().removesuffix(":")):
        async with Repository.open(location) as repository:
            assert "main" in await repository.list_branches()
    with pytest.raises(InvalidURLError, match=r"a repository is opened whole.*open_url"):
        Repository.open(place.url("@tag.v1"))
    with pytest.raises(RepositoryNotFoundError):  # a path, as before
        await Repository.open(f"{place.location}|zip:")


def test_a_repository_is_opened_whole_in_blocking_code(place: Place) -> None:
    """The same."""
    with icechunk.Repository.open(place.url()) as repository:
        assert repository.list_tags() == {"v1"}
    with pytest.raises(icechunk.IcechunkError, match=r"a repository is opened whole.*open_url"):
        icechunk.Repository.open(place.url("g"))
    path = place.location.removeprefix("file://")
    with icechunk.Repository.open(f"{path}|icechunk:") as repository:
        assert repository.list_tags() == {"v1"}
    for call in (icechunk.Repository.open, icechunk.Repository.create, icechunk.Repository.exists):
        with pytest.raises(icechunk.IcechunkError, match="a repository is opened whole"):
            call(f"{path}/|icechunk:@tag.v1")


def test_secrets_of_a_url_are_shown_nowhere() -> None:
    """Neither by the URL nor by what is opened with it; xarray notes the URL as the source."""
    url = IcechunkURL.parse("s3://key:secret@b/r?token=hidden|icechunk:@tag.v1")
    with pytest.raises(InvalidInputError) as caught:
        Repository.open(str(url))
    location = "memory://key:secret@shown?token=hidden"
    with icechunk.Repository.create(location) as repository:
        session = repository.writable_session("main")
        to_icechunk(xr.Dataset({"a": ("x", [7])}), session, group="g")
        session.commit("seven")
    opened = opened_by(f"{location}|icechunk:g")
    assert opened.encoding["source"].endswith("@shown|icechunk:g")
    for text in (repr(url), str(caught.value), repr(opened.encoding), repr(opened.icechunk)):
        assert "secret" not in text
        assert "hidden" not in text
