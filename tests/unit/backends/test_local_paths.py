"""Where the local backend puts objects, and what it takes for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from icechunk_async.errors import (
    InvalidInputError,
    InvalidObjectKeyError,
    InvalidURLError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
)
from icechunk_async.storage import ABSENT, CommonPrefix, Version, open_storage
from icechunk_async_local.paths import RESERVED_PREFIX, Tree, root_of
from tests.unit.backends.local_tools import everything


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///data/repo", "/data/repo"),
        ("file:///data/repo/", "/data/repo"),
        ("file://localhost/data", "/data"),
        ("file:///with%20space/%C3%A9/%25/%3F%23", "/with space/é/%/?#"),
        ("FILE:///data", "/data"),
        ("file:///", "/"),
        ("file:///not%FFunicode", os.fsdecode(b"/not\xffunicode")),
    ],
)
def test_a_url_names_a_directory(url: str, path: str) -> None:
    """Paths are absolute and percent-decoded."""
    assert root_of(url) == Path(path)


@pytest.mark.parametrize(
    "url",
    [
        *("file://server/share", "file:relative", "file://", "s3://bucket/x"),
        *("file:///a?b", "file:///a#b", "file:///a?", "file:///a%00b"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    """The message says what is wrong, and shows a URL that would do."""
    with pytest.raises(InvalidURLError, match="file:///absolute/path"):
        root_of(url)


async def test_a_path_with_odd_characters_is_opened(tmp_path: Path) -> None:
    """A path goes through its URL and comes back."""
    root = tmp_path / "a b%20c#d?é"
    async with open_storage(root) as storage:
        await storage.put("key", b"body")
        async with open_storage(storage.description.url) as other:
            assert (await other.get("key")).data == b"body"
    assert (root / "key").read_bytes() == b"body"


async def test_keys_are_plain_files(tmp_path: Path) -> None:
    """Other programs find ``a/b`` in the folder ``a``, and we find what they put there."""
    async with open_storage(tmp_path) as storage:
        await storage.put("a/b", b"ours")
        assert (tmp_path / "a" / "b").read_bytes() == b"ours"
        (tmp_path / "a" / "c").write_bytes(b"theirs")
        assert (await storage.get("a/c")).data == b"theirs"
    assert everything(tmp_path) == ["a/", "a/b", "a/c"]


async def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    """The root appears with the first write, not when someone looks whether it is there."""
    root = tmp_path / "not" / "there"
    async with open_storage(root) as storage:
        with pytest.raises(ObjectNotFoundError):
            await storage.get("key")
        assert [entry async for entry in storage.list_prefix()] == []
        assert await storage.delete(["key", "a/b"]) == []
        with pytest.raises(PreconditionFailedError):
            await storage.put("a/b", b"x", if_version=Version("0-0-0"))
        await storage.sync()
        assert everything(tmp_path) == []
        await storage.put("key", b"body", if_version=ABSENT)
        assert everything(tmp_path) == ["not/", "not/there/", "not/there/key"]


async def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """It is said when it is opened, with the file's name."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidURLError, match="is not a directory"):
            async with open_storage(path):
                pass


async def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    """Links are only refused below the root."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    async with open_storage(tmp_path / "link") as storage:
        await storage.put("a/b", b"body")
        await storage.sync()
        assert (await storage.get("a/b")).data == b"body"
    assert (tmp_path / "real" / "a" / "b").exists()


async def test_a_root_that_is_a_dangling_link_is_refused(tmp_path: Path) -> None:
    """It leads to no directory, and none is made at its other end."""
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InvalidURLError, match="link"):
        async with open_storage(tmp_path / "link"):
            pass


async def test_reserved_names_are_no_keys(tmp_path: Path) -> None:
    """Names of unfinished files, of ours and of the official engine's, are refused everywhere."""
    reserved = RESERVED_PREFIX.decode()
    keys = (reserved + "x", f"a/{reserved}x", f"{reserved}x/a", "a#1", "a/b#12")
    async with open_storage(tmp_path) as storage:
        await storage.put("real", b"body")
        for key in keys:
            for operation in (
                storage.get(key),
                storage.get_if_changed(key, Version("0")),
                storage.put(key, b"x"),
                storage.delete(["real", key]),
                storage.copy("real", key),
                storage.copy(key, "b"),
            ):
                with pytest.raises(InvalidObjectKeyError, match="unfinished"):
                    await operation
        for key in ("a#", "a#1/b", "a#x", "#"):
            await storage.put(key, b"x")
        assert (await storage.get("real")).data == b"body"


async def test_a_segment_that_is_too_long_is_no_key(tmp_path: Path) -> None:
    """A file name has at most 255 bytes, however few characters."""
    async with open_storage(tmp_path) as storage:
        for key in ("x" * 256, "é" * 128, "a/" + "x" * 256 + "/b"):
            with pytest.raises(InvalidObjectKeyError, match="255"):
                await storage.put(key, b"x")
            with pytest.raises(InvalidObjectKeyError, match="255"):
                await storage.delete([key])


async def test_a_key_cannot_lie_below_another(tmp_path: Path) -> None:
    """``a`` and ``a/b`` cannot both exist: writing says so, reading finds nothing."""
    async with open_storage(tmp_path) as storage:
        await storage.put("a", b"file")
        for expected in (None, ABSENT, Version("1-1-1")):
            with pytest.raises(InvalidObjectKeyError, match="file stands where a folder is needed"):
                await storage.put("a/b", b"x", if_version=expected)
        with pytest.raises(ObjectNotFoundError):
            await storage.get("a/b")
        assert await storage.delete(["a/b", "a/b/c"]) == []
        assert [entry async for entry in storage.list_prefix("a/")] == []

        await storage.put("d/e", b"file")
        for expected in (None, ABSENT, Version("1-1-1")):
            with pytest.raises(InvalidObjectKeyError, match="folder has this name"):
                await storage.put("d", b"x", if_version=expected)
        with pytest.raises(ObjectNotFoundError):
            await storage.get("d")
        with pytest.raises(InvalidObjectKeyError):
            await storage.copy("a", "d")
        assert await storage.delete(["d"]) == []
        assert (await storage.get("d/e")).data == b"file"
    assert everything(tmp_path) == ["a", "d/", "d/e"]


@pytest.mark.parametrize("expected", [None, ABSENT])
async def test_an_empty_folder_gives_way_to_an_object(tmp_path: Path, expected: None) -> None:
    """Folders that were left behind by others are no reason to refuse a key."""
    (tmp_path / "a").mkdir()
    async with open_storage(tmp_path) as storage:
        await storage.put("a", b"body", if_version=expected)
        assert (await storage.get("a")).data == b"body"


async def test_folders_go_with_their_last_object(tmp_path: Path) -> None:
    """Deleting removes folders that it emptied, up to the root, which stays."""
    root = tmp_path / "root"
    async with open_storage(root) as storage:
        await storage.put("a/b/c/d", b"x")
        await storage.put("a/e", b"x")
        await storage.delete(["a/b/c/d"])
        assert everything(root) == ["a/", "a/e"]
        await storage.delete(["a/e"])
        assert everything(root) == []
        assert root.exists()


