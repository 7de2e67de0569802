"""All that both sides say after a step, compared."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, cast

from tests.interop.sides import attempt, keys_and_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tests.interop.sides import Side

__all__ = ["check_views"]


def _refs(side: Side, spec: int) -> dict[str, Any]:
    """Return branches, tags, their ancestries, and what belongs to the repository itself."""
    repo = side.repo
    refs = {
        **{f"branch {it}": repo.lookup_branch(it) for it in sorted(repo.list_branches())},
        **{f"tag {it}": repo.lookup_tag(it) for it in sorted(repo.list_tags())},
    }
    seen: dict[str, Any] = {"refs": side.plain(refs)}
    for tip in dict.fromkeys(refs.values()):
        seen[f"ancestry {side.plain(tip)}"] = side.plain(list(repo.ancestry(snapshot_id=tip)))
    if spec > 1:
        seen["operations"] = side.plain(list(repo.ops_log()))
        seen["metadata"] = side.plain(repo.get_metadata())
        seen["status"] = side.plain(repo.get_status())
        seen["flags"] = sorted(side.plain(repo.feature_flags()))
    return seen


def _contents(side: Side, tip: str) -> dict[str, Any]:
    """Return the contents of a snapshot, and the changes of its commit and all before it."""
    line = list(side.repo.ancestry(snapshot_id=tip))
    starts = {line[-1].id, *(it.id for it in line[1:2])} - {tip}
    seen: dict[str, Any] = {
        "keys": keys_and_values(side.repo.readonly_session(snapshot_id=tip).store)
    }
    for start in sorted(starts, key=side.known.index):

        def compare(of: Side, start: str = start) -> object:
            return of.repo.diff(from_snapshot_id=start, to_snapshot_id=tip)

        seen[f"since {side.plain(start)}"] = attempt(side, compare)
    return seen


def _tips(side: Side, *, everything: bool) -> dict[str, Any]:
    """Return the contents of tips that nobody looked into yet, or of all."""
    repo = side.repo
    tips = [*repo.list_branches(), *repo.list_tags()]
    found = {
        *(repo.lookup_branch(it) for it in repo.list_branches()),
        *(repo.lookup_tag(it) for it in repo.list_tags()),
    }
    assert tips
    fresh = [it for it in found if everything or it not in side.contents]
    for tip in sorted(fresh, key=side.known.index):
        side.contents[tip] = _contents(side, tip)
    return {side.names[tip]: side.contents[tip] for tip in fresh}


def _session(side: Side, slot: int) -> dict[str, Any]:
    session = side.sessions[slot]
    return {
        "mode": int(session.mode),
        "read only": session.read_only,
        "snapshot": side.plain(session.snapshot_id),
        "branch": session.branch,
        "uncommitted": session.has_uncommitted_changes,
        "status": attempt(side, lambda _: session.status()),
        "keys": keys_and_values(session.store),
    }


def _measures(side: Side, left_out: Collection[str]) -> dict[str, Any]:
    """Return sizes, and what garbage collection would delete."""
    now = dt.datetime.now(dt.UTC)
    garbage = attempt(side, lambda it: it.repo.garbage_collect(now, dry_run=True))
    if garbage[0] == "did":
        garbage = ("did", {it: n for it, n in garbage[1].items() if it not in left_out})
    *stats, _ = side.plain(side.repo.chunk_storage_stats())
    return {"stats": stats, "garbage": garbage}


def _check_inlined(official: Side, ours: Side) -> None:
    """Compare the bytes of inline chunks, which count in each manifest that has them.

    Arrays that move out of a manifest that several share are in the new one as well.
    """
    theirs, found = (it.repo.chunk_storage_stats().inlined_bytes for it in (official, ours))
    assert found >= theirs, f"inlined bytes: theirs {theirs}, ours {found}"
    assert (found == 0) == (theirs == 0)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a compound value, or None."""
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).items())
    if isinstance(value, list):
        return [(str(place), part) for place, part in enumerate(cast("Iterable[Any]", value))]
    return None


def _compare(what: str, theirs: Any, ours: Any) -> None:
    """Fail with what differs, and only that: whole views would drown the message."""
    wanted, found = _parts(theirs), _parts(ours)
    if wanted and found and [name for name, _ in wanted] == [name for name, _ in found]:
        for (name, one), (_, other) in zip(wanted, found, strict=True):
            _compare(f"{what} > {name}", one, other)
        return
    assert ours == theirs, f"{what}: theirs {theirs}, ours {ours}"


def check_views(
    sides: Sequence[Side],
    spec: int,
    *,
    slot: int | None,
    everything: bool,
    left_out: Collection[str],
) -> None:
    """Compare all that both sides say of their repositories, and of one session."""
    _compare("refs", *(_refs(it, spec) for it in sides))
    _compare("tips", *(_tips(it, everything=everything) for it in sides))
    if slot is not None and all(slot in it.sessions for it in sides):
        _compare(f"session {slot}", *(_session(it, slot) for it in sides))
    _compare("measures", *(_measures(it, left_out) for it in sides))
    _check_inlined(*sides)
