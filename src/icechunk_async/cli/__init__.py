"""The ``icechunk-async`` command.

Commands are thin: each parses its arguments, runs one asynchronous function that answers a
document (:mod:`.documents`), and shows it as JSON or, through :mod:`.render`, as text.
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
