"""Cards: values as rows and tables, drawn as text or as HTML for notebooks; and whole pages.

Both styles of the library show their values by them. A card holds only what is in memory when it is
made: drawing one never asks a storage.
"""

from __future__ import annotations

import html
from textwrap import indent
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.clock import from_us
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "POLICY",
    "Card",
    "Table",
    "byte_size",
    "count",
    "date",
    "document",
    "first_line",
    "literal",
]

_INDENT: Final = "    "
_LONGEST: Final = 80
"""Letters of a message in a line."""
# Cards stand in pages of others, which are light or dark: ink is the page's, lines are its shade.
_STYLE: Final = (
    "<style>.icechunk-async{line-height:1.5;max-width:64em}"
    ".icechunk-async header{border-bottom:1px solid;opacity:.8;margin-bottom:.3em}"
    ".icechunk-async .row{overflow-wrap:anywhere}"
    ".icechunk-async b{opacity:.65;font-weight:500}"
    ".icechunk-async summary{cursor:pointer}"
    ".icechunk-async details>div{margin-left:1em}"
    ".icechunk-async .wide{overflow-x:auto}"
    ".icechunk-async table{border-collapse:collapse;border:none;margin:.1em 0 .5em;"
    "font-size:.92em;color:inherit}"
    ".icechunk-async tr{background:none!important}"
    ".icechunk-async th,.icechunk-async td{text-align:left!important;vertical-align:top;"
    "padding:.12em 1.4em .12em 0;border:none;white-space:nowrap;"
    "border-bottom:1px solid rgba(128,128,128,.3)}"
    ".icechunk-async th{opacity:.65;font-weight:500}"
    ".icechunk-async .note{opacity:.65;font-size:.92em}</style>"
)
# Beside the escaping of all that others wrote: if one place is ever forgotten, nothing runs.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy of pages: they run nothing and ask for nothing."""
_PAGE_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2329; --quiet: #5d6872; --paper: #ffffff;
  --panel: #f3f5f7; --line: #d5dbe1; --good: #1a7f37; --bad: #b42318; --none: #e6eaee;
  --chunk: 9, 105, 218; --up: 191, 77, 0; --down: 9, 105, 218; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --quiet: #9aa6b1; --paper: #12161a;
  --panel: #1b2127; --line: #37414b; --good: #4ac26b; --bad: #ff7b72; --none: #262e36;
  --chunk: 88, 166, 255; --up: 255, 166, 87; --down: 88, 166, 255; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; margin-bottom: 0.3rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 0.3rem; overflow-wrap: anywhere; }
