"""Make commands of asynchronous functions, with the options that all commands share.

A command is a plain function of a repository (or of a URL) that returns a document, a frozen
dataclass, and a function that prints the document for people::

    async def log(repository: Repository, ref: Ref = "main", *, as_of: AsOf = None) -> Log: ...

    app.command()(repository_command(log, show_log))

The URL, ``--option``, ``--json``, ``--debug`` and, if asked for, ``--authorize`` are added here.
The function's docstring is the command's help.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from re import fullmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from icechunk_async._runtime import clock
from icechunk_async.cli.completing import complete_ref
from icechunk_async.cli.console import (
    ask,
    assembled,
    is_answered,
    json_text,
    make_console,
    one_line,
    warn,
)
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    InvalidInputError,
    UnsupportedFeatureError,
    UnsupportedSpecVersionError,
)

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Generator,
        Mapping,
        Sequence,
    )

    from rich.console import Console

    from icechunk_async import Repository

__all__ = [
    "AsJson",
    "AsOf",
    "Authorize",
    "Debug",
    "DestinationOptions",
    "DryRun",
    "OlderThan",
    "OptionPair",
    "Paths",
    "Ref",
    "RefOption",
    "Spoken",
    "parse_time",
    "parse_time_or_age",
    "repository_command",
    "run_and_show",
    "streaming_command",
    "url_command",
]

type OptionPair = tuple[str, object]

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

type Spoken = Callable[[Mapping[str, Any]], str | None]
"""Return a sentence to say before a command with these arguments, or None."""


def parse_pair(text: str) -> OptionPair:
    """Read ``key=value``. A value that is JSON is decoded; any other is a string.

    So ``true``, ``3``, ``2.5`` and ``null`` are not strings, and ``"3"`` in quotes is one.

    Raises:
        typer.BadParameter: there is no ``=``, or nothing before it.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"{text!r} is not of the form key=value")
    try:
        # Options of backends have types: allow_http=true is a boolean, which text is not taken for.
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_time(text: str) -> datetime:
    """Read an ISO 8601 time. Without an offset it is UTC.

    Raises:
        typer.BadParameter: it is not one.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not an ISO 8601 time such as 2026-01-31 or 2026-01-31T12:00:00+01:00"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def parse_time_or_age(text: str, *also: str) -> datetime:
    """Read an ISO 8601 time, or an age such as ``90d``, ``12h``, ``30 minutes`` or ``2 weeks``.

    Args:
        text: the time or age.
        also: other forms that the text could have had, for the message.

    Raises:
        typer.BadParameter: it is neither.
    """
    # `m` is minutes. Months are refused, as `2 months`, since they differ in length.
    age = fullmatch(
        r"(\d{1,9}) *(m(?=$|in(?:ute)?s?$)|h(?=$|ours?$)|d(?=$|ays?$)|w(?=$|eeks?$))[a-z]*", text
    )
    if age is None:
        try:
            return parse_time(text)
        except typer.BadParameter:
            forms = "an age such as 90d or 12h", "an ISO 8601 time such as 2026-01-31T12:00+01:00"
            raise typer.BadParameter(
                f"{text!r} is neither {' nor '.join((*forms, *also))}"
            ) from None
    now = clock.from_us(clock.now_us())
    try:
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is longer ago than the calendar reaches") from None


Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF", autocompletion=complete_ref, help="A branch, a tag or a snapshot id."
    ),
]
RefOption = Annotated[
    str,
    typer.Option(
        "--ref",
        metavar="REF",
        autocompletion=complete_ref,
        help="A branch, a tag or a snapshot id.",
    ),
]
AsOf = Annotated[
    datetime | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        parser=parse_time,
        help="With a branch: its tip at this ISO 8601 time (UTC unless it has an offset).",
    ),
]
OlderThan = Annotated[
    datetime,
    typer.Option(
        "--older-than",
        metavar="TIME",
        parser=parse_time_or_age,
        help="An ISO 8601 time (UTC unless it has an offset), or an age such as 90d, 12h or "
        "'30 minutes'.",
    ),
]
Paths = Annotated[
    list[str] | None,
    typer.Option("--path", metavar="PATH", help="Only this array or group. May be repeated."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; show what would be changed.")
]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before it is done.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_WORDS = {"ref": "ref", "as_of": "time", "path": "path"}
_Url = Annotated[str, typer.Argument(metavar="URL", help="Path or URL of the repository.")]
_Options = Annotated[
    list[OptionPair] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        parser=parse_pair,
        help="An option of the storage backend, such as durability=none. May be repeated.",
    ),
]
DestinationOptions = Annotated[
    list[OptionPair] | None,
    typer.Option(
        "--destination-option",
        metavar="KEY=VALUE",
        parser=parse_pair,
        help="An option of the destination's storage backend. May be repeated.",
    ),
]
Authorize = Annotated[
    list[str] | None,
    typer.Option(
        "--authorize",
        metavar="URL_PREFIX",
        help="Allow virtual chunks in the container with this URL prefix. May be repeated.",
    ),
]


def repository_command[D](
    function: Callable[..., Coroutine[Any, Any, D]],
    show: Callable[[D, Console], None],
    *,
    authorizes: bool = False,
    has_failed: Callable[[D], bool] | None = None,
    asks: Spoken | None = None,
    warns: Spoken | None = None,
) -> Callable[..., None]:
    """Return a command that opens a repository and calls a function with it.

    Args:
        function: its first parameter is the open repository; the others are those of the command.
        show: prints the document for people.
        authorizes: add ``--authorize``.
        has_failed: whether a document means exit code 1.
        asks: the question to somebody at a terminal before anything is done; adds ``--yes``.
        warns: a warning for standard error before anything is done.
    """

    async def work(
        url: str, options: dict[str, Any], *, authorize: list[str] | None = None, **arguments: Any
    ) -> D:
        location = _named_in(url, arguments, parameters)
        async with _opened(location, options, authorize) as repository:
            return await function(repository, **arguments)

    parameters = _parameters_of(function)[1:]
    if authorizes:
        parameters.append(_keyword("authorize", Authorize))
    return _command(function, work, parameters, show, has_failed, asks=asks, warns=warns)


def _named_in(url: str, arguments: dict[str, Any], parameters: Sequence[inspect.Parameter]) -> str:
    """Return the repository of a URL, and put what else it names into a command's arguments.

    Raises:
        InvalidInputError: the command takes no ref, time or path, or is given another one as well.
    """
    from icechunk_async.urls import IcechunkURL, is_icechunk_url  # noqa: PLC0415 -- not for each start

    if not is_icechunk_url(url):
        return url
    named = IcechunkURL.parse(url)
    taken = {it.name: it.default for it in parameters}
    has_ref = not (named.branch is named.tag is named.snapshot_id is None)
    values = {
        "ref": named.ref if has_ref else None,
        "as_of": named.as_of,
        "path": named.path if named.group else None,
    }
    for name, value in values.items():
        if value is None:
            continue
        if name not in taken:
            raise InvalidInputError(
                f"The URL names a {_WORDS[name]} ({value}), and this command takes none. Leave it "
                "out of the URL."
            )
        # A default that was typed cannot be told from one that was not, and does no harm.
        if arguments[name] != taken[name]:
            raise InvalidInputError(
                f"The URL names a {_WORDS[name]} ({value}), and the command line another one "
                f"({arguments[name]}). Give one."
            )
        # Some commands take several refs or paths.
        arguments[name] = [value] if name != "as_of" and taken[name] is None else value
    return named.location


@asynccontextmanager
async def _opened(
    url: str, options: dict[str, Any], authorize: list[str] | None = None
) -> AsyncGenerator[Repository]:
    """Open a repository; if it is damaged, the error says which commands look at it and mend it."""
    from icechunk_async.repository import Repository  # noqa: PLC0415 -- slow to import

    access = dict.fromkeys(authorize or ())
    opened = Repository.open(url, storage_options=options, authorize_virtual_chunk_access=access)
    # Only errors of the opening get the note: those of the block come up at `yield`, outside of
    # `try`.
    async with AsyncExitStack() as stack:
        try:
            repository = await stack.enter_async_context(opened)
        # Both are FormatErrors of a repository that is whole; `verify` would have nothing to say.
        except (UnsupportedFeatureError, UnsupportedSpecVersionError):
            raise
        except FormatError as error:
            error.add_note(
                "See what is damaged with 'icechunk-async verify', and what can be restored with "
                "'icechunk-async repair'."
            )
            raise
        yield repository


def streaming_command[D](
    function: Callable[..., AsyncIterator[D]],
    show: Callable[[D, Console], None],
    *,
    authorizes: bool = False,
) -> Callable[..., None]:
    """Return a command that opens a repository and prints documents as a function yields them.

    With ``--json`` each is one line. See `repository_command` for the rest.
    """
    parameters = _parameters_of(function)[1:]

    async def work(
        url: str,
        options: dict[str, Any],
        *,
        as_json: bool,
        authorize: list[str] | None = None,
        **arguments: Any,
    ) -> None:
        console = make_console()
        location = _named_in(url, arguments, parameters)
        async with _opened(location, options, authorize) as repository:
            async for document in function(repository, **arguments):
                if as_json:
                    # One line each, so that a reader of the pipe can parse as lines come.
                    typer.echo(_to_json(document, indent=None))
                else:
                    show(document, console)
                # A pipe is buffered by blocks: the commit that just came would be seen dozens of
                # commits later.
                sys.stdout.flush()

    def run(
        *, url: str, option: list[OptionPair] | None, as_json: bool, debug: bool, **arguments: Any
    ) -> None:
        with _reporting(debug=debug, error_code=1):
            asyncio.run(work(url, dict(option or ()), as_json=as_json, **arguments))

    if authorizes:
        parameters.append(_keyword("authorize", Authorize))
    return _described(run, function, parameters)


def url_command[D](
    function: Callable[..., Coroutine[Any, Any, D]],
    show: Callable[[D, Console], None],
    *,
    has_failed: Callable[[D], bool] | None = None,
    error_code: int = 1,
    asks: Spoken | None = None,
) -> Callable[..., None]:
    """Return a command that calls a function with a URL and the options of its storage.

    The other parameters of the function are those of the command; see `repository_command`.
    ``error_code`` is the exit code if it cannot be done.
    """
    parameters = _parameters_of(function)[2:]

    async def work(url: str, options: dict[str, Any], **arguments: Any) -> D:
        location = _named_in(url, arguments, parameters)
        return await function(location, options, **arguments)

    return _command(function, work, parameters, show, has_failed, error_code=error_code, asks=asks)


def _command[D](
    function: Callable[..., Coroutine[Any, Any, D]],
    work: Callable[..., Coroutine[Any, Any, D]],
    parameters: list[inspect.Parameter],
    show: Callable[[D, Console], None],
    has_failed: Callable[[D], bool] | None,
    *,
    error_code: int = 1,
    asks: Spoken | None = None,
    warns: Spoken | None = None,
) -> Callable[..., None]:
    def run(
        *,
        url: str,
        option: list[OptionPair] | None,
        as_json: bool,
        debug: bool,
        yes: bool = False,
        **arguments: Any,
    ) -> None:
        # Before anything is opened: somebody who says no has cost no request.
        _speak_first(arguments, asks, warns, yes=yes)
        document = run_and_show(
            lambda: work(url, dict(option or ()), **arguments),
            show,
            as_json=as_json,
            debug=debug,
            error_code=error_code,
        )
        if has_failed is not None and has_failed(document):
            raise typer.Exit(1)

    if asks is not None:
        parameters.append(_keyword("yes", _Yes, default=False))
    return _described(run, function, parameters)


def _speak_first(
    arguments: Mapping[str, Any], asks: Spoken | None, warns: Spoken | None, *, yes: bool
) -> None:
    """Warn, and ask whether to continue if somebody is there to answer.

    A script is not asked: what it says it means, and nobody would answer.
    """
    warning = warns(arguments) if warns is not None else None
    if warning is not None:
        warn(warning)
    question = asks(arguments) if asks is not None and not yes else None
    if question is not None and is_answered():
        ask(question)


def _described(
    run: Callable[..., None],
    function: Callable[..., object],
    parameters: list[inspect.Parameter],
) -> Callable[..., None]:
    """Give a command the name, the help and the parameters of its function, and the common ones."""
    # Keyword-only, as Typer passes all by name; the order here is that of the help and of
    # arguments.
    signature = inspect.Signature(
        [
            inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, annotation=_Url),
            *(it.replace(kind=inspect.Parameter.KEYWORD_ONLY) for it in parameters),
            _keyword("option", _Options),
            _keyword("as_json", AsJson, default=False),
            _keyword("debug", Debug, default=False),
        ]
    )
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    # Typer reads these. Annotations of the function itself name types that are slow to import.
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {it.name: it.annotation for it in signature.parameters.values()}
    return run


def _keyword(name: str, annotation: object, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with annotations evaluated for Typer."""
    # Importing these classes takes long, and Typer is told of neither.
    names = {"Repository": object, str(function.__annotations__.get("return")): object}
    signature = inspect.signature(function, locals=names, eval_str=True)
    return list(signature.parameters.values())


