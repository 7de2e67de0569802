"""The page of a proposal: one HTML file without script, for light and dark screens.

Everything in it was written by others: names, messages, attributes, values. All of it goes through
`literal`, and the page forbids scripts and requests to itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from icechunk_async._display.cards import date, document, literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from icechunk_async.engine.proposals.record import (
        ArrayReview,
        ChangeMap,
        CheckResult,
        NodeReview,
        ProposalRecord,
    )
    from icechunk_async.format.json.metadata import JSON

__all__ = ["render"]

_MAPS: Final = """
.maps { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0.6rem 0; }
figcaption { color: var(--quiet); font-size: 0.85rem; max-width: 24rem; }
svg { display: block; max-width: 100%; height: auto; }
.none { fill: var(--none); } .chunk { fill: rgb(var(--chunk)); } .up { fill: rgb(var(--up)); }
.down { fill: rgb(var(--down)); }
"""
_FIELD: Final = 12
_GAP: Final = 1
_MOST_DRAWN: Final = 100
"""Arrays with maps."""


def render(record: ProposalRecord) -> str:
    """Return the page of a proposal in its present state."""
    body = [*_head(record), *_checks(record), *_nodes(record), *_arrays(record)]
    return document(record.title, body, style=_MAPS)


def _json(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _head(record: ProposalRecord) -> Iterator[str]:
    kind = {"accepted": "good", "closed": "bad"}.get(record.state.value, "quiet")
    candidate = record.candidate
    yield f"<h1>{literal(record.title)}</h1>"
    yield (
        f'<p><span class="state {kind}">{literal(record.state.value)}</span> '
        f"<code>{literal(record.source_ref)}</code> into <code>{literal(record.into)}</code></p>"
    )
    if record.message and record.message != record.title:
        yield f"<pre>{literal(record.message)}</pre>"
    if record.reason:
        yield f"<p>Closed: {literal(record.reason)}</p>"
    rows = [
        ("Proposal", record.id),
        ("Proposed at", date(record.created_us)),
        ("Last change", date(record.at_us)),
        ("Snapshot that is proposed", record.source_id),
        (f"Tip of {record.into}", candidate.target_id),
        ("Merged state", candidate.snapshot_id),
        *((f"Property {name}", _json(value)) for name, value in record.metadata.items()),
    ]
    cells = (f"<tr><th>{literal(name)}</th><td>{literal(value)}</td></tr>" for name, value in rows)
    yield '<div class="wide"><table>' + "".join(cells) + "</table></div>"
    yield (
        '<p class="quiet">Checks run on the merged state, and that very snapshot is published when '
        "the proposal is accepted. If the branch moves before, it is made and checked anew.</p>"
    )


def _checks(record: ProposalRecord) -> Iterator[str]:
    yield "<h2>Checks</h2>"
    results = {it.name: it for it in record.candidate.results}
    names = list(dict.fromkeys([*record.checks, *results]))
    if not names:
        yield "<p>This proposal has no checks.</p>"
        return
    yield '<table class="checks"><tr><th>Check</th><th>Outcome</th></tr>'
    for name in names:
        yield _check(name, results.get(name))
    yield "</table>"


def _check(name: str, result: CheckResult | None) -> str:
    if result is None:
        return f'<tr><td>{literal(name)}</td><td class="short bad">not run</td></tr>'
    kind = "good" if result.passed else "bad"
    has = ' class="has"' if result.detail else ""
    row = (
        f"<tr><td{has}>{literal(name)}<br>"
        f'<span class="quiet">{result.seconds:.3f} s, until {date(result.at_us)}</span></td>'
        f'<td class="short {kind}{" has" if has else ""}">{literal(result.outcome)}</td></tr>'
    )
    if not result.detail:
        return row
    return f'{row}<tr><td colspan="2"><pre>{literal(result.detail)}</pre></td></tr>'


def _nodes(record: ProposalRecord) -> Iterator[str]:
    review = record.review
    yield "<h2>Arrays and groups</h2>"
    if not review.nodes:
        yield "<p>None is created, deleted, moved, or given other metadata.</p>"
        return
    yield '<div class="wide"><table><tr><th>Change</th><th>Kind</th><th>Path</th></tr>'
    for node in review.nodes:
        yield _node(node)
    yield "</table></div>"
    if review.more_nodes:
        yield f'<p class="quiet">And {review.more_nodes} more.</p>'


def _node(node: NodeReview) -> str:
    where = literal(node.path)
    if node.previous_path is not None:
        where = f"{literal(node.previous_path)} &rarr; {where}"
    keys = "".join(
        f"<br>{literal(it.key)}: {_value(it.before)} &rarr; {_value(it.after)}" for it in node.keys
    )
    kind = "array" if node.is_array else "group"
    return (
        f'<tr><td class="short">{literal(node.kind)}</td><td class="short">{kind}</td>'
        f"<td>{where}{keys}</td></tr>"
    )


def _value(value: str | None) -> str:
    return '<span class="quiet">none</span>' if value is None else literal(value)


def _arrays(record: ProposalRecord) -> Iterator[str]:
    review = record.review
    yield "<h2>Chunks and values</h2>"
    if not review.arrays:
        yield "<p>No chunk is written or removed.</p>"
    for number, array in enumerate(review.arrays):
        drawn = number < _MOST_DRAWN  # more than this library stores
        yield from _array(array if drawn else replace(array, chunks=None, values=None))
    if review.more_arrays:
        yield f'<p class="quiet">And {review.more_arrays} more arrays.</p>'


def _array(array: ArrayReview) -> Iterator[str]:
    yield f"<h3>{literal(array.path)}</h3>"
    yield (
        f"<p>Chunks: {array.added:,} added, {array.changed:,} changed, {array.removed:,} removed."
        f"{_values(array)}</p>"
    )
    if array.note:
        yield f'<p class="quiet">{literal(array.note)}</p>'
    pictures: list[str] = []
    if array.chunks is not None:
        pictures.append(_picture(array.chunks, "Number of chunks that changed", "chunks", "chunk"))
    if array.values is not None:
        what = "Mean change of the cells that changed: orange up, blue down"
        pictures.append(_picture(array.values, what, "cells", "up"))
    if pictures:
        yield '<div class="maps">' + "".join(pictures) + "</div>"
    if array.first:
        yield '<div class="wide"><table><tr><th>Cell</th><th>Before</th><th>After</th></tr>'
        for cell in array.first:
            index = ", ".join(map(str, cell.index))
            yield (
                f'<tr><td class="short">[{literal(index)}]</td><td>{literal(cell.before)}</td>'
                f"<td>{literal(cell.after)}</td></tr>"
            )
        yield "</table></div>"


def _values(array: ArrayReview) -> str:
    if array.cells is None:
        return ""
    share = array.changed_cells / array.cells if array.cells else 0.0
    text = f" Cells with another value: {array.changed_cells:,} of {array.cells:,} ({share:.3%})."
    sizes = (
        ("least", array.min_change),
        ("mean", array.mean_change),
        ("greatest", array.max_change),
    )
    known = [f"{name} {size:+.6g}" for name, size in sizes if size is not None]
    return text + (f" Change: {', '.join(known)}." if known else "")


def _picture(found: ChangeMap, what: str, unit: str, more: str) -> str:
    """Draw a map; fields above zero get the class ``more``."""
    step = _FIELD + _GAP
    width, height = found.columns * step, found.rows * step
    # The record bounds a map to 64 by 64 fields, so the page grows with the number of maps alone.
    most = max((abs(it) for it in found.values), default=0.0)
    fields = "".join(_fields(found, most, step, more))
    across = f"{found.column_cells:,}"
    axes = f"{found.row_cells:,} by {across}" if found.rows > 1 else across
    unit = unit.removesuffix("s") if axes == "1" else unit
    return (
        f'<figure><svg role="img" aria-label="Map: {what}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
        f'<rect class="none" width="{width}" height="{height}"/>{fields}</svg>'
        f"<figcaption>{what}. A field is {axes} {unit}; the strongest colour is "
        f"{most:.6g}.</figcaption></figure>"
    )


def _fields(found: ChangeMap, most: float, step: int, more: str) -> Iterator[str]:
    for place, value in enumerate(found.values):
        if value == 0 or most == 0:
            continue
        row, column = divmod(place, found.columns)
        # From a quarter, so that the least change is seen at all.
        strength = 0.25 + 0.75 * abs(value) / most
        yield (
            f'<rect class="{more if value > 0 else "down"}" x="{column * step}" y="{row * step}" '
            f'width="{_FIELD}" height="{_FIELD}" opacity="{strength:.3f}"/>'
        )
