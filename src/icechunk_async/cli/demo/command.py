"""The command ``icechunk-async demo``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from icechunk_async.cli.console import make_console
from icechunk_async.cli.declaring import AsJson, Debug, run_and_show
from icechunk_async.errors import MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rich.console import Console

    from icechunk_async.cli.demo.story import Demonstrated

__all__ = ["check_installed", "register"]

_MODULES: Final = ("cftime", "h5py", "iris_sample_data", "matplotlib", "xarray")
_WIDTH: Final = 100


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where to put repository and picture.")
    ] = Path("demo"),
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also use a directory that holds other things, or a demonstration changed "
            "since. Only what a demonstration created is ever replaced.",
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Put real climate data into a versioned repository, and show what that is good for.

    Two climate projections for North America go into one repository: one is copied, decade by
    decade; the other stays where it is, in its NetCDF file, and is only referred to. Then the
    demonstration tags a release, corrects a value, travels back in time, lets two writers
    collide, and draws a picture.

    JSON keys: directory, repository, picture, container, branch, tag, release (a snapshot id),
    correction (a snapshot id), tip (a snapshot id), corrected_value (at, unit, before, after,
    as_of_release), commands. The story itself goes to standard error then.
    """
    console = make_console(stderr=as_json)
    console.width = min(console.width, _WIDTH)

    def work() -> Coroutine[Any, Any, Demonstrated]:
        # First, and by looking: an import would fail at the first missing package, and name that
        # alone.
        check_installed()
        with console.status("Loading xarray and matplotlib ..."):
            from icechunk_async.cli.demo.story import tell  # noqa: PLC0415  # needs them

        return tell(directory, force=force, console=console)

    run_and_show(work, _say_nothing, as_json=as_json, debug=debug)


def _say_nothing(_document: Demonstrated, _console: Console) -> None:
    """Print nothing: the story was printed step by step."""


def check_installed() -> None:
    """Refuse if a package that only the demonstration needs is not installed.

    Raises:
        MissingDriverError: it names them, and how to install them.
    """
    missing = [name for name in _MODULES if find_spec(name) is None]
    if missing:
        raise MissingDriverError(
            f"The demonstration needs Python modules that are not installed: {', '.join(missing)}. "
            "Install them with: pip install 'icechunk-async[demo]'",
            modules=missing,
        )
