"""Where a demonstration may put things, and what it may replace."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.cli.demo import command
from icechunk_async.cli.demo.place import claim, read_refs
from icechunk_async.errors import AlreadyExistsError, MissingDriverError

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.cli.demo.place import Place


async def demonstrate(directory: Path, *, force: bool = False) -> Place:
    """Leave behind what a demonstration does."""
    place = await claim(directory, force=force)
    async with Repository.create(place.repository) as repository:
        refs = await read_refs(repository)
    await asyncio.to_thread(place.picture.write_bytes, b"picture")
    await asyncio.to_thread(place.mark, refs)
    return place


async def change(place: Place) -> None:
    """Change the repository, as a user may."""
    async with Repository.open(place.repository) as repository:
        await repository.create_tag("mine", await repository.lookup_branch("main"))


@pytest.mark.parametrize("made", [False, True])
def test_demo_uses_an_empty_directory(tmp_path: Path, *, made: bool) -> None:
    """It creates the directory if it is missing."""
    directory = tmp_path / "a" / "b"
    if made:
        directory.mkdir(parents=True)
    place = asyncio.run(demonstrate(directory))
    assert place.repository.is_dir()


def test_a_previous_demonstration_is_replaced(tmp_path: Path) -> None:
    """Other files beside it stay."""
    place = asyncio.run(demonstrate(tmp_path))
    (tmp_path / "notes.txt").touch()
    asyncio.run(claim(tmp_path, force=False))
    assert sorted(it.name for it in tmp_path.iterdir()) == [place.marker.name, "notes.txt"]


def test_a_demonstration_that_was_interrupted_is_replaced(tmp_path: Path) -> None:
    """Its repository may be in any state."""
    place = asyncio.run(claim(tmp_path, force=False))
    place.repository.mkdir()
    asyncio.run(claim(tmp_path, force=False))
    assert not place.repository.exists()


@pytest.mark.parametrize("text", ["[]", "5", "null", "{", "[" * 100_000])
def test_a_marker_of_somebody_else_claims_nothing(tmp_path: Path, text: str) -> None:
    """It says nothing about what is there; with --force a demonstration begins beside it."""
    (tmp_path / ".icechunk-async-demo.json").write_text(text, encoding="utf-8")
    with pytest.raises(AlreadyExistsError, match="is not empty"):
        asyncio.run(claim(tmp_path, force=False))
    place = asyncio.run(demonstrate(tmp_path, force=True))
    assert place.repository.is_dir()


def test_missing_repository_is_replaced_without_force(tmp_path: Path) -> None:
    """The remaining files of the demonstration are replaced."""
    place = asyncio.run(demonstrate(tmp_path))
    shutil.rmtree(place.repository)
    asyncio.run(claim(tmp_path, force=False))
    assert not place.picture.exists()


def test_a_changed_repository_is_kept_unless_forced(tmp_path: Path) -> None:
    """The user's changes may matter."""
    place = asyncio.run(demonstrate(tmp_path))
    asyncio.run(change(place))
    with pytest.raises(AlreadyExistsError, match=r"was changed since.*--force"):
        asyncio.run(claim(tmp_path, force=False))
    assert place.repository.is_dir()
    asyncio.run(claim(tmp_path, force=True))
    assert not place.repository.exists()


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    """Refused; with force the demonstration goes beside them."""
    (tmp_path / "thesis.txt").write_text("all my work", encoding="utf-8")
    with pytest.raises(AlreadyExistsError, match=r"not empty.*--force"):
        asyncio.run(claim(tmp_path, force=False))
    assert [it.name for it in tmp_path.iterdir()] == ["thesis.txt"]
    asyncio.run(demonstrate(tmp_path, force=True))
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "all my work"


@pytest.mark.parametrize("name", ["repository", "temperature.png"])
def test_names_that_are_taken_are_refused(tmp_path: Path, name: str) -> None:
    """Files that the demonstration did not make are refused even with force."""
    (tmp_path / name).mkdir()
    with pytest.raises(AlreadyExistsError, match="is not from a demonstration"):
        asyncio.run(claim(tmp_path, force=True))
    assert (tmp_path / name).is_dir()


def test_symlink_is_removed_but_not_its_target(tmp_path: Path) -> None:
    """The place of the repository may have been moved elsewhere."""
    place = asyncio.run(demonstrate(tmp_path / "demo"))
    moved = place.repository.rename(tmp_path / "moved")
    place.repository.symlink_to(moved)
    asyncio.run(claim(tmp_path / "demo", force=True))
    assert not place.repository.is_symlink()
    assert moved.is_dir()


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """The error says so."""
    (tmp_path / "file").touch()
    with pytest.raises(AlreadyExistsError, match="is a file"):
        asyncio.run(claim(tmp_path / "file", force=True))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with the extra that brings them."""
    monkeypatch.setattr(command, "find_spec", {"xarray": 1, "cftime": 1, "h5py": 1}.get)
    expected = r"iris_sample_data, matplotlib\..*pip install 'icechunk-async\[demo\]'"
    with pytest.raises(MissingDriverError, match=expected):
        command.check_installed()
