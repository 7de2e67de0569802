"""``probe``: what a storage promises, and whether it keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async.cli import render
from icechunk_async.cli.documents import PromiseLine, Promises
from icechunk_async.cli.options import (  # noqa: TC001  # Typer reads them at run time
    AsJson,
    Debug,
    Options,
)
from icechunk_async.cli.run import answer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(probe)


def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="Path or URL of the storage.")],
    *,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up after this.")
    ] = 60.0,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Try what a storage promises, with objects of its own that it removes again.

    Exit code 1 where commits could be lost: a promise that is needed is not kept.

    JSON keys: url, is_safe, seconds, promises (each: promise, needed, verdict (kept, broken, not
    promised or unknown), detail), left_behind (keys that could not be removed).
    """

    def work() -> Coroutine[Any, Any, Promises]:
        return _probe(url, timeout_seconds, dict(option or ()))

    document = answer(work, render.promises, as_json=as_json, debug=debug)
    if not document.is_safe:
        raise typer.Exit(1)


async def _probe(url: str, timeout_seconds: float, options: Mapping[str, Any]) -> Promises:
    from icechunk_async.storage import open_storage  # noqa: PLC0415  # slow to import
    from icechunk_async.storage.probe import probe_storage  # noqa: PLC0415  # slow to import

    async with open_storage(url, **options) as storage:
        result = await probe_storage(storage, timeout_seconds=timeout_seconds)
    return Promises(
        result.url,
        result.is_safe,
        round(result.seconds, 3),
        [PromiseLine(it.promise, it.needed, str(it.verdict), it.detail) for it in result.findings],
        list(result.left_behind),
    )
