"""The `icechunk-async` command.

Each command is an asynchronous function that returns a document, a frozen dataclass, beside a
function that prints the document for people. They are in `commands`. `declaring` makes commands of
them and adds the options that all share, `console` prints, `targets` finds what a REF names, and
`app` puts all together. To add a command, write both functions in the module of its kind, or in a
new one, add a line to `register`, and the name to the list in `app`.

Typer and Rich come with the extra `cli`: a service that never runs the command does without them.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

from icechunk_async._version import __version__

__all__ = ["main"]

_NEEDS: Final = ("typer", "rich")


_SHORT: Final = frozenset(
    {"log", "show", "diff", "branch", "tag", "status", "config", "ops", "sessions", "transactions"}
)
"""Commands that only read small files of metadata, and start no programs."""


_OBJECTS: Final = 100_000
"""Made, and still there, before garbage is collected."""


def main() -> None:
    """Run the command with the arguments of this process."""
    _open_what_is_closed()
    try:
        try:
            _run()
        finally:
            # As the interpreter ends, an error of the last write would be one without a sentence.
            sys.stdout.flush()
    except OSError as error:
        from icechunk_async.cli.streams import end_with  # noqa: PLC0415 -- only in need

        end_with(error)


def _run() -> None:
    if sys.argv[1:] == ["--version"]:  # the parser of arguments takes longer to import than it all
        sys.stdout.write(f"icechunk-async {__version__}\n")
        return
    if _SHORT.intersection(sys.argv[1:2]):
        # As NumPy is imported its library for matrices starts a thread for each processor, which
        # takes as much CPU as all the rest of NumPy. Nobody needs them here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Nearly all that is made while modules are imported stays. To look for garbage among it
        # again and again takes a tenth of the start.
        gc.set_threshold(_OBJECTS)
    try:
        from icechunk_async.cli.app import app  # noqa: PLC0415  # takes a moment

        app()
    except ModuleNotFoundError:
        _check_installed()
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as end:
        # Typer and Rich count a broken pipe as a failure, where they print help.
        if isinstance(end.__context__, BrokenPipeError):
            end.code = 0
        raise
    finally:
        # As the interpreter ends it would look for garbage among all that is there, several times.
        gc.freeze()


def _open_what_is_closed() -> None:
    """Give streams to a process that was started without them, who wants the work and no output."""
    # Python sets them to None then, and the work would end where it looks for a terminal.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 -- to the end


def _check_installed() -> None:
    """Exit with one sentence if the extra `cli` is not installed: an import has failed."""
    from importlib.util import find_spec  # noqa: PLC0415  # only in need

    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The command icechunk-async needs {' and '.join(missing)}, not installed here. "
            "Install what it needs with: pip install 'icechunk-async[cli]'\n"
        )
        raise SystemExit(1)
