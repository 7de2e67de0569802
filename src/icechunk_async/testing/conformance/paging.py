"""Promises about going on with a listing where an earlier one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.testing.conformance._base import Promises
from icechunk_async.testing.conformance._helpers import fill, listed, names, take
from icechunk_async.testing.conformance.keys import AWKWARD_KEYS

if TYPE_CHECKING:
    from icechunk_async.storage import Storage

__all__ = ["PagingPromises"]


class PagingPromises(Promises):
    """What ``start_after`` leaves out."""

    async def test_a_listing_starts_after_a_key_that_is_there(self, storage: Storage) -> None:
        """That key itself is left out."""
        await fill(storage, ["a", "b/c", "b/d", "e"])
        assert names(await listed(storage, start_after="b/c")) == ["b/d", "e"]
        assert names(await listed(storage, start_after="a")) == ["b/c", "b/d", "e"]
        assert await listed(storage, start_after="e") == []

    async def test_a_listing_starts_after_a_string_that_is_no_key(self, storage: Storage) -> None:
        """Any string will do; what is greater follows."""
        await fill(storage, ["a", "b/c", "b/d", "e"])
        expected = {
            "": ["a", "b/c", "b/d", "e"],
            "a/": ["b/c", "b/d", "e"],
            "b": ["b/c", "b/d", "e"],
            "b/": ["b/c", "b/d", "e"],
            "b/cc": ["b/d", "e"],
            "b/c/x": ["b/d", "e"],
            "b/d0": ["e"],
            "b0": ["e"],
            "zzz": [],
        }
        found = {after: names(await listed(storage, start_after=after)) for after in expected}
        assert found == expected

    async def test_a_listing_starts_after_a_key_within_a_prefix(self, storage: Storage) -> None:
        """Prefix and start both hold, wherever the start lies."""
        await fill(storage, ["a", "b/c", "b/d/e", "b/f", "g"])
        expected = {
            "a": ["b/c", "b/d/e", "b/f"],
            "b/c": ["b/d/e", "b/f"],
            "b/d": ["b/d/e", "b/f"],
            "b/d/e": ["b/f"],
            "b/f": [],
            "c": [],
        }
        found = {after: names(await listed(storage, "b/", start_after=after)) for after in expected}
        assert found == expected

    async def test_a_listing_can_be_continued_after_every_key(self, storage: Storage) -> None:
        """What was listed and what follows it make up the whole, for the oddest keys."""
        await fill(storage, AWKWARD_KEYS)
        everything = names(await listed(storage))
        for index, key in enumerate(everything):
            assert names(await listed(storage, start_after=key)) == everything[index + 1 :]

    async def test_a_long_listing_can_be_continued(self, storage: Storage) -> None:
        """The continuation may itself have several pages."""
        keys = [f"{n % 4}/{n:05}" for n in range(3000)]
        await fill(storage, keys)
        found: list[str] = []
        for count in (1, 999, 1000):
            after = found[-1] if found else None
            found += names(await take(storage.list_prefix(start_after=after), count))
        found += names(await listed(storage, start_after=found[-1]))
        assert found == sorted(keys)

    async def test_groups_that_are_not_greater_are_left_out(self, storage: Storage) -> None:
        """A group is compared like a key: by its own string, not by what is in it."""
        await fill(storage, ["a", "b/c", "b/d", "b0", "e/f"])
        expected = {
            "a": ["b/", "b0", "e/"],
            "b": ["b/", "b0", "e/"],
            "b.": ["b/", "b0", "e/"],
            "b/": ["b0", "e/"],
            "b/c": ["b0", "e/"],
            "b/zzz": ["b0", "e/"],
            "b0": ["e/"],
            "e/": [],
        }
        found = {
            after: names(await listed(storage, start_after=after, delimiter="/"))
            for after in expected
        }
        assert found == expected

    async def test_groups_below_a_prefix_start_after_a_string(self, storage: Storage) -> None:
        """Prefix, start and delimiter hold together."""
        await fill(storage, ["a/b", "a/c/d", "a/c/e", "a/f/g", "h"])
        expected = {
            "a": ["a/b", "a/c/", "a/f/"],
            "a/b": ["a/c/", "a/f/"],
            "a/c/": ["a/f/"],
            "a/c/d": ["a/f/"],
            "a/f/": [],
            "b": [],
        }
        found = {
            after: names(await listed(storage, "a/", start_after=after, delimiter="/"))
            for after in expected
        }
        assert found == expected