async def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    """Neither out of the root nor within it, neither as a folder nor as a file."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "in").mkdir(parents=True)
    (outside / "in" / "secret").write_bytes(b"secret")
    (root / "real").mkdir(parents=True)
    (root / "real" / "object").write_bytes(b"object")
    (root / "out").symlink_to(outside)
    (root / "within").symlink_to("real")
    (root / "real" / "file").symlink_to(outside / "in" / "secret")
    before = everything(tmp_path)
    async with open_storage(root) as storage:
        for key, link in (
            ("out/in/secret", "out"),
            ("out/secret", "out"),
            ("within/object", "within"),
            ("real/file", "real/file"),
        ):
            with pytest.raises(PermissionDeniedError, match=f"{link}' is a symbolic link"):
                await storage.get(key)
            with pytest.raises(PermissionDeniedError, match=f"{link}' is a symbolic link"):
                await storage.copy(key, "copy")
        for key in ("out/in/secret", "out/new", "out/in/deep/new", "within/object", "within/new"):
            for expected in (None, ABSENT, Version("1-1-1")):
                with pytest.raises(PermissionDeniedError, match="is a symbolic link"):
                    await storage.put(key, b"x", if_version=expected)
        failures = await storage.delete(["out/in/secret", "within/object", "out/missing"])
        assert [type(failure.error) for failure in failures] == [PermissionDeniedError] * 3
        with pytest.raises(PermissionDeniedError, match="is a symbolic link"):
            assert [entry async for entry in storage.list_prefix("out/in/")]
        assert [entry async for entry in storage.list_prefix(delimiter="/")] == [
            CommonPrefix("real/")
        ]
        found = [entry async for entry in storage.list_prefix()]
        assert [getattr(entry, "key", None) for entry in found] == ["real/object"]
    assert everything(tmp_path) == before
    assert (outside / "in" / "secret").read_bytes() == b"secret"


def test_a_link_that_appears_meanwhile_is_not_followed(tmp_path: Path) -> None:
    """Between the look and the making of folders someone may put a link in their way."""
    (tmp_path / "outside").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").symlink_to(tmp_path / "outside")
    (root / "c").mkdir()
    (root / "c" / "d").symlink_to(tmp_path / "outside")
    for folders in ((b"a",), (b"a", b"b"), (b"c", b"d")):
        with pytest.raises(NotADirectoryError):
            Tree(root).make_folder(folders, lambda _: None)
    assert list((tmp_path / "outside").iterdir()) == []


async def test_writing_over_a_link_replaces_the_link(tmp_path: Path) -> None:
    """The target of the link is not touched."""
    (tmp_path / "outside").write_bytes(b"outside")
    root = tmp_path / "root"
    root.mkdir()
    (root / "key").symlink_to(tmp_path / "outside")
    async with open_storage(root) as storage:
        with pytest.raises(PreconditionFailedError):
            await storage.put("key", b"x", if_version=ABSENT)
        await storage.put("key", b"inside")
        assert (await storage.get("key")).data == b"inside"
    assert (tmp_path / "outside").read_bytes() == b"outside"


async def test_special_files_are_no_objects(tmp_path: Path) -> None:
    """A pipe is not waited for, and not listed."""
    os.mkfifo(tmp_path / "pipe")
    async with open_storage(tmp_path) as storage:
        with pytest.raises(ObjectNotFoundError):
            await storage.get("pipe")
        with pytest.raises(ObjectNotFoundError):
            await storage.copy("pipe", "copy")
        assert [entry async for entry in storage.list_prefix()] == []


async def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    """Files and folders have the rights of any other file that this process makes."""
    before = os.umask(0o027)
    try:
        async with open_storage(tmp_path / "root") as storage:
            await storage.put("a/plain", b"x")
            await storage.put("a/created", b"x", if_version=ABSENT)
            await storage.copy("a/plain", "a/copied")
    finally:
        os.umask(before)
    for name in ("plain", "created", "copied"):
        assert (tmp_path / "root" / "a" / name).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "root" / "a").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    "options",
    [
        {"durability": "sometimes"},
        {"durability": None},
        {"lock_timeout_seconds": -1},
        {"lock_timeout_seconds": float("nan")},
        {"lock_timeout_seconds": "30"},
        {"lock_timeout_seconds": True},
        {"unknown": 1},
    ],
)
async def test_options_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """Nothing is opened with an option that means nothing."""
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        async with open_storage(tmp_path, **options):
            pass


async def test_the_description_has_the_options_that_matter(tmp_path: Path) -> None:
    """A worker opens an equal storage."""
    async with open_storage(tmp_path, durability="none", single_machine=True) as storage:
        assert storage.description.url == tmp_path.as_uri()
        assert storage.description.options == {"durability": "none", "single_machine": True}
    async with open_storage(tmp_path) as storage:
        assert storage.description.options == {}
        assert repr(storage) == f"LocalStorage('{tmp_path.as_uri()}')"
