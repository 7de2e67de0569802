"""The `icechunk-async` command.

Each command is an asynchronous function that returns a document, a frozen dataclass, beside a
function that prints the document for people. They are in `commands`. `declaring` makes commands of
them and adds the options that all share, `console` prints, `targets` finds what a REF names, and
`app` puts all together. To add a command, write both functions in the module of its kind, or in a
new one, and add a line to `register`.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of this process."""
    try:
        from icechunk_async.cli.app import app  # noqa: PLC0415  # takes a moment

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as end:
        # Typer and Rich count a broken pipe as a failure, where they print help.
        if isinstance(end.__context__, BrokenPipeError):
            end.code = 0
        raise
