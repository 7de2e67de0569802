"""Commands about a repository as a whole: ``status``, ``config``, ``ops``."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, cast

import typer

from icechunk_async import _clock
from icechunk_async.cli import render_operating as render
from icechunk_async.cli.opening import on_repository
from icechunk_async.cli.operating_documents import Configuration, Operation, Operations, State
from icechunk_async.cli.options import (  # Typer reads them at run time
    AsJson,
    Debug,
    OptionPair,
    Options,
    Url,
    parse_pair,
)
from icechunk_async.cli.run import answer

if TYPE_CHECKING:
    from icechunk_async import Repository
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.updates import Update

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, config, ops):
        app.command()(command)


def status(
    url: Url,
    *,
    read_only: Annotated[
        str | None,
        typer.Option("--read-only", metavar="REASON", help="Refuse changes from now on."),
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="Allow changes again.")] = False,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show whether a repository may be changed, and allow or forbid it.

    Writers honour it; the storage does not enforce it.

    JSON keys: url, spec_version, availability, reason, set_at, branches, tags, feature_flags,
    metadata.
    """
    if online and read_only is not None:
        raise typer.BadParameter("--online and --read-only exclude each other")

    async def work(repository: Repository) -> State:
        from icechunk_async.repository.administration import (  # noqa: PLC0415  # slow to import
            RepoAvailability,
            RepoStatus,
        )

        if read_only is not None:
            status = RepoStatus(RepoAvailability.READ_ONLY, limited_availability_reason=read_only)
            await repository.set_status(status)
        elif online:
            await repository.set_status(RepoStatus(RepoAvailability.ONLINE))
        return await _read_state(repository)

    answer(on_repository(url, option, work), render.state, as_json=as_json, debug=debug)


async def _read_state(repository: Repository) -> State:
    branches, tags = await repository.branches(), await repository.tags()
    url, version = repository.storage.description.url, repository.spec_version
    if version == 1:
        return State(url, version, "online", None, None, len(branches), len(tags), {}, {})
    found = await repository.get_status()
    flags = {it.name: it.enabled for it in await repository.feature_flags()}
    metadata = await repository.get_metadata()
    availability = found.availability.name.lower()
    return State(
        url,
        version,
        availability,
        found.limited_availability_reason,
        found.set_at,
        len(branches),
        len(tags),
        flags,
        dict(metadata),
    )


def config(
    url: Url,
    *,
    set_: Annotated[
        list[OptionPair] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            parser=parse_pair,
            help="Store a value, such as caching.num_chunk_refs=1000000; null is the default. "
            "May be repeated.",
        ),
    ] = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the stored configuration, and change it for everyone who opens the repository later.

    JSON keys: changed, config (null where the default counts).
    """

    async def work(repository: Repository) -> Configuration:
        from icechunk_async import RepositoryConfig  # noqa: PLC0415  # slow to import
        from icechunk_async.cli.configuring import as_document, with_values  # noqa: PLC0415

        stored = await repository.fetch_config(repository.storage)
        current = stored or RepositoryConfig()
        if not set_:
            return Configuration(changed=False, config=as_document(current))
        changed = with_values(current, set_)
        async with repository.reopen(config=changed) as other:
            await other.save_config()
        return Configuration(changed=True, config=as_document(changed))

    answer(on_repository(url, option, work), render.configuration, as_json=as_json, debug=debug)


def ops(
    url: Url,
    *,
    number: Annotated[
        int | None, typer.Option("--number", "-n", min=1, help="Operations to list at most.")
    ] = None,
    option: Options = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List what was done to a repository, newest first: commits, refs, upkeep, settings.

    JSON keys: operations (each: kind, updated_at, detail).
    """

    async def work(repository: Repository) -> Operations:
        found: list[Operation] = []
        async for update in repository.ops_log():
            found.append(_operation(update))
            if len(found) == number:
                break
        return Operations(found)

    answer(on_repository(url, option, work), render.operations, as_json=as_json, debug=debug)


def _operation(update: Update) -> Operation:
    detail: dict[str, JSON] = {key: _plain(it) for key, it in asdict(update.detail).items()}
    return Operation(_kind(update.detail), _clock.from_us(update.updated_at), detail)


def _kind(detail: object) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(detail).__name__).lower()


def _plain(value: object) -> JSON:
    if isinstance(value, dict):
        return {str(key): _plain(it) for key, it in cast("dict[object, object]", value).items()}
    return value if isinstance(value, bool | int | str | None) else str(value)
