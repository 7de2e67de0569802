"""Listings of directories: laziness, odd names, concurrent changes."""

from __future__ import annotations

import errno
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icechunk_async.errors import InvalidObjectKeyError, PermissionDeniedError
from icechunk_async.storage import ABSENT, open_storage
from icechunk_async_local.listing import PAGE_ENTRIES, next_page, walk
from icechunk_async_local.paths import Tree
from icechunk_async_local.storage import LocalStorage
from icechunk_async_memory import MemoryStorage, forget, open_memory
from tests.unit.backends.local_tools import make_files, names, open_descriptors, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what a listing asks the system for."""
    counted: Counter[str] = Counter()
    for name in ("scandir", "stat"):
        original = getattr(os, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            counted[_name] += 1
            return _original(*args, **kw)

        monkeypatch.setattr(os, name, count)
    return counted


def fill(root: Path, keys: list[str]) -> Tree:
    """Make files."""
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return Tree(root)


def test_folders_are_read_when_they_are_reached(tmp_path: Path, calls: Counter[str]) -> None:
    """The first entries of a large tree cost one folder, not all."""
    tree = fill(tmp_path, [f"{folder:03}/{n}" for folder in range(50) for n in range(30)])
    calls.clear()
    entries = walk(tree, "", None, grouped=False)
    assert names([next(entries)]) == ["000/0"]
    assert calls == {"scandir": 2, "stat": 30}
    assert names([next(entries) for _ in range(30)])[-1] == "001/0"
    assert calls == {"scandir": 3, "stat": 60}


def test_a_start_skips_folders_without_reading_them(tmp_path: Path, calls: Counter[str]) -> None:
    """Entries before the start are neither read nor checked."""
    tree = fill(tmp_path, [f"{folder:03}/{n}" for folder in range(50) for n in range(10)])
    calls.clear()
    assert len(list(walk(tree, "", "048/5", grouped=False))) == 4 + 10
    assert calls == {"scandir": 3, "stat": 14}
    calls.clear()
    assert list(walk(tree, "", "zzz", grouped=False)) == []
    assert list(walk(tree, "010/", "011", grouped=False)) == []
    assert calls["stat"] == 0
    assert calls["scandir"] <= 2


def test_a_prefix_reads_only_its_folder(tmp_path: Path, calls: Counter[str]) -> None:
    """Other folders, and other names in that folder, are not asked about."""
    tree = fill(tmp_path, [f"{folder:03}/{n}" for folder in range(50) for n in range(10)])
    calls.clear()
    assert names(list(walk(tree, "007/3", None, grouped=False))) == ["007/3"]
    assert calls == {"scandir": 1, "stat": 1}


def test_groups_are_not_walked(tmp_path: Path, calls: Counter[str]) -> None:
    """Whether there is an object in a folder is known from the first one."""
    tree = fill(tmp_path, [f"{folder:03}/{n}" for folder in range(5) for n in range(100)])
    calls.clear()
    assert len(list(walk(tree, "", None, grouped=True))) == 5
    assert calls == {"scandir": 6}


def test_a_folder_of_empty_folders_is_no_group(tmp_path: Path) -> None:
    """A group stands for keys; empty folders of any depth are not listed."""
    tree = fill(tmp_path, ["a/b/c/d", "x"])
    (tmp_path / "a" / "b" / "c" / "d").unlink()
    (tmp_path / "e" / "f").mkdir(parents=True)
    (tmp_path / "e" / "g").symlink_to(tmp_path / "x")
    (tmp_path / "e" / ".icechunk-tmp-1").write_bytes(b"")
    assert names(list(walk(tree, "", None, grouped=True))) == ["x"]


def test_nothing_is_held_open_between_entries(tmp_path: Path) -> None:
    """A listing that is left costs no descriptor."""
    tree = fill(tmp_path, [f"a/b/{n}" for n in range(2000)])
    before = open_descriptors()
    walks = [walk(tree, "", None, grouped=False) for _ in range(20)]
    for entries in walks:
        assert len(next_page(entries)) == PAGE_ENTRIES
        assert open_descriptors() == before


async def test_names_that_are_not_unicode_are_left_out(tmp_path: Path) -> None:
    """They can be no key; others next to them are listed."""
    for name in (b"\xff", b"a\xffb", b"ok"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"x")
    (tmp_path / os.fsdecode(b"\xfe")).mkdir()
    (tmp_path / os.fsdecode(b"\xfe") / "in").write_bytes(b"x")
    async with open_storage(tmp_path) as storage:
        assert names([entry async for entry in storage.list_prefix()]) == ["ok"]
        assert names([entry async for entry in storage.list_prefix(delimiter="/")]) == ["ok"]


async def test_paths_that_are_too_long_for_a_key_are_left_out(tmp_path: Path) -> None:
    """Files that no key can name are not listed."""
    deep = tmp_path
    for _ in range(5):
        deep /= "d" * 250
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x")
    (deep.parent / "k").write_bytes(b"x")
    async with open_storage(tmp_path) as storage:
        found = names([entry async for entry in storage.list_prefix()])
        assert [len(key) for key in found] == [251 * 4 + 1]
        for key in found:
            await storage.get(key)


def test_listing_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    """Keys are UTF-8 in files and in listings."""
    files = make_files(tmp_path)
    write(files, "é/日本", b"x", ABSENT)
    assert (os.fsencode(tmp_path) + "/é/日本".encode()) in {
        os.path.join(folder, name)  # noqa: PTH118
        for folder, _, found in os.walk(os.fsencode(tmp_path))
        for name in found
    }


SEGMENTS = st.text(alphabet="a./-0é\U0001f600\uffee", min_size=1, max_size=4)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    keys=st.lists(SEGMENTS, max_size=12),
    prefix=st.one_of(st.just(""), SEGMENTS),
    start_after=st.one_of(st.none(), SEGMENTS),
    grouped=st.booleans(),
)
async def test_directories_list_like_memory(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    prefix: str,
    start_after: str | None,
    *,
    grouped: bool,
) -> None:
    """For any keys, prefix, start and delimiter both backends answer the same."""
    root = tmp_path_factory.mktemp("any")
    url = f"memory://{root}"
    async with open_memory(url) as memory, open_storage(root, durability="none") as local:
        for key in keys:
            await put_where_possible(memory, local, key)
        arguments: Any = {"start_after": start_after, "delimiter": "/" if grouped else None}
        found = [entry async for entry in local.list_prefix(prefix, **arguments)]
        expected = [entry async for entry in memory.list_prefix(prefix, **arguments)]
        assert names(found) == names(expected)
    forget(url)


async def put_where_possible(memory: MemoryStorage, local: Any, key: str) -> None:
    """Write to both, if the key is one and neither lies below another nor above."""
    try:
        await local.put(key, b"x")
    except InvalidObjectKeyError:
        return
    await memory.put(key, b"x")


async def test_states_have_far_times_and_refused_folders_raise_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of far centuries are told; a folder that may not be entered is an error of ours."""
    async with open_storage(tmp_path.as_uri()) as storage:
        assert isinstance(storage, LocalStorage)
        await storage.put("chunks/A", b"abc")
        far = 13_569_465_600  # the year 2400
        os.utime(tmp_path / "chunks/A", (far, far))
        states = await storage.states("chunks", ["A", "B"])
        assert states.present.tolist() == [True, False]
        assert states.modified_us[0] == far * 1_000_000

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "refused")

        monkeypatch.setattr("icechunk_async_local.listing.os.stat", refuse)
        with pytest.raises(PermissionDeniedError, match="chunks"):
            await storage.states("chunks", ["A"])
