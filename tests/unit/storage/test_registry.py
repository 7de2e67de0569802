"""From a URL to an open storage."""

from __future__ import annotations

import inspect
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from icechunk_async.errors import (
    InvalidInputError,
    InvalidURLError,
    MissingDriverError,
    UnknownSchemeError,
    UnsafeStorageError,
)
from icechunk_async.storage import installed_schemes, normalize_url, open_storage, registry, reopen

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that pretends that these backends are installed."""

    def install(**modules: str) -> None:
        points = [
            EntryPoint(name, f"{module}:open", registry.GROUP) for name, module in modules.items()
        ]
        monkeypatch.setattr(
            metadata,
            "entry_points",
            lambda group, name=None: [it for it in points if name in (None, it.name)],
        )
        monkeypatch.setattr(registry, "_DISTRIBUTION", "not-installed")
        monkeypatch.setattr(registry, "_loaded", {})

    return install


def test_paths_become_file_urls_and_urls_stay() -> None:
    """Relative paths are made absolute; drive letters are no schemes."""
    assert normalize_url("/data/my repo") == "file:///data/my%20repo"
    assert normalize_url(Path("/data/x")) == "file:///data/x"
    assert normalize_url("data") == (Path.cwd() / "data").as_uri()
    assert normalize_url("~/data") == (Path.home() / "data").as_uri()
    assert normalize_url("S3://Bucket/x y") == "s3://Bucket/x y"
    with pytest.raises(InvalidURLError, match="empty"):
        normalize_url("")


def test_file_urls_of_spark_have_one_slash() -> None:
    """Spark itself hands such URLs to sources."""
    assert normalize_url("file:/tmp/x y") == "file:///tmp/x y"
    assert normalize_url("FILE:/tmp/x") == "file:///tmp/x"
    assert normalize_url("file:///tmp/x") == "file:///tmp/x"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("dbfs:/mnt/x", "'/dbfs/mnt/x'"),
        ("DBFS:/mnt/x", "az://"),
        ("s3:/bucket/x", "s3:// with two slashes"),
        ("hdfs:/x", "'./hdfs:/x'"),
    ],
)
def test_other_urls_with_one_slash_are_no_directories(url: str, advice: str) -> None:
    """They became directories below the working directory, on each machine another."""
    with pytest.raises(InvalidURLError, match="one slash") as raised:
        normalize_url(url)
    assert advice in str(raised.value)
    assert normalize_url(f"./{url}") == (Path.cwd() / url).as_uri()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3a://bucket/x", "'s3://bucket/x'"),
        ("abfss://data@mine.dfs.core.windows.net/x/y", "'az://data/x/y', with the option acc"),
        ("wasbs://data@mine.blob.core.windows.net", "'az://data', with the option account_n"),
        ("hdfs://namenode:8020/x", "'fsspec+hdfs://namenode:8020/x'"),
    ],
)
async def test_urls_of_hadoop_are_translated(url: str, advice: str) -> None:
    """The error says how the same place is written here."""
    with pytest.raises(UnknownSchemeError) as raised:
        async with open_storage(url):
            pass
    assert f"Write {advice}" in str(raised.value)


async def test_a_storage_opens_by_its_url_and_from_its_description() -> None:
    """The description is enough to open it again."""
    async with open_storage("MEMORY://registry") as storage:
        await storage.put("k", b"x")
        description = storage.description
    async with reopen(description) as again:
        assert (await again.get("k")).data == b"x"


async def test_the_parameters_of_a_backend_are_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took as long as a request."""
    asked: list[object] = []
    look = inspect.signature

    def signature(backend: Callable[..., object]) -> inspect.Signature:
        asked.append(backend)
        return look(backend)

    monkeypatch.setattr(registry, "_parameters", {})
    monkeypatch.setattr(inspect, "signature", signature)
    for _ in range(3):
        async with open_storage("memory://looked-up-once"):
            pass
    assert len(asked) == 1


