"""Which fragments, conditions and schemas are seen at a time."""

from __future__ import annotations

import pytest

from icechunk_async.errors import UnsupportedFeatureError
from icechunk_async.tiledb.format.history import (
    ALL_TIME,
    LEGACY_SCHEMA,
    Commits,
    Window,
    fragment_folder,
    parse_name,
    schema_at,
    visible,
)


def _name(start: int, end: int, version: int | None = 22, mark: str = "a") -> str:
    suffix = "" if version is None else f"_{version}"
    return f"__{start}_{end}_{mark * 32}{suffix}"


def _seen(commits: Commits, window: Window, *, is_sparse: bool = False) -> list[str]:
    return [it.text for it in visible(commits, window, is_sparse=is_sparse).fragments]


def test_fragments_are_seen_in_the_order_of_writing() -> None:
    """By their first time, then by name."""
    names = [_name(5, 5, mark="b"), _name(5, 5), _name(1, 1), _name(9, 9)]
    commits = Commits(frozenset(names))
    assert _seen(commits, ALL_TIME) == [names[2], names[1], names[0], names[3]]
    assert _seen(commits, Window(2, 8)) == [names[1], names[0]]


def test_consolidated_fragment_hides_what_it_replaced_once_it_is_seen() -> None:
    """Before its end the originals are seen."""
    one, two, merged = _name(1, 1), _name(2, 2), _name(1, 2, mark="c")
    commits = Commits(frozenset({one, two, merged}), {merged: [one, two]})
    assert _seen(commits, ALL_TIME) == [merged]
    assert _seen(commits, Window(0, 1)) == [one]


def test_cells_with_times_are_seen_from_a_part_of_a_fragment() -> None:
    """Of sparse arrays since version 15; of dense ones never."""
    new, old = _name(1, 9), _name(1, 9, 14)
    commits = Commits(frozenset({new, old}))
    assert _seen(commits, Window(0, 5), is_sparse=True) == [new]
    assert _seen(commits, Window(0, 5)) == []


def test_names_that_are_unknown_are_ignored() -> None:
    """Others may put files there."""
    assert _seen(Commits(frozenset({"readme", "__1_2_zz_3"})), ALL_TIME) == []


def test_deletions_are_seen_in_their_window() -> None:
    """In the order of time."""
    files = {f"{_name(time, time)}.del": None for time in (7, 3, 20)}
    seen = visible(Commits(frozenset(), {}, files), Window(0, 10), is_sparse=True)
    assert [it.time for it in seen.deletions] == [3, 7]


def test_update_conditions_are_refused_when_they_are_seen() -> None:
    """They are not supported, and ignoring them would give wrong cells."""
    commits = Commits(frozenset(), updates=frozenset({f"{_name(5, 5)}.upd"}))
    with pytest.raises(UnsupportedFeatureError, match="update condition"):
        visible(commits, ALL_TIME, is_sparse=True)
    assert not visible(commits, Window(0, 4), is_sparse=True).fragments


def test_schema_is_the_last_until_a_time_or_else_the_first() -> None:
    """Those of old versions, which have no time, come before all others."""
    first, second = _name(5, 5, None), _name(8, 8, None)
    assert schema_at([second, first], 100) == second
    assert schema_at([second, first], 7) == first
    assert schema_at([second, first], 2) == first
    assert schema_at([second, LEGACY_SCHEMA], 2) == LEGACY_SCHEMA
    assert schema_at(["readme"], 2) is None


@pytest.mark.parametrize(
    ("text", "start", "end", "version", "folder"),
    [
        (_name(1, 2, 12), 1, 2, 12, "__fragments/"),
        (_name(1, 2, 11), 1, 2, 11, ""),
        (_name(1, 2, None), 1, 2, None, ""),
        (f"__{'a' * 32}_7", 7, 7, 2, ""),
        (f"__{'a' * 32}_7_9", 9, 9, 2, ""),
    ],
)
def test_names_tell_times_version_and_folder(
    text: str, start: int, end: int, version: int | None, folder: str
) -> None:
    """In the three forms that TileDB has used."""
    name = parse_name(text)
    assert name is not None
    assert (name.start, name.end, name.version) == (start, end, version)
    assert fragment_folder(name) == folder + text
