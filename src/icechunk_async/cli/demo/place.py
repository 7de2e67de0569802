"""The directory of a demonstration: what it may create there, and what it may replace."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Final

from icechunk_async import Repository
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.targets import ref_targets
from icechunk_async.errors import AlreadyExistsError, IcechunkError
from icechunk_async.format.json.values import is_object

if TYPE_CHECKING:
    from pathlib import Path

    type Refs = dict[str, dict[str, str]]

__all__ = ["Place", "claim", "read_refs"]

_MARKER: Final = ".icechunk-async-demo.json"
_ABOUT: Final = "Written by 'icechunk-async demo', which replaces what is listed here as created."


@dataclass(frozen=True, slots=True)
class Place:
    """Where a demonstration puts things. Its marker tells a later one what it may replace."""

    directory: Path

    @property
    def repository(self) -> Path:
        """The repository's directory."""
        return self.directory / "repository"

    @property
    def picture(self) -> Path:
        """The picture."""
        return self.directory / "temperature.png"

    @property
    def created(self) -> list[Path]:
        """All that a demonstration creates, but for the marker."""
        return [self.repository, self.picture]

    @property
    def marker(self) -> Path:
        """The file that says which of the things here are a demonstration's."""
        return self.directory / _MARKER

    def mark(self, refs: Refs | None) -> None:
        """Claim the things here; ``refs`` is how the repository was left, None while at work."""
        self.directory.mkdir(parents=True, exist_ok=True)
        marker = {"about": _ABOUT, "created": [it.name for it in self.created], "refs": refs}
        self.marker.write_text(json.dumps(marker, indent=2), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Found:
    """The contents of a directory."""

    is_empty: bool
    has_marker: bool
    refs: Refs | None
    """How the previous demonstration left its repository; None if it did not end."""


async def claim(directory: Path, *, force: bool) -> Place:
    """Make a directory ready for a demonstration, replacing what a previous one created.

    Raises:
        AlreadyExistsError: something is there that must not be replaced, or needs ``force``.
    """
    place = Place(directory)
    found = await asyncio.to_thread(_look, place)
    if not found.has_marker and not found.is_empty and not force:
        raise AlreadyExistsError(
            f"{str(directory)!r} is not empty, and what it holds is not from a demonstration. "
            "Choose another directory, or pass --force to put the demonstration beside what is "
            "there; nothing of that is replaced.",
            directory=str(directory),
        )
    # None: the last demonstration did not come to its end, so nobody has built on what it left.
    if found.refs is not None and not force and await _was_changed(place, found.refs):
        raise AlreadyExistsError(
            f"The repository in {str(directory)!r} was changed since a demonstration created it. "
            "Choose another directory, or pass --force to replace it.",
            directory=str(directory),
        )
    await asyncio.to_thread(_clear, place, has_marker=found.has_marker)
    return place


async def read_refs(repository: Repository) -> Refs:
    """Return the snapshot ids of all branches and tags."""
    return {
        kind: {name: str(target) for name, target in await ref_targets(repository, kind)}
        for kind in ("branch", "tag")
    }


async def _was_changed(place: Place, refs: Refs) -> bool:
    try:
        async with Repository.open(place.repository) as repository:
            return await read_refs(repository) != refs
    except IcechunkError:
        return False  # removed or damaged: there is nothing to lose


def _look(place: Place) -> _Found:
    if not place.directory.exists():
        return _Found(is_empty=True, has_marker=False, refs=None)
    if not place.directory.is_dir():
        raise AlreadyExistsError(
            f"{str(place.directory)!r} is a file. Choose a directory for the demonstration.",
            directory=str(place.directory),
        )
    is_empty = next(place.directory.iterdir(), None) is None
    try:
        marker = json.loads(place.marker.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        marker = None
    if not is_object(marker):  # a file of somebody else
        return _Found(is_empty, has_marker=False, refs=None)
    return _Found(is_empty, has_marker=True, refs=marker.get("refs"))


def _clear(place: Place, *, has_marker: bool) -> None:
    """Remove what a previous demonstration created, and nothing else; then claim the place."""
    for path in place.created:
        if not path.exists() and not path.is_symlink():
            continue
        if not has_marker:
            raise AlreadyExistsError(
                f"{str(path)!r} is there already and is not from a demonstration. Move it, or "
                "choose another directory.",
                path=str(path),
            )
        # A link is removed and not followed: what it leads to was not created by a demonstration.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    # Before anything is created: a run that is killed leaves what a later one may replace.
    place.mark(None)
