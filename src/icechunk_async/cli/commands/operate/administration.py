"""`status`, `config`, `ops` and `probe`: a repository as a whole, and its storage."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.cli.console import (
    ADDED,
    CHANGED,
    REMOVED,
    Listing,
    assembled,
    cell,
    make_table,
    moment,
    one_line,
    plain,
    print_json,
    styled,
    time_head,
    time_of,
)
from icechunk_async.cli.declaring import OptionPair, parse_pair, repository_command, url_command
from icechunk_async.cli.pager import paged
from icechunk_async.errors import FormatError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from rich.console import Console

    from icechunk_async import Repository, RepositoryConfig
    from icechunk_async.format.config.fields import Section
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import Update

__all__ = ["in_words", "operation_of", "register"]

_ReadOnly = Annotated[
    str | None, typer.Option("--read-only", metavar="REASON", help="Refuse changes from now on.")
]
_Online = Annotated[bool, typer.Option("--online", help="Allow changes again.")]
_Set = Annotated[
    list[OptionPair] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        parser=parse_pair,
        help="Store a value, such as caching.num_chunk_refs=1000000; null is the default. May be "
        "repeated.",
    ),
]
_Effective = Annotated[
    bool,
    typer.Option(
        "--effective", help="Show what counts: defaults where nothing is stored, instead of null."
    ),
]
_Statistics = Annotated[
    bool | None,
    typer.Option(
        "--statistics/--no-statistics",
        help="Make statistics of chunks as they are written (queries by value), or no more.",
        show_default=False,
    ),
]
_Number = Annotated[
    int | None,
    typer.Option("--limit", "--number", "-n", min=1, help="List at most this many operations."),
]
_Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up after this time.")
]


@dataclass(frozen=True, slots=True)
class State:
    """The document of `status`."""

    url: str
    spec_version: int
    """0 for layouts before version 1."""
    layout: str
    availability: str
    """``online``, ``read_only`` or ``offline``."""
    reason: str | None
    set_at: datetime | None
    """None with format version 1, which has no status."""
    branches: int
    tags: int
    feature_flags: dict[str, bool]
    metadata: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Configuration:
    """The document of `config`."""

    changed: bool
    """Whether it was stored anew."""
    statistics: bool
    """Whether statistics of chunks are made as they are written."""
    config: JSON


@dataclass(frozen=True, slots=True)
class Operation:
    """A line of the operations log."""

    kind: str
    updated_at: datetime
    detail: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Operations:
    """The document of `ops`, newest first."""

    operations: list[Operation]


@dataclass(frozen=True, slots=True)
class PromiseLine:
    """One promise of a storage."""

    promise: str
    needed: bool
    """Commits could be lost without it."""
    verdict: str
    """``kept``, ``broken``, ``not promised`` or ``unknown``."""
    detail: str


@dataclass(frozen=True, slots=True)
class Promises:
    """The document of `probe`."""

    url: str
    is_safe: bool
    """Whether every promise that is needed was kept."""
    is_safe_numbered: bool
    """Whether every promise was kept that numbered references need."""
    seconds: float
    promises: list[PromiseLine]
    left_behind: list[str]
    """Keys of the trial that could not be removed."""


async def status(
    repository: Repository, *, read_only: _ReadOnly = None, online: _Online = False
) -> State:
    """Show whether a repository may be changed, and allow or forbid it.

    Writers honour the status; the storage does not enforce it.

    JSON keys: url, spec_version (0 for layouts before version 1), layout, availability, reason,
    set_at, branches, tags, feature_flags, metadata.
    """
    from icechunk_async.repository import (  # noqa: PLC0415 -- slow to import
        RepoAvailability,
        RepoStatus,
    )

    if online and read_only is not None:
        raise typer.BadParameter("--online and --read-only exclude each other")
    if read_only is not None:
        status = RepoStatus(RepoAvailability.READ_ONLY, limited_availability_reason=read_only)
        await repository.set_status(status)
    elif online:
        await repository.set_status(RepoStatus(RepoAvailability.ONLINE))
    return await _read_state(repository)


async def _read_state(repository: Repository) -> State:
    branches, tags = await repository.branches(), await repository.tags()
    url, version = repository.storage.description.url, repository.spec_version
    layout = repository.layout
    if not repository.engine.history.capabilities.status:
        return State(url, version, layout, "online", None, None, len(branches), len(tags), {}, {})
    found = await repository.get_status()
    flags = {it.name: it.enabled for it in await repository.feature_flags()}
    metadata = await repository.get_metadata()
    availability = found.availability.name.lower()
    return State(
        url,
        version,
        layout,
        availability,
        found.limited_availability_reason,
        found.set_at,
        len(branches),
        len(tags),
        flags,
        dict(metadata),
    )


async def config(
    repository: Repository,
    *,
    set_: _Set = None,
    statistics: _Statistics = None,
    effective: _Effective = False,
) -> Configuration:
    """Show the stored configuration, and change it for everyone who opens the repository later.

    Headers, keys and other options of containers that may be secrets are shown as ****.

    JSON keys: changed, statistics (made of chunks as they are written), config (null where the
    default counts; with --effective only where nothing counts).
    """
    from icechunk_async import RepositoryConfig  # noqa: PLC0415  # slow to import

    current = await repository.fetch_config(repository.storage) or RepositoryConfig()
    # All values are checked before anything is stored, statistics included.
    changed = _with_values(current, set_ or ())
    if statistics is not None:
        await repository.keep_statistics(enabled=statistics)
    if set_:
        # `save_config` stores what the repository was opened with.
        async with repository.reopen(config=changed) as other:
            await other.save_config()
    return Configuration(
        changed=bool(set_) or statistics is not None,
        statistics=repository.keeps_statistics,
        config=_shown(_in_effect(changed) if effective else changed),
    )


def _in_effect[S: Section](section: S) -> S:
    """Return a section of the configuration with the values that count where it has None."""
    values = {it.name: getattr(section, it.name) for it in fields(section)}
    found: dict[str, Any] = {}
    for name, value in values.items():
        # None asks for no compression of locations: there is no default that would count.
        asked = name != "virtual_chunk_location_compression"
        found[name] = getattr(section, f"effective_{name}", value) if asked else value
        if is_dataclass(found[name]) and hasattr(found[name], "__dataclass_fields__"):
            found[name] = _in_effect(found[name])
    return replace(section, **found)


def _shown(config: RepositoryConfig) -> JSON:
    """Return a configuration without its secrets: output is pasted, logged and kept."""
    from icechunk_async.format.config.codec import config_to_json  # noqa: PLC0415  # slow to import
    from icechunk_async.format.config.secrets import veiled_document  # noqa: PLC0415 -- slow

    return veiled_document(config_to_json(config))


def _with_values(config: RepositoryConfig, values: Iterable[OptionPair]) -> RepositoryConfig:
    """Return a configuration with other values at some paths, such as ``manifest.preload``.

    Raises:
        InvalidInputError: there is no such setting, or a value does not fit it or holds the veil of
            a secret.
    """
    from icechunk_async.format.config.codec import (  # noqa: PLC0415 -- slow to import
        config_from_json,
        config_to_json,
    )
    from icechunk_async.format.config.secrets import is_veiled  # noqa: PLC0415 -- slow to import

    for path, value in values:
        if is_veiled(cast("JSON", value)):
            raise InvalidInputError(
                f"The value for {path!r} holds '****', which stands for a secret where a "
                "configuration is shown. Give the secret itself; nothing was changed."
            )
        # One value after the other, on what the one before made: two may be of one section.
        document = config_to_json(config)
        place = document
        *sections, name = path.split(".")
        for section in sections:
            if place.get(section) is None:
                place[section] = {}
            below = place[section]
            if not isinstance(below, dict):
                raise _unknown(path)
            place = below
        place[name] = value  # type: ignore[assignment] # it was read from JSON
        try:
            config = config_from_json(document)
        except FormatError as error:  # here the document is no file: an argument is wrong
            raise InvalidInputError(error.message) from error
        if not _has(config_to_json(config), [*sections, name], set_=value is not None):
            raise _unknown(path)
    return config


def _has(document: JSON, names: list[str], *, set_: bool) -> bool:
    """Return whether a setting was understood: unknown ones are dropped when it is decoded."""
    for name in names:
        if not isinstance(document, dict) or name not in document:
            return not set_ and document is None
        document = document[name]
    return document is not None or not set_


def _unknown(path: str) -> InvalidInputError:
    return InvalidInputError(
        f"The configuration has no setting {path!r}. Run 'config' without --set to list them all."
    )


async def ops(repository: Repository, *, number: _Number = None) -> Operations:
    """List what was done to a repository, newest first: commits, refs, upkeep, settings.

    JSON keys: operations (each: kind, updated_at, detail).
    """
    found: list[Update] = []
    # The log first: that it has none is what an older layout must be refused for.
    async for update in repository.ops_log():
        found.append(update)
        if len(found) == number:
            break
    names = {it.id: it.name for it in await repository.feature_flags()}
    return Operations([operation_of(it, names) for it in found])


def operation_of(update: Update, names: Mapping[int, str]) -> Operation:
    """Return a line of the log. ``names`` are those of feature flags, by number."""
    from icechunk_async.format.operations_log import FeatureFlagChanged  # noqa: PLC0415 -- slow

    detail: dict[str, JSON] = {
        it.name: _as_json(getattr(update.detail, it.name)) for it in fields(update.detail)
    }
    if isinstance(update.detail, FeatureFlagChanged):
        # A newer writer may know flags that this version has no name for.
        detail["name"] = names.get(update.detail.flag, f"number {update.detail.flag}")
    return Operation(_kind(update.detail), clock.from_us(update.updated_at), detail)


def _kind(detail: object) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(detail).__name__).lower()


def _as_json(value: object) -> JSON:
    if isinstance(value, dict):
        return {str(key): _as_json(it) for key, it in cast("dict[object, object]", value).items()}
    if is_dataclass(value) and not isinstance(value, type):  # a status
        document = {it.name: _as_json(getattr(value, it.name)) for it in fields(value)}
        since = document.get("set_at")
        if isinstance(since, int):
            document["set_at"] = clock.from_us(since).isoformat(timespec="microseconds")
        return document
    if isinstance(value, Enum):
        return value.name.lower()
    return value if isinstance(value, bool | int | str | None) else str(value)


def in_words(operation: Operation) -> str:
    """Return the words for an operation: its branch or tag, its snapshots, its values."""
    it = operation.detail
    match operation.kind:
        case "new commit":
            return f"{it['branch']} is at {it['new_snapshot_id']}"
        case "commit amended":
            return (
                f"{it['branch']} is at {it['new_snapshot_id']}, which replaced "
                f"{it['previous_snapshot_id']}"
            )
        case "branch reset" | "branch deleted" | "tag deleted":
            return f"{it['name']}, which was at {it['previous_snapshot_id']}"
        case "detached snapshot created":
            return f"{it['new_snapshot_id']}, on no branch"
        case "repo migrated":
            return f"from format version {it['from_version']} to {it['to_version']}"
        case "feature flag changed":
            value = "on" if it["new_value"] else "off"
            return f"{it['name']} is {value if it['is_set'] else 'as by default'}"
        case "repo status changed":
            status = cast("dict[str, JSON]", it["status"])
            reason = f": {status['reason']}" if status["reason"] else ""
            return f"{str(status['availability']).replace('_', ' ')}{reason}"
        case _:
            return ", ".join(str(value) for value in it.values())


async def probe(url: str, options: dict[str, Any], *, timeout_seconds: _Timeout = 60.0) -> Promises:
    """Test the promises of a storage with small objects, which are removed again.

    Exit code 1 if commits could be lost: a promise that is needed is not kept.

    JSON keys: url, is_safe, is_safe_numbered (for repositories with numbered references, which need
    no conditional update), seconds, promises (each: promise, needed, verdict (kept, broken, not
    promised or unknown), detail), left_behind (keys that could not be removed).
    """
    from icechunk_async.storage import open_storage  # noqa: PLC0415  # slow to import
    from icechunk_async.storage.probe import probe_storage  # noqa: PLC0415  # slow to import

    # Not `Repository.open`: a storage is tried before there is a repository.
    async with open_storage(url, **options) as storage:
        result = await probe_storage(storage, timeout_seconds=timeout_seconds)
    return Promises(
        result.url,
        result.is_safe,
        result.is_safe_numbered,
        round(result.seconds, 3),
        [PromiseLine(it.promise, it.needed, str(it.verdict), it.detail) for it in result.findings],
        list(result.left_behind),
    )


def _show_state(document: State, console: Console) -> None:
    table = Listing("", "", header=False)
    table.add_row(cell("repository"), cell(document.url))
    table.add_row(cell("format"), cell(document.layout))
    style = "" if document.availability == "online" else REMOVED
    table.add_row(cell("availability"), cell(document.availability.replace("_", " "), style))
    if document.reason is not None:
        table.add_row(cell("reason"), cell(one_line(document.reason)))
    if document.set_at is not None:
        table.add_row(cell("since"), cell(moment(document.set_at)))
    table.add_row(cell("branches"), cell(f"{document.branches:,}"))
    table.add_row(cell("tags"), cell(f"{document.tags:,}"))
    for name, enabled in sorted(document.feature_flags.items()):
        table.add_row(cell(name), cell("enabled") if enabled else cell("disabled", REMOVED))
    for name, value in sorted(document.metadata.items()):
        table.add_row(cell(name), cell(json.dumps(value, ensure_ascii=False)))
    console.print(table)


def _show_configuration(document: Configuration, console: Console) -> None:
    if document.changed:
        console.print("Stored:")
    print_json(document.config, console)
    if document.statistics:
        console.print("Statistics of chunks are made as they are written.")


def _show_operations(document: Operations, console: Console) -> None:
    table = make_table(time_head("DONE", console), "OPERATION", "")
    for it in document.operations:
        table.add_row(time_of(it.updated_at, console), it.kind, plain(one_line(in_words(it))))
    with paged(console):
        console.print(table)


def _show_promises(document: Promises, console: Console) -> None:
    table = make_table("PROMISE", "NEEDED", "VERDICT", "")
    for line in document.promises:
        style = {"kept": ADDED, "broken": REMOVED}.get(line.verdict, CHANGED)
        needed = "yes" if line.needed else "no"
        table.add_row(line.promise, needed, styled(line.verdict, style), plain(line.detail))
    console.print(table)
    for key in document.left_behind:
        console.print(assembled("Could not be removed: ", plain(key)), soft_wrap=True)
    sentence = "is safe for commits" if document.is_safe else "is not safe: commits could be lost"
    if document.is_safe_numbered and not document.is_safe:
        sentence = (
            "is safe for commits with numbered states (init --layout format-2-numbered), and not "
            "safe otherwise: commits could be lost"
        )
    console.print(assembled(plain(document.url, "bold"), f" {sentence}."), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(repository_command(status, _show_state))
    app.command()(repository_command(config, _show_configuration))
    app.command()(repository_command(ops, _show_operations))
    app.command()(url_command(probe, _show_promises, has_failed=lambda it: not it.is_safe))
