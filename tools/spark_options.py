"""Write the reference page of Spark options: `python -m tools.spark_options`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from icechunk_async.spark.options import OPTIONS, Use

if TYPE_CHECKING:
    from icechunk_async.spark.options import Option

__all__ = ["PAGE", "render"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "spark-options.md"
_INTRODUCTION: Final = """\
# Options of the Spark source

Written by `python -m tools.spark_options` from `icechunk_async.spark.options`. The case of names
does not matter. An unknown option is an error that suggests the nearest name.

Options that begin with `storage.` go to the storage backend, such as `storage.region`. A value that
is JSON is parsed (`true` is a boolean, `"true"` is text). Identifiers and secrets are always text.
"""
_HEADINGS: Final = {
    Use.READ: 'Read: `spark.read.format("icechunk")`',
    Use.READ_STREAM: 'Read a stream: `spark.readStream.format("icechunk")`',
    Use.WRITE: 'Write: `df.write.format("icechunk")`',
    Use.WRITE_STREAM: 'Write a stream: `df.writeStream.format("icechunk")`',
}


def render() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for use, heading in _HEADINGS.items():
        rows = [_row(it) for it in OPTIONS if use in it.uses]
        table = ["| Option | Default | Meaning |", "|---|---|---|", *rows]
        parts.append(f"## {heading}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    default = option.shown or (f"`{option.default}`" if option.default else "")
    names = " or ".join(f"`{it}`" for it in (option.name, option.alias) if it)
    return f"| {names} | {default} | {option.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