code, td, pre { font-family: ui-monospace, monospace; font-size: 0.88rem; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--panel); padding: 0.7rem; margin: 0.3rem 0; }
.quiet { color: var(--quiet); } .good { color: var(--good); } .bad { color: var(--bad); }
.state { border: 1px solid currentColor; border-radius: 1rem; padding: 0 0.7rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; }
th, td { padding: 0.2rem 1.2rem 0.2rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
table.checks { width: 100%; } table.checks > tbody > tr > :last-child { padding-right: 0; }
td.has { border-bottom: none; }
td pre { max-height: 16rem; overflow-y: auto; } td.short { white-space: nowrap; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Some rows under headings."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    total: int | None = None
    """The number of all rows, if these are only the first; None if these are all."""

    @property
    def more(self) -> str:
        """Tells how many rows are not shown; empty if all are."""
        left = 0 if self.total is None else self.total - len(self.rows)
        return f"and {left:,} more" if left > 0 else ""


@dataclass(frozen=True, slots=True)
class Card:
    """A title, rows of names and values, and tables. A value may be a card."""

    title: str
    rows: Sequence[tuple[str, object]] = ()
    tables: Sequence[Table] = ()
    note: str = ""

    def text(self) -> str:
        """Draw as lines, below the title in angle brackets."""
        return "\n".join([f"<{printable(self.title)}>", *self.lines()])

    def lines(self) -> list[str]:
        """Draw as lines, without the title."""
        found: list[str] = []
        for name, value in self.rows:
            if isinstance(value, Card):
                inner = indent("\n".join(value.lines()), _INDENT)
                found += [f"{printable(name)}:", *([inner] if inner else [])]
            else:
                found.append(f"{printable(name)}: {_shown(value)}")
        for table in self.tables:
            found += _table_lines(table)
        return [*found, f"({printable(self.note)})"] if self.note else found

    def html(self) -> str:
        """Draw for a notebook, with the rules that it is drawn by."""
        # With each card: a notebook keeps the outputs of cells apart, and may show this one alone.
        return _STYLE + self.body()

    def body(self) -> str:
        """Draw for a notebook, as a part of something that brings the rules."""
        inner = "".join(self.parts())
        return f'<div class="icechunk-async"><header>{literal(self.title)}</header>{inner}</div>'

    def parts(self) -> Iterator[str]:
        """Yield rows and tables as HTML, without the title."""
        for name, value in self.rows:
            title = literal(printable(name))
            if isinstance(value, Card):
                inner = value.body() if value.title else "".join(value.parts())
                yield f"<details><summary><b>{title}</b></summary><div>{inner}</div></details>"
            else:
                # After escaping, so that the only tags are ours.
                shown = literal(value).replace("\n", "<br>")
                yield f'<div class="row"><b>{title}:</b> {shown}</div>'
        for table in self.tables:
            yield f"<details open><summary><b>{literal(printable(table.title))}</b></summary>"
            yield f'<div class="wide">{_table_html(table)}</div></details>'
        if self.note:
            yield f'<div class="note">{literal(self.note)}</div>'


def _shown(value: object) -> str:
    """Return text that cannot do harm on a terminal; messages keep their lines."""
    return printable(str(value), keep="\n")


def _table_lines(table: Table) -> list[str]:
    cells = [[printable(str(it)) for it in row] for row in table.rows]
    # Without the heads: as text, a table is a list below its title, and what its columns are is
    # plain to see.
    widths = [max((len(row[at]) for row in cells), default=0) for at in range(len(table.heads))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    more = [f"... {table.more}"] if table.more else []
    return [f"{printable(table.title)}:", *(f"{_INDENT}{line}" for line in (*lines, *more))]


def _table_html(table: Table) -> str:
    heads = "".join(f"<th>{literal(it)}</th>" for it in table.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{literal(printable(str(it)))}</td>' for it in row)}</tr>"
        for row in table.rows
    )
    more = f'<div class="note">... {table.more}</div>' if table.more else ""
    return f"<table><tr>{heads}</tr>{rows}</table>{more}"


def date(microseconds: int) -> str:
    """Return a time for people, in UTC, from microseconds since the epoch."""
    return f"{from_us(microseconds):%Y-%m-%d %H:%M:%S} UTC"


def first_line(message: str) -> str:
    """Return the first line of a message, shortened."""
    line = message.split("\n", 1)[0]
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def count(number: int, noun: str) -> str:
    """Return a number of things, in the plural unless it is one."""
    many = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"


def byte_size(size_bytes: int) -> str:
    """Return a number of bytes in a unit that people read."""
    if size_bytes < 1000:
        return count(size_bytes, "byte")
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        size /= 1000
        if size < 999.5 or unit == "EB":  # else three digits would round it up to 1,000
            break
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:,.0f} {unit}"


def literal(text: object) -> str:
    """Return text that a browser shows literally, and that cannot reorder its surroundings."""
    # Printable first: marks of direction are no HTML, and would show a name in another order.
    return html.escape(printable(str(text), keep="\n"))


def document(title: str, body: Iterable[str], *, style: str = "") -> str:
    """Return a page.

    Args:
        title: any text.
        body: HTML, in which all text of others went through `literal`.
        style: more rules.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{literal(title)}</title>",
            f"<style>{_PAGE_STYLE}{style}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )
