"""Completion by Tab: branches, tags and the ids of snapshots, looked up in the repository.

Typer asks these functions while somebody types. They open the repository as the command would, with
the URL and the options that are on the line already, and complete nothing if that fails or takes
long: a shell is no place for errors.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Final

import typer  # noqa: TC002 -- it evaluates annotations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from icechunk_async import Repository

    type Found = list[tuple[str, str]]
    """Words and what they mean."""

__all__ = ["complete_branch", "complete_ref", "complete_tag"]

# Somebody waits with a finger on the key. Retries of a storage that does not answer take minutes.
_SECONDS: Final = 3.0
_MOST_SNAPSHOTS: Final = 10_000
"""Snapshots of each branch that are looked at."""
_MOST: Final = 100
"""Ids that are offered; more are narrowed down by another letter."""
# Others chose the names and the messages, and shells take what is offered for more than text: bash
# puts it into the line unquoted, where $(...) runs once Enter is pressed; zsh evaluates words and
# descriptions when Tab is (Typer 0.29 escapes a backquote, but no backslash before it).
_WORD: Final = re.compile(r"[\w./@+,][\w./@+,:=%-]*")
_NO_TEXT: Final = re.compile(r"[^\w ,./+-]+")


def complete_branch(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the branches whose names begin so."""
    return _completed(ctx, lambda repository: _branches(repository, incomplete))


def complete_tag(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the tags whose names begin so."""
    return _completed(ctx, lambda repository: _tags(repository, incomplete))


def complete_ref(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the branches, the tags and, after a first letter, the ids that begin so."""

    async def find(repository: Repository) -> Found:
        named = [*await _branches(repository, incomplete), *await _tags(repository, incomplete)]
        return named + (await _ids(repository, incomplete) if incomplete else [])

    return _completed(ctx, find)


async def _branches(repository: Repository, start: str) -> Found:
    names = sorted(await repository.list_branches())
    return [(name, "branch") for name in names if name.startswith(start)]


async def _tags(repository: Repository, start: str) -> Found:
    names = sorted(await repository.list_tags())
    return [(name, "tag") for name in names if name.startswith(start)]


async def _ids(repository: Repository, start: str) -> Found:
    found: dict[str, str] = {}
    seen: set[object] = set()
    for branch in sorted(await repository.list_branches()):
        count = 0
        async for info in repository.ancestry(branch=branch):
            count += 1
            if info.id in seen or count > _MOST_SNAPSHOTS or len(found) >= _MOST:
                break  # what comes before it was looked at with another branch
            seen.add(info.id)
            if str(info.id).startswith(start):
                found[str(info.id)] = " ".join(_NO_TEXT.sub(" ", info.message).split())[:60]
    return list(found.items())


def _completed(ctx: typer.Context, find: Callable[[Repository], Awaitable[Found]]) -> Found:
    # Behind an option that wants a value, the words are there and not assigned yet.
    url, options = ctx.params.get("url") or next(iter(ctx.args), None), ctx.params.get("option")
    if not isinstance(url, str):
        return []
    # A warning would be printed into the line that is being typed.
    logging.disable()
    try:
        found = asyncio.run(asyncio.wait_for(_looked_up(url, dict(options or ()), find), _SECONDS))
        # Other names have to be typed, in quotes.
        return [(word, meaning) for word, meaning in found if _WORD.fullmatch(word)]
    except Exception:  # noqa: BLE001 -- whatever it is, there is nothing to complete
        return []
    finally:
        logging.disable(logging.NOTSET)


async def _looked_up(
    url: str, options: dict[str, Any], find: Callable[[Repository], Awaitable[Found]]
) -> Found:
    from icechunk_async.repository import Repository  # noqa: PLC0415 -- slow to import
    from icechunk_async.urls import IcechunkURL, is_icechunk_url  # noqa: PLC0415 -- slow to import

    # A ref in the URL does not limit what is offered: the whole repository is looked at.
    location = IcechunkURL.parse(url).location if is_icechunk_url(url) else url
    async with Repository.open(location, storage_options=options) as repository:
        return await find(repository)