async def test_a_storage_opened_read_only_writes_nothing(tmp_path: Path) -> None:
    """It does not write to find out its promises. Every backend accepts the option."""
    touched_ns = tmp_path.stat().st_mtime_ns  # noqa: ASYNC240
    async with open_storage(tmp_path, read_only=True) as storage:
        assert not storage.capabilities.writable
        assert "read_only=True" in storage.capabilities.reasons["writable"]
        with pytest.raises(UnsafeStorageError):
            await storage.put("k", b"x")
        description = storage.description
    async with reopen(description) as again:
        assert not again.capabilities.writable
    assert tmp_path.stat().st_mtime_ns == touched_ns  # noqa: ASYNC240
    async with open_storage("memory://read-only", read_only=True) as storage:
        assert [entry async for entry in storage.list_prefix()] == []


async def test_an_unknown_scheme_names_those_that_are_known() -> None:
    """The error says that a backend can be installed."""
    with pytest.raises(UnknownSchemeError, match=r"gopher://.*file.*memory"):
        async with open_storage("gopher://host/x"):
            pass


def test_the_backends_of_this_distribution_are_installed() -> None:
    """Memory and local disks."""
    assert set(installed_schemes()) >= {"file", "memory"}


async def test_a_missing_driver_names_what_to_install(backends: Callable[..., None]) -> None:
    """The module that is missing, and the command."""
    backends(s3="no_such_driver_module")
    with pytest.raises(MissingDriverError, match="'no_such_driver_module'") as caught:
        async with open_storage("s3://bucket/x"):
            pass
    assert "pip install" in str(caught.value)
    assert "[s3]" in str(caught.value)
    assert isinstance(caught.value, ImportError)


async def test_a_name_with_a_plus_serves_all_that_begin_with_it(
    backends: Callable[..., None],
) -> None:
    """Unless a scheme has a separate backend; the extra is that of the name."""
    backends(**{"fsspec+": "no_such_family", "fsspec+own": "no_such_own"})
    for url, module in (
        ("fsspec+sftp://host/x", "no_such_family"),
        ("FSSPEC+own://x", "no_such_own"),
    ):
        with pytest.raises(MissingDriverError, match=f"'{module}'") as caught:
            async with open_storage(url):
                pass
        assert ("[fsspec]" in str(caught.value)) == (module == "no_such_family")
    for url in ("fsspec://x", "other+sftp://x"):
        with pytest.raises(UnknownSchemeError):
            async with open_storage(url):
                pass


async def test_unknown_options_are_named_with_those_there_are() -> None:
    """Before anything is opened."""
    with pytest.raises(InvalidInputError, match=r"no option 'durabilty'.*durability"):
        async with open_storage("file:///tmp", durabilty="none"):
            pass


@pytest.mark.parametrize("url", ["memory://", "file://"])
async def test_urls_that_name_nothing_are_refused(url: str) -> None:
    """With an example of one that does."""
    with pytest.raises(InvalidURLError):
        async with open_storage(url):
            pass


def test_a_backend_of_this_library_is_found_without_looking_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That would read a file of every installed distribution, at each start."""

    def refuse(**_: object) -> NoReturn:
        raise AssertionError("all distributions were read")

    monkeypatch.setattr(metadata, "entry_points", refuse)
    assert registry._find("s3", "s3://bucket").value == "icechunk_async_s3:open_s3"  # pyright: ignore[reportPrivateUsage]


async def test_backends_without_a_driver_are_found_without_entry_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those that the distribution declares; to look for them would take a while."""
    declared = metadata.distribution("icechunk-async").entry_points.select(group=registry.GROUP)
    known = registry._WITHOUT_DRIVER  # pyright: ignore[reportPrivateUsage]
    assert known.items() <= {it.name: it.value for it in declared}.items()

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the distribution was read")

    monkeypatch.setattr(metadata, "distribution", refuse)
    monkeypatch.setattr(registry, "_loaded", {})
    async with open_storage("memory://own") as storage:
        assert storage.description.url == "memory://own"
