"""Which snapshots leave a history, and who becomes whose child: values only."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from icechunk_async.engine.history.protocol import Expiration
from icechunk_async.engine.history.ref_files.upkeep import cut_history
from icechunk_async.engine.history.repo_info.edits import expire, release
from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import Availability, RepoInitialized, RepoStatus, Update
from icechunk_async.format.repo_info import (
    RepoInfo,
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
)
from icechunk_async.format.repo_info.snapshots import Snapshots
from tests.helpers import counted_calls

if TYPE_CHECKING:
    from collections.abc import Mapping


def name(letter: str) -> SnapshotId:
    """Return the id that a letter stands for."""
    return SnapshotId(letter.encode() * 12)


def history(parents: str, branches: str, tags: str = "") -> RepoInfo:
    """Make a history.

    Args:
        parents: pairs such as ``ba`` (b's parent is a), in order of time; a root is alone.
        branches: tips; the first is main's, the others are called by their letters.
        tags: snapshots of tags, which are called by their letters.
    """
    infos: dict[SnapshotId, SnapshotInfo] = {}
    for time, word in enumerate(parents.split(), 1):
        parent = name(word[1]) if len(word) > 1 else None
        infos[name(word[0])] = SnapshotInfo(name(word[0]), parent, time, word)
    return RepoInfo(
        {"main": name(branches[0]), **{it: name(it) for it in branches[1:]}},
        {it: name(it) for it in tags},
        frozenset(),
        infos,
        RepoStatus(Availability.ONLINE, 1),
        (Update(RepoInitialized(), 1),),
    )


def letters(info: RepoInfo) -> dict[str, str]:
    """Return each snapshot's parent and, after a dash, the logs that it remembers."""

    def letter(it: SnapshotId | None) -> str:
        return "" if it is None else chr(it[0])

    return {
        letter(it.id): letter(it.parent_id)
        + ("-" + "".join(map(letter, it.pruned_ancestor_logs)) if it.pruned_ancestor_logs else "")
        for it in info.snapshots.values()
    }


LINE = "a ba cb dc ed"


@pytest.mark.parametrize(
    ("older_than", "tags", "expected"),
    [
        (1, "", {"a": "", "b": "a", "c": "b", "d": "c", "e": "d"}),
        (3, "", {"a": "", "c": "a-b", "d": "c", "e": "d"}),
        (5, "", {"a": "", "e": "a-bcd"}),
        (99, "", {"a": "", "e": "a-bcd"}),  # the tip of main stays
        (99, "c", {"a": "", "c": "a-b", "e": "a-bcd"}),  # what stays between is passed over
        (3, "b", {"a": "", "b": "a", "c": "b", "d": "c", "e": "d"}),
    ],
)
def test_expiration_reparents_oldest_kept_snapshot_to_root(
    older_than: int, tags: str, expected: Mapping[str, str]
) -> None:
    """It remembers the logs of the expired snapshots, the oldest first."""
    info, expired = expire(history(LINE, "e", tags), Expiration(older_than))
    assert letters(info) == expected
    assert {chr(it[0]) for it in expired} == set("abcde") - expected.keys()


def test_repeated_expiration_keeps_pruned_logs() -> None:
    """The logs that an expired snapshot remembered come before its own."""
    info, _ = expire(history(LINE, "e"), Expiration(3))
    info, _ = expire(info, Expiration(4))
    info, _ = expire(info, Expiration(5))
    assert letters(info) == {"a": "", "e": "a-bcd"}


def test_expiration_deletes_refs_only_if_asked() -> None:
    """It never deletes main."""
    before = history(LINE, "ebd", "cd")
    info, expired = expire(before, Expiration(4, delete_branches=True))
    assert info.branches.keys() == {"main", "d"}
    assert info.tags.keys() == {"c", "d"}
    assert {chr(it[0]) for it in expired} == {"b"}
    info, expired = expire(before, Expiration(4, delete_tags=True))
    assert info.tags.keys() == {"d"}
    assert info.deleted_tags == {"c"}
    assert info.branches == before.branches
    info, expired = expire(before, Expiration(99, delete_branches=True, delete_tags=True))
    assert info.branches == {"main": name("e")}
    assert letters(info) == {"a": "", "e": "a-bcd"}


def test_detached_snapshots_expire_like_others() -> None:
    """Nothing protects them but their age; the young find a new parent."""
    info, expired = expire(history("a ba cb xb yx", "c"), Expiration(5))
    assert letters(info) == {"a": "", "c": "a-b", "y": "a-bx"}
    assert {chr(it[0]) for it in expired} == {"b", "x"}


def test_release_drops_old_unreachable_snapshots() -> None:
    """The young stay; their parent is then the nearest that stays."""
    before = history("a ba cb xb yx zy wz", "c")
    old = {name(it) for it in "abcxz"}
    assert letters(release(before, old)) == {"a": "", "b": "a", "c": "b", "y": "b-x", "w": "y-z"}
    assert letters(release(before, frozenset())) == letters(before)
    everything = frozenset(before.snapshots)
    assert letters(release(before, everything)) == {"a": "", "b": "a", "c": "b"}


def test_snapshot_without_ancestors_becomes_a_root() -> None:
    """There may be histories without a common beginning, though nobody writes them."""
    info = release(history("a ba m nm", "b"), {name("m")})
    assert letters(info) == {"a": "", "b": "a", "n": "-m"}


@pytest.mark.parametrize(
    ("tips", "older_than", "parents", "released"),
    [
        ("e", 3, {"c": "a"}, "b"),
        ("e", 99, {"e": "a"}, "bcde"),
        ("ce", 4, {"c": "a", "d": "a"}, "bc"),
        ("e", 2, {}, ""),
        ("b", 99, {}, ""),  # nothing is between it and the root
        ("a", 99, {}, ""),
        ("dc", 5, {"d": "a", "c": "a"}, "bcd"),
    ],
)
def test_format_1_expiration_shortens_each_history(
    tips: str, older_than: int, parents: Mapping[str, str], released: str
) -> None:
    """Each ref's own oldest snapshot that stays becomes a child of the root."""
    infos = history(LINE, "e").snapshots
    cut = cut_history([name(it) for it in tips], infos, older_than)
    assert cut.parents == {name(one): name(two) for one, two in parents.items()}
    assert cut.released == {name(it) for it in released}


def test_circular_ancestry_is_a_format_error() -> None:
    """Hostile files do not make it walk for ever."""
    circle = history("a ba", "b")
    infos = {**circle.snapshots, name("a"): SnapshotInfo(name("a"), name("b"), 1, "")}
    with pytest.raises(FormatError, match="circle"):
        cut_history([name("b")], infos, 5)


def random_history(seed: int, count: int) -> RepoInfo:
    """Make a tree of snapshots, a few of which remember others that expired before."""
    chance = Random(seed)
    ids = [SnapshotId(chance.randbytes(12)) for _ in range(count)]
    infos: dict[SnapshotId, SnapshotInfo] = {}
    for time, it in enumerate(ids):
        parent = ids[max(0, time - chance.choice((1, 1, 1, 1, 5)))] if time else None
        pruned = tuple(SnapshotId(chance.randbytes(12)) for _ in range(chance.choice((0, 0, 2))))
        infos[it] = SnapshotInfo(it, parent, chance.randrange(count), "message", (), pruned)
    tips = chance.sample(ids, 3)
    return RepoInfo(
        {"main": ids[-1], "other": tips[0]},
        {"tag": tips[1]},
        frozenset(),
        infos,
        RepoStatus(Availability.ONLINE, 1),
        (Update(RepoInitialized(), 1),),
    )


def stored(info: RepoInfo) -> RepoInfo:
    """Return a repo info as read from its file."""
    return decode_repo_info(Envelope(2, encode_repo_info(info)))


@pytest.mark.parametrize("count", [5, 40, 300])
@pytest.mark.parametrize("seed", range(5))
def test_columns_of_a_file_expire_like_its_entries(seed: int, count: int) -> None:
    """Also with entries on top of the file, and others of it that are gone."""
    info = random_history(seed, count)
    newest = SnapshotInfo(name("z"), info.branches["main"], count, "on top")
    keep = frozenset(Random(seed).sample(sorted(info.snapshots), 2))
    rule = Expiration(count // 2, delete_tags=True, delete_branches=True, keep=keep)
    for half in (0, count // 4):
        found: list[RepoInfo] = []
        gone: list[frozenset[SnapshotId]] = []
        for start in (info, stored(info)):
            first, _ = expire(start, replace(rule, older_than_us=half))
            snapshots = Snapshots.of(first.snapshots).edited([newest])
            on_top = replace(first, snapshots=snapshots, branches={"main": newest.id})
            next_info, dropped = expire(on_top, rule)
            found.append(next_info)
            gone.append(dropped)
        plain, by_column = found
        assert gone[0] == gone[1]
        assert {it.id: it for it in by_column.snapshots.values()} == dict(plain.snapshots)
        assert by_column.tags == plain.tags
        assert by_column.branches == plain.branches
        released = [release(it, frozenset(info.snapshots)) for it in found]
        assert dict(released[0].snapshots) == dict(released[1].snapshots)


def test_expiration_takes_few_calls_a_snapshot() -> None:
    """Most of a history is looked at as columns."""
    count = 1000
    ids = [SnapshotId(number.to_bytes(12)) for number in range(count)]
    parents = [None, *ids]
    infos = {it: SnapshotInfo(it, parents[at], at, "x") for at, it in enumerate(ids)}
    info = stored(replace(history("a", "a"), snapshots=infos, branches={"main": ids[-1]}))
    with counted_calls() as calls:
        _, dropped = expire(info, Expiration(count))
    assert len(dropped) == count - 2
    assert len(calls) < count + 400