def run_and_show[D](
    work: Callable[[], Coroutine[Any, Any, D]],
    show: Callable[[D, Console], None],
    *,
    as_json: bool,
    debug: bool,
    error_code: int = 1,
) -> D:
    """Do the work of a command, print its document and return it.

    Args:
        work: returns the document; it runs in a new event loop.
        show: prints the document for people.
        as_json: print it as JSON instead.
        debug: print the traceback of an error.
        error_code: the exit code after an error of this library.

    Raises:
        typer.Exit: with the exit code if the command failed.
    """
    with _reporting(debug=debug, error_code=error_code):
        document = asyncio.run(work())
        if as_json:
            typer.echo(_to_json(document))
        else:
            show(document, make_console())
        # Within the block: an error of the last write, such as of a full disk, must become an exit
        # code and not be lost when the interpreter ends.
        sys.stdout.flush()
        return document


@contextmanager
def _reporting(*, debug: bool, error_code: int) -> Generator[None]:
    """Turn errors of the block into one sentence and an exit code."""
    try:
        yield
    except IcechunkError as error:
        from icechunk_async.cli.hints import in_command_words  # noqa: PLC0415 -- only in need

        if debug:
            traceback.print_exc()
        else:
            # The first failure of several says enough; --debug shows all.
            notes = [it for it in getattr(error, "__notes__", ()) if "more concurrent" not in it]
            text = " ".join([str(error), *notes])
            _complain(f" ({error.kind})", in_command_words(text))
        raise typer.Exit(error_code) from None
    except BrokenPipeError:  # the reader has enough
        from icechunk_async.cli.streams import drop_output  # noqa: PLC0415 -- only in need

        drop_output()
        raise typer.Exit(0) from None
    # After BrokenPipeError, which is one.
    except OSError as error:  # a disk that is full, or a folder that nobody may write to
        if debug:
            traceback.print_exc()
        else:
            _complain("", f"{error}. --debug shows where it happened.")
        try:
            sys.stdout.flush()
        except OSError:
            from icechunk_async.cli.streams import drop_output  # noqa: PLC0415 -- only in need

            drop_output()
        raise typer.Exit(error_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _complain(kind: str, text: str) -> None:
    complaint = assembled(("Error", "bold red"), f"{kind}: {one_line(text)}")
    make_console(stderr=True).print(complaint, soft_wrap=True)


def _to_json(document: object, indent: int | None = 2) -> str:
    values: Any = asdict(document) if is_dataclass(document) else document  # type: ignore[arg-type]
    return json_text(values, default=_encode, indent=indent)


def _encode(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    raise TypeError(f"a document cannot hold a {type(value).__name__}")
