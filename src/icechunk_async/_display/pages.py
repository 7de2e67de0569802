"""HTML pages without script, for light and dark screens, that show text written by others."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["POLICY", "document", "literal"]

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The content security policy of pages: they run nothing and ask for nothing."""
_STYLE: Final = """
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


def literal(text: object) -> str:
    """Return text that a browser shows literally, and that cannot reorder its surroundings."""
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
            f"<style>{_STYLE}{style}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )
